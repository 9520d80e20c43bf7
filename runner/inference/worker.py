"""One of several processes of `runner eval` and `runner predict`. Free of torch at import."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from accel.machine.env import Environment
from runner.exit_codes import DONE
from runner.inference.predict import predictions_dropped, write_predictions
from runner.inference.session import Evaluation, Request, Worker, evaluate
from runner.runs.directory import REQUEST
from runner.runs.json_files import JsonObject, write_json

RESULT = "result.json"


def write_request(folder: Path, request: Request) -> None:
    """Write a request for the processes; it names no placement."""
    write_json(folder / REQUEST, asdict(replace(request, placement=None)))


def read_request(folder: Path) -> Request:
    """Return the request of a folder."""
    found = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    output = None if found["output"] is None else Path(found["output"])
    found |= {"run_dir": Path(found["run_dir"]), "output": output}
    found |= {name: tuple(found[name]) for name in ("overrides", "splits")}
    return Request(**found)


def run(folder: Path, worker: Worker) -> int:
    """Do what the folder's request asks for, as one of its processes; rank 0 writes the result.

    Args:
        folder: with the request.
        worker: this process.
    """
    request = read_request(folder)
    result = attempt(request, Environment.read().rank or 0, worker)
    if result is not None:
        write_json(folder / RESULT, result)
    return DONE


def attempt(request: Request, rank: int, worker: Worker | None = None) -> JsonObject | None:
    """Evaluate or predict as one of several processes; return the result on rank 0, else None."""
    if request.output is None:
        found = evaluate(request, worker)
        return plain(found) if rank == 0 else None
    if rank > 0:
        predictions_dropped(request, worker)
        return None
    return {"count": write_predictions(request, worker)}


def plain(found: Evaluation) -> JsonObject:
    """Return an evaluation as plain containers."""
    return {**asdict(found), "checkpoint": str(found.checkpoint)}


def read_result(folder: Path) -> JsonObject:
    """Return the result that rank 0 has written."""
    found: JsonObject = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    return found
