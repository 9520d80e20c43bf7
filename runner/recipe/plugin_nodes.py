"""The launcher and the sweeper of a command line: which files, and with which settings."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from runner.recipe import diagnose, hydra_setup

KINDS = ("launcher", "sweeper")


def choices(overrides: Sequence[str], config_name: str) -> dict[str, str]:
    """Return the files of `hydra/launcher` and `hydra/sweeper` that a command line chooses.

    Where a file is not there, or cannot be read, only those that the command line names: that is
    reported when the jobs are composed.
    """
    single = hydra_setup.not_swept(overrides)
    for some in (single, [o for o in single if hydra_setup.key_of(o).startswith("hydra/")]):
        with contextlib.suppress(*diagnose.MISTAKES):
            files = hydra_setup.chosen_files(some, config_name)
            chosen = dict(name.rpartition("/")[::2] for name in files)
            return {kind: chosen.get(f"hydra/{kind}", "basic") for kind in KINDS}
    return dict.fromkeys(KINDS, "basic")


def nodes(overrides: Sequence[str], config_name: str) -> dict[str, Any]:
    """Return the launcher and the sweeper that files of groups, and Hydra's own overrides, set.

    By key: `hydra/launcher` and `hydra/sweeper` are names, `hydra.launcher` and `hydra.sweeper`
    plain containers.

    Raises:
        Exception: Hydra's and OmegaConf's own; `diagnose` translates them.
    """
    node = hydra_setup.composed_with_hydra(_of_files(overrides), config_name).hydra
    chosen = {f"hydra/{kind}": node.runtime.choices[f"hydra/{kind}"] for kind in KINDS}
    plain = {kind: OmegaConf.to_container(node[kind], resolve=False) for kind in KINDS}
    return {**chosen, **{f"hydra.{kind}": content for kind, content in plain.items()}}


def settings(kind: str, overrides: Sequence[str], config_name: str) -> dict[str, Any]:
    """Return `hydra.<kind>` (launcher, sweeper) as plain containers, without the swept keys.

    Where the recipe does not compose, only from Hydra's own overrides and the files of groups.

    Raises:
        Exception: Hydra's and OmegaConf's own; `diagnose` translates them.
    """
    fixed = hydra_setup.not_swept(overrides)
    of_hydra = list(filter(_is_of_hydra, overrides))
    node: Any = None
    for some in (fixed, _of_files([o for o in overrides if o in fixed or o in of_hydra])):
        with contextlib.suppress(Exception):
            node = hydra_setup.composed_with_hydra(some, config_name).hydra[kind]
            break
    if node is None:
        node = hydra_setup.composed_with_hydra(of_hydra, config_name).hydra[kind]
    plain: Any = OmegaConf.to_container(node, resolve=False)
    return dict(plain)


def _of_files(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that choose files of groups, and Hydra's own."""
    groups = set(hydra_setup.groups())
    return [o for o in overrides if hydra_setup.key_of(o) in groups or _is_of_hydra(o)]


def _is_of_hydra(override: str) -> bool:
    return bool(re.match(r"hydra[./]", hydra_setup.key_of(override)))
