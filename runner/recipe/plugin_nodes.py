"""The launcher and the sweeper of a command line: which files, and with which settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from accel.machine.errors import ConfigError, Problem, nearest
from runner.recipe import diagnose, hydra_setup

KINDS = ("launcher", "sweeper")


def _hydra(overrides: Sequence[str], config_name: str) -> DictConfig:
    """Return Hydra's own node, as files of groups and Hydra's own overrides set it.

    Files that cannot be composed are left out: they are reported when the jobs are composed.

    Raises:
        Exception: Hydra's and OmegaConf's own; `diagnose` translates them.
    """
    groups = set(hydra_setup.groups())
    of_hydra = [
        one for one in overrides if hydra_setup.key_of(one).startswith(("hydra.", "hydra/"))
    ]
    chosen = [one for one in hydra_setup.not_swept(overrides) if hydra_setup.key_of(one) in groups]
    with contextlib.suppress(*diagnose.MISTAKES):
        return hydra_setup.composed_with_hydra([*chosen, *of_hydra], config_name).hydra
    return hydra_setup.composed_with_hydra(of_hydra, config_name).hydra


def choices(overrides: Sequence[str], config_name: str) -> dict[str, str]:
    """Return the files of `hydra/launcher` and `hydra/sweeper` that a command line chooses.

    Raises:
        ConfigError: if one of their keys is wrong.
    """
    try:
        chosen = _hydra(overrides, config_name).runtime.choices
    except diagnose.MISTAKES as error:
        wrong = list(_wrong_keys(overrides))
        raise ConfigError(*(wrong or diagnose.translate(error, config_name))) from error
    return {kind: chosen.get(f"hydra/{kind}") or "basic" for kind in KINDS}


def _wrong_keys(overrides: Sequence[str]) -> Iterator[Problem]:
    """Yield the problem of each key of a launcher or a sweeper that Hydra refuses."""
    files = [one for one in overrides if hydra_setup.key_of(one).startswith("hydra/")]
    for one in overrides:
        head, kind, name = [*hydra_setup.key_of(one).split("."), "", ""][:3]
        if head == "hydra" and kind in KINDS:
            try:
                hydra_setup.composed_with_hydra([*files, one], hydra_setup.PRIMARY)
            except diagnose.MISTAKES:
                node = hydra_setup.composed_with_hydra(files, hydra_setup.PRIMARY).hydra
                known = [key for key in map(str, node[kind]) if not key.startswith("_")]
                rule = f"the {kind} has no such key, or the key takes no such value"
                yield Problem(one, rule, nearest(name, known))


def nodes(overrides: Sequence[str], config_name: str) -> dict[str, Any]:
    """Return the launcher and the sweeper of a command line.

    By key: `hydra/launcher` and `hydra/sweeper` are names, `hydra.launcher` and `hydra.sweeper`
    plain containers. Raises as `settings`.
    """
    node = _hydra(overrides, config_name)
    chosen = {f"hydra/{kind}": node.runtime.choices[f"hydra/{kind}"] for kind in KINDS}
    plain = {f"hydra.{kind}": OmegaConf.to_container(node[kind], resolve=False) for kind in KINDS}
    return {**chosen, **plain}


def settings(kind: str, overrides: Sequence[str], config_name: str) -> dict[str, Any]:
    """Return `hydra.<kind>` (launcher, sweeper) as plain containers.

    Raises:
        Exception: Hydra's and OmegaConf's own; `diagnose` translates them.
    """
    found: dict[str, Any] = nodes(overrides, config_name)[f"hydra.{kind}"]
    return found
