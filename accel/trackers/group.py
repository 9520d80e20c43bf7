"""The trackers of a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel.errors import ConfigError, Problem, StateError, nearest
from accel.trackers.base import GeneralTracker

if TYPE_CHECKING:
    from accel.trackers.table import Choice


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

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, object] | None = None,
        init_kwargs: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Open a run in every tracker of `log_with`, and record the hyper-parameters.

        Args:
            project_name: name of the run or project, as the tracker takes it.
            config: hyper-parameters; may be nested.
            init_kwargs: arguments of each tracker by its name, e.g.
                ``{"tensorboard": {"flush_secs": 10}}``.

        Raises:
            ConfigError: if `init_kwargs` names no tracker of this run.
        """
        arguments = init_kwargs or {}
        unknown = [self._unknown(f"init_kwargs[{name!r}]", name) for name in arguments]
        ConfigError.raise_if([problem for problem in unknown if problem is not None])
        self.trackers = []
        for choice in self.log_with:
            if not choice.main_process_only or self._is_main_process:
                self.trackers.append(self._open(choice, project_name, arguments))
        for tracker in self.trackers:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def _unknown(self, value: str, name: str) -> Problem | None:
        names = [choice.name for choice in self.log_with]
        return (
            None
            if name in names
            else Problem(value, "no such tracker is used", nearest(name, names))
        )

    def _open(
        self, choice: Choice, project_name: str, arguments: Mapping[str, Mapping[str, object]]
    ) -> GeneralTracker:
        if not inspect.isclass(choice):
            return choice
        given = arguments.get(choice.name, {})
        if choice.requires_logging_directory is True:
            return choice(project_name, self._logging_dir, **given)  # type: ignore[call-arg]
        return choice(project_name, **given)  # type: ignore[call-arg]

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker of this run.

        Args:
            name: its name, e.g. "tensorboard".
            unwrap: whether to return the object of the tracking library instead.

        Returns:
            The tracker. On a process where it does not log: one whose methods do nothing, or None
            for `unwrap`.

        Raises:
            ConfigError: if no tracker of that name is used.
            StateError: before `init_trackers`.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        unknown = self._unknown(f"get_tracker({name!r})", name)
        if unknown is not None:
            raise ConfigError(unknown)
        if self._is_main_process:
            raise StateError(f"get_tracker({name!r}): call init_trackers(…) first.")
        return None if unwrap else SilentTracker()

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record values in every tracker.

        Args:
            values: by name: numbers, 0-d tensors, text or dicts of numbers.
            step: optimizer step.
            log_kwargs: arguments of each tracker's own call, by its name.
        """
        for tracker in self.trackers:
            tracker.log(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record images in every tracker.

        Args:
            values: by name: images [N, ...], as the trackers take them.
            step: optimizer step.
            log_kwargs: arguments of each tracker's own call, by its name.
        """
        for tracker in self.trackers:
            tracker.log_images(values, step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def finish(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []


class SilentTracker(GeneralTracker):
    """Stands for a tracker on a process where that does not log: every method does nothing."""

    name = "silent"
    requires_logging_directory = False
    main_process_only = False

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
