"""What must hold of a run, however it ended: each way to use it is one cell of the matrix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.runs.job import Job
from tests.resume_matrix.held import (
    NAME,
    STEPS_PER_EPOCH,
    Held,
    Known,
    chosen,
    digest,
    kept,
    lost,
    measured,
    newest,
    predicted,
    runs,
    strange,
)
from tests.resume_matrix.warm import Answer, run

# Two epochs of three steps, a checkpoint after each.
RECIPE = (
    *(f"name={NAME}", "model.width=2", "model.dropout=0", "data.augment=false"),
    *("tracker.log_with=[]", "trainer.log_every=1", "trainer.epochs=2"),
    *("trainer.limit_train_batches=3", "trainer.limit_eval_batches=1"),
)
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


def cells(
    state: str, folder: Path, before: Held, known: Known, uses: tuple[str, ...] = USES
) -> list[Cell]:
    """Use what a command has left in `folder`, each time in a copy.

    Args:
        state: how the run ended.
        folder: the working directory.
        before: what it held, recorded before that command, and must still hold.
        known: the weights that a run may have.
        uses: what to do with it.
    """
    found = []
    for use in uses:
        copy = folder.with_name(f"{folder.name}-{use.replace('=', '-')}")
        shutil.copytree(folder, copy)
        try:
            wrong = lost(copy, before, known) or CHECKS[use](copy, known)
        except Exception as error:  # a check that cannot be made has failed
            wrong = f"{type(error).__name__}: {error}"
        shutil.rmtree(copy)
        found.append(Cell(state, use, wrong))
    return found


def _resume(folder: Path, known: Known) -> str:
    """Each run with a state is trained to its end, once; any other is refused."""
    before = runs(folder)
    for run_dir in before:
        step = newest(run_dir)
        answer = run([f"resume={run_dir}"], folder)
        wrong = refused(answer) if step is None else _ended(answer, run_dir, step, known)
        if wrong:
            return wrong
    return "" if runs(folder) == before else f"runs were {before}, are {runs(folder)}"


def _auto(folder: Path, known: Known) -> str:
    """The run that has a state is trained to its end; without one a new run is."""
    before = {run_dir: newest(run_dir) for run_dir in runs(folder)}
    resumable = [run_dir for run_dir, step in before.items() if step is not None]
    others = {path: tree(path) for path in before if path not in resumable[-1:]}
    limit = _limit(resumable[-1]) if resumable else 2
    line = [*RECIPE[:-3], f"trainer.epochs={limit}", *RECIPE[-2:], "resume=auto"]
    answer = run(line, folder)
    changed = [path for path, was in others.items() if not path.exists() or tree(path) != was]
    if changed:
        return f"other runs were changed: {changed}"
    if resumable:
        if set(runs(folder)) != set(before):
            return f"other runs than before: {answer.output[-300:]}"
        return _ended(answer, resumable[-1], before[resumable[-1]] or 0, known)
    (new,) = set(runs(folder)) - set(before)
    return _ended(answer, new, 0, known)


def _limit(run_dir: Path) -> int:
    plain: Any = Job.read(run_dir)[1]
    return int(plain["trainer"]["epochs"])


def reached(run_dir: Path, last: int, known: Known) -> str:
    """Return why a run that a command has ended with code 0 is not complete; empty: it is."""
    path = run_dir / "summary.json"
    if not path.exists():
        return "it has no summary"
    summary = json.loads(path.read_text())
    if not (summary["complete"] is True and summary["step"] == last):
        return f"ended at step {summary['step']} of {last}, complete: {summary['complete']}"
    if set(summary["metrics"]) != {"validation", "test"} or not summary["samples_per_second"]:
        return f"summary: {summary['metrics']}, {summary['samples_per_second']} samples/s"
    if trained(run_dir) != list(range(1, last + 1)):
        return f"trained steps {trained(run_dir)}"
    if newest(run_dir) != last:
        return f"ended at step {last}, kept is {newest(run_dir)}"
    return strange(run_dir, known)


def _ended(answer: Answer, run_dir: Path, step: int, known: Known) -> str:
    """Return what is wrong with a run that a command has resumed from a step."""
    if answer.code != 0:
        return f"code {answer.code}: {answer.output[-300:]}"
    wrong = reached(run_dir, _limit(run_dir) * STEPS_PER_EPOCH, known)
    if wrong:
        return wrong
    if step and "finished" not in answer.output and f"(step {step}," not in answer.output:
        return f"not resumed from step {step}: {answer.output[:400]}"
    before = tree(run_dir)
    again = run([f"resume={run_dir}"], run_dir.parents[2])
    if again.code != 0 or "finished" not in again.output:
        return f"finished, then code {again.code}: {again.output[-300:]}"
    changed = _changed(before, tree(run_dir))
    return f"a finished run was changed: {changed}" if changed else ""


def _changed(
    before: dict[str, tuple[int, bytes]], after: dict[str, tuple[int, bytes]]
) -> list[str]:
    names = before.keys() | after.keys()
    return sorted(name for name in names if before.get(name) != after.get(name))


def refused(answer: Answer) -> str:
    """Return what is wrong with the refusal of a run that has no state."""
    if answer.code not in (1, 2) or "Traceback" in answer.output:
        return f"without a state: code {answer.code}: {answer.output[-300:]}"
    return ""


def _using(
    line: Callable[[Path, Path], list[str]],
    wrong_with: Callable[[Path, Path, Answer, Known], str],
    writes: tuple[str, ...] = (),
) -> Callable[[Path, Known], str]:
    """Return the check of a command that uses each run, and changes nothing but `writes` in it.

    Args:
        line: the command's arguments, given the working directory and the run.
        wrong_with: returns what is wrong with what it did with a run that has a state, given
            the working directory, the checkpoint that it should use, and its answer.
        writes: what it may write into a run that has a state.
    """

    def check(folder: Path, known: Known) -> str:
        for run_dir in runs(folder):
            before = tree(run_dir)
            answer = run(line(folder, run_dir), folder)
            wrong = ""
            if not kept(run_dir):
                wrong = refused(answer)
            elif answer.code != 0:
                wrong = f"code {answer.code}: {answer.output[-300:]}"
            else:
                wrong = wrong_with(folder, chosen(run_dir), answer, known)
            allowed = writes if kept(run_dir) else ()
            changed = [n for n in _changed(before, tree(run_dir)) if n not in allowed]
            if wrong or changed:
                return wrong or f"it changed {changed}"
        return ""

    return check


def _measured(folder: Path, path: Path, answer: Answer, known: Known) -> str:
    expected, found = known[digest(path / "model.safetensors")], measured(path.parents[1])
    if (found["step"], found["metrics"]) == (expected.step, expected.metrics):
        return ""
    return f"measured {found}, {path} has step {expected.step}: {expected.metrics}"


def _predicted(folder: Path, path: Path, answer: Answer, known: Known) -> str:
    expected = known[digest(path / "model.safetensors")].predictions
    same = predicted(folder / "predicted.jsonl") == expected
    return "" if same else f"the predictions are not those of {path}"


def _loaded(folder: Path, path: Path, answer: Answer, known: Known) -> str:
    return ""  # the command has compared the weights, and its code is 0


def _load_line(folder: Path, run_dir: Path) -> list[str]:
    return ["load", str(run_dir), *(str(chosen(run_dir)) for _ in list(kept(run_dir))[:1])]


CHECKS: dict[str, Callable[[Path, Known], str]] = {
    "resume": _resume,
    "resume=auto": _auto,
    "eval": _using(lambda folder, run_dir: ["eval", str(run_dir)], _measured, (".", "eval.json")),
    "predict": _using(
        lambda folder, run_dir: [
            *("predict", str(run_dir), "--output", str(folder / "predicted.jsonl"))
        ],
        _predicted,
    ),
    "load": _using(_load_line, _loaded),
}
