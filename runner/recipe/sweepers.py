"""The runner's own sweepers, as Hydra's configuration knows them. Free of torch and Optuna.

Keys of `hydra.sweeper` with ``hydra/sweeper=optuna`` (``random``: the same with sampler=random).
Values are checked where the study is planned, all at once.

n_trials: number of jobs of the sweep, over all commands.
n_jobs: how many are handed to the launcher at once; it returns once all of them have ended. null:
    as many as run at once on this machine (`sweep.jobs`), one under other launchers.
metrics: objectives: "best", the best value of the monitored validation metric (the default); names
    of numbers in summary.json such as seconds or samples_per_second; "validation/<metric>" and
    "test/<metric>", the last measured value.
direction: minimize or maximize; null: as the monitored metric has it.
directions: the same for each of several metrics.
sampler: name of a sampler of Optuna's (tpe, random, cmaes, gp, …), or a mapping of `name` and
    arguments.
pruner: likewise (median, successivehalving, hyperband, …); null: no run is pruned.
seed: of the sampler; null: another one each time.
study_name: null: a name of the sweep's own. A study is of one sweep: a new sweep needs a new name.
storage: path of a journal, or URL of a database; null: a journal in the sweep's folder.
max_failure_rate: the sweep ends early where more than this part of its jobs fail, 0 to 1.
timeout: seconds, or HH:MM:SS, after which this command starts no further job.
params: swept keys and their ranges, as on the command line, which goes before them.
when: conditions of swept keys: ``{optimizer.momentum: 'optimizer=sgd'}``.
"""

from __future__ import annotations

from collections.abc import Mapping

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

MODULE, CLASS = "hydra_plugins.accel_runner", "OptunaSweeper"
NODE, GROUP = "hydra.sweeper", "hydra/sweeper"
TARGET = f"{MODULE}.{CLASS}"
DEFAULTS: dict[str, object] = {
    "n_trials": 20,
    "n_jobs": None,
    "metrics": None,
    "direction": None,
    "directions": None,
    "sampler": {"name": "tpe"},
    "pruner": {"name": None},
    "seed": 0,
    "study_name": None,
    "storage": None,
    "max_failure_rate": 1.0,
    "timeout": None,
    "params": {},
    "when": {},
}
OWN: dict[str, dict[str, object]] = {
    "optuna": DEFAULTS,
    "random": {**DEFAULTS, "sampler": {"name": "random"}},
}
# They may change while a search goes on.
SCHEDULING = tuple(f"{NODE}.{k}" for k in ("n_trials", "n_jobs", "timeout", "max_failure_rate"))
# Mappings that take any key.
OPEN = ("sampler", "pruner", "params", "when")


def store() -> None:
    """Make the sweepers known to Hydra's configuration."""
    calls = {"_target_": TARGET, "_recursive_": False}  # nothing below is a call
    for name, keys in OWN.items():
        node = OmegaConf.create({**calls, **keys})
        for key in OPEN:
            OmegaConf.set_struct(node[key], False)
        ConfigStore.instance().store(group=GROUP, name=name, node=node, provider="runner")


def is_own(node: Mapping[str, object]) -> bool:
    """Return whether `hydra.sweeper` is one of the runner's own sweepers."""
    return node.get("_target_") == TARGET
