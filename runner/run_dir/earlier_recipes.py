"""In what the earlier recipes of a run differ from its present one: steps were made with them.

A resume with another recipe keeps the one before as ``config.<n>.yaml``. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from runner.recipe import keys, resumed_recipe
from runner.recipe.schema import PLUGINS
from runner.run_dir import atomic_update, json_files

# Nodes whose keys are those of a person's functions: one that has come since is no newer version's.
OPEN = (*keys.FACTORY_NODES, "callbacks")
MOST_CHARACTERS = 60  # of a value
UNKNOWN = "unknown"
_MISSING = object()
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def changes(run_dir: Path, recipe: Mapping[str, object]) -> dict[str, str]:
    """Return by the name of each kept recipe what it had instead, e.g. "optimizer.lr=0.1 step=x".

    One that computes the same as the present `recipe`, in plain containers, is not among them; of
    one that is damaged it is `UNKNOWN`.
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
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return UNKNOWN
    if not isinstance(then, Mapping):
        return UNKNOWN
    return " ".join(_differing(then, recipe))


def _differing(then: object, now: object, key: tuple[str, ...] = ()) -> Iterator[str]:
    if key in resumed_recipe.NO_CHANGE or then == now or repr(then) == repr(now):  # NaN is NaN
        return
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for name in [*then, *(name for name in now if name not in then)]:
            below = then.get(name, _MISSING), now.get(name, _MISSING)
            yield from _differing(*below, (*key, str(name)))
    elif then is _MISSING:
        if key[0] in OPEN or (len(key) == 1 and key[0] in PLUGINS and now is not None):
            yield f"no {'.'.join(key)}"
    elif then is not None or now is not _MISSING:  # else an older version had it
        yield f"{'.'.join(key)}={_shown(then)}"


def _shown(value: object) -> str:
    """Return a value as text; a long one as a digest, different for different ones."""
    text = str(value)
    if isinstance(value, Mapping) or len(text) > MOST_CHARACTERS:
        return f"{{{json_files.digest(text)[:8]}}}"
    return text
