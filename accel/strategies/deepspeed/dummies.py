"""Stand-ins for the optimizer and the scheduler that DeepSpeed's own configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, final

import torch

from accel.errors import StateError


def _refuse(what: str) -> NoReturn:
    raise StateError(
        f"{what} stands for what DeepSpeed's configuration describes, and was not prepared with "
        "DeepSpeed. Switch it on with deepspeed_plugin=…, or build one of torch."
    )


@final
class DummyOptim(torch.optim.Optimizer):
    """Stand-in for the optimizer that the section ``optimizer`` of the configuration describes.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, where the configuration says nothing or ``"auto"``; another number there
            is refused, unless this is the default.
        weight_decay: the same of the weight decay.
        kwargs: further values of ``optimizer.params``, which the configuration may not contradict.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        self.lr, self.weight_decay, self.kwargs = lr, weight_decay, kwargs
        self.params = list(params)
        # The base class writes its defaults into groups; the configuration decides on those here.
        groups = [dict(g) if isinstance(g, Mapping) else g for g in self.params]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @property
    def values(self) -> dict[str, Any]:
        """All values of ``optimizer.params``, by name."""
        return {"lr": self.lr, "weight_decay": self.weight_decay, **self.kwargs}

    @property
    def defaulted(self) -> set[str]:
        """The names of values that nobody gave, as far as can be told: the configuration wins."""
        defaults = {"lr": 0.001, "weight_decay": 0}
        return {name for name, value in defaults.items() if self.values[name] == value}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refuse: only what `prepare` returns can step.

        Args:
            closure: not used.

        Raises:
            StateError: always.
        """
        _refuse("DummyOptim")


@final
class DummyScheduler:
    """Stand-in for the scheduler that the section ``scheduler`` of the configuration describes.

    Args:
        optimizer: the optimizer, or its `DummyOptim`.
        total_num_steps: steps of one process alone until the end of the schedule.
        warmup_num_steps: steps of one process alone until the full learning rate.
        lr_scheduler_callable: builds the scheduler from the optimizer, in place of the
            configuration.
        kwargs: further values of ``scheduler.params``, which the configuration may not contradict.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[torch.optim.Optimizer], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: only what `prepare` returns can step.

        Args:
            args: not used.
            kwargs: not used.

        Raises:
            StateError: always.
        """
        _refuse("DummyScheduler")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no schedule yet."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: only what `prepare` returns has a state.

        Args:
            state_dict: not used.

        Raises:
            StateError: always.
        """
        _refuse("DummyScheduler")
