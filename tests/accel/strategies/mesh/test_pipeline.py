"""Pipeline parallelism on gloo trains as one process does. Holds E3, E5, R5."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel import Accelerator
from accel.checkpoint.optimizer_state import ParameterNames
from accel.checkpoint.sharded import Shards, read_model_folder
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.parallelism import ParallelismConfig
from accel.machine.errors import StateError
from accel.state import AcceleratorState
from accel.strategies.mesh.state import full_tensor
from tests.accel.strategies.training import Block, Model, loss_of
from tests.helpers import run_distributed

MICRO_BATCHES = 4
SHARDED = "SHARDED_STATE_DICT"
# Of losses, relative; of gradients, relative to the largest of a parameter.
CLOSE = 1e-6


def deep(frozen: bool = True) -> Model:
    """Return a model of four blocks: one for each stage of two ranks, or two."""
    model = Model(frozen=frozen)
    model.blocks.extend([Block(20), Block(20)])
    return model


def windows(count: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return windows of micro-batches; the last one of the third window is larger."""
    generator = torch.Generator().manual_seed(3)
    shape = (count, MICRO_BATCHES + 1, 2, 4)
    found = []
    for index, tokens in enumerate(torch.randint(12, shape, generator=generator)):
        last = tokens[3:].flatten(0, 1) if index == 2 else tokens[3]
        found.append([(one, one.roll(-1, dims=1)) for one in (*tokens[:3], last)])
    return found


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return loss_of(model, *batch)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def share(window: list[Any], accelerator: Accelerator) -> list[Any]:
    """Return this rank's part of each micro-batch."""
    dims = accelerator.parallel_dims
    return [tuple(x.chunk(dims.dp_size)[dims.dp_rank] for x in batch) for batch in window]


def accelerator_of(**sizes: Any) -> Accelerator:
    AcceleratorState._reset_state(True)
    shards = sizes.pop("shards", False)
    return Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=SHARDED) if shards else None,
        parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        gradient_accumulation_steps=MICRO_BATCHES,
    )


