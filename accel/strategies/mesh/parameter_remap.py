"""Remap optimizers from the parameters that a model had to the DTensors that replace them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel.machine.errors import ConfigError, Problem
from accel.optimizer import unwrap_optimizer
from accel.strategies.mesh.state import shard_like

Named = dict[str, torch.nn.Parameter]


def parameters_by_name(model: torch.nn.Module) -> Named:
    """Return the parameters by name, tied ones under all their names."""
    return dict(model.named_parameters(remove_duplicate=False))


class ParameterRemap:
    """Which parameter replaced which."""

    def __init__(self) -> None:
        self._new: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def record(self, before: Named, after: Named) -> None:
        """Record the parameters, by name, that replaced those of a model as the user built it.

        Raise `ConfigError` if tied parameters are not tied any more.
        """
        for name, old in before.items():
            if old is not after[name]:
                known = self._new.setdefault(old, after[name])
                if known is not after[name]:
                    raise ConfigError(_untied(before, old))

    def record_unsharded(
        self, pairs: Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter]]
    ) -> None:
        """Record all-gathered parameters, which optimizers must not step, with their shards."""
        for unsharded, shard in pairs:
            self._new[unsharded] = shard

    def current(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the parameter that replaced `parameter`, or itself where none did."""
        found: torch.Tensor = self._new.get(parameter, parameter)
        return found

    def remap(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of `optimizer`, prepared or not; its state is sharded alike."""
        own = unwrap_optimizer(optimizer)
        for group in own.param_groups:
            for index, old in enumerate(group["params"]):
                new = self._new.get(old)
                if new is None:
                    continue
                group["params"][index] = new
                if old in own.state:
                    state = own.state.pop(old)
                    own.state[new] = {key: shard_like(v, new) for key, v in state.items()}


def _untied(before: Named, shared: torch.nn.Parameter) -> Problem:
    names = [name for name, parameter in before.items() if parameter is shared]
    return Problem(
        f"prepare: the parameter shared by {', '.join(names)}",
        "tied weights are sharded alike and gathered together",
        "Give all of them the same style in the plan, or none.",
    )
