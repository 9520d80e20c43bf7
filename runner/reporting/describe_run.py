"""`runner show`: one run in full, from its files alone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import AccelError
from runner.recipe.units import size
from runner.reporting.run_table import STYLES, described, relative
from runner.runs import directory, provenance, sessions
from runner.runs import record as records
from runner.runs.json_files import PLACE, Fields, JsonObject, finite
from runner.runs.record import RunRecord
from runner.training.console import clock, number

CODE = ("git", "code")  # keys of environment.json
MOST_LINES = 12  # of a traceback


def describe(run: RunRecord) -> JsonObject:
    """Return everything that is known of a run as plain containers."""
    environment, states = run.environment, list(_checkpoints(run.path))
    for _ in run.records():  # damaged lines are noted
        pass
    return {
        **described(run),
        "command": shlex.join(map(str, environment.get("command") or ())),
        "overrides": list(run.job.get("overrides") or ()),
        "cwd": environment.get("cwd"),
        "earlier_recipes": [path.name for path in sessions.earlier_recipes(run.path)],
        "earlier_sessions": [path.name for path in sessions.earlier_environments(run.path)],
        "code": {key: environment[key] for key in CODE if key in environment},
        "packages": dict(environment.get("packages") or {}),
        "machine": {
            key: environment.get(key)
            for key in ("hostname", "platform", "python", "cpu", "cpu_count", "device")
        },
        "data": dict(environment.get("data") or {}),
        "metrics": dict(run.summary.get("metrics") or {}),
        "best": run.summary.get("best"),
        "last": dict(run.last),
        "evaluations": list(run.evaluations),
        "checkpoints": states,
        "failure": dict(run.failure) if run.status == records.FAILED else None,
        "resume": _resume(run) if any(state["complete"] for state in states) else "",
        "samples_per_second": run.summary.get("samples_per_second"),
    }


def _checkpoints(run_dir: Path) -> Iterator[JsonObject]:
    """Yield the checkpoints of a run; sizes and digests are verified when one is loaded."""
    try:
        found = directory.own_checkpoints(run_dir)
    except (OSError, AccelError):
        found = checkpoints.checkpoints(run_dir / checkpoints.FOLDER)
    for path in found:
        one = {"name": path.name, "path": str(path), "step": None, "bytes": 0, "problem": ""}
        try:
            manifest = checkpoints.read_manifest(path)
            one["step"] = manifest.metadata.get("step")
            one["bytes"] = sum(entry.size for entry in manifest.files.values())
        except AccelError as error:
            one["problem"] = str(error).partition(": ")[2] or str(error)
        yield {**one, "complete": not one["problem"]}


def _resume(run: RunRecord) -> str:
    where = shlex.quote(relative(run.path))
    command = "runner submit" if _is_on_slurm(run) else "runner"
    if run.status in (records.RUNNING, records.BROKEN):
        return ""
    if run.status in (records.FINISHED, records.PRUNED):
        limit = "trainer.epochs" if run.value("trainer.max_steps") is None else "trainer.max_steps"
        return f"{command} resume={where} {limit}=…"
    return f"{command} resume={where}"


def _is_on_slurm(run: RunRecord) -> bool:
    """Return whether a job of `runner submit` trains a run, or did last: no later resume here."""
    job = sessions.submitted_job(run.path)
    variables = run.environment.get("variables") or {}
    return job is not None and (run.is_submitted or variables.get("SLURM_JOB_ID") == job)


# -- for people ----------------------------------------------------------------------------


def as_json(found: Sequence[Fields]) -> str:
    """Return descriptions as JSON: one object, or a list of several."""
    content: object = found[0] if len(found) == 1 else list(found)
    return json.dumps(finite(content), indent=2, ensure_ascii=False, default=str)


def show(found: Fields, console: Console) -> None:
    """Print the description of one run."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _rows(found):
        table.add_row(Text(label), value if isinstance(value, Text) else Text(value))
    title = Text(relative(Path(found["directory"])), style="bold")
    if console.is_terminal:
        console.print(Panel(table, title=title, title_align="left", box=box.ROUNDED, expand=False))
    else:
        console.print(title)
        console.print(table)
        console.print()


