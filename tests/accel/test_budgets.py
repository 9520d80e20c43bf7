"""What a step may cost over the hand-written loop, in things that can be counted (E6).

Counts do not depend on the machine or its load; `make bench` measures the time. Whoever makes the
engine do more per step has to raise a number here, and say why.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import GradScalerKwargs
from tests.helpers import python, run_distributed

STEPS, BATCH = 12, 8
# Over the hand-written loop, per step of one process.
PYTHON_CALLS = 8
C_CALLS = 1
# Modules with code that `from accel import Accelerator` brings beyond torch's own; none at a step.
# (Among them those of data order and its resumes, of how a loop reads, of loader workers, and of
# the sizes, setters, fields shown and launchers' variables that the current release documents.)
MODULES = 110
OPTIONAL = (
    "deepspeed",
    "tensorboard",
    "rich",
    "yaml",
    "torchdata",
    "sklearn",
    "hydra",
    "omegaconf",
)

SECONDS_TO_NOTE = 0.2
READ = "aten::_local_scalar_dense"  # waits for the device

Epoch = Callable[[], None]


class Operations(TorchDispatchMode):
    """Notes the names of the operations that tensors go through."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def parts(num_batches: int = STEPS) -> tuple[Any, ...]:
    """Return a model, an optimizer, a loader and a scheduler."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(num_batches * BATCH, 8), torch.randn(num_batches * BATCH, 1))
    return model, optimizer, DataLoader(data, batch_size=BATCH), scheduler


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return torch.nn.functional.mse_loss(model(inputs), targets)


def by_hand(wrap: Callable[[Any], Any] = lambda model: model, steps: int = STEPS) -> Epoch:
    """Return one epoch of the loop without the engine."""
    model, optimizer, loader, scheduler = parts(steps)
    model = wrap(model)

    def epoch() -> None:
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return epoch


def with_engine(steps: int = STEPS, **options: Any) -> Epoch:
    """Return one epoch of the same loop with it."""
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts(steps))

    def epoch() -> None:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return epoch


def operations(epoch: Epoch) -> Counter[str]:
    """Count the operations of one epoch that is not the first."""
    epoch()
    with Operations() as seen:
        epoch()
    return Counter(seen.names)


# -- calls -----------------------------------------------------------------------------------


def calls(epoch: Epoch) -> Counter[str]:
    """Count the calls into Python functions ("call") and C functions ("c_call") of one epoch."""
    counts: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        counts[event] += 1

    epoch()
    gc.collect()
    gc.disable()  # what other tests have left would be finalized in between
    sys.setprofile(note)
    try:
        epoch()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def extra_calls(long: int = 60, short: int = 20) -> tuple[float, float]:
    """Return the calls of a step over the hand-written one: into Python, into C."""
    # The difference of a long and a short epoch leaves out what happens once in an epoch.
    counted = {
        (maker, steps): calls(maker(steps=steps))
        for maker in (by_hand, with_engine)
        for steps in (long, short)
    }

    def per_step(maker: Any, kind: str) -> float:
        return (counted[maker, long][kind] - counted[maker, short][kind]) / (long - short)

    python_calls, c_calls = (
        per_step(with_engine, kind) - per_step(by_hand, kind) for kind in ("call", "c_call")
    )
    return python_calls, c_calls


def test_calls_of_a_step() -> None:
    python_calls, c_calls = extra_calls()
    assert python_calls <= PYTHON_CALLS
    assert c_calls <= C_CALLS


# -- operations on tensors: allocations, waiting for the device ------------------------------


def test_a_step_runs_the_operations_of_the_hand_written_one_and_no_other() -> None:
    """So it allocates no tensor more, and waits for the device no more often."""
    assert operations(with_engine()) == operations(by_hand())


def test_accumulation_adds_one_division_a_micro_batch() -> None:
    added = operations(with_engine(gradient_accumulation_steps=3)) - operations(by_hand())
    assert added.pop("aten::div") == 2 * STEPS  # the loss and its gradient
    # Gradients of a window are added up, where the hand-written loop starts anew.
    assert set(added) <= {"aten::add_", "aten::add"}


def test_bf16_runs_the_operations_of_autocast_and_conversion_alone() -> None:
    def hand() -> Epoch:
        model, optimizer, loader, scheduler = parts()

        def epoch() -> None:
            for inputs, targets in loader:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    outputs = model(inputs)
                torch.nn.functional.mse_loss(outputs.float(), targets).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        return epoch

    assert operations(with_engine(mixed_precision="bf16")) == operations(hand())


def test_fp16_reads_what_torch_reads_and_one_number_more_per_optimizer_step() -> None:
    handlers = [GradScalerKwargs(init_scale=2.0)]
    ours = operations(with_engine(mixed_precision="fp16", kwargs_handlers=handlers))
    reads = ours[READ] - operations(by_hand())[READ]
    assert reads <= 2 * STEPS  # torch's scaler reads the flag in its own `step`


def test_a_pass_leaves_no_objects_behind() -> None:
    epoch = with_engine()
    epoch()
    gc.collect()
    gc.disable()  # so that cycles count
    try:
        before = len(gc.get_objects())
        epoch()
        assert len(gc.get_objects()) <= before + 1
    finally:
        gc.enable()


# -- collectives -----------------------------------------------------------------------------


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Note the collectives that the process group itself is asked for."""
    names: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield names
        # A thread of gloo's notes the end of a collective, after who waits for it has gone on.
        time.sleep(SECONDS_TO_NOTE)
    names += [event.name for event in profiler.events() if event.name.startswith("gloo:")]


def collectives_of(epoch: Epoch) -> list[str]:
    epoch()
    with counted_collectives() as names:
        epoch()
    return sorted(names)


def count_collectives() -> dict[str, list[str]]:
    ours = collectives_of(with_engine())
    windows = collectives_of(with_engine(gradient_accumulation_steps=4))
    dist.barrier()
    hand = collectives_of(by_hand(DistributedDataParallel, STEPS // dist.get_world_size()))
    return {"ours": ours, "windows": windows, "hand": hand}


@pytest.mark.parametrize("size", [2])
def test_ddp_exchanges_what_the_hand_written_loop_exchanges(size: int) -> None:
    for found in run_distributed(count_collectives, size):
        reductions = [name for name in found["hand"] if "all_reduce" in name]
        assert len(reductions) == STEPS // size
        # The loader agrees on the random state once a pass, if at all.
        assert len(found["ours"]) <= len(found["hand"]) + 1
        assert [name for name in found["ours"] if "all_reduce" in name] == reductions
        per_window = [name for name in found["windows"] if "all_reduce" in name]
        assert len(per_window) == -(-(STEPS // size) // 4)


# -- modules ---------------------------------------------------------------------------------


def test_modules_that_come_with_the_import() -> None:
    probe = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "from accel import Accelerator\n"
        "Accelerator\n"
        "new = set(sys.modules) - before\n"
        "print(*(name for name in sorted(new) if sys.modules[name].__spec__.loader))"
    )
    answer = subprocess.run(python("-c", probe), capture_output=True, text=True, timeout=300)
    new = answer.stdout.split()
    assert new, answer.stderr
    assert len(new) <= MODULES
    assert not {name.partition(".")[0] for name in new} & set(OPTIONAL)


def test_a_step_imports_nothing() -> None:
    epoch = with_engine()
    epoch()
    before = set(sys.modules)
    epoch()
    assert set(sys.modules) == before
