"""A pass over a prepared loader that is under way, beside others over the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from accel.data.window_ends import Reading

if TYPE_CHECKING:
    from accel.data.independent_draws import Drawn, PassDraws


@dataclass
class Start:
    """The states that decide the order of a pass, as they were when it began.

    Attributes:
        generators: states of the generators that the loader and its samplers hold.
        process: states of the process's own generators that the sampler may draw from, or None.
        samplers: state dicts of the samplers that have one, outermost first.
        epoch: number of the pass, None where the loader does not know it.
        agreed: states of the process's generators when indices for all ranks were drawn, or None.
        draws: the draws of the pass, where its sampler is not known; None before they begin.
        drawn: how far the sampler of a pass that is drawn again had drawn, or None.
        stream: whether the last of `generators` is the loader's own stream of permutations.
    """

    generators: list[torch.Tensor]
    process: dict[str, object] | None = None
    samplers: list[dict[str, object]] = field(default_factory=list)
    epoch: int | None = None
    agreed: dict[str, object] | None = None
    draws: PassDraws | None = None
    drawn: Drawn | None = None
    stream: bool = False

    def __getstate__(self) -> dict[str, object]:
        # Generators are not pickled; how far they were drawn from is.
        return {**self.__dict__, "draws": None, "drawn": self.so_far()}

    def so_far(self) -> Drawn | None:
        """Return how far the sampler has drawn; None where its order needs no such record."""
        return self.drawn if self.draws is None else self.draws.drawn()

    def keep_drawn(self) -> None:
        """Note how far the sampler has drawn, before generators are set to draw again."""
        self.drawn, self.draws = self.so_far(), None


@dataclass(eq=False)
class Pass:
    """A pass under way; other fields are values of the pass around it, restored when it ends.

    Attributes:
        epoch: its number.
        given: how many batches it gave.
        in_hand: real samples, and all, of the batch in hand over all processes, where the main
            process read it; None elsewhere.
        total: samples of all its batches, and how many were repetitions, where that is known so.
        num_begun: how many passes had begun over any loader when the batch was given, likewise.
        is_complete: whether it gave all its batches.
        others: the loaders that were read when it began, with the batches that they had given.
    """

    epoch: int
    end_of_dataloader: bool
    remainder: int
    reading: Reading | None
    started: Start | None
    at_end: int | None
    given: int = 0
    in_hand: tuple[int, int] | None = None
    total: tuple[int, int] = (0, 0)
    num_begun: int = 0
    is_complete: bool = False
    others: list[tuple[Any, int]] = field(default_factory=list)

    def note(self, real: int, size: int, num_begun: int) -> None:
        """Note that a batch is given, `real` of whose `size` samples are no repetitions."""
        self.given += 1
        self.in_hand, self.num_begun = (real, size), num_begun
        self.total = self.total[0] + size, self.total[1] + size - real


def begun_after(current: Pass, passes: Sequence[Pass]) -> Pass | None:
    """Return the first of `passes` that began after `current`; it restores what `current` shows."""
    following = passes[passes.index(current) + 1 :]
    return following[0] if following else None
