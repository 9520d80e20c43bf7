"""Documented functions on sharded models and optimizers: what they write is read back equal.

Holds E1, E3.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.checkpoint.serialization import load_plain
from accel.machine import env
from accel.machine.errors import ConfigError
from accel.strategies.mesh import utilities
from accel.strategies.mesh.state import full_tensor
from tests.accel.strategies.training import BATCH, Model, adamw, build, data, steps_of
from tests.helpers import run_distributed

FSDP: dict[str, Any] = {"transformer_cls_names_to_wrap": ["Block"]}


def started(seed: int) -> tuple[Accelerator, Any, Any, Any]:
    accelerator, model = build(fsdp=FSDP), Model(seed=seed)
    return accelerator, *accelerator.prepare(model, adamw(model), DataLoader(data(2), BATCH))


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def saved_and_loaded(folder: str, index: int, adapter: bool, kind: str) -> tuple[bool, list[str]]:
    """Return whether a second run has the state of the first, and the files."""
    accelerator, model, optimizer, loader = started(seed=0)
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    plugin.set_state_dict_type(kind)
    steps_of(accelerator, model, optimizer, loader)
    utilities.save_fsdp_model(plugin, accelerator, model, folder, index, adapter)
    utilities.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, index)
    before = steps_of(accelerator, model, optimizer, loader), accelerator.get_state_dict(model)
    accelerator.free_memory()
    accelerator, model, optimizer, loader = started(seed=1)
    utilities.load_fsdp_model(plugin, accelerator, model, folder, index, adapter)
    utilities.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, index, adapter)
    after = steps_of(accelerator, model, optimizer, loader), accelerator.get_state_dict(model)
    accelerator.end_training()
    return before[0] == after[0] and equal(before[1], after[1]), sorted(os.listdir(folder))


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sharded_model_and_its_optimizer_are_saved_and_loaded(index: int, tmp_path: Path) -> None:
    adapter = index == 1  # it makes no difference to a model without one
    suffix = "" if index == 0 else "_1"
    for kind, files in (
        ("FULL_STATE_DICT", [f"optimizer{suffix}.bin", f"pytorch_model_fsdp{suffix}.bin"]),
        ("SHARDED_STATE_DICT", [f"optimizer_{index}", f"pytorch_model_fsdp_{index}"]),
    ):
        folder = str(tmp_path / kind)
        found = run_distributed(saved_and_loaded, 2, folder, index, adapter, kind)
        assert found == [(True, files)] * 2


def adapter_saved_and_loaded(folder: str) -> tuple[set[str], bool, bool]:
    """Return the names in an adapter's file, whether it was loaded, and what else was kept."""
    peft = pytest.importorskip("peft")
    accelerator = build(fsdp=FSDP)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(Model(seed=0), config)
    base = copy.deepcopy(model.state_dict())
    model, _ = accelerator.prepare(model, adamw(model))
    plugin = accelerator.state.fsdp_plugin
    assert plugin is not None
    utilities.save_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    names = set(load_plain(Path(folder) / "pytorch_model_fsdp.bin"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    moved = accelerator.get_state_dict(model)
    utilities.load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    after = accelerator.get_state_dict(model)
    loaded = all(torch.equal(after[name], base[name]) for name in names)
    others = set(moved) - names
    kept = bool(others) and all(torch.equal(after[name], moved[name]) for name in others)
    accelerator.end_training()
    return names, loaded, kept


@pytest.mark.slow
def test_only_the_adapter_of_a_model_of_peft_is_saved_and_loaded(tmp_path: Path) -> None:
    for names, loaded, others_kept in run_distributed(adapter_saved_and_loaded, 2, str(tmp_path)):
        assert names
        assert all("lora_" in name for name in names)
        assert loaded
        assert others_kept


def full_state_loaded() -> list[bool]:
    accelerator = build(fsdp=FSDP)
    model = utilities.fsdp2_prepare_model(accelerator, Model(seed=accelerator.process_index))
    held = list(model.parameters())
    wanted = Model(seed=7).state_dict()
    given = wanted if accelerator.is_main_process else {}
    utilities.fsdp2_load_full_state_dict(accelerator, model, given)
    found = accelerator.get_state_dict(model)
    same = all(one is other for one, other in zip(held, model.parameters(), strict=True))
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    accelerator.end_training()
    return [equal(found, wanted), same, sharded]


def loaded_without_memory() -> list[bool]:
    """Load into a model that a library sharded on the meta device."""
    accelerator = build(fsdp=FSDP)
    with torch.device("meta"):
        model = Model()
    assert accelerator.torch_device_mesh is not None
    fully_shard(model, mesh=accelerator.torch_device_mesh)
    wanted = Model(seed=7).state_dict()
    utilities.fsdp2_load_full_state_dict(accelerator, model, wanted, cpu_offload=True)
    weights = [model.blocks[0].up.weight, model.shift, model.scale]
    full = {name: full_tensor(value) for name, value in model.state_dict().items()}
    accelerator.end_training()
    return [equal(full, wanted), all(weight.device.type == "cpu" for weight in weights)]


def test_a_model_on_the_meta_device_gets_memory() -> None:
    assert run_distributed(loaded_without_memory, 2) == [[True, True]] * 2


@pytest.mark.parametrize("cpu_offload", [True, False])
def test_weights_rest_on_the_host_or_the_device(
    cpu_offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1: on a machine without a GPU both are the host, so that the options of torch tell."""
    asked: list[bool] = []

    def record(model: torch.nn.Module, state: object, options: StateDictOptions) -> None:
        asked.append(options.cpu_offload)

    monkeypatch.setattr(utilities, "set_model_state_dict", record)
    run: Any = SimpleNamespace()
    utilities.fsdp2_load_full_state_dict(run, torch.nn.Linear(1, 1), {}, cpu_offload)
    assert asked == [cpu_offload]


def test_the_state_of_rank_0_is_loaded_into_the_shards() -> None:
    assert run_distributed(full_state_loaded, 2) == [[True, True, True]] * 2


def switched() -> bool:
    """Let an optimizer, with the state of a step, follow the parameters of a sharded model."""
    accelerator, model = build(fsdp=FSDP), Model(frozen=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    optimizer.step()
    before = {name: (p.data_ptr(), p) for name, p in model.named_parameters()}
    kept = [p for _, p in before.values()]
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, (_, p) in before.items()}
    model = utilities.fsdp2_prepare_model(accelerator, model)
    after = dict(model.named_parameters())
    mapping = {pointer: after[name] for name, (pointer, _) in before.items()}
    # The module was sharded in place: hand the optimizer its former parameters again.
    first = next(iter(mapping))
    with pytest.raises(KeyError, match=str(first)):
        utilities.fsdp2_switch_optimizer_parameters(
            optimizer, {key: value for key, value in mapping.items() if key != first}
        )
    assert optimizer.param_groups[0]["params"][0] is kept[0]
    utilities.fsdp2_switch_optimizer_parameters(optimizer, mapping)
    follows = all(
        one is other
        for one, other in zip(optimizer.param_groups[0]["params"], after.values(), strict=True)
    )
    equal_moments = all(
        torch.equal(optimizer.state[p]["exp_avg"].full_tensor(), moments[name])
        for name, p in after.items()
    )
    accelerator.end_training()
    return follows and equal_moments


def test_an_optimizer_follows_the_shards() -> None:
    assert run_distributed(switched, 2) == [True, True]


def test_a_model_is_sharded_only_under_fsdp() -> None:
    with pytest.raises(ConfigError, match="FSDP is off"):
        utilities.fsdp2_prepare_model(Accelerator(cpu=True), torch.nn.Linear(1, 1))


def test_the_parameters_of_ignored_modules() -> None:
    model = Model()
    chosen = utilities.get_parameters_from_modules("blocks.0", model)
    assert chosen == set(model.blocks[0].parameters())
    modules = [model.blocks[1]]
    device = torch.device("meta")
    assert utilities.get_parameters_from_modules(modules, model, device) == set(
        model.blocks[1].parameters()
    )
    assert all(p.is_meta for p in model.blocks[1].parameters())
    assert utilities.get_parameters_from_modules(None, model) == set()


def test_loading_on_rank_0_is_switched_by_the_environment() -> None:
    with env.patched(ACCELERATE_USE_FSDP=None, FSDP_CPU_RAM_EFFICIENT_LOADING=None):
        utilities.enable_fsdp_ram_efficient_loading()
        assert (env.flag("ACCELERATE_USE_FSDP"), env.flag("FSDP_CPU_RAM_EFFICIENT_LOADING")) == (
            True,
            True,
        )
        utilities.disable_fsdp_ram_efficient_loading()
        assert not env.flag("FSDP_CPU_RAM_EFFICIENT_LOADING")
