"""Freeze parameters by name, and unfreeze them at epochs or steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch.nn.modules.batchnorm import _BatchNorm

from accel.machine.errors import ConfigError, Problems
from runner.training.parameter_names import matching, parameters
from runner.training.run import Callback, count_parameters

if TYPE_CHECKING:
    from runner.training.run import Run


class Freeze(Callback):
    """Freezes parameters before the first step, and unfreezes some of them later.

    Frozen parameters stay in their optimizer, which leaves them as they are.

    Args:
        names: patterns of names, as in a shell; ``*`` also matches dots.
        unfreeze: patterns of frozen names by the epoch, counted from 1, at whose start they are
            unfrozen, or by the optimizer step after which they are.
        by: what `unfreeze` counts, "epoch" or "step".
        eval_mode: whether BatchNorm layers whose parameters are frozen are in eval mode.

    Raises:
        ConfigError: if an argument is invalid.
    """

    def __init__(
        self,
        names: str | Sequence[str],
        unfreeze: Mapping[Any, str | Sequence[str]] | None = None,
        by: Literal["epoch", "step"] = "epoch",
        eval_mode: bool = False,
    ) -> None:
        self.names, self.by, self.eval_mode = names, by, eval_mode
        self.unfreeze = unfreeze or {}
        if by not in ("epoch", "step") or not all(str(when).isdigit() for when in self.unfreeze):
            rule = "parameters are unfrozen at an epoch from 1 on, or after a step"
            value = f"freeze.unfreeze={unfreeze} by={by}"
            raise ConfigError.of(value, rule, "Write unfreeze: {2: head.*}, by: epoch.")
        self._frozen: dict[str, int | None] = {}  # until which epoch or step; None: to the end

    def on_setup(self, loop: Run) -> None:
        """Freeze.

        Raises:
            ConfigError: if a pattern matches nothing, or the strategy cannot unfreeze.
        """
        problems, spec = Problems(), loop.accelerator.strategy.spec
        in_stages = loop.accelerator.parallel_dims.pp > 1
        if self.unfreeze and (spec.owns_parameters or in_stages):
            value = f"freeze.unfreeze with {'pipeline stages' if in_stages else spec.name}"
            rule = "what requires gradients there is fixed when training begins"
            problems.add(value, rule, "Leave unfreeze out, or choose another strategy.")
        named = parameters(loop.accelerator, loop.step.models)
        frozen = matching(named, self.names, "freeze.names", problems)
        self._frozen = dict.fromkeys(frozen)
        for when, patterns in self.unfreeze.items():
            found = matching(frozen, patterns, f"freeze.unfreeze.{when}", problems)
            self._frozen |= dict.fromkeys(found, int(when))
        problems.raise_if()
        for name in frozen:
            named[name].requires_grad_(False)
        loop.num_parameters = count_parameters(loop.accelerator, loop.step.models)

    def on_start(self, loop: Run) -> None:
        """Unfreeze what was unfrozen before a resume."""
        self._follow(loop)

    def on_epoch_start(self, loop: Run) -> None:
        """Unfreeze what is due."""
        self._follow(loop)

    def on_step(self, loop: Run) -> None:
        """Unfreeze what is due."""
        if self.by == "step":
            self._follow(loop)

    def _follow(self, loop: Run) -> None:
        now = loop.state.step if self.by == "step" else loop.state.epoch + 1
        due = {name for name, when in self._frozen.items() if when is not None and when <= now}
        if due:
            named = parameters(loop.accelerator, loop.step.models)
            for name in due:
                named[name].requires_grad_(True)
                del self._frozen[name]
            loop.display.note(f"Unfrozen at step {loop.state.step}: {len(due)} parameters.")
        for model in loop.step.models.values() if self.eval_mode else ():
            for layer in model.modules():
                if isinstance(layer, _BatchNorm) and layer.affine:
                    layer.train(layer.weight.requires_grad)
