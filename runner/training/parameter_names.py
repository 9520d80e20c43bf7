"""Parameters by name, and names by pattern: as in a shell, where ``*`` also matches dots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from accel.machine.errors import Problems, nearest
from accel.precision.wrapping import plain_name

if TYPE_CHECKING:
    import torch

    from accel import Accelerator


def parameters(
    accelerator: Accelerator, models: Mapping[str, torch.nn.Module]
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of models, prepared or not, by name; of several, ``model.name``."""
    unwrap, several = accelerator.strategy.state.unwrap, len(models) > 1
    return {
        plain_name(f"{key}.{name}" if several else name): parameter
        for key, model in models.items()
        for name, parameter in unwrap(model).named_parameters()
    }


def matching(
    names: Iterable[str], patterns: str | Sequence[str], key: str, problems: Problems
) -> set[str]:
    """Return the names that match a pattern; a pattern without a match is a problem of `key`."""
    known, found = list(names), set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = {name for name in known if fnmatchcase(name, pattern)}
        found |= matched
        if not matched:
            problems.add(
                f"{key}: {pattern}", "no parameter has such a name", nearest(pattern, known)
            )
    return found
