"""Optimizer state that rests on disk: read into memory for as long as somebody works on it.

DeepSpeed has buffers for one part ("sub-group") of the optimizer at a time.

Source: https://www.deepspeed.ai/tutorials/zero/#offloading-to-cpu-and-nvme-with-zero-infinity
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, final

from accel.errors import CheckpointError, Problem


@final
class Disk:
    """The parts of an engine's optimizer that rest on disk; none where it is all in memory.

    Within its context, `fetch` reads a part. Another part, or the end, sends it back.

    Args:
        engine: DeepSpeed's.

    Raises:
        CheckpointError: if the engine reads ahead while it steps.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer if swaps(engine) else None
        self._part: int | None = None
        self._changed = False
        swapper = getattr(self._optimizer, "optimizer_swapper", None)
        if hasattr(swapper, "async_swap_in"):
            value = "state under offload to nvme with pipeline_read or pipeline_write"
            rule = "parts that are read ahead cannot be gathered"
            raise CheckpointError(Problem(value, rule, "Switch both off."))

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._send_back()

    def fetch(self, part: int | None, change: bool = False) -> None:
        """Have a part in memory until the next call.

        Args:
            part: its index; None: it is in memory always.
            change: whether it is written back.
        """
        if self._optimizer is None or part is None:
            return
        if part != self._part:
            self._send_back()
            if not self._optimizer._swappable_optimizer_subgroup(part):
                return
            self._optimizer._optimizer_states_and_gradient_swap_in(part)
            self._part = part
        self._changed = self._changed or change

    def forget_state(self) -> None:
        """Drop the optimizer's state on disk; the weights that it steps stay."""
        if self._optimizer is not None:
            self._send_back()
            self._optimizer.optimizer_swapper.purge_state()

    def _send_back(self) -> None:
        if self._part is None or self._optimizer is None:
            return
        if self._changed:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._part)
        else:
            self._optimizer._release_swap_buffers(self._part)
        self._part, self._changed = None, False


def swaps(engine: Any) -> bool:
    """Return whether an engine's optimizer has parts on disk."""
    return bool(getattr(getattr(engine, "optimizer", None), "swap_optimizer", False))
