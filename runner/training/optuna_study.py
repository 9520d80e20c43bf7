"""Optuna's study of a sweep: storage, samplers and pruners by name. Free of torch.

In a journal, a last line that was cut off (a full disk, a power failure) is removed before the next
is written, since Optuna reads no journal with such a line in it. Some samplers (CMA-ES) keep their
state in the journal as a pickle, which Optuna loads: continue studies of people whom you trust.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError

from accel.machine.errors import ConfigError, Problem, nearest

SAMPLER, PRUNER = "sampler", "pruner"
FAILURES = (SQLAlchemyError, StorageInternalError)  # of a database
# Without arguments that YAML could give, or in no need of a search.
_GRIDS = {"grid", "bruteforce"}
_LEFT_OUT = {"base", "basega", "partialfixed", "nop", *_GRIDS}
# A name and its usual abbreviations, without separators.
_ALIASES = {"asha": "successivehalving", "cma": "cmaes", "sobol": "qmc", "nsga2": "nsgaii"}
# They optimize one objective.
SINGLE_OBJECTIVE = ("cmaes",)
WRAPPED = "wrapped_pruner"


class Lock(JournalFileSymlinkLock):
    """Lock of a journal under which a last line that was cut off is removed first."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path = Path(path)

    def acquire(self) -> bool:
        """Wait for the lock; that of a process that was killed is broken after half a minute."""
        super().acquire()
        try:
            _remove_cut_line(self._path)
        except BaseException:
            self.release()
            raise
        return True


def _remove_cut_line(path: Path) -> None:
    with path.open("rb+") as journal:
        size = journal.seek(0, os.SEEK_END)
        if size == 0:
            return
        journal.seek(-1, os.SEEK_END)
        if journal.read(1) == b"\n":
            return
        journal.seek(0)
        journal.truncate(journal.read().rfind(b"\n") + 1)


def failed_database(url: str, error: Exception) -> ConfigError:
    """Return what to say of a study's database that could not be opened, or not be used."""
    cause = error.__cause__ if isinstance(error, (StorageInternalError, ImportError)) else None
    lines = str(cause or error).splitlines() or [type(error).__name__]
    rule = f"a study is kept in that database, which failed ({lines[0]})"
    remedy = "Mend it, or begin a new sweep with another."
    if isinstance(error, ImportError):
        remedy = "Install the Python package that the URL's driver needs, or name another database."
    return ConfigError.of(f"storage={url}", rule, remedy)  # which shows no password


def storage_of(text: str, folder: Path) -> BaseStorage:
    """Return the storage of a URL, or the journal of a path, which starts from `folder`.

    Raises:
        ConfigError: if a database cannot be opened.
    """
    if "://" in text:
        try:
            return RDBStorage(text)
        except (*FAILURES, ImportError, ValueError) as error:
            raise failed_database(text, error) from error
    path = str(folder / text)
    return JournalStorage(JournalFileBackend(path, lock_obj=Lock(path)))


def names(kind: str) -> list[str]:
    """Return the names of samplers or pruners."""
    return sorted(_classes(kind))


def _classes(kind: str) -> dict[str, type]:
    module: Any = optuna.samplers if kind == SAMPLER else optuna.pruners
    found = {name: getattr(module, name) for name in module.__all__}
    return {
        _short(name): value
        for name, value in found.items()
        if inspect.isclass(value) and _short(name) not in _LEFT_OUT
    }


def _short(name: str) -> str:
    text = name.lower().replace("_", "").replace("-", "")
    text = text.removesuffix(SAMPLER).removesuffix(PRUNER)
    return _ALIASES.get(text, text)


def normalized(kind: str, given: object) -> dict[str, object] | None:
    """Return name and arguments of a sampler or pruner; None where it is null or "none".

    Raises:
        ConfigError: if there is no such name or argument.
    """
    where = f"hydra.sweeper.{kind}"
    spec = dict(given) if isinstance(given, Mapping) else {"name": given}
    name = spec.pop("name", None)
    if name is None or _short(str(name)) in ("none", "null", "nop"):
        if spec:
            rule = f"arguments belong to a {kind}"
            raise ConfigError.of(f"{where}={given}", rule, f"Give {where}.name, too.")
        return None
    known = _classes(kind)
    short = _short(str(name))
    if short in _GRIDS:
        rule = "a grid needs no sampler"
        remedy = "Leave out hydra/sweeper=optuna and give lists."
        raise ConfigError.of(f"{where}={name}", rule, remedy)
    if short not in known:
        rule = f"it is one of {', '.join(sorted(known))}"
        raise ConfigError.of(f"{where}={name}", rule, nearest(short, known))
    parameters = [p for p in inspect.signature(known[short]).parameters]
    allowed = [p for p in parameters if p not in ("seed", "args", "kwargs")]
    problems = [
        Problem(f"{where}.{key}", f"{short} has no such argument", nearest(key, allowed))
        for key in spec
        if key not in allowed
    ]
    if "seed" in spec:
        remedy = f"Write hydra.sweeper.seed={spec['seed']}."
        problems = [Problem(f"{where}.seed", "the seed is the study's", remedy)]
    ConfigError.raise_if(problems)
    return {"name": short, **spec}


def make(kind: str, spec: Mapping[str, object] | None, **own: object) -> Any:
    """Return a sampler or a pruner from what `normalized` returned; `own` are further arguments.

    Raises:
        ConfigError: if it refuses an argument's value.
    """
    if spec is None or not spec:
        return optuna.pruners.NopPruner()
    arguments = {name: value for name, value in spec.items() if name != "name"}
    if WRAPPED in arguments:
        arguments[WRAPPED] = make(kind, normalized(kind, arguments[WRAPPED]))
    found = _classes(kind)[str(spec["name"])]
    try:
        with warnings.catch_warnings():  # what it says is for people who write Python
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return found(**arguments, **own)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        value = f"hydra.sweeper.{kind}={spec['name']}({given})"
        rule = f"Optuna refuses it ({' '.join(str(error).split())})"
        raise ConfigError.of(value, rule, "Correct the arguments.") from error


JOB = "job"  # a trial's user attribute: the number of its job


def trials_of(study: optuna.Study) -> dict[int, FrozenTrial]:
    """Return the newest trial of each job of a sweep by the job's number."""
    trials = study.get_trials(deepcopy=False)
    return {int(one.user_attrs[JOB]): one for one in trials if JOB in one.user_attrs}


def running(study: optuna.Study, storage: BaseStorage, found: FrozenTrial) -> optuna.Trial:
    """Return a trial that is under way, to sample and to report to."""
    study_id = storage.get_study_id_from_name(study.study_name)
    return optuna.Trial(
        study, storage.get_trial_id_from_study_id_trial_number(study_id, found.number)
    )
