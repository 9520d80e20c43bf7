"""Aim: a repository in a folder.

Source: https://aimstack.readthedocs.io/en/latest/refs/sdk.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.trackers.base import LibraryTracker, Values, images_of, on_main_process

Options = Mapping[str, Mapping[str, object]]


class AimTracker(LibraryTracker):
    """Logs to a run of an Aim repository.

    Args:
        run_name: name of the run, and of its experiment where `kwargs` give none.
        logging_dir: folder of the repository (``.aim``).
        kwargs: for `aim.Run`.
    """

    name = "aim"
    id_path = "hash"
    alias = "writer"
    requires_logging_directory = True

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: object
    ) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = logging_dir

    def _open(self) -> object:
        from aim import Run

        repo = self._kwargs.get("repo") or os.fspath(self.logging_dir or ".")
        if isinstance(repo, str) and "://" not in repo:
            Path(repo).mkdir(parents=True, exist_ok=True)
        run = Run(**{"experiment": self.run_name, **self._kwargs, "repo": repo})
        run.name = self.run_name
        return run

    def _close(self, run: Any) -> None:
        run.close()

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, object]:
        """Return the arguments of `aim.Run` that continue a run."""
        return {"run_hash": run_id}

    def _configure(self, values: dict[str, Any]) -> None:
        self.tracker["hparams"] = values

    def _write(self, values: Values, step: int | None, **kwargs: Any) -> None:
        from aim import Text

        texts = {name: Text(text) for name, text in values.texts.items()}
        for name, value in {**values.numbers, **texts}.items():
            self.tracker.track(value, name=name, step=step, **kwargs)

    @on_main_process
    def log_images(
        self,
        values: dict[str, Any],
        step: int | None = None,
        kwargs: Options | None = None,
        **options: Mapping[str, object],
    ) -> None:
        """Record images.

        Args:
            values: by name: images, as `images_of` takes them, or (image, caption).
            step: optimizer step.
            kwargs: ``aim_image``: arguments of `aim.Image`; ``track``: of the run's `track`.
            options: the same, by keyword.
        """
        from aim import Image

        given = {"aim_image": {}, "track": {}, **(kwargs or {}), **options}
        for name, found in values.items():
            images, caption = _captioned(found)
            described = {"caption": caption, **given["aim_image"]}
            made = [Image(image, **described) for image in images_of(images)]
            one = made[0] if len(made) == 1 else made
            self.tracker.track(one, name=name, step=step, **given["track"])


def _captioned(found: object) -> tuple[object, str]:
    """Return (images, caption) of a value, which may be such a pair."""
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], str):
        return found[0], found[1]
    return found, ""
