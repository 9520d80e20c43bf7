"""The events a callback may answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.training.current_run import Run


class Callback:
    """Base of callbacks; every method does nothing by default and runs on every rank.

    Registered with ``@register.callback(name)``. A callback with `state_dict` and `load_state_dict`
    is saved in checkpoints. `loop.stop(reason)` ends training at the next step boundary; every
    process must call it at the same step. Random draws in an event do not affect training. Only in
    `on_step`, which is called too often to restore the generators, they would: it must not draw.

    An event may freeze and unfreeze layers, on all ranks alike: models are prepared again before
    the next step. An optimizer that lacks unfrozen parameters gets them by `add_param_group`.
    """

    def on_start(self, loop: Run) -> None:
        """Before the first step, after a resume."""

    def on_step(self, loop: Run) -> None:
        """After each optimizer step. Must not wait for the device."""

    def on_log(self, loop: Run, values: Mapping[str, float]) -> None:
        """At a log point, with the values that were read."""

    def on_evaluate(self, loop: Run, split: str, metrics: Mapping[str, float]) -> None:
        """After an evaluation of `split` ("validation", "test")."""

    def on_checkpoint(self, loop: Run, path: str) -> None:
        """After a checkpoint was committed."""

    def on_end(self, loop: Run) -> None:
        """After the last evaluation; on rank 0 before the final table is shown."""
