"""Which outputs of a model have the batch as dim 0: told by two sizes of the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import torch

from accel.logging import silenced
from accel.machine.errors import ConfigError, Problem, text_of

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Batched = tuple[bool, ...]
_MAX_OTHERS = 3  # inputs that may be batches or not, of which every choice is tried
_CHATTY = ("torch._subclasses.fake_tensor",)  # it logs the traceback of an error that it raises
_REMEDY = "Give an example whose number of samples is no other size of inputs and outputs."


class BatchOutputs:
    """Which outputs have the micro-batch as dim 0, by which of the inputs have it.

    An output whose dim 0 only happens to be as long keeps it with twice the batch.

    Args:
        run: returns the model's output tensors, without data, given its input tensors.
        inputs: of the example; those with `micro_batch` as dim 0 may be batches, the first is one.
        outputs: of `run` with them.
        micro_batch: dim 0 of the first input.

    Raises:
        ConfigError: if an output is as long, and the model takes no larger batch to tell.
    """

    def __init__(
        self,
        run: Run,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        micro_batch: int,
    ) -> None:
        self.micro_batch = micro_batch
        self._long = [at for at, tensor in enumerate(inputs) if _is_long(tensor, micro_batch)]
        self._outputs = outputs
        self._alike = tuple(_is_long(tensor, micro_batch) for tensor in outputs)
        self._known: dict[tuple[int, ...], Batched] = {}
        self._reason = "it was not tried"
        for grown in self._choices() if any(self._alike) else ():
            larger = [torch.cat([x, x]) if at in grown else x for at, x in enumerate(inputs)]
            try:
                with silenced(_CHATTY, logging.CRITICAL):  # some of these inputs cannot go together
                    twice = run(larger)
            except Exception as error:  # of the model's own kind: it takes no such batch
                self._reason = text_of(error).partition("\n")[0]
                continue
            self._known[grown] = self._told(twice)
        if any(self._alike) and not self._known:
            raise ConfigError(self._problem())

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Yield the inputs that may be batches together; all of them first."""
        first, *others = self._long
        counts = range(len(others), -1, -1)
        for count in counts if len(others) <= _MAX_OTHERS else (len(others), 0):
            yield from ((first, *some) for some in combinations(others, count))

    def _told(self, twice: Sequence[torch.Tensor]) -> Batched:
        return tuple(
            like and tuple(other.shape) == (2 * self.micro_batch, *tensor.shape[1:])
            for like, tensor, other in zip(self._alike, self._outputs, twice, strict=True)
        )

    def _problem(self) -> Problem:
        like = self._outputs[self._alike.index(True)]
        return Problem(
            f"an output {list(like.shape)} with micro-batches of {self.micro_batch}",
            "the model takes no larger batch of such inputs, which would tell whether dim 0 is it "
            f"({self._reason})",
            _REMEDY,
        )

    def batches_of(self, inputs: Sequence[torch.Tensor], num_rows: int) -> tuple[int, ...]:
        """Return the positions of the inputs of a call that are batches.

        With as many samples as a micro-batch has, all that may be batches are.
        """
        if num_rows == self.micro_batch:
            return next(iter(self._known), tuple(self._long))
        return tuple(at for at in self._long if _is_long(inputs[at], num_rows))

    def problems(self, batches: tuple[int, ...]) -> list[Problem]:
        """Return why it is not known which outputs are batches, given the inputs that are."""
        known = not any(self._alike) or batches in self._known
        return [] if known else [self._problem()]

    def batched(self, batches: tuple[int, ...]) -> Batched:
        """Return whether each output is a batch, given the positions of the inputs that are."""
        return self._known[batches] if any(self._alike) else self._alike


def _is_long(tensor: torch.Tensor, size: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == size
