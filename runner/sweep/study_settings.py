"""Settings of a search, `hydra.sweeper`, checked at once. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accel.machine.errors import ConfigError, Problems, nearest
from accel.machine.imports import is_available
from runner.recipe.durations import parse_duration
from runner.recipe.sweepers import NODE
from runner.run_dir.study import BEST, SPLITS
from runner.training import optuna_study
from runner.training.optuna_study import PRUNER, SAMPLER

CMAES = "cmaes"
# Numbers of summary.json.
NUMBERS = ("seconds", "samples_per_second", "num_parameters", "step", "epoch", "samples")
DIRECTIONS = {"minimize": "min", "maximize": "max", "min": "min", "max": "max"}


@dataclass(frozen=True)
class Settings:
    """A search: how many jobs, of which objectives, chosen and pruned by whom.

    Attributes:
        metrics: the objectives, of which "best" is the monitored validation metric's best value.
        modes: "min" or "max" of each; None: as the run's monitored metric has it.
        sampler: its name and arguments.
        pruner: likewise; None: nothing is pruned.
        timeout: seconds after which no further job is started; None: never.
        others: as `compose.sweepers.OptunaConf` has them.
    """

    n_trials: int
    n_jobs: int | None
    metrics: tuple[str, ...]
    modes: tuple[str, ...] | None
    sampler: Mapping[str, object]
    pruner: Mapping[str, object] | None
    seed: int | None
    study_name: str | None
    storage: str | None
    max_failure_rate: float
    timeout: float | None

    @classmethod
    def read(cls, node: Mapping[str, object]) -> Settings:
        """Return the settings of `hydra.sweeper`.

        Raises:
            ConfigError: naming everything that is wrong.
        """
        problems = Problems()
        metrics = _metrics(node["metrics"], problems)
        modes = _modes(node["direction"], node["directions"], metrics, problems)
        sampler, pruner = (_named(kind, node[kind], problems) for kind in (SAMPLER, PRUNER))
        if sampler is None and not problems:
            rule, remedy = "a sampler chooses the jobs", "Choose sampler=tpe or sampler=random."
            problems.add(f"{NODE}.sampler={node['sampler']}", rule, remedy)
        _check_several(metrics, sampler, pruner, problems)
        n_trials = _whole("n_trials", node["n_trials"], 1, problems)
        n_jobs = None if node["n_jobs"] is None else _whole("n_jobs", node["n_jobs"], 1, problems)
        seed = None if node["seed"] is None else _whole("seed", node["seed"], 0, problems)
        name, storage = (_text(key, node[key], problems) for key in ("study_name", "storage"))
        rate = _rate(node["max_failure_rate"], problems)
        try:
            timeout = parse_duration(node["timeout"], f"{NODE}.timeout")
        except ConfigError as error:
            problems += error.problems
        problems.raise_if()
        assert sampler is not None
        return cls(
            *(n_trials, n_jobs, metrics, modes, sampler, pruner),
            *(seed, name, storage, rate, timeout),
        )

    @property
    def reported(self) -> str | None:
        """The validation metric that runs report; "best": the monitored one; None: there is none.

        Optuna prunes by one objective only.
        """
        if len(self.metrics) > 1:
            return None
        split, _, name = self.metrics[0].partition("/")
        return BEST if split == BEST else name if split == "validation" else None


def _metrics(given: object, problems: Problems) -> tuple[str, ...]:
    listed = [BEST] if given is None else given if isinstance(given, list) else [given]
    known = (BEST, *NUMBERS)
    for metric in listed:
        split, slash, name = str(metric).partition("/")
        if metric in known or (slash and split in SPLITS and name):
            continue
        rule = f"it is one of {', '.join(known)}, validation/<metric> and test/<metric>"
        meant = nearest(str(metric), [*known, *(f"{one}/{name or split}" for one in SPLITS)])
        problems.add(f"{NODE}.metrics={metric}", rule, meant)
    if len(set(map(str, listed))) < len(listed) or not listed:
        problems.add(f"{NODE}.metrics={given}", "it names each objective once", "Correct it.")
    return tuple(map(str, listed))


def _modes(
    direction: object, directions: object, metrics: tuple[str, ...], problems: Problems
) -> tuple[str, ...] | None:
    if direction is not None and directions is not None:
        rule, remedy = "one of both is given", f"Leave {NODE}.direction out."
        problems.add(f"{NODE}.direction={direction} with directions={directions}", rule, remedy)
        return None
    given = directions if directions is not None else direction
    if given is None:
        if metrics != (BEST,):
            value = f"{NODE}.metrics={', '.join(metrics)}"
            rule = "whether less or more of it is better is given with it"
            listed = ", ".join("minimize" for _ in metrics)
            problems.add(value, rule, f"Give {NODE}.directions=[{listed}] or maximize.")
        return None
    listed_ = given if isinstance(given, list) else [given]
    for one in listed_:
        if str(one).lower() not in DIRECTIONS:
            rule, meant = "it is minimize or maximize", nearest(str(one), DIRECTIONS)
            problems.add(f"{NODE}.direction={one}", rule, meant)
    if len(listed_) != len(metrics):
        rule = f"there is one for each of the {len(metrics)} metrics ({', '.join(metrics)})"
        remedy = f"Give {NODE}.directions and {NODE}.metrics as lists of the same length."
        problems.add(f"{NODE}.directions={given}", rule, remedy)
    return tuple(DIRECTIONS.get(str(one).lower(), "min") for one in listed_)


def _named(kind: str, given: object, problems: Problems) -> dict[str, object] | None:
    try:
        spec = optuna_study.normalized(kind, given)
        if spec is not None and spec["name"] == CMAES and not is_available(CMAES):
            rule = f"it needs the package {CMAES!r}, which is not installed"
            problems.add(f"{NODE}.sampler={CMAES}", rule, f"Install it with `pip install {CMAES}`.")
        elif spec is not None:
            optuna_study.make(kind, spec)
        return spec
    except ConfigError as error:
        problems += error.problems
        return None


def _check_several(
    metrics: tuple[str, ...],
    sampler: Mapping[str, object] | None,
    pruner: Mapping[str, object] | None,
    problems: Problems,
) -> None:
    several = f"{NODE}.metrics={', '.join(metrics)}"
    if pruner is not None and len(metrics) > 1:
        rule = "runs are pruned by one objective only"
        problems.add(f"{NODE}.pruner={pruner['name']} with {several}", rule, "Leave one out.")
    elif pruner is not None and not metrics[0].startswith((BEST, "validation/")):
        rule = "runs are pruned by a validation metric"
        problems.add(f"{NODE}.pruner={pruner['name']} with {several}", rule, "Leave one out.")
    if sampler is not None and sampler["name"] in optuna_study.SINGLE_OBJECTIVE and metrics[1:]:
        rule, remedy = "it optimizes one objective", "Choose sampler=tpe or sampler=nsgaii."
        problems.add(f"{NODE}.sampler={sampler['name']} with {several}", rule, remedy)


def _whole(name: str, value: object, least: int, problems: Problems) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = f"it is a whole number of at least {least}"
        problems.add(f"{NODE}.{name}={value}", rule, f"Give {NODE}.{name}={max(least, 20)}.")
        return least
    return value


def _rate(value: object, problems: Problems) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        rule, remedy = "it is a part between 0 and 1", "Give 0.5 to end where half of them fail."
        problems.add(f"{NODE}.max_failure_rate={value}", rule, remedy)
        return 1.0
    return float(value)


def _text(name: str, value: object, problems: Problems) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        problems.add(f"{NODE}.{name}={value}", "it is a text", "Leave it out, or give a name.")
        return None
    return value
