"""E1: examples of the reference show the same with the package they were written for.

Needs the extra `compare`, which nothing else does: ``pip install -e .[compare]``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.documentation import objects, processes, training
from tests.documentation.player import DOCUMENTED, Example, Shown, shown

pytest.importorskip(DOCUMENTED, reason="the extra `compare` installs it")
pytestmark = pytest.mark.slow  # `tests/documentation` holds accel to what the pages say

# What version 1.15 does not show, though the pages say it, by example; accel does.
OLD_SPELLING = "the example's spelling is not taken any more"
ONLY_ACCELERATOR = "on a CPU, a state alone joins no processes, or is refused"
DIFFERENT = {
    "JOIN_UNEVEN_INPUTS": OLD_SPELLING,
    "JOIN_UNEVEN_INPUTS_OF_DDP": OLD_SPELLING,
    "NO_SYNC": OLD_SPELLING,
    "NO_SYNC_OF_TWO_BATCHES": OLD_SPELLING,
    "TRIGGER_SYNC_IN_BACKWARD": OLD_SPELLING,
    "CHECK_BREAKPOINT": OLD_SPELLING,
    "ACCELERATOR_STATE_SPLIT_BETWEEN_PROCESSES": ONLY_ACCELERATOR,
    **{name: ONLY_ACCELERATOR for name in vars(processes) if name.startswith("STATE_")},
}
# A single process that torchrun started: there the model is wrapped though there is no other.
WRAPPED_ALONE = ("PREPARE", "PREPARE_WITH_DEVICE_PLACEMENT", "UNWRAP_MODEL")


def examples(*modules: ModuleType) -> list[Any]:
    return [
        pytest.param(value, size, id=f"{name}-{size}")
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Example) and not name.startswith("PROFILE")  # tables of timings
        for size in value.sizes
        if name not in DIFFERENT and not (size == 1 and name in WRAPPED_ALONE)
    ]


def alike(answer: Shown) -> tuple[list[str], list[str], Any]:
    lines = [line for line in answer.lines if "[WARNING]" not in line]  # a library's own
    return lines, answer.files, rounded(answer.observed)


def rounded(value: Any) -> Any:
    """Return nested lists and tuples with numbers rounded to what float32 holds of a sum."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, (list, tuple)):
        return [rounded(entry) for entry in value]
    return value


@pytest.mark.parametrize(("example", "size"), examples(training, processes, objects))
def test_the_example_shows_the_same(example: Example, size: int) -> None:
    theirs, ours = (shown(example, size, package) for package in (DOCUMENTED, "accel"))
    assert [alike(answer) for answer in ours] == [alike(answer) for answer in theirs]
