"""A pass over a prepared loader that is under way, beside others over the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel.window_ends import Reading

if TYPE_CHECKING:
    from accel.data.order import Start


@dataclass(eq=False)
class Pass:
    """A pass under way, and what it restores of a pass around it when it ends.

    Attributes:
        epoch: its number.
        end_of_dataloader: of the pass around it.
        remainder: of the pass around it.
        reading: of the pass around it.
        started: of the pass around it, None where there is none.
        at_end: of the pass around it.
        given: how many batches it gave.
        whole: whether it gave all its batches.
        others: the loaders that were read when it began, with the batches that they had given.
    """

    epoch: int
    end_of_dataloader: bool
    remainder: int
    reading: Reading | None
    started: Start | None
    at_end: int | None
    given: int = 0
    whole: bool = False
    others: list[tuple[Any, int]] = field(default_factory=list)


def begun_after(current: Pass, passes: Sequence[Pass]) -> Pass | None:
    """Return the first of `passes` that began after `current`; it restores what `current` shows."""
    following = passes[passes.index(current) + 1 :]
    return following[0] if following else None
