"""Which parameters of a module are trained, compared with what was seen before."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import TypeVar

import torch

T = TypeVar("T")
requires_grad = attrgetter("requires_grad")


class Trainable:
    """The parameters of a module, and which of them require gradients, as they were seen last.

    `changed` runs in each step: it is loops of C over dictionaries that are kept.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._parameter_dicts = [child._parameters for child in modules]
        self._module_dicts = [child._modules for child in modules]
        self._entries = list(chain.from_iterable(map(dict.values, self._parameter_dicts)))
        self._children = list(chain.from_iterable(map(dict.values, self._module_dicts)))
        unique = {id(entry): entry for entry in self._entries if entry is not None}
        self.parameters: list[torch.nn.Parameter] = list(unique.values())
        self.flags: list[bool] = list(map(requires_grad, self.parameters))

    def changed(self) -> bool:
        """Return whether any parameter was added, replaced, frozen or unfrozen."""
        return (
            self.flags != list(map(requires_grad, self.parameters))
            or not _same(self._parameter_dicts, self._entries)
            or not _same(self._module_dicts, self._children)
        )


def _same(dicts: Iterable[dict[str, T]], entries: list[T]) -> bool:
    found = list(chain.from_iterable(map(dict.values, dicts)))
    return len(found) == len(entries) and all(map(is_, found, entries))
