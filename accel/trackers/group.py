"""The trackers of a run."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from accel.logging import get_logger
from accel.machine.errors import ConfigError, Problem, StateError, nearest
from accel.trackers.base import GeneralTracker
from accel.trackers.table import OWN, REGISTERED, TRACKERS

if TYPE_CHECKING:
    from accel.trackers.table import Choice

logger = get_logger(__name__)


class Opening(NamedTuple):
    """The arguments of `init_trackers`."""

    project_name: str
    config: Mapping[str, object] | None
    arguments: Mapping[str, Mapping[str, object]]


class TrackerGroup:
    """Trackers of a run. A tracker that logs only on the main process exists only there.

    `log_with` are classes, or instances of the caller's own; `trackers` are those that
    `init_trackers` opened.
    """

    def __init__(
        self, log_with: list[Choice], logging_dir: str | None, is_main_process: bool
    ) -> None:
        self.log_with = log_with
        self.trackers: list[GeneralTracker] = []
        self._logging_dir = logging_dir
        self._is_main_process = is_main_process
        self._resumed: dict[str, str] = {}
        self._is_used = False  # since `init_trackers`: an unused run may be exchanged
        self._opening = Opening("", None, {})

    def open(
        self,
        project_name: str,
        config: Mapping[str, object] | None,
        arguments: Mapping[str, Mapping[str, object]],
    ) -> None:
        """Open a run in every tracker of `log_with`: `Accelerator.init_trackers`."""
        self._check_names("init_kwargs", arguments)
        self.finish()
        self._opening, self._is_used = Opening(project_name, config, arguments), False
        for choice in self.log_with:
            if not choice.main_process_only or self._is_main_process:
                self.trackers.append(self._build(choice))
        self._resumed = {}
        with self._closed_at_exit():
            for tracker in self.trackers:
                self._start(tracker)

    def _check_names(self, parameter: str, arguments: Iterable[str]) -> None:
        """Refuse names that no tracker has.

        Scripts give arguments of a tracker that this run does not choose: they take no effect.
        """
        known = {*TRACKERS, *OWN, *REGISTERED}
        others = [name for name in arguments if name not in known]
        unknown = [self._unknown(f"{parameter}[{name!r}]", name) for name in others]
        ConfigError.raise_if([problem for problem in unknown if problem is not None])

    def _unknown(self, value: str, name: str) -> Problem | None:
        names = [choice.name for choice in self.log_with]
        return (
            None
            if name in names
            else Problem(value, "no such tracker is used", nearest(name, names))
        )

    def _build(self, choice: Choice) -> GeneralTracker:
        if not inspect.isclass(choice):
            return choice
        project_name = self._opening.project_name
        given = dict(self._opening.arguments.get(choice.name, {}))
        if choice.name in self._resumed:
            given = {**choice.resume_arguments(self._resumed[choice.name]), **given}
        build: Callable[..., GeneralTracker] = choice
        places = (self._logging_dir,) if choice.requires_logging_directory is True else ()
        with self._told_of_arguments(choice.name):
            return build(project_name, *places, **given)

    @contextlib.contextmanager
    def _told_of_arguments(self, name: str) -> Iterator[None]:
        """Context in which an argument of `init_kwargs` that a library does not know is refused."""
        given = self._opening.arguments.get(name, {})
        try:
            yield
        except TypeError as error:
            if not any(repr(argument) in str(error) for argument in given):
                raise
            raise ConfigError.of(
                f"init_kwargs[{name!r}] with {', '.join(given)}",
                f"they are arguments of the tracker, which says: {error}",
                "Correct the name, or omit it.",
            ) from error

    def _start(self, tracker: GeneralTracker) -> None:
        with self._told_of_arguments(tracker.name):
            tracker.start()
        if self._opening.config is not None:
            tracker.store_init_configuration(dict(self._opening.config))

    def run_ids(self) -> dict[str, str]:
        """Return the run ids of the open trackers by their names, as checkpoints keep them."""
        ids = {tracker.name: _run_id(tracker) for tracker in self.trackers}
        return {**self._resumed, **{name: found for name, found in ids.items() if found}}

    def resume(self, run_ids: Mapping[str, str]) -> None:
        """Continue earlier runs at the next `init_trackers`; at once in place of open, empty ones.

        Args:
            run_ids: by name of the tracker, as `run_ids` returned them.
        """
        self._resumed = dict(run_ids)
        with self._closed_at_exit():
            self._exchange_unused()

    def _exchange_unused(self) -> None:
        """Open the runs to continue in place of open, empty ones."""
        for index, tracker in enumerate(self.trackers):
            if self._is_another(tracker):
                if self._is_used or tracker in self.log_with:
                    self._warn_of_another(tracker)
                else:
                    tracker.discard()
                    self.trackers[index] = self._build(type(tracker))
                    self._start(self.trackers[index])
                    del self._resumed[tracker.name]

    def _is_another(self, tracker: GeneralTracker) -> bool:
        """Return whether a tracker is open with another run than it would continue by itself."""
        run_id = self._resumed.get(tracker.name)
        if run_id is None or run_id == _run_id(tracker):
            return False
        by_id = tracker.resume_arguments(run_id)
        chosen = self._opening.arguments.get(tracker.name, {})
        is_chosen = any(str(chosen.get(name, value)) != str(value) for name, value in by_id.items())
        return bool(by_id) and not is_chosen

    def _warn_of_another(self, tracker: GeneralTracker) -> None:
        run_id = self._resumed[tracker.name]
        logger.warning(
            "load_state: the checkpoint's run of %s is %s, and %s is open: a run in use is not "
            "exchanged, so the record is in two parts. Call load_state before init_trackers, or "
            "init_trackers(…, init_kwargs={%r: %r}).",
            tracker.name,
            run_id,
            _run_id(tracker),
            tracker.name,
            tracker.resume_arguments(run_id),
        )

    def get(self, name: str, unwrap: bool = False) -> Any:
        """Return an open tracker: `Accelerator.get_tracker`."""
        self._is_used = True
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        unknown = self._unknown(f"get_tracker({name!r})", name)
        if unknown is not None:
            raise ConfigError(unknown)
        if self._is_main_process:
            raise StateError(f"get_tracker({name!r}): call init_trackers(…) first.")
        choice = next(choice for choice in self.log_with if choice.name == name)
        return None if unwrap else SilentTracker(choice)

    def log(
        self,
        values: dict[str, Any],
        step: int | None,
        own: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Record values in every tracker: `Accelerator.log`."""
        self._check_names("log_kwargs", own)
        self._use("log")
        _each(self.trackers, lambda one: one.log(values, step=step, **own.get(one.name, {})))

    def _use(self, method: str) -> None:
        self._is_used = True
        if not self.trackers and self.log_with and self._is_main_process:
            names = ", ".join(choice.name for choice in self.log_with)
            logger.warning_once(
                "%s: no tracker of %s is open, so values are lost. Call init_trackers(…) before "
                "the first of them, and end_training() after the last.",
                method,
                names,
            )

    def log_images(
        self,
        values: dict[str, Any],
        step: int | None,
        own: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Record images in every tracker that has them: `Accelerator.log_images`."""
        self._check_names("log_kwargs", own)
        self._use("log_images")
        nothing = GeneralTracker.log_images
        able = [one for one in self.trackers if type(one).log_images is not nothing]
        for tracker in self.trackers:
            if not able:
                raise NotImplementedError(f"The tracker {tracker.name!r} does not log images.")
            if tracker not in able:
                logger.warning_once("The tracker %r does not log images: skipped.", tracker.name)
        _each(able, lambda one: one.log_images(values, step=step, **own.get(one.name, {})))

    def flush(self) -> None:
        """Write what the trackers buffer, so that a kill does not lose it."""
        _each(self.trackers, lambda one: one.flush())

    def finish(self, failed: bool = False) -> None:
        """Close every tracker, once.

        Args:
            failed: whether the run ends with an exception, for trackers that record it.

        Raises:
            Exception: that of the first tracker that could not be closed, after all others are.
        """
        atexit.unregister(self._finish_at_exit)
        for tracker in self.trackers:  # where a user's class has not something else by this name
            if isinstance(inspect.getattr_static(tracker, "failed"), bool):
                tracker.failed = failed
        open_trackers, self.trackers = self.trackers, []
        # Libraries wrap the standard output in one another's: the last one takes its wrapper off.
        _each(reversed(open_trackers), lambda one: one.finish())

    @contextlib.contextmanager
    def _closed_at_exit(self) -> Iterator[None]:
        """Context in which trackers are opened: the exit of the process closes them.

        What was registered last is called first, and a library whose own hook had run could close
        nothing any more.
        """
        try:
            yield
        finally:
            atexit.unregister(self._finish_at_exit)
            if self.trackers:
                atexit.register(self._finish_at_exit)

    def _finish_at_exit(self) -> None:
        # Python keeps the exception that ended the script there.
        self.finish(failed=getattr(sys, "last_value", None) is not None)


def _each(trackers: Iterable[GeneralTracker], act: Callable[[GeneralTracker], None]) -> None:
    """Call `act` on every tracker, and raise the first exception afterwards."""
    errors = []
    for tracker in trackers:
        try:
            act(tracker)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _run_id(tracker: GeneralTracker) -> str | None:
    found = tracker.run_id
    return None if found is None or callable(found) else str(found)


class SilentTracker(GeneralTracker):
    """Stands for a tracker on a process where that does not log: its methods do nothing.

    The attribute that is the run object of a library is None.

    Args:
        choice: the tracker's class, or the tracker.
    """

    name = "silent"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.name = choice.name
        self._choice = choice

    @property
    def tracker(self) -> None:
        """None."""
        return

    def store_init_configuration(self, values: object) -> None:
        """Do nothing."""

    def log(self, values: object, step: int | None = None, **kwargs: object) -> None:
        """Do nothing."""

    def log_images(self, values: object, step: int | None = None, **kwargs: object) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None] | None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None if name == getattr(self._choice, "alias", None) else _nothing


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""
