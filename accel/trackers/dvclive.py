"""DVCLive: metrics as files beside a Git repository.

Source: https://dvc.org/doc/dvclive/live
"""

from __future__ import annotations

from typing import Any

from accel.trackers.base import (
    LibraryTracker,
    images_of,
    on_main_process,
    plain,
    scalars_and_texts,
)


class DVCLiveTracker(LibraryTracker):
    """Logs into a folder of DVCLive.

    Args:
        run_name: unused: DVCLive names folders (`dir`) and experiments (`exp_name`) in `kwargs`.
        live: an open `dvclive.Live`, used as it is.
        kwargs: for `dvclive.Live`.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: object = None, **kwargs: object) -> None:
        super().__init__()
        self.run_name = run_name
        self._live = live
        self._kwargs = kwargs

    def _open(self) -> object:
        if self._live is not None:
            return self._live
        from dvclive import Live

        return Live(**self._kwargs)

    def _close(self, run: Any) -> None:
        run.end()

    @property
    def run_id(self) -> str | None:
        """The folder."""
        return None if self._run is None else str(self._run.dir)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `dvclive.Live` that append to a folder."""
        return {"dir": run_id, "resume": True}

    @on_main_process
    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Record hyper-parameters in ``params.yaml``, nested as they are."""
        self.tracker.log_params(plain(values))

    @on_main_process
    def log(self, values: dict[str, object], step: int | None = None, **kwargs: object) -> None:
        """Record numbers and text, and make the step's summary.

        Args:
            values: by name; nested ones are named ``outer/inner``.
            step: optimizer step; None: the next one.
            kwargs: for `Live.log_metric`.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        numbers, texts = scalars_and_texts(values)
        for name, value in {**numbers, **texts}.items():
            live.log_metric(name, value, **kwargs)
        live.next_step()

    @on_main_process
    def log_images(
        self, values: dict[str, object], step: int | None = None, **kwargs: object
    ) -> None:
        """Record images as ``<name>.png``, several as ``<name>_<index>.png``.

        Args:
            values: by name: images, as `images_of` takes them.
            step: optimizer step.
            kwargs: for `Live.log_image`.
        """
        live = self.tracker
        if step is not None:
            live.step = step
        for name, found in values.items():
            images = images_of(found)
            for index, image in enumerate(images):
                file = f"{name}.png" if len(images) == 1 else f"{name}_{index}.png"
                live.log_image(file, image, **kwargs)
