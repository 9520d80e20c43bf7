"""`runner show`: one run in full, from its files alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import AccelError
from runner.recipe.units import size
from runner.reporting.run_table import STYLES, cell, described, relative
from runner.runs import directory, environment, provenance, sessions
from runner.runs import record as records
from runner.runs.json_files import PLACE, Fields, JsonObject
from runner.runs.record import RunRecord
from runner.training.console import clock, number, shown_rates, shown_shares

CODE = ("git", "code")  # keys of environment.json


def describe(run: RunRecord) -> JsonObject:
    """Return everything that is known of a run as plain containers."""
    recorded, states = run.environment, list(_checkpoints(run.path))
    for _ in run.records():  # damaged lines are noted
        pass
    return {
        **described(run),
        "command": shlex.join(map(str, recorded.get("command") or ())),
        "overrides": list(run.job.get("overrides") or ()),
        "cwd": recorded.get("cwd"),
        "earlier_recipes": [path.name for path in environment.earlier_recipes(run.path)],
        "earlier_sessions": [path.name for path in environment.earlier_environments(run.path)],
        "code": {key: recorded[key] for key in CODE if key in recorded},
        "packages": dict(recorded.get("packages") or {}),
        "machine": {
            key: recorded.get(key)
            for key in ("hostname", "platform", "python", "cpu", "cpu_count", "device")
        },
        "data": dict(recorded.get("data") or {}),
        "metrics": dict(run.summary.get("metrics") or {}),
        "best": run.summary.get("best"),
        "speed": dict(run.summary.get("speed") or {}),
        "last": dict(run.last),
        "evaluations": list(run.evaluations),
        "checkpoints": states,
        "failure": dict(run.failure) or None,
        "resume": _resume(run) if any(state["complete"] for state in states) else "",
    }


def _checkpoints(run_dir: Path) -> Iterator[JsonObject]:
    """Yield the checkpoints of a run; sizes and digests are verified when one is loaded."""
    for path in directory.own_checkpoints(run_dir):
        one = {"name": path.name, "path": str(path), "step": None, "bytes": 0, "problem": ""}
        try:
            manifest = checkpoints.read_manifest(path)
            one["step"] = manifest.metadata.get("step")
            one["bytes"] = sum(entry.size for entry in manifest.files.values())
        except AccelError as error:
            one["problem"] = str(error).partition(": ")[2] or str(error)
        yield {**one, "complete": not one["problem"]}


def _resume(run: RunRecord) -> str:
    if run.status in (records.RUNNING, records.BROKEN):
        return ""
    command = "" if sessions.submitted_job(run.path) is None else "submit"
    line = directory.resume_command(relative(run.path), run.job.get("imports") or (), command)
    if run.status in (records.FINISHED, records.PRUNED):
        limit = "trainer.epochs" if run.value("trainer.max_steps") is None else "trainer.max_steps"
        return f"{line} {limit}=…"
    return line


# -- for people ----------------------------------------------------------------------------


def show(found: Fields, console: Console) -> None:
    """Print the description of one run."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in (*_origin(found), *_course(found)):
        if value:
            table.add_row(label, value)
    console.print(relative(Path(found["directory"])), style="bold")
    console.print(table, end="\n\n")


def _origin(found: Fields) -> Iterator[tuple[str, str | Text]]:
    """Yield labels and texts of what a run was given, and its status first."""
    status, code = Text(found["status"], style=STYLES[found["status"]]), found["code"]
    yield "status", status.append(f"  {found['reason']}" if found["reason"] else "", style="none")
    yield "damaged", "\n".join(found["problems"])
    yield "tags", ", ".join(found["tags"])
    yield "started", found["started"].replace("T", " ")
    yield "command", found["command"]
    yield "overrides", shlex.join(found["overrides"])
    for label, key in (("other recipes", "earlier_recipes"), ("other code", "earlier_sessions")):
        yield label, "in earlier sessions: " + ", ".join(found[key]) if found[key] else ""
    yield "code", provenance.described_git(code["git"]) if "git" in code else "not known"
    yield "versions", "  ".join(f"{name} {version}" for name, version in found["packages"].items())
    yield "machine", " · ".join(cell(one) for one in found["machine"].values() if one is not None)
    for key, files in found["data"].items():
        yield "data", f"{key}: {files.get('path')} ({environment.described_data(files)})"


def _course(found: Fields) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of what a run has reached, and of how to go on."""
    step = (found["best"] or {}).get("step")
    if found["objective"] is not None:
        where = "" if step is None else f" at step {step}"
        yield "best", f"{found['metric']} {number(found['objective'])}{where}"
    for split, metrics in found["metrics"].items():
        yield split, _listed(metrics)
    if not found["metrics"] and found["last"]:
        values = {k: v for k, v in found["last"].items() if k not in PLACE and "time/" not in k}
        yield f"last ({found['last'].get('split')})", _listed(values)
    for one in found["evaluations"]:
        where = f"({one.get('checkpoint')}, {str(one.get('time'))[:16]})"
        for split, metrics in (one.get("metrics") or {}).items():
            yield f"eval {split}", f"{_listed(metrics)}  {where}"
        yield "", "\n".join(one.get("notes") or ())
    if found["step"] is not None:
        took = "" if found["seconds"] is None else f" in {clock(found['seconds'])}"
        yield "step", f"{found['step']}{took}"
    if speed := found["speed"]:
        yield "speed", f"{shown_rates(speed)}: {shown_shares(speed['seconds'])}"
    yield "checkpoints", "\n".join(map(_checkpoint, found["checkpoints"]))
    yield "failure", str((found["failure"] or {}).get("traceback") or "").rstrip()
    yield "resume", found["resume"]
    if found["status"] != records.BROKEN:
        yield "again", f"runner again {shlex.quote(relative(Path(found['directory'])))}"


def _listed(metrics: Fields) -> str:
    return "  ".join(f"{name} {number(value)}" for name, value in metrics.items())


def _checkpoint(found: Fields) -> str:
    if not found["complete"]:
        return f"{found['name']}  incomplete: {found['problem']}"
    return f"{found['name']}  step {found['step']}  {size(found['bytes'])}"
