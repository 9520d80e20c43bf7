"""R1, R5, E3: a reduced parity matrix: every strategy on few processes, and red controls.

An engine of each kind is tried always, the other backends by the slow tests.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from accel.machine.errors import ConfigError
from tests.parity.cells import BACKENDS, FLOAT8, Cell, matrix, reason_not_to_run
from tests.parity.controls import (
    DATA,
    FAR_FROM_FP32,
    FLOAT8_SABOTAGES,
    SABOTAGES,
    SEQUENCES,
    STAGES,
    controls,
)
from tests.parity.gates import FLOAT8 as FLOAT8_GATE
from tests.parity.gates import Difference, Verdict, plain
from tests.parity.running import run
from tests.parity.task import Task
from tests.parity.workers import make_accelerator

TASK = Task(num_steps=6, context=16, dim=32)
SLOW = pytest.mark.slow
# What `prepare` makes of the model.
TYPES = {
    "single": "ByteGPT",
    "ddp": "DistributedDataParallel",
    "fsdp_full_shard": "FSDPByteGPT",
    "fsdp_shard_grad_op": "FSDPByteGPT",
    "fsdp_hybrid_shard": "FSDPByteGPT",
    "fsdp_no_shard": "FSDPByteGPT",
    "fsdp_cpu_offload": "FSDPByteGPT",
    "fsdp_tp": "FSDPByteGPT",
    "cp": "FSDPByteGPT",
    "cp_tp": "FSDPByteGPT",
    **dict.fromkeys((name for name in BACKENDS if name.startswith("pp")), "Pipelined"),
    "tp": "ByteGPT",
    "tp_ddp": "FSDPByteGPT",
    "zero0": "DeepSpeedEngine",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "zero2_offload": "DeepSpeedEngine",
    "zero3_offload": "DeepSpeedEngine",
    **dict.fromkeys((name for name in BACKENDS if "megatron" in name), "MegatronModel"),
    "compile_single": "OptimizedModule",
    "compile_ddp": "DistributedDataParallel",
    "compile_fsdp": "FSDPByteGPT",
    "compile_zero2": "DeepSpeedEngine",
}
# What a process of two holds of what a replica holds, from and to. DDP's buckets are as large as
# the gradients: with weights, gradients and two moments, 5/4.
HELD = {"ddp": (1.2, 1.3), "fsdp_full_shard": (0.45, 0.55), "zero3": (0.45, 0.55), "pp": (0.4, 0.7)}
ALWAYS = ("ddp",)  # the others are slow tests
HERE = [name for name in BACKENDS if name != "xla"]  # `make parity-xla` has an environment for it


def test_every_cell_runs_or_has_a_reason() -> None:
    cells = list(matrix(TASK, "cpu"))
    number = len(HERE) * (3 * 3 * 2 + 3 * 2 + 3) + 3 * len(FLOAT8)
    assert len(cells) == len(set(cells)) == number
    reasons = {cell: reason_not_to_run(cell, 0) for cell in cells}
    run_by = {cell.backend for cell, reason in reasons.items() if reason is None}
    assert run_by == set(HERE) == set(TYPES)
    assert {cell.backend for cell in matrix(TASK, "xla")} == {"xla"}
    assert all(reason is None or len(reason) > 20 for reason in reasons.values())
    on_gpu = Cell("ddp", world_size=2, device="cuda")
    assert "there are 1" in (reason_not_to_run(on_gpu, 1) or "")


def test_the_plain_loop_trains_and_clipping_acts() -> None:
    found = plain(TASK, 1, "cpu")
    for name, weight in TASK.model().state_dict().items():
        assert (found.weights[name] - weight).abs().max() > TASK.recipe.lr
    assert min(found.norms) > (TASK.recipe.max_norm or 0)
    parameters = sum(weight.numel() for name, weight in found.weights.items() if "head" not in name)
    # Weights, gradients and two moments in fp32; batches and counters beside them.
    assert 16 * parameters <= found.num_bytes["after"] <= 16 * parameters + 8192


def compiled(backend: str) -> bool:
    """Return whether `backend` compiles, which takes as long as all else."""
    return backend.startswith("compile_")


def reduced(backend: str) -> list[Cell]:
    """Return a cell in fp32 and one in bf16, on two processes where the backend runs on two.

    What is compiled is compiled once, for fp32.
    """
    sizes = [n for n in (2, 4, 1) if reason_not_to_run(Cell(backend, world_size=n), 0) is None]
    special = replace(TASK, short=True, ragged=True)
    cells = [
        Cell(backend, "no", sizes[0], 2, special, "short"),
        # The gate of bf16 is of the matrix's model: weights of a smaller one are noisier.
        Cell(backend, "bf16", sizes[0], 1, Task(num_steps=6)),
    ]
    return cells[:1] if compiled(backend) else cells


def marks(backend: str) -> list[pytest.MarkDecorator]:
    """Return how a test of `backend` is marked."""
    longer = [pytest.mark.timeout(1800)] if compiled(backend) else []
    return [*longer, *([] if backend in ALWAYS else [SLOW])]


@pytest.mark.parametrize("backend", [pytest.param(b, marks=marks(b)) for b in HERE])
def test_a_backend_is_the_plain_loop(backend: str) -> None:
    for cell in reduced(backend):
        verdict = run(cell)
        assert verdict.green, verdict.failures
        assert verdict.types[0] == TYPES[backend]
        least, most = HELD.get(backend, (0.0, 2.0))
        assert least <= (verdict.share or 0.0) <= most


@pytest.mark.parametrize(
    "backend",
    [pytest.param(b, marks=SLOW) for b in ("fsdp_full_shard", "tp", "zero2", "zero3")],
)
def test_a_model_that_computes_its_own_loss_is_the_plain_loop(backend: str) -> None:
    verdict = run(Cell(backend, "bf16", 2, 1, replace(TASK, own_loss=True), "own loss"))
    assert verdict.green, verdict.failures


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp_full_shard", "zero3", "zero3_offload"])
def test_a_fourth_is_held_on_four_processes(backend: str) -> None:
    verdict = run(Cell(backend, "no", 4, 1, TASK))
    assert verdict.green, verdict.failures
    assert verdict.share is not None
    assert verdict.share <= (0.375 if backend == "zero3_offload" else 0.3)


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("single", 1), pytest.param("ddp", 2, marks=SLOW), pytest.param(FLOAT8[-1], 2, marks=SLOW)],
)
def test_fp8_is_the_plain_loop_in_fp8_and_near_to_fp32(backend: str, world_size: int) -> None:
    cell = Cell(backend, "fp8", world_size, task=TASK)
    if (reason := reason_not_to_run(cell, 0)) is not None:
        pytest.skip(reason)
    verdict = run(cell)
    assert verdict.green, verdict.failures
    assert backend != "single" or verdict.difference == Difference(0.0, 0.0)


@pytest.mark.parametrize("sabotage", FLOAT8_SABOTAGES)
def test_a_mistake_in_fp8_turns_the_matrix_red(sabotage: str) -> None:
    verdict = spoiled_float8("single", 1, sabotage)
    assert verdict.caught
    assert verdict.caught_from_fp32 is (sabotage in FAR_FROM_FP32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sabotage"),
    list(itertools.product(("ddp", "fsdp_full_shard"), FLOAT8_SABOTAGES)),
)
def test_a_mistake_in_fp8_turns_several_processes_red(backend: str, sabotage: str) -> None:
    verdict = spoiled_float8(backend, 2, sabotage)
    assert verdict.caught
    assert verdict.layers
    assert not verdict.green
    assert verdict.caught_from_fp32 is (sabotage in FAR_FROM_FP32)
    assert verdict.gate == Difference(FLOAT8_GATE, FLOAT8_GATE)


def spoiled_float8(backend: str, world_size: int, sabotage: str) -> Verdict:
    cell = Cell(backend, "fp8", world_size, task=TASK)
    if (reason := reason_not_to_run(cell, 0)) is not None:
        pytest.skip(reason)
    (spoiled,) = (found for found in controls([cell]) if found.sabotage == sabotage)
    return run(spoiled)


@pytest.mark.slow
def test_a_rank_that_reads_the_data_of_another_turns_the_matrix_red() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
    (spoiled,) = controls([Cell("megatron_dp", "no", 2, 2, TASK)])
    verdict = run(spoiled)
    assert spoiled.sabotage == DATA
    assert verdict.caught, verdict.failures


FAST_CONTROLS = [("ddp", "gradients divided by W twice"), ("ddp", "tied weight untied")]


@pytest.mark.parametrize(
    ("backend", "sabotage"),
    [
        pair if pair in FAST_CONTROLS else pytest.param(*pair, marks=SLOW)
        for pair in itertools.product(("ddp", "fsdp_full_shard", "zero3"), SABOTAGES)
    ],
)
def test_a_mistake_turns_the_matrix_red(backend: str, sabotage: str) -> None:
    cells = [Cell(backend, "no", 2, 2, replace(TASK, short=short)) for short in (False, True)]
    cells[1] = replace(cells[1], variant="short")
    spoiled = [cell for cell in controls(cells) if cell.sabotage == sabotage]
    assert len(spoiled) == 1
    verdict = run(spoiled[0])
    assert verdict.caught, verdict.failures
    assert verdict.difference is not None
    assert verdict.gate is not None
    assert verdict.difference.weight > 10 * verdict.gate.weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sabotage"),
    [*itertools.product(["cp"], SEQUENCES), *itertools.product(["pp"], STAGES)],
)
def test_a_mistake_with_parts_of_sequences_or_stages_turns_it_red(
    backend: str, sabotage: str
) -> None:
    cells = controls([Cell(backend, "no", 2, 2, TASK)])
    verdict = run(next(cell for cell in cells if cell.sabotage == sabotage))
    assert verdict.caught, verdict.failures


@pytest.mark.parametrize("backend", ["zero0", "zero3_offload", "compile_zero2"])
def test_what_is_not_run_for_being_refused_is_refused(backend: str) -> None:
    cell = Cell(backend, "fp16")
    assert "refuses it" in (reason_not_to_run(cell, 0) or "")
    with pytest.raises(ConfigError, match="fp16"):
        make_accelerator(cell)
