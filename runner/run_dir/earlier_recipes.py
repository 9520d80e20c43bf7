"""In what the earlier recipes of a run differ from its present one: steps were made with them.

A resume with another recipe keeps the one before as ``config.<n>.yaml``. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from runner.config import resumed_recipe
from runner.run_dir import atomic_update

# What says where a run is computed, how it is watched, and when one session of it stops.
NO_CHANGE = (
    *resumed_recipe.PER_INVOCATION,
    *resumed_recipe.ELSEWHERE,
    ("checkpoint", "project"),
)
UNKNOWN = "unknown"
_MISSING = object()
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def changes(run_dir: Path, recipe: Mapping[str, object]) -> dict[str, str]:
    """Return by the name of each kept recipe what it had instead, e.g. "optimizer.lr=0.1 step=x".

    One that computes the same as the present `recipe`, in plain containers, is not among them; of
    one that is damaged it is `UNKNOWN`. Keys that only the present one has are of a newer version.
    """
    try:
        kept = atomic_update.kept_recipes(run_dir)
    except OSError:
        return {}
    found = {path.name: _described(path, recipe) for path in kept}
    return {name: text for name, text in found.items() if text}


def _described(path: Path, recipe: Mapping[str, object]) -> str:
    try:
        then = yaml.load(path.read_bytes(), _LOADER)
    except (OSError, yaml.YAMLError):
        return UNKNOWN
    if not isinstance(then, Mapping):
        return UNKNOWN
    return " ".join(_differing(then, recipe))


def _differing(then: object, now: object, key: tuple[str, ...] = ()) -> Iterator[str]:
    if key in NO_CHANGE or then == now or repr(then) == repr(now):  # NaN is no other NaN
        return
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name, value in then.items():
            yield from _differing(value, now.get(name, _MISSING), (*key, str(name)))
    else:
        yield f"{'.'.join(key)}={'{…}' if isinstance(then, Mapping) else then}"
