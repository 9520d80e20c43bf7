"""The runner's own sweepers, as Hydra's configuration knows them. Free of torch and Optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore

# Hydra takes plugins from packages of this name only; `runner.sweep.optuna_sweeper` registers it.
MODULE, CLASS = "hydra_plugins.runner_optuna", "OptunaSweeper"
NODE = "hydra.sweeper"


@dataclass
class OptunaConf:
    """Keys of `hydra.sweeper` with ``hydra/sweeper=optuna``.

    Values are checked where the study is planned, all at once.

    Attributes:
        n_trials: number of jobs of the sweep, over all commands.
        n_jobs: how many are handed to the launcher at once; it returns once all of them have ended.
        metrics: objectives: "best", the best value of the monitored validation metric (the
            default); names of summary.json such as seconds or samples_per_second; "validation/…"
            and "test/…", the last measured value.
        direction: minimize or maximize; null: as the monitored metric has it.
        directions: the same for each of several metrics.
        sampler: name of a sampler of Optuna's (tpe, random, cmaes, gp, …), or a mapping of `name`
            and arguments.
        pruner: likewise (median, successivehalving, hyperband, …); null: no run is pruned.
        seed: of the sampler; null: another one each time.
        study_name: null: the name of the sweep's folder, or of the one study of its journal.
        storage: path of a journal, or URL of a database; null: a journal in the sweep's folder.
        max_failure_rate: the sweep ends early where more than this part of its jobs fail.
        timeout: seconds, or HH:MM:SS, after which this command starts no further job.
        params: swept keys and their ranges, as on the command line, which goes before them.
        when: conditions of swept keys: ``{optimizer.momentum: optimizer=sgd}``.
    """

    _target_: str = f"{MODULE}.{CLASS}"
    _recursive_: bool = False  # nothing below is a call
    n_trials: Any = 20
    n_jobs: Any = 1
    metrics: Any = None
    direction: Any = None
    directions: Any = None
    sampler: Any = field(default_factory=lambda: {"name": "tpe"})
    pruner: Any = field(default_factory=lambda: {"name": None})
    seed: Any = 0
    study_name: Any = None
    storage: Any = None
    max_failure_rate: Any = 1.0
    timeout: Any = None
    params: Any = field(default_factory=dict)
    when: Any = field(default_factory=dict)


@dataclass
class RandomConf(OptunaConf):
    """Keys of `hydra.sweeper` with ``hydra/sweeper=random``."""

    sampler: Any = field(default_factory=lambda: {"name": "random"})


OWN: dict[str, type[OptunaConf]] = {"optuna": OptunaConf, "random": RandomConf}
KEYS = [item.name for item in fields(OptunaConf) if item.name[0] != "_"]
# Mappings that take any key.
OPEN = ("sampler", "pruner", "params", "when")


def is_own(node: Mapping[str, object]) -> bool:
    """Return whether `hydra.sweeper` is one of the runner's own sweepers."""
    return node.get("_target_") == OptunaConf._target_


def store() -> None:
    """Make the sweepers known to Hydra's configuration."""
    for name, node in OWN.items():
        group = "hydra/sweeper"
        ConfigStore.instance().store(group=group, name=name, node=node, provider="runner")


def opened(key: str, value: str) -> str | None:
    """Return an override of an open mapping of `hydra.sweeper` as Hydra wants it; else None."""
    head, _, inner = key.removeprefix(f"{NODE}.").partition(".")
    if not key.startswith(f"{NODE}.") or head not in OPEN:
        return None
    if not inner and head in ("sampler", "pruner") and not value.startswith("{"):
        inner = "name"
    return f"++{NODE}.{head}{'.' if inner else ''}{inner}={value}"
