"""Aim: a repository in a folder, read back with its SDK (R8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.accel.trackers.offline import logged, needs


def read(run_id: str) -> dict[str, Any]:
    """Return what Aim's SDK finds."""
    from aim import Repo
    from aim.sdk.index_manager import RepoIndexManager
    from aim.storage.context import Context

    repo = Repo(".")
    RepoIndexManager.get_index_manager(repo).index(run_id)  # as `aim up` does
    run = repo.get_run(run_id)
    histories = {metric.name: metric.data.items_list() for metric in run.metrics()}
    return {
        "metrics": {name: [steps, found[0]] for name, (steps, found) in histories.items()},
        "hparams": run["hparams"],
        "names": [run.name, run.experiment],
        "texts": [run.get_text_sequence("note", Context({})).values.last()[1].data],
        "images": [
            [image.width, image.height, image.caption]
            for image in run.get_image_sequence("digits", Context({})).values.last()[1]
        ],
    }


@needs("aim")
def test_a_repository_holds_what_was_logged(tmp_path: Path) -> None:
    report = logged(tmp_path, "aim", f"{__name__}:read")
    assert report["ids"][0] == report["ids"][1]
    found = report["found"]
    assert found["metrics"]["train/loss"] == [[1, 2, 3], [0.5, 0.25, 0.125]]
    assert found["metrics"]["parts/a"] == [[2], [1.0]]
    hparams = {"name": "digits", "optimizer": {"lr": 0.2, "betas": [0.9, 0.99]}, "layers": None}
    assert found["hparams"] == hparams
    assert found["names"] == ["proj", "proj"]
    assert (found["texts"], found["images"]) == (["fine"], [[4, 4, ""]] * 2)


ARGUMENTS = """
import numpy as np
from aim import Repo
from aim.sdk.index_manager import RepoIndexManager
from aim.storage.context import Context
from accel.tracking import AimTracker

tracker = AimTracker("mine", "unused", repo="here", experiment="other")
pixels = np.zeros((4, 4, 3), dtype=np.uint8)
tracker.log_images({"a": (pixels, "a caption")}, step=1)
own = {"aim_image": {"caption": "b"}, "track": {"context": {"subset": "test"}}}
tracker.log_images({"b": pixels}, 1, own)
tracker.log_images({"c": pixels}, step=1, **own)
run_id = tracker.run_id
tracker.finish()
repo = Repo("here")
RepoIndexManager.get_index_manager(repo).index(run_id)
run = repo.get_run(run_id)
assert (run.name, run.experiment) == ("mine", "other")
subset = Context({"subset": "test"})
places = (("a", Context({}), "a caption"), ("b", subset, "b"), ("c", subset, "b"))
for name, context, caption in places:
    steps, found = run.get_image_sequence(name, context).data.items_list()
    assert (steps, found[0][0].caption) == ([1], caption), (name, steps, found)
"""
