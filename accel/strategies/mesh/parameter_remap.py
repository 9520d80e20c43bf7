"""Parameters that took the place of others, and the optimizers that follow them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel.errors import ConfigError, Problem
from accel.optimizer import unwrap_optimizer
from accel.strategies.mesh.full_tensors import fitted


def by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by name, under all their names."""
    return dict(model.named_parameters(remove_duplicate=False))


class Successors:
    """Which parameter took the place of which, so that optimizers follow."""

    def __init__(self) -> None:
        self._new: Any = WeakIdKeyDictionary()

    def record(
        self, before: dict[str, torch.nn.Parameter], after: dict[str, torch.nn.Parameter]
    ) -> None:
        """Remember what a model's parameters became.

        Args:
            before: by name.
            after: by name.

        Raises:
            ConfigError: if names that shared a parameter do not share one any more.
        """
        for name, old in before.items():
            if old is not after[name]:
                known = self._new.setdefault(old, after[name])
                if known is not after[name]:
                    raise ConfigError(_untied(before, old))

    def record_copies(self, pairs: Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter]]) -> None:
        """Remember which parameters are gathered copies of which shards.

        Args:
            pairs: copy and shard.
        """
        for copy, shard in pairs:
            self._new[copy] = shard

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the successor of `parameter`, or itself where it has none."""
        found: torch.Tensor = self._new.get(parameter, parameter)
        return found

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` train the successors of its parameters, with the state it has.

        Args:
            optimizer: prepared or not.
        """
        own = unwrap_optimizer(optimizer)
        for group in own.param_groups:
            for index, old in enumerate(group["params"]):
                new = self._new.get(old)
                if new is None:
                    continue
                group["params"][index] = new
                if old in own.state:
                    state = own.state.pop(old)
                    own.state[new] = {k: fitted(v, new) for k, v in state.items()}


def _untied(before: dict[str, torch.nn.Parameter], shared: torch.nn.Parameter) -> Problem:
    names = [name for name, parameter in before.items() if parameter is shared]
    return Problem(
        f"prepare: the parameter shared by {', '.join(names)}",
        "all its uses are split alike and gathered together",
        "Give all of them the same style in the plan, or none.",
    )
