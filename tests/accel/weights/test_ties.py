"""Tied weights, some of which are offloaded, stay tied, and no longer than in a plain model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accel import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accel.hooks import (
    ModelHook,
    SequentialHook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel.machine.errors import ConfigError, StateError
from accel.utils.modeling import get_state_dict_offloaded_model
from tests.accel.weights.models import Tied, hook_of, inputs, net, on_meta

TOKENS = torch.arange(6)
ACROSS = [{"": "cpu", "embedding": "disk"}, {"": "cpu", "head": "disk"}]


def made(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied().eval()


def empty() -> Tied:
    with init_empty_weights(include_buffers=False):
        return Tied().eval()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    Accelerator(cpu=True).save_model(made(), tmp_path / "weights")
    return tmp_path / "weights"


def plain_as(checkpoint: Path) -> Tied:
    """Return the model of the checkpoint; its shift is in no checkpoint."""
    model = made(1)
    load_checkpoint_in_model(model, checkpoint)
    return model


def loaded(checkpoint: Path, where: dict[str, str], folder: Path) -> nn.Module:
    model = load_checkpoint_and_dispatch(empty(), checkpoint, where, offload_folder=folder)
    model.get_submodule("block")._buffers["shift"] = made(1).get_buffer("block.shift")
    return model


@pytest.mark.parametrize("where", ACROSS)
def test_weights_that_are_loaded_to_disk_and_memory_are_tied(
    checkpoint: Path, where: dict[str, str], tmp_path: Path
) -> None:
    model, plain = loaded(checkpoint, where, tmp_path / "off"), plain_as(checkpoint)
    for one in (model, plain):
        name = "head.weight" if "embedding" in where else "embedding.weight"
        with torch.no_grad():
            one.get_parameter(name).mul_(2)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    remove_hook_from_submodules(model)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


@pytest.mark.parametrize("where", [{"": "cpu"}, *ACROSS])
def test_what_was_loaded_to_disk_alone_is_dispatched_tied(
    checkpoint: Path, where: dict[str, str], tmp_path: Path
) -> None:
    model = empty()
    load_checkpoint_in_model(model, checkpoint, {"": "disk"}, tmp_path / "off")
    dispatch_model(model, where, offload_dir=tmp_path / "off")
    remove_hook_from_submodules(model)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


def test_buffers_that_modules_share_are_loaded_as_one(tmp_path: Path) -> None:
    def sharing() -> nn.Sequential:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        model[1].running_mean = model[0].running_mean
        return model

    torch.save(sharing().state_dict(), tmp_path / "one.bin")
    with init_empty_weights():
        model = sharing()
    where = {"": "disk"}
    load_checkpoint_in_model(
        model, tmp_path / "one.bin", where, tmp_path / "off", offload_buffers=True
    )
    dispatch_model(model, {"": "cpu"}, offload_dir=tmp_path / "off")
    assert model[0].running_mean is model[1].running_mean


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_buffers_that_modules_share_have_the_statistics_of_both(
    offload: Callable[..., nn.Module], tmp_path: Path
) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain[3].running_mean = plain[1].running_mean
    model = copy.deepcopy(plain)
    given = (tmp_path,) if offload is disk_offload else ()
    offload(model, *given, execution_device="cpu", offload_buffers=True)
    with torch.no_grad():
        for _ in range(3):
            model(inputs()), plain(inputs())
    model.eval(), plain.eval()
    assert torch.equal(model(inputs()), plain(inputs()))
    remove_hook_from_submodules(model)
    assert model[3].running_mean is model[1].running_mean


@pytest.mark.parametrize("where", ACROSS)
def test_what_is_assigned_to_the_one_that_stays_is_its_alone(
    where: dict[str, str], tmp_path: Path
) -> None:
    plain = made()
    model = dispatch_model(copy.deepcopy(plain), where, offload_dir=tmp_path)
    name = "head" if "embedding" in where else "embedding"
    for one in (model, plain):
        with torch.no_grad():
            one.get_parameter(f"{name}.weight").mul_(3)  # of both, still
        one.get_submodule(name).weight = nn.Parameter(torch.ones(6, 4))
    assert torch.equal(model(TOKENS), plain(TOKENS))
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())
    remove_hook_from_submodules(model)
    assert torch.equal(model(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("where", ACROSS)
def test_functional_calls_cannot_replace_a_part_of_a_tie(
    where: dict[str, str], tmp_path: Path
) -> None:
    model = dispatch_model(made(), where, offload_dir=tmp_path)
    name = "head.weight" if "embedding" in where else "embedding.weight"
    with pytest.raises(StateError, match=r"replaced, as by functional_call, and is tied"):
        torch.func.functional_call(model, {name: torch.ones(6, 4)}, (TOKENS,))
    assert torch.equal(model(TOKENS), made()(TOKENS))


def test_what_is_assigned_to_one_that_was_given_back_is_its_alone(tmp_path: Path) -> None:
    plain = made()
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    remove_hook_from_module(model.get_submodule("embedding"))
    for one in (model, plain):
        one.get_submodule("embedding").weight = nn.Parameter(torch.ones(6, 4))
    assert torch.equal(model(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("where", ACROSS)
@pytest.mark.parametrize("lacks", [(), ("head.weight",)])
def test_a_state_dict_is_loaded_into_the_one_that_stays(
    where: dict[str, str], lacks: tuple[str, ...], tmp_path: Path
) -> None:
    plain = made()
    model = dispatch_model(copy.deepcopy(plain), where, offload_dir=tmp_path)
    # The other weights are equal: one that is offloaded alone cannot be written.
    state = plain.state_dict() | {"embedding.weight": torch.ones(6, 4)}
    state |= {"head.weight": torch.ones(6, 4)}
    for name in lacks:
        del state[name]
    for one in (model, plain):
        one.load_state_dict(state, strict=not lacks)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_a_state_dict_of_another_model_without_values_is_refused(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path / "a", "cpu")
    other = disk_offload(made(1), tmp_path / "b", "cpu")
    for state in (other.state_dict(), empty().state_dict()):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=r"embedding\.weight: the state dict has no val"):
                model.load_state_dict(state, assign=assign)
    before = model(TOKENS)
    for copied in (model, copy.deepcopy(model)):
        copied.load_state_dict(copied.state_dict())
        assert torch.equal(copied(TOKENS), before)


Freeze = Callable[[nn.Module], object]
FREEZE: list[Freeze] = [
    lambda model: model.get_submodule("head").requires_grad_(False),
    lambda model: model.get_submodule("embedding").requires_grad_(False),
    lambda model: (
        model.requires_grad_(False),
        model.get_submodule("embedding").requires_grad_(True),
    ),
    lambda model: (model.requires_grad_(False), model.get_submodule("head").requires_grad_(True)),
    lambda model: setattr(model.get_parameter("head.weight"), "requires_grad", False),
]


@pytest.mark.parametrize("where", [{"": "disk"}, *ACROSS])
@pytest.mark.parametrize("freeze", FREEZE)
@pytest.mark.parametrize("runs", [False, True])
def test_who_freezes_one_name_freezes_the_weight(
    where: dict[str, str], freeze: Freeze, runs: bool, tmp_path: Path
) -> None:
    plain = made()
    model = dispatch_model(copy.deepcopy(plain), where, "cpu", offload_dir=tmp_path)
    for one in (model, plain):
        freeze(one)
        for _ in range(runs):
            one(TOKENS)
    for name in ("embedding.weight", "head.weight"):
        one = model.get_parameter(name)
        if where == {"": "disk"} or not one.is_meta:  # else the tensor that stays has the say
            assert one.requires_grad == plain.get_parameter(name).requires_grad
    remove_hook_from_submodules(model)
    flags = {name: one.requires_grad for name, one in model.named_parameters()}
    assert flags == {name: one.requires_grad for name, one in plain.named_parameters()}


def test_a_copy_is_frozen_by_itself(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path, "cpu")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.get_submodule("head").requires_grad_(False)
        assert not copied.get_parameter("embedding.weight").requires_grad
        assert model.get_parameter("embedding.weight").requires_grad


@pytest.mark.parametrize("where", [{"": "disk"}, {"": "disk", "block": "cpu"}])
def test_a_weight_that_is_offloaded_is_not_kept_in_memory(
    where: dict[str, str], tmp_path: Path
) -> None:
    model = made()
    seen = weakref.ref(model.embedding.weight)
    dispatch_model(model, where, "cpu", offload_dir=tmp_path)
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("part", ["embedding", "head"])
def test_a_part_that_is_tied_to_what_an_earlier_dispatch_has_is_refused(
    part: str, tmp_path: Path
) -> None:
    model = disk_offload(made(), tmp_path, "cpu")
    with pytest.raises(ConfigError, match="it is tied to a weight outside of what is"):
        cpu_offload(model.get_submodule(part), "cpu")
    assert torch.equal(model(TOKENS), made()(TOKENS))
    cpu_offload(model.get_submodule("block"), "cpu")
    assert torch.equal(model(TOKENS), made()(TOKENS))
    remove_hook_from_submodules(model)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    disk_offload(model, tmp_path / "again", "cpu")


@pytest.mark.parametrize("first", [{"": "disk"}, *ACROSS])
@pytest.mark.parametrize("is_removed", [True, False])
def test_what_was_untied_between_two_dispatches_is_no_longer_tied(
    first: dict[str, str], is_removed: bool, tmp_path: Path
) -> None:
    model = dispatch_model(made(), first, "cpu", offload_dir=tmp_path / "first")
    if is_removed:
        remove_hook_from_submodules(model)
    model.get_submodule("head").weight = nn.Parameter(torch.ones(6, 4))
    disk_offload(model, tmp_path / "second", "cpu")
    model.get_submodule("embedding").requires_grad_(False)
    assert model.get_parameter("head.weight").requires_grad


def test_a_second_dispatch_holds_no_weight_of_the_first(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path / "first", "cpu")
    remove_hook_from_submodules(model)
    seen = weakref.ref(model.get_parameter("embedding.weight"))
    disk_offload(model, tmp_path / "second", "cpu")
    gc.collect()
    assert seen() is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"\d+ offloaded weights that are to train"):
        Accelerator(cpu=True).prepare(model, optimizer)


def test_two_models_share_a_module_with_tied_weights(tmp_path: Path) -> None:
    shared = nn.Sequential(made(), nn.Linear(6, 6))
    first, second = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh())
    plain = copy.deepcopy([first, second])
    disk_offload(first, tmp_path / "first", "cpu")
    disk_offload(second, tmp_path / "second", "cpu")
    for model, expected in zip((first, second), plain, strict=True):
        assert torch.equal(model(TOKENS), expected(TOKENS))
    remove_hook_from_submodules(first)
    tied = shared[0]
    assert tied.head.weight is tied.embedding.weight


@pytest.mark.parametrize("where", [{"": "disk"}, *ACROSS])
def test_who_freezes_a_weight_as_its_module_runs_freezes_it(
    where: dict[str, str], tmp_path: Path
) -> None:
    class Freezing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.requires_grad_(False)
            return super().forward(x)

    model = made()
    weight, model.head = model.head.weight, Freezing(4, 6, bias=False)
    model.head.weight = weight
    dispatch_model(model, where, "cpu", offload_dir=tmp_path)
    with torch.no_grad():
        model(TOKENS)
    remove_hook_from_submodules(model)
    assert not model.embedding.weight.requires_grad
    assert model.embedding.weight is model.head.weight


@pytest.mark.parametrize("where", ACROSS)
def test_a_value_that_is_assigned_to_one_name_is_not_that_of_others(
    where: dict[str, str], tmp_path: Path
) -> None:
    plain = made()
    model = dispatch_model(copy.deepcopy(plain), where, offload_dir=tmp_path)
    name = "embedding.weight" if "embedding" in where else "head.weight"
    with pytest.raises(RuntimeError, match="offloaded weights cannot be loaded"):
        model.load_state_dict({name: torch.ones(6, 4)}, strict=False, assign=True)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_values_that_are_assigned_by_a_state_dict_are_no_ones_else(tmp_path: Path) -> None:
    """A plain model unties them; of two names that are offloaded one value would be lost."""
    plain = made()
    plain.head.register_parameter("other", plain.head.weight)
    model = dispatch_model(copy.deepcopy(plain), {"": "cpu", "head": "disk"}, offload_dir=tmp_path)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    state["head.other"] += 1
    with pytest.raises(RuntimeError, match=r"head\.other: offloaded weights cannot be loaded"):
        model.load_state_dict(state, assign=True)


def test_of_a_tied_weight_one_file_is_enough(tmp_path: Path) -> None:
    plain = made()
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    (tmp_path / "embedding.weight.dat").unlink()
    remove_hook_from_submodules(model)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_a_tied_weight_whose_files_are_gone_stays_tied(checkpoint: Path, tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path, "cpu")
    for name in ("embedding", "head"):
        (tmp_path / f"{name}.weight.dat").unlink()
    remove_hook_from_submodules(model)
    load_checkpoint_in_model(model, checkpoint)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert on_meta(model) == set()


# -- removal -------------------------------------------------------------------------------


def test_what_is_written_after_a_call_by_hand_is_kept_by_removal(tmp_path: Path) -> None:
    plain = net()
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    hook_of(model[0]).pre_forward(model[0])
    for one in (model, plain):
        with torch.no_grad():
            one[0].scale.mul_(2)
    remove_hook_from_submodules(model)
    assert torch.equal(model[0].scale, plain[0].scale)


def test_a_refused_removal_of_nested_hooks_changes_nothing(tmp_path: Path) -> None:
    model = disk_offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path, "cpu")
    model[1]._hf_hook = SequentialHook(SequentialHook(model[1]._hf_hook), ModelHook())
    model[1].weight = model[0].weight
    before = [getattr(module, "_hf_hook", None) for module in model.modules()]
    with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
        remove_hook_from_submodules(model)
    assert [getattr(module, "_hf_hook", None) for module in model.modules()] == before


def test_hooks_are_removed_within_a_call(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    model.register_forward_pre_hook(lambda module, _: remove_hook_from_submodules(module))
    assert torch.equal(model(inputs()), plain(inputs()))


def test_a_module_removes_its_own_hook_as_it_runs(tmp_path: Path) -> None:
    class Removing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            remove_hook_from_module(self)
            return super().forward(x)

    model = disk_offload(Removing(4, 4), tmp_path, "cpu")
    before = model(inputs())
    assert torch.equal(model(inputs()), before)
    assert on_meta(model) == set()


def test_a_refused_removal_keeps_what_was_written_by_hand(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path, "cpu")
    embedding, head = model.get_submodule("embedding"), model.get_submodule("head")
    before = head.weight
    hook_of(embedding).pre_forward(embedding)
    with torch.no_grad():
        embedding.get_parameter("weight").mul_(2)
    head.weight = model.get_parameter("block.linear.weight")
    with pytest.raises(StateError, match="weight of Linear: offloaded tensors were assigned"):
        remove_hook_from_submodules(model)
    head.weight = before
    with pytest.raises(StateError, match="is tied to others and was changed"):
        hook_of(embedding).post_forward(embedding, None)


def test_tied_weights_that_are_written_after_a_call_by_hand_are_given_back(tmp_path: Path) -> None:
    plain = made()
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    embedding = model.get_submodule("embedding")
    hook_of(embedding).pre_forward(embedding)
    for one in (model, plain):
        with torch.no_grad():
            one.get_parameter("embedding.weight").mul_(2)
    remove_hook_from_submodules(model)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def test_a_model_with_a_list_of_modules_is_pickled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[1].layers = nn.ModuleList([nn.Linear(4, 4)])
    plain = copy.deepcopy(model)
    dispatch_model(model, {"": "cpu", "2": "disk"}, offload_dir=tmp_path)
    assert torch.equal(pickle.loads(pickle.dumps(model))(inputs()), plain(inputs()))


def test_an_optimizer_of_offloaded_weights_that_train_is_refused(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "all", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"\d+ offloaded weights that are to train"):
        Accelerator(cpu=True).prepare(model, optimizer)
    model.requires_grad_(False)
    Accelerator(cpu=True).prepare(model, optimizer)


def test_of_an_optimizer_of_some_offloaded_weights_the_others_train(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    dispatch_model(model, {"0": "disk", "1": "cpu"}, "cpu", offload_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "2 offloaded weights of an optimizer do not train" in caplog.text
    before = model[1].weight.clone()
    with torch.no_grad():
        hidden = model[0](inputs())
    accelerator.backward(model[1](hidden).sum())
    optimizer.step()
    assert not torch.equal(model[1].weight, before)


def test_an_optimizer_without_what_an_offloaded_weight_is_tied_to_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dispatch_model(made(), {"": "cpu", "head": "disk"}, "cpu", offload_dir=tmp_path)
    head, block = (list(model.get_submodule(one).parameters()) for one in ("head", "block"))
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="1 offloaded weights that are to train"):
        accelerator.prepare(torch.optim.SGD(head, lr=0.1))
    accelerator.prepare(torch.optim.SGD([*head, *block], lr=0.1))
    assert "1 offloaded weights of an optimizer do not train" in caplog.text
    caplog.clear()
    accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not caplog.text


def test_a_state_dict_is_loaded_after_a_freeze(tmp_path: Path) -> None:
    model = dispatch_model(made(), {"": "cpu", "head": "disk"}, "cpu", offload_dir=tmp_path)
    state = model.state_dict()
    model.get_submodule("embedding").requires_grad_(False)
    model(TOKENS)
    model.load_state_dict(state)
    assert not model.get_parameter("head.weight").requires_grad
