"""The same command as that of a sweep in which nothing is left to do, told without composing.

Composing takes longer than reading ten thousand results. What is found here is what composing would
find: the same overrides of the same files, composed by the same versions.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path

from runner.recipe import hydra_setup, paths
from runner.recipe.schema import Recipe
from runner.runs.directory import SWEEP
from runner.sweep import directory
from runner.sweep.directory import Description, Sweep
from runner.sweep.settings import Settings

# Interpolations whose values are not in the files of a recipe.
RESOLVER = re.compile(rb"\$\{[^}]*:")


def find(given: Sequence[str], config_name: str, chosen: Settings) -> Sweep | None:
    """Return the finished sweep of a command; None: composing tells.

    Args:
        given: the overrides of the command, those of where jobs run included.
        config_name: the primary file of the recipes.
        chosen: the settings of the sweep.

    Raises:
        ConfigError: if the sweep's description is damaged.
    """
    digest = directory.digest_of(config_name, given)
    place = None if chosen.list is not None else _place(digest, chosen)
    if place is None:
        return None
    sweep = directory.read(place)
    there = sweep.description
    if not there.jobs or there.digest != digest or sorted(there.overrides) != sorted(given):
        return None
    if chosen.dir is None and not _is_where_it_was_made(sweep):
        return None
    if sweep.pending():
        return None
    with hydra_setup.session(given):  # dearer than all before
        if not are_of(there, fingerprint()):
            return None
    return sweep


def _place(digest: str, chosen: Settings) -> Path | None:
    """Return the directory that the command chose, or that its digest names, if there is one."""
    if chosen.dir is None:
        return directory.find(Recipe.output_dir, None, digest)
    path = Path(chosen.dir).expanduser().absolute()
    return path if (path / SWEEP).exists() else None


def _is_where_it_was_made(sweep: Sweep) -> bool:
    """Return whether composing would look for a sweep here: a folder of runs may be a copy."""
    recipe = sweep.description.recipe
    folder = Path(recipe["output_dir"]).expanduser().absolute() / recipe["name"]
    return sweep.path.parent == folder


# -- what recipes are composed from --------------------------------------------------------


def fingerprint() -> str | None:
    """Return a digest of all files of recipes, inside a Hydra session.

    None: values come from elsewhere, too.
    """
    if hydra_setup.packages():
        return None
    found = hashlib.sha256()
    for _, path in hydra_setup.files():
        content = path.read_bytes()
        if RESOLVER.search(content):
            return None
        found.update(f"{path}\0".encode(errors="replace") + content + b"\0")
    for package in ("hydra-core", "omegaconf"):
        found.update(importlib.metadata.version(package).encode())
    return found.hexdigest()


def version() -> str:
    """Return the version of the runner, or where its checkout is."""
    try:
        return importlib.metadata.version("accel-runner")
    except importlib.metadata.PackageNotFoundError:
        return str(paths.conf_folder().parent)


def are_of(there: Description, here: str | None) -> bool:
    """Return whether a sweep was composed from what is `here`, the fingerprint, by this version."""
    return here is not None and there.sources == here and there.version == version()