def plain(model: torch.nn.Module, steps: int) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the losses and the gradients of each step of a plain loop."""
    optimizer = optimizer_of(model)
    losses, gradients = [], []
    for window in windows(steps):
        for batch in window:
            loss = loss_fn(model, batch)
            losses.append(loss.item())
            (loss / MICRO_BATCHES).backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        )
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def check_as_plain(sizes: dict[str, Any], frozen: bool) -> None:
    torch.set_default_dtype(torch.float64)
    expected_losses, expected = plain(deep(frozen), 3)
    accelerator = accelerator_of(**sizes)
    model = deep(frozen)
    optimizer = optimizer_of(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step, window in enumerate(windows(3)):
        mine = share(window, accelerator)
        found = accelerator.forward_backward(model, mine, loss_fn)
        losses += [accelerator.reduce(one, "mean").item() for one in found]
        for name, parameter in model.module.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                wanted = expected[step][name.replace("head", "embed")]
                gradient = full_tensor(parameter.grad)
                torch.testing.assert_close(gradient, wanted, rtol=CLOSE, atol=1e-12)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(losses, expected_losses, rtol=CLOSE, atol=0)
    tokens, trained_alone = windows(1)[0][0][0], deep()
    trained_alone.load_state_dict(accelerator.get_state_dict(model))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), trained_alone(tokens), rtol=CLOSE, atol=1e-12)
    accelerator.end_training()
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "schedule"),
    [
        ("dp_shard", "1F1B"),
        ("dp_shard", "ZBVZeroBubble"),
        ("dp_replicate", "InterleavedZeroBubble"),
        ("tp", "1F1B"),
        ("tp", "Interleaved1F1B"),
    ],
)
def test_other_axes_train_as_one_process(axis: str, schedule: str) -> None:
    sizes = {"pp_size": 2, f"{axis}_size": 2, "pp_schedule": schedule}
    run_distributed(check_as_plain, 4, sizes, False)


@pytest.mark.slow
def test_four_uneven_stages_train_as_one_process() -> None:
    sizes = {"pp_size": 4, "pp_split": ["blocks.0", "blocks.1", "head"]}
    run_distributed(check_as_plain, 4, sizes, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
)
@pytest.mark.parametrize("frozen", [True, False])
def test_training_is_that_of_one_process(schedule: str, frozen: bool) -> None:
    run_distributed(check_as_plain, 2, {"pp_size": 2, "pp_schedule": schedule}, frozen)


def check_accumulation(sizes: dict[str, Any]) -> None:
    accelerator = accelerator_of(**sizes)
    model = accelerator.prepare(deep(frozen=False))
    found = []
    for window in windows(3)[1:]:
        accelerator.forward_backward(model, share(window, accelerator), loss_fn)
        found.append({n: full_tensor(p.grad).clone() for n, p in model.module.named_parameters()})
    model.zero_grad()
    accelerator.forward_backward(model, share(windows(3)[2], accelerator), loss_fn)
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(found[0][name] + full_tensor(parameter.grad), found[1][name])
    accelerator.end_training()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"dp_shard_size": 2}])
def test_windows_add_to_gradients(sizes: dict[str, int]) -> None:
    run_distributed(check_accumulation, 2 * math.prod(sizes.values()), {"pp_size": 2, **sizes})


# -- what it costs -----------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts calls of a process group by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name().removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def costs(schedule: str) -> tuple[dict[str, int], list[int]]:
    """Return the calls of this rank in a step that is not the first, and the elements it holds."""
    accelerator = accelerator_of(pp_size=2, pp_schedule=schedule)
    model = deep(frozen=False)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    for window in windows(2):
        with Collectives() as made:
            accelerator.forward_backward(model, window, loss_fn)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    states = [one for entry in optimizer.state.values() for one in entry.values()]
    held = [sum(one.numel() for one in tensors) for tensors in (model.parameters(), states)]
    accelerator.end_training()
    return dict(made.counts), held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "boundaries", "shared"),
    [("GPipe", 1, 2), ("1F1B", 1, 2), ("Interleaved1F1B", 3, 2), ("ZBVZeroBubble", 2, 1)],
)
def test_a_step_makes_the_calls_that_its_schedule_needs(
    schedule: str, boundaries: int, shared: int
) -> None:
    """Micro-batches cross boundaries between ranks twice; shared weights' gradients once.

    Each rank holds half of the blocks, and the moments of their weights.
    """
    ranks, held = zip(*run_distributed(costs, 2, schedule), strict=True)
    sends = 2 * boundaries * MICRO_BATCHES + 2 * shared
    for name in ("send", "recv_"):
        assert sum(counts.pop(name) for counts in ranks) == sends
    assert ranks == ({"broadcast_": 1, "allreduce_": 1},) * 2  # losses, the norm
    whole = sum(one.numel() for one in deep().parameters())
    assert all(parameters < 0.55 * whole and state < 1.15 * whole for parameters, state in held)


# -- evaluation, checkpoints -------------------------------------------------------------------


def check_evaluation() -> None:
    accelerator = accelerator_of(pp_size=2)
    model = accelerator.prepare(deep())
    for rows in (1, 3):
        tokens = torch.randint(12, (rows, 4), generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            assert torch.equal(model(tokens), deep()(tokens))
    with pytest.raises(StateError, match="is called with gradients"):
        model(tokens)
    with pytest.raises(StateError, match="order of a schedule"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    own = accelerator.unwrap_model(model)
    with torch.no_grad():
        assert torch.equal(own(tokens), deep()(tokens))
    with pytest.raises(StateError, match="is called by itself"):
        own.embed(tokens)
    accelerator.end_training()


@pytest.mark.slow
def test_every_rank_gets_the_output_of_an_evaluation() -> None:
    run_distributed(check_evaluation, 2)


def trained(folder: Path, sizes: dict[str, Any], steps: range, resume: bool) -> dict[str, Any]:
    """Train some steps, from a checkpoint or the start; save, and return the full state."""
    accelerator = accelerator_of(**sizes)
    model = deep(frozen=False)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    if resume:
        accelerator.load_state(str(folder))
    for window in windows(steps.stop)[steps.start :]:
        accelerator.forward_backward(model, share(window, accelerator), loss_fn)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))
    names = ParameterNames([accelerator.unwrap_model(model)])
    state = {
        "model": accelerator.get_state_dict(model),
        "optimizer": accelerator.strategy.state.optimizer_state(optimizer, names)["state"],
    }
    accelerator.end_training()
    return copy.deepcopy(state)


TWO = {"pp_size": 2}
IN_SHARDS = {**TWO, "shards": True}


def assert_equal(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_resume(folder: Path, sizes: dict[str, Any]) -> None:
    """A run that was interrupted ends as one that was not."""
    whole = trained(folder / "whole", sizes, range(4), resume=False)
    trained(folder / "half", sizes, range(2), resume=False)
    assert_equal(trained(folder / "half", sizes, range(2, 4), resume=True), whole)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [TWO, IN_SHARDS])
def test_a_resumed_run_is_bit_equal(sizes: dict[str, Any], tmp_path: Path) -> None:
    run_distributed(check_resume, 2, tmp_path, sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "sizes"),
    [
        (TWO, {}),
        (TWO, {"dp_shard_size": 2}),
        (TWO, {**TWO, "dp_shard_size": 2}),
        (IN_SHARDS, {}),
        (IN_SHARDS, {"dp_shard_size": 2, "shards": True}),
        (TWO, {**IN_SHARDS, "dp_shard_size": 2}),
        (TWO, {"cp_size": 2}),
        (IN_SHARDS, {**IN_SHARDS, "cp_size": 2}),
    ],
)
def test_state_moves_between_stages_and_other_strategies(
    stages: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Weights and state of the optimizer are the same there, and back."""
    (saved, _) = run_distributed(trained, 2, tmp_path, stages, range(2), False)
    assert saved["model"].keys() == deep().state_dict().keys()
    world_size = math.prod(sizes.values())
    for there in run_distributed(trained, world_size, tmp_path, sizes, range(2, 2), True):
        assert_equal(there, saved)
    for again in run_distributed(trained, 2, tmp_path, stages, range(2, 2), True):
        assert_equal(again, saved)


