"""What must hold of a run, however it ended: each way to use it is one cell of the matrix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accel.checkpoint import files
from tests.resume_matrix.warm import run

NAME = "tiny"
# Two epochs of three steps, a checkpoint after each.
RECIPE = (
    *(f"name={NAME}", "model.width=2", "model.dropout=0", "data.augment=false"),
    *("tracker.log_with=[]", "trainer.log_every=1", "trainer.epochs=2"),
    *("trainer.limit_train_batches=3", "trainer.limit_eval_batches=1"),
)
STEPS_PER_EPOCH = 3
USES = ("resume", "resume=auto", "eval", "predict", "load")


@dataclass(frozen=True)
class Cell:
    """One use of a run that ended in some way.

    Attributes:
        state: how the run ended.
        use: what was done with it.
        wrong: what does not hold; empty if all does.
    """

    state: str
    use: str
    wrong: str


def runs(folder: Path) -> list[Path]:
    """Return the run directories below a working directory, oldest first."""
    found = [path for path in folder.glob(f"runs/{NAME}/*") if not path.name.startswith(".")]
    return sorted(found)


def steps_kept(run_dir: Path) -> int | None:
    """Return the step of a run's newest complete checkpoint; None if it has none."""
    found = files.newest_complete(run_dir / files.FOLDER)
    return None if found is None else int(files.read_manifest(found).metadata["step"])


def trained(run_dir: Path) -> list[int]:
    """Return the steps in a run's metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return [record["step"] for record in records if record["split"] == "train"]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return time of change and content of every file and folder below `folder`."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def cells(state: str, folder: Path, uses: tuple[str, ...] = USES) -> list[Cell]:
    """Use what a command has left in `folder`, each time in a copy."""
    found = []
    for use in uses:
        copy = folder.with_name(f"{folder.name}-{use.replace('=', '-')}")
        shutil.copytree(folder, copy)
        try:
            wrong = CHECKS[use](copy)
        except Exception as error:  # a check that cannot be made has failed
            wrong = f"{type(error).__name__}: {error}"
        shutil.rmtree(copy)
        found.append(Cell(state, use, wrong))
    return found


def _resume(folder: Path) -> str:
    """Each run with a state is trained to its end, once; any other is refused."""
    for run_dir in runs(folder):
        kept = steps_kept(run_dir)
        answer = run([f"resume={run_dir}"], folder)
        if kept is None:
            wrong = _refused(answer.code, answer.output)
        else:
            wrong = _ended(answer.code, answer.output, run_dir, kept)
        if wrong:
            return wrong
    return ""


def _auto(folder: Path) -> str:
    """The run that has a state is trained to its end; without one a new run is."""
    before = {run_dir: steps_kept(run_dir) for run_dir in runs(folder)}
    resumable = [run_dir for run_dir, kept in before.items() if kept is not None]
    limit = _limit(resumable[-1]) if resumable else 2
    line = [*RECIPE[:-3], f"trainer.epochs={limit}", *RECIPE[-2:], "resume=auto"]
    answer = run(line, folder)
    if resumable:
        if set(runs(folder)) != set(before):
            return f"a new run was started: {answer.output[-300:]}"
        return _ended(answer.code, answer.output, resumable[-1], before[resumable[-1]] or 0)
    (new,) = set(runs(folder)) - set(before)
    return _ended(answer.code, answer.output, new, 0)


def _limit(run_dir: Path) -> int:
    from omegaconf import OmegaConf

    for place in (run_dir / ".committed", run_dir):
        if (place / "config.yaml").exists():
            return int(OmegaConf.load(place / "config.yaml").trainer.epochs)
    raise AssertionError(f"{run_dir} has no recipe")


def _ended(code: int, output: str, run_dir: Path, kept: int) -> str:
    """Return what is wrong with a run that a command has resumed from step `kept`."""
    if code != 0:
        return f"code {code}: {output[-300:]}"
    last = _limit(run_dir) * STEPS_PER_EPOCH
    summary = json.loads((run_dir / "summary.json").read_text())
    if not (summary["complete"] and summary["step"] == last):
        return f"ended at step {summary['step']} of {last}"
    if set(summary["metrics"]) != {"validation", "test"} or not summary["samples_per_second"]:
        return f"summary: {summary['metrics']}, {summary['samples_per_second']} samples/s"
    if trained(run_dir) != list(range(1, last + 1)):
        return f"trained steps {trained(run_dir)}"
    if kept and "finished" not in output and f"(step {kept}," not in output:
        return f"not resumed from step {kept}: {output[:400]}"
    before = tree(run_dir)
    again = run([f"resume={run_dir}"], run_dir.parents[2])
    if again.code != 0 or "finished" not in again.output:
        return f"finished, then code {again.code}: {again.output[-300:]}"
    changed = [name for name, was in tree(run_dir).items() if before.get(name) != was]
    return f"a finished run was changed: {changed}" if changed else ""


def _refused(code: int, output: str) -> str:
    if code not in (1, 2) or "Traceback" in output:
        return f"without a state: code {code}: {output[-300:]}"
    return ""


def _using(*arguments: str) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        for run_dir in runs(folder):
            line = [argument.format(run=run_dir, folder=folder) for argument in arguments]
            before, kept = tree(run_dir), steps_kept(run_dir)
            answer = run(line, folder)
            wrong = ""
            if kept is None:
                wrong = _refused(answer.code, answer.output)
            elif answer.code != 0:
                wrong = f"code {answer.code}: {answer.output[-300:]}"
            changed = [name for name, was in tree(run_dir).items() if before.get(name) != was]
            if wrong or changed:
                return wrong or f"it changed {changed}"
        return ""

    return check


CHECKS: dict[str, Callable[[Path], str]] = {
    "resume": _resume,
    "resume=auto": _auto,
    "eval": _using("eval", "{run}"),
    "predict": _using("predict", "{run}", "--output", "{folder}/predicted.jsonl"),
    "load": _using("load", "{run}"),
}
