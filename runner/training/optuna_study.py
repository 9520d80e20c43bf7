"""Optuna's study of a sweep: storage, samplers and pruners by name. Free of torch.

The journal is Optuna's, behind a lock that the kernel drops with its holder: after a SIGKILL the
next process waits for nothing. A last line that was cut off (a full disk, a power failure) is
removed before the next is written, since Optuna reads no journal with such a line in it. Some
samplers (CMA-ES) keep their state in the journal as a pickle, which Optuna loads: continue studies
of people whom you trust.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from accel.machine.errors import ConfigError, Problem, nearest
from runner.runs import lock

SAMPLER, PRUNER = "sampler", "pruner"
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between tries to open a database
LONGEST_TRY = 10.0  # seconds, after which none follows
FAILURES = (SQLAlchemyError, StorageInternalError)  # of a database
# Without arguments that YAML could give, or in no need of a search.
_GRIDS = {"grid", "bruteforce"}
_LEFT_OUT = {"base", "basega", "partialfixed", "nop", *_GRIDS}
# A name and its usual abbreviations, without separators.
_ALIASES = {"asha": "successivehalving", "cma": "cmaes", "sobol": "qmc", "nsga2": "nsgaii"}
# They optimize one objective.
SINGLE_OBJECTIVE = ("cmaes",)
WRAPPED = "wrapped_pruner"
QUIET = "warn_independent_sampling"
# They sample together only keys that have distances and are always set; others at random.
NUMERIC = ("cmaes", "qmc")


class Lock(JournalFileSymlinkLock):
    """Lock of a journal: the kernel's, or Optuna's own where the file system offers none."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._path = Path(path)
        self._stack = contextlib.ExitStack()

    def acquire(self) -> bool:
        """Wait for the lock, and remove a last line that was cut off."""
        try:
            self._stack.enter_context(
                lock.waited_for(self._path.with_name(f".{self._path.name}.lock"))
            )
        except OSError as error:
            if error.errno not in lock.NOT_OFFERED:
                raise
            super().acquire()
            self._stack.callback(super().release)
        try:
            _remove_cut_line(self._path)
        except BaseException:
            self._stack.close()
            raise
        return True

    def release(self) -> None:
        """Release the lock."""
        self._stack.close()


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


def _database(url: str) -> RDBStorage:
    """Return the storage of a URL; commands that begin one at once make its tables together.

    Each of them then meets tables that the other has made meanwhile, and finds them at its next
    try. A host that does not answer is not waited for again.

    Raises:
        ConfigError: if it cannot be opened.
    """
    for seconds in (*PAUSES, None):
        began = time.monotonic()
        try:
            return RDBStorage(url)
        except (*FAILURES, ImportError, ValueError) as error:
            is_slow = time.monotonic() - began > LONGEST_TRY
            if seconds is None or is_slow or not isinstance(error, FAILURES):
                raise failed_database(url, error) from error
        time.sleep(seconds)
    raise AssertionError("the last try returns or raises")


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
    """Return the storage of a URL, or the journal of a path, which starts from `folder`."""
    if "://" in text:
        return _database(text)
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
    if spec["name"] in NUMERIC:  # the sweep tells it, once
        arguments.setdefault(QUIET, False)
    try:
        with warnings.catch_warnings():  # what it says is for people who write Python
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return found(**arguments, **own)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in arguments.items())
        value = f"hydra.sweeper.{kind}={spec['name']}({given})"
        rule = f"Optuna refuses it ({' '.join(str(error).split())})"
        raise ConfigError.of(value, rule, "Correct the arguments.") from error


# A trial's user attribute that says which job it is, of which command.
JOB = "job"


def trials_of(study: optuna.Study) -> dict[int, FrozenTrial]:
    """Return the newest trial of each job of a sweep by the job's number."""
    trials = study.get_trials(deepcopy=False)
    return {int(one.user_attrs[JOB]["number"]): one for one in trials if JOB in one.user_attrs}


def running_trial(study: optuna.Study, storage: BaseStorage, number: int) -> optuna.Trial | None:
    """Return the trial of a job, to report to; None if it is not running."""
    found = trials_of(study).get(number)
    if found is None or found.state is not TrialState.RUNNING:
        return None
    return trial_numbered(study, storage, found.number)


def trial_numbered(study: optuna.Study, storage: BaseStorage, number: int) -> optuna.Trial:
    """Return a trial of a study that is under way."""
    study_id = storage.get_study_id_from_name(study.study_name)
    return optuna.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))