@pytest.mark.slow
def test_each_rank_writes_its_own_stage_in_shards(tmp_path: Path) -> None:
    (saved, _) = run_distributed(trained, 2, tmp_path, IN_SHARDS, range(1), False)
    for kind, prefix in (("model", "pytorch_model_fsdp_0"), ("optimizer", "optimizer_0")):
        written = Shards(tmp_path / prefix)._metadata.storage_data
        for block, number in (("blocks.0.", 0), ("blocks.3.", 1)):
            files = {one.relative_path for at, one in written.items() if block in at.fqn}
            assert files == {f"__{number}_0.distcp"}, kind
    assert_equal(read_model_folder(tmp_path / "pytorch_model_fsdp_0"), dict(saved["model"]))


# -- what is wrong shows -----------------------------------------------------------------------


def check_controls() -> None:
    """A stage that is left out of a norm, and tied weights that are not summed, are noticed."""
    torch.set_default_dtype(torch.float64)
    (window,) = windows(1)
    reference = deep()
    for batch in window:
        (loss_fn(reference, batch) / MICRO_BATCHES).backward()
    expected = torch.nn.utils.get_total_norm(
        [p.grad for p in reference.parameters() if p.requires_grad]
    )
    norms = []
    for broken in ("", "a stage", "_sum_shared", "counted_elsewhere"):
        accelerator = accelerator_of(pp_size=2)
        model, _ = accelerator.prepare(model := deep(), optimizer_of(model))
        answers = {"_sum_shared": lambda: None, "counted_elsewhere": set}
        if broken in answers:
            setattr(model.pipeline, broken, answers[broken])
        accelerator.forward_backward(model, window, loss_fn)
        if broken == "a stage" and model.pipeline.rank == 1:
            everything = set(map(id, model.parameters()))
            model.pipeline.counted_elsewhere = everything.copy
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e9))
        accelerator.end_training()
    right, *wrong = [torch.isclose(norm, expected, rtol=CLOSE) for norm in norms]
    assert right
    assert not any(wrong)
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_a_norm_without_a_stage_and_tied_weights_that_are_not_summed_are_noticed() -> None:
    run_distributed(check_controls, 2)
