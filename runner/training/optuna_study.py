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
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError

from accel.machine.errors import ConfigError, nearest

SAMPLER, PRUNER = "sampler", "pruner"
JOB = "job"  # a trial's user attribute: the number of its job
FAILURES = (SQLAlchemyError, StorageInternalError)  # of a database
# Base classes, wrappers, and grids: a sweep over lists needs no search.
LEFT_OUT = ("base", "basega", "partialfixed", "grid", "bruteforce")
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
        if size := journal.seek(0, os.SEEK_END):
            journal.seek(size - 1)
            if journal.read() != b"\n":
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)


def failed_database(url: str, error: Exception) -> ConfigError:
    """Return what to say of a study's database that could not be opened, or not be used."""
    lines = str(error.__cause__ or error).splitlines() or [type(error).__name__]
    rule = f"a study is kept in that database, which failed ({lines[0]})"
    return ConfigError.of(f"storage={url}", rule, "Mend it, or begin a new sweep with another.")


def address_of(storage: str) -> str:
    """Return `hydra.sweeper.storage` with its interpolations, as of the environment, resolved.

    Raises:
        ConfigError: if one cannot be resolved.
    """
    try:
        return str(OmegaConf.create({"storage": storage}).storage)
    except OmegaConfBaseException as error:
        rule = str(error).splitlines()[0]
        raise ConfigError.of(f"storage={storage}", rule, "Set or correct it.") from None


def is_there(text: str, folder: Path) -> bool:
    """Return whether a storage is a database, or a journal that is there: opening makes one."""
    address = address_of(text)
    return "://" in address or (folder / address).exists()


def storage_of(text: str, folder: Path) -> BaseStorage:
    """Return the storage of a URL, or the journal of a path, which starts from `folder`.

    Raises:
        ConfigError: if a database cannot be opened.
    """
    address = address_of(text)
    if "://" in address:
        try:
            return RDBStorage(address)
        except (*FAILURES, ImportError, ValueError) as error:
            raise failed_database(text, error) from error
    path = str(folder / address)
    return JournalStorage(JournalFileBackend(path, lock_obj=Lock(path)))


def make(kind: str, given: object, **own: object) -> Any:
    """Return the sampler or the pruner of a name, or of a mapping of its name and arguments.

    `own` are further arguments. Without a name nothing is pruned.

    Raises:
        ConfigError: if there is no such name, or Optuna refuses an argument.
    """
    spec: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"name": given}
    name, known = spec.pop("name", None), _classes(kind)
    if kind == PRUNER and name is None and not spec:
        return optuna.pruners.NopPruner()
    where = f"hydra.sweeper.{kind}"
    if name not in known:
        rule = f"it is one of {', '.join(sorted(known))}"
        raise ConfigError.of(f"{where}={given}", rule, nearest(str(name).lower(), known))
    if WRAPPED in spec:
        spec[WRAPPED] = make(kind, spec[WRAPPED])
    try:
        with warnings.catch_warnings():  # what it says is for people who write Python
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return known[name](**spec, **own)
    except (TypeError, ValueError) as error:
        rule = f"Optuna refuses it ({' '.join(str(error).split())})"
        arguments = [one for one in inspect.signature(known[name]).parameters if one != "seed"]
        remedy = f"The arguments of {name} are {', '.join(arguments)}."
        raise ConfigError.of(f"{where}={given}", rule, remedy) from error


def _classes(kind: str) -> dict[str, Any]:
    module: Any = optuna.samplers if kind == SAMPLER else optuna.pruners
    listed = [one for one in module.__all__ if one.lower().endswith(kind)]
    found = {one.lower().removesuffix(kind): getattr(module, one) for one in listed}
    return {name: value for name, value in found.items() if name not in LEFT_OUT}


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
