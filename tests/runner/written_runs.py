"""Run directories as files alone, made without torch, for the tests of what reads them."""

from __future__ import annotations

import functools
import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

from runner.recipe import composition, hydra_setup, serialization
from runner.runs import sessions
from runner.runs.json_files import finite

STARTED = 1_790_000_000.0


@functools.cache
def _base() -> dict[str, Any]:
    with hydra_setup.session():
        recipe = composition.require(composition.new_run([], "config"))
    return dict(serialization.frozen_plain(recipe))


def write_run(
    path: Path,
    values: dict[str, Any] | None = None,
    *,
    best: float | None = 0.5,
    stopped: str = "max_steps",
    complete: bool = True,
    started: float = STARTED,
    summary: bool = True,
    metrics: int | None = None,
    packages: dict[str, str] | None = None,
    git: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    overrides: list[str] | None = None,
) -> Path:
    """Write and return a run directory.

    Args:
        path: where.
        values: of the recipe, by dotted key.
        best: the objective (the loss, lower is better); None: none was measured.
        stopped: why it ended.
        complete: whether it reached its end.
        started: when, in seconds since the epoch.
        summary: whether it has come to an end of its own.
        metrics: how many records metrics.jsonl has, of training and of validation each; 0: there is
            no such file, None: as many as steps 1 to 20 of a run that has ended have.
        packages: versions.
        git: state of the work tree.
        data: states of the files that its data factory was given.
        overrides: of its command; None: those of `values`.
    """
    metrics = (2 if summary else 0) if metrics is None else metrics
    path.mkdir(parents=True, exist_ok=True)
    recipe = deepcopy(_base())
    for key, value in (values or {}).items():
        *parents, leaf = key.split(".")
        node = recipe
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    session = sessions.create(path)
    (session / "config.yaml").write_text(serialization.yaml_text(recipe))
    given = [f"{k}={v}" for k, v in (values or {}).items()] if overrides is None else overrides
    job: dict[str, Any] = {"overrides": given, "imports": []}
    job |= {"run_dir": str(path), "resume_from": None, "cwd": "/", "config_name": "config"}
    (session / "job.json").write_text(json.dumps(job))
    write(session / "begun.json", {"time": started})
    write(session / "environment.json", {
        "started": started, "command": ["python", "-m", "runner"], "cwd": "/", "hostname": "vm",
        "packages": packages or {"torch": "2.13.0"}, "git": git, "data": data or {}, "cpu_count": 2,
    })  # fmt: skip
    lines = [
        {"step": 10 * n, "epoch": 1, "samples": 640 * n, "split": split, "loss": 2 / n + by,
         "time": float(n), "samples_per_second": 1000.0}
        for n in range(1, metrics + 1)
        for split, by in (("train", 0.0), ("validation", 0.1))
    ]  # fmt: skip
    if lines:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary:
        found = {"metric": "loss", "mode": "min", "value": best, "step": 10, "checkpoint": None}
        write(session / "ended.json", {"code": 0, "time": started + 90.0, "summary": {
            "name": recipe["name"], "stopped": stopped, "reason": f"{stopped} reached",
            "complete": complete, "step": 10 if metrics == 1 else 20,
            "seconds": 90.0, "samples_per_second": 1500.0,
            "speed": {"samples_per_second": 1500.0, "seconds": {"data": 30.0, "other": 60.0}},
            "monitor": "loss", "mode": "min", "best": None if best is None else found,
            "metrics": {} if best is None else {"validation": {"loss": best, "accuracy": 0.9}},
            "memory": {"process": 300_000_000, "device": None}, "ended": started + 90.0,
        }})  # fmt: skip
    return path


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(finite(value)))


def session_of(path: Path) -> Path:
    """Return the newest session of a run."""
    return sessions.of_run(path)[-1]


def change_summary(path: Path, **best: object) -> None:
    """Change what the summary of a run says of its best state."""
    file = session_of(path) / "ended.json"
    ended = json.loads(file.read_text())
    ended["summary"]["best"] |= best
    write(file, ended)


def write_session(path: Path, ended: dict[str, Any] | None = None, *, begun: bool = True) -> Path:
    """Add a session to a run, with the recipe of the first; `ended` as `ended.json` has it."""
    first, session = sessions.of_run(path)[0], sessions.create(path)
    for name in ("config.yaml", "environment.json", "job.json"):
        (session / name).write_bytes((first / name).read_bytes())
    if begun:
        write(session / "begun.json", {"time": STARTED})
    if ended is not None:
        write(session / "ended.json", ended)
    return session


def failure(message: str = "ValueError: no", code: int = 1) -> dict[str, Any]:
    """Return how a session ended that rank 0 has failed."""
    cause = {
        "rank": 0, "time": STARTED, "code": code, "message": message,
        "traceback": f'File "model.py", line 3\n{message}', "is_consequence": False,
    }  # fmt: skip
    return {"code": code, "time": STARTED, "cause": cause}


def write_failure(path: Path, message: str = "ValueError: no", code: int = 1) -> None:
    """Write how the newest session of a run ended."""
    write(session_of(path) / "ended.json", failure(message, code))


def write_sweep(folder: Path, rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)) -> Path:
    """Write and return a sweep over learning rate, width and two seeds."""
    sweep = folder / "digits" / "sweep-20261124-120000-abcd"
    sweep.mkdir(parents=True)
    for number, (rate, width, seed) in enumerate(
        (rate, width, seed) for rate in rates for width in (16, 32) for seed in (0, 1)
    ):
        best = 0.2 + abs(math.log10(rate / 3e-3)) + 0.01 * seed + (0.1 if width == 16 else 0.0)
        values = {"optimizer.lr": rate, "model.width": width, "seed": seed}
        write_run(sweep / f"{number:04}", values, best=best, metrics=5, started=STARTED + number)
    (sweep / "sweep.json").write_text("{}")
    return sweep
