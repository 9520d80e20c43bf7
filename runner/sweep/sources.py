"""What the recipes of a sweep are composed from: files, and versions of what composes them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re

from runner.recipe import hydra_setup, paths
from runner.sweep.directory import Description

# Interpolations whose values are not in the files of a recipe.
RESOLVER = re.compile(rb"\$\{[^}]*:")


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
