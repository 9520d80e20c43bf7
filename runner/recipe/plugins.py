"""The runner's own launcher and sweeper, as Hydra's configuration knows them.

Hydra checks the types of the keys, `__post_init__` their values. Free of torch, Ray and Optuna.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from accel.machine.errors import Problems, nearest
from runner.recipe import machines
from runner.recipe.units import parse_duration

MODULE = "hydra_plugins.accel_runner"
LAUNCHER, SWEEPER = "hydra.launcher", "hydra.sweeper"
LAUNCHERS, SWEEPERS = "hydra/launcher", "hydra/sweeper"
BEST = "best"  # the best value of the monitored validation metric
SPLITS = ("validation", "test")
# Numbers of summary.json.
NUMBERS = ("seconds", "samples_per_second", "num_parameters", "step", "epoch", "samples")
DIRECTIONS = ("minimize", "maximize")
# They may change while a search goes on.
SCHEDULING = tuple(f"{SWEEPER}.{name}" for name in ("n_trials", "n_jobs", "timeout"))


@dataclass
class RayConf:
    """`hydra.launcher` with ``hydra/launcher=ray``.

    Args:
        address: host:port of the cluster's head; local: a cluster on this machine, for this sweep
            alone; null: RAY_ADDRESS, else the cluster that runs on this machine.
        num_cpus: CPUs of each job; null: processes × threads of its recipe.
        num_gpus: GPUs of each job; null: one for each process, if the cluster has any and the
            recipe does not compute on the CPU.
        resources: custom resources of each job, by name.
        runtime_env: Ray's runtime environment of the jobs.
    """

    _target_: str = f"{MODULE}.RayLauncher"
    _recursive_: bool = False  # nothing below is a call
    _convert_: str = "all"
    address: str | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems(machines.client_address(self.address, f"{LAUNCHER}.address"))
        _at_least(self, LAUNCHER, {"num_cpus": 0, "num_gpus": 0}, problems)
        problems.raise_if()


@dataclass
class SearchConf:
    """`hydra.sweeper` with ``hydra/sweeper=optuna`` (``random``: with sampler=random).

    Args:
        n_trials: number of jobs of the sweep, over all commands.
        n_jobs: how many are handed to the launcher at once; it returns once all of them have ended.
            null: as many as run at once on this machine (`sweep.jobs`), one under other launchers.
        metrics: objective, or a list: "best", the best value of the monitored validation metric;
            numbers in summary.json such as seconds; "validation/<metric>" and "test/<metric>", the
            last measured value.
        direction: minimize or maximize, a list for several metrics; null: that of the monitored
            metric.
        sampler: name of a sampler of Optuna's (tpe, random, …), or a mapping of `name` and
            arguments.
        pruner: likewise (median, hyperband, …); null: no run is pruned.
        seed: of the sampler; null: another one each time.
        study_name: null: a name of the sweep's own. A new sweep needs a new name.
        storage: path of a journal, or URL of a database; null: a journal in the sweep's folder.
        timeout: seconds, or HH:MM:SS, after which this command starts no further job.
        params: swept keys and their ranges, as on the command line, which goes before them.
        when: conditions of swept keys: ``{optimizer.momentum: 'optimizer=sgd'}``.
    """

    _target_: str = f"{MODULE}.OptunaSweeper"
    _recursive_: bool = False  # nothing below is a call
    _convert_: str = "all"
    n_trials: int = 20
    n_jobs: int | None = None
    metrics: Any = BEST
    direction: Any = None
    sampler: Any = field(default_factory=lambda: {"name": "tpe"})
    pruner: Any = field(default_factory=lambda: {"name": None})
    seed: int | None = 0
    study_name: str | None = None
    storage: str | None = None
    timeout: Any = None
    params: dict[str, Any] = field(default_factory=dict)
    when: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        _at_least(self, SWEEPER, {"n_trials": 1, "n_jobs": 1, "seed": 0}, problems)
        self.metrics, self.direction = _listed(self.metrics) or [BEST], _listed(self.direction)
        for metric in self.metrics:
            split, _, name = str(metric).partition("/")
            if metric not in (BEST, *NUMBERS) and (split not in SPLITS or not name):
                known = [BEST, *NUMBERS, *(f"{one}/{name or split}" for one in SPLITS)]
                rule = f"it is one of {', '.join(known)}"
                problems.add(f"{SWEEPER}.metrics={metric}", rule, nearest(str(metric), known))
        for one in self.direction:
            if one not in DIRECTIONS:
                rule = f"it is {' or '.join(DIRECTIONS)}"
                problems.add(f"{SWEEPER}.direction={one}", rule, nearest(str(one), DIRECTIONS))
        judged = ", ".join(map(str, self.metrics))
        wanted = (0, 1) if judged == BEST else (len(self.metrics),)
        if len(self.direction) not in wanted:
            rule = f"each objective ({judged}) has a direction"
            remedy = "Give a list of minimize or maximize, as long as that of the metrics."
            problems.add(f"{SWEEPER}.direction={self.direction or None}", rule, remedy)
        validated = len(self.metrics) == 1 and judged.startswith((BEST, "validation/"))
        if name_of(self.pruner) is not None and not validated:
            value = f"{SWEEPER}.pruner={name_of(self.pruner)} with metrics={judged}"
            problems.add(value, "runs are pruned by one validation metric", "Leave one out.")
        self.timeout = problems.collect(parse_duration, self.timeout, f"{SWEEPER}.timeout")
        problems.raise_if()


def name_of(spec: Any) -> Any:
    """Return the name of a sampler or a pruner, which may have arguments beside it."""
    return spec.get("name") if isinstance(spec, dict) else spec


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _at_least(node: object, prefix: str, least: dict[str, int], problems: Problems) -> None:
    for name, smallest in least.items():
        value = getattr(node, name)
        if value is not None and value < smallest:
            problems.add(f"{prefix}.{name}={value}", f"it is at least {smallest}", "Raise it.")


OWN = {"optuna": SearchConf(), "random": SearchConf(sampler={"name": "random"})}


def store() -> None:
    """Make the launcher and the sweepers known to Hydra's configuration."""
    for group, named in ((LAUNCHERS, {machines.RAY: RayConf()}), (SWEEPERS, OWN)):
        for name, conf in named.items():
            node = OmegaConf.structured(conf)
            for one in fields(conf):
                if OmegaConf.is_dict(node[one.name]):  # it takes any key
                    OmegaConf.set_struct(node[one.name], False)
            ConfigStore.instance().store(group=group, name=name, node=node, provider="runner")


def is_own(sweeper: Mapping[str, object]) -> bool:
    """Return whether `hydra.sweeper` is the runner's own."""
    return sweeper.get("_target_") == SearchConf._target_