def _rows(found: Fields) -> Iterator[tuple[str, str | Text]]:
    status = Text(found["status"], style=STYLES[found["status"]])
    reason = found["reason"]
    yield "status", status.append(f"  {reason}" if reason else "", style="default")
    for problem in found["problems"]:
        yield "damaged", Text(problem, style="red")
    if found["tags"]:
        yield "tags", ", ".join(found["tags"])
    yield "started", str(found["started"]).replace("T", " ")
    if found["command"]:
        yield "command", found["command"]
    yield from _recipe_rows(found)
    yield from _code_rows(found)
    yield from _metric_rows(found)
    for label, lines in (("checkpoints", _checkpoint_lines(found)), ("failure", _failure(found))):
        for number_, line in enumerate(lines):
            yield label if number_ == 0 else "", line
    if found["resume"]:
        yield "resume", found["resume"]
    if found["status"] not in (records.BROKEN,):
        yield "again", f"runner again {shlex.quote(relative(Path(found['directory'])))}"


def _recipe_rows(found: Fields) -> Iterator[tuple[str, str]]:
    if found["overrides"]:
        yield "overrides", shlex.join(found["overrides"])
    if found["earlier_recipes"]:
        names = ", ".join(found["earlier_recipes"])
        yield "resumed", f"with another recipe; those before: {names}"


def _code_rows(found: Fields) -> Iterator[tuple[str, str]]:
    code, machine = found["code"], found["machine"]
    yield "code", provenance.described_git(code["git"]) if "git" in code else "not known"
    if found["earlier_sessions"]:
        names = ", ".join(found["earlier_sessions"])
        yield "", f"earlier sessions had other code, versions or data: {names}"
    packages = found["packages"]
    if packages:
        main = ("accel-runner", "torch", "numpy")
        yield "versions", "  ".join(f"{n} {packages[n]}" for n in main if n in packages)
    if machine.get("hostname"):
        device = machine.get("device") or {}
        parts = [machine["hostname"], machine.get("cpu"), f"{machine.get('cpu_count')} CPUs"]
        if device.get("type") not in (None, "cpu"):
            parts.append(f"{device.get('count')} × {device['type']}")
        yield "machine", " · ".join(str(part) for part in parts if part)
    for key, files in found["data"].items():
        held = f"{files.get('files', '?')} files, {size(files.get('bytes') or 0)}"
        yield "data", f"{key}: {files.get('path', '?')} ({held})"


def _metric_rows(found: Fields) -> Iterator[tuple[str, str]]:
    best = found["best"]
    if best and best.get("metric") and best.get("value") is not None:
        where = "" if best.get("step") is None else f" at step {best['step']}"
        yield "best", f"{best['metric']} {number(best['value'])}{where}"
    elif found["objective"] is not None:
        yield "best", f"{found['metric']} {number(found['objective'])}"
    for split, metrics in found["metrics"].items():
        yield split, _listed(metrics)
    if not found["metrics"] and found["last"]:
        named = (*PLACE, "lr", "samples_per_second")
        values = {k: v for k, v in found["last"].items() if k not in named}
        yield f"last ({found['last'].get('split')})", _listed(values)
    for one in found["evaluations"]:
        for split, metrics in (one.get("metrics") or {}).items():
            where = f"{one.get('checkpoint')}, {str(one.get('time'))[:16]}"
            yield f"eval {split}", f"{_listed(metrics)}  ({where})"
        for note in one.get("notes") or ():
            yield "", note
    if found["step"] is not None:
        took = "" if found["seconds"] is None else f" in {clock(found['seconds'])}"
        yield "step", f"{found['step']}{took}"
    rate = found["samples_per_second"]
    if isinstance(rate, int | float):
        yield "speed", f"{rate:,.0f} samples/s"


def _listed(metrics: Fields) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in metrics.items())


def _checkpoint_lines(found: Fields) -> list[str]:
    best = (found["best"] or {}).get("checkpoint")
    lines = []
    for one in found["checkpoints"]:
        parts = [one["name"], f"step {one['step']}" if one["step"] is not None else "", ""]
        parts[2] = size(one["bytes"]) if one["complete"] else f"incomplete: {one['problem']}"
        parts += ["the best"] if one["name"] == best else []
        lines.append("  ".join(part for part in parts if part))
    return lines


def _failure(found: Fields) -> list[str]:
    failure = found["failure"] or {}
    text = str(failure.get("traceback") or "").rstrip().splitlines()
    if not text:
        return []
    lines = text[-MOST_LINES:]
    return [*(["…"] if len(text) > len(lines) else []), *lines]
