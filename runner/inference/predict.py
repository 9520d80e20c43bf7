"""Predictions of a trained run, and the processes that evaluate or predict together.

A line of the predictions is a sample, in the order of the data set. Free of torch at import.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from accel.checkpoint import directory as checkpoints
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from runner.exit_codes import DONE
from runner.inference.session import Request, Session, Watch, alone, evaluate, opened
from runner.runs import json_files
from runner.runs.directory import REQUEST
from runner.runs.json_files import JsonObject

if TYPE_CHECKING:
    from runner.data.batches import EvalBatches
    from runner.training.step import Step


RESULT = "result.json"


def write_request(folder: Path, request: Request) -> None:
    """Write a request for several processes; it names no placement."""
    json_files.write_json(folder / REQUEST, asdict(replace(request, placement=None)))


def read_request(folder: Path) -> Request:
    """Return the request of a folder."""
    found = json_files.read_json(folder / REQUEST)
    output = None if found["output"] is None else Path(found["output"])
    found |= {"run_dir": Path(found["run_dir"]), "output": output}
    found |= {name: tuple(found[name]) for name in ("overrides", "splits")}
    return Request(**found)


def run(folder: Path, watch: Watch) -> int:
    """Do what the folder's request asks for, as one of its processes; rank 0 writes the result."""
    result = attempt(read_request(folder), Environment.read().rank or 0, watch)
    if result is not None:
        json_files.write_json(folder / RESULT, result)
    return DONE


def attempt(request: Request, rank: int, watch: Watch = alone) -> JsonObject | None:
    """Evaluate or predict as one of several processes; return the result on rank 0, else None."""
    if request.output is None:
        found = evaluate(request, watch)
        return found if rank == 0 else None
    if rank == 0:
        return {"count": write_predictions(request, watch)}
    with opened(request, watch) as session:
        for _ in _predictions(session):  # rank 0 writes them
            pass
    return None


def write_predictions(request: Request, watch: Watch = alone) -> int:
    """Write predictions as .jsonl, in the order of the data set, and return how many.

    A line is ``{"index": i, …}`` with the entries of the step's prediction for that sample, or
    ``"prediction"`` where it is a single value. The file appears once it is complete.
    """
    from accel.checkpoint import disk_full

    output, count = _require_output(request.output), 0
    with (
        disk_full.told("the predictions", output.parent),
        checkpoints.replacing(output) as partial,
        _opened(partial, output) as file,
        opened(request, watch) as session,
    ):
        for count, record in enumerate(_predictions(session), start=1):
            line = json_files.finite({"index": count - 1, **record})
            file.write(json.dumps(line, allow_nan=False) + "\n")
    return count


def _require_output(output: Path | None) -> Path:
    if output is None or not output.parent.is_dir() or (output.exists() and not output.is_file()):
        rule = "predictions are written to a file in a folder that exists"
        raise ConfigError.of(f"--output {output}", rule, "Give --output predictions.jsonl.")
    return Path(os.path.realpath(output))  # a link stays one


def _opened(partial: Path, output: Path) -> TextIO:
    """Open the file that predictions are written to, before anything is computed."""
    try:
        return partial.open("w", encoding="utf-8")
    except OSError as error:
        rule = f"it cannot be written ({error.strerror})"
        remedy = "Give --output a file in a folder that you may write to."
        raise ConfigError.of(f"--output {output}", rule, remedy) from error


def _predictions(session: Session) -> Iterator[dict[str, object]]:
    """Yield the prediction of each sample; `set` names its data set where a split has several."""
    import torch

    from runner.training.evaluation import evaluation_mode

    sets = next(reversed(session.batches.values()), None)
    if sets is None:
        value, rule = "predict without --split", "the recipe's data has neither test nor validation"
        raise ConfigError.of(value, rule, "Give --split train.")
    phase = session.progress.in_phase("predictions", timed=True)
    with evaluation_mode(session.step), torch.no_grad(), phase:
        for name, batches in sets.items():
            for row in _of_one_set(session, batches):
                yield {"set": name, **row} if name else row


def _of_one_set(session: Session, batches: EvalBatches) -> Iterator[dict[str, object]]:
    step, count = session.step, 0
    owner = _predicting(step)
    several = session.accelerator.num_processes > 1
    for batch in batches:
        rows = rows_of(owner, step.predict(batch), batches.size_of(batch))
        if several:
            rows = session.accelerator.gather_for_metrics(rows, use_gather_object=True)
        count += len(rows)
        session.progress.batch()
        yield from rows
    if batches.num_samples not in (None, count):
        value = f"{type(owner).__name__}.predict returned {count} rows"
        rule = f"the data set has {batches.num_samples} samples"
        raise ConfigError.of(value, rule, "Give one row per sample of the data set.")


def _predicting(step: Step) -> object:
    """Return whose `predict` a person has written: the step's objective, or the step itself."""
    from runner.training.step import SupervisedStep

    handed_on = type(step).predict is SupervisedStep.predict
    return getattr(step, "objective", step) if handed_on else step


# -- rows ----------------------------------------------------------------------------------


def rows_of(owner: object, value: object, num_samples: int | None) -> list[dict[str, object]]:
    """Return the result of `predict` as one mapping of plain values per sample.

    Each tensor [B, ...] of nested mappings and tuples is a column with a dotted name; so is a list
    of B other values, such as texts, or tensors of different lengths. `owner` is the step or
    objective that was called; `num_samples` is B, None: not known.

    Raises:
        ConfigError: if a column has not one row per sample, or holds a type that JSON lacks.
    """
    from runner.training.step import refused, shown

    rule = "a prediction has one row for each sample of the batch"
    rule += f", which has {num_samples}" if num_samples is not None else ""
    remedy = "Return a tensor [B, ...], or several by name, of the B samples that are given."
    columns: dict[str, list[object]] = {}
    for name, column in _columns(value, "prediction"):
        found = f"shape {list(column.shape)}" if hasattr(column, "shape") else shown(column)
        found += f" for {name!r}" if isinstance(value, Mapping) else ""
        try:
            rows = _plain(column)
        except TypeError as error:
            rule, remedy = f"JSON has no type for {error}", "Return tensors, numbers or texts."
            raise refused(owner, "predict", found, rule, remedy) from None
        if num_samples is None:
            num_samples = len(rows) if isinstance(rows, list) else 0
        if not isinstance(rows, list) or len(rows) != num_samples or not rows:
            raise refused(owner, "predict", found, rule, remedy)
        columns[name] = rows
    if not columns:
        raise refused(owner, "predict", f"{shown(value)} without values", rule, remedy)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _columns(node: object, name: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each column of nested mappings and tuples."""
    if isinstance(node, (Mapping, tuple)):
        inner = node if isinstance(node, Mapping) else dict(enumerate(node))
        for key, column in inner.items():
            yield from _columns(column, f"{prefix}{key}", f"{prefix}{key}.")
    else:
        yield name, node


def _plain(value: Any) -> object:
    """Return a value in types of JSON; raises TypeError, naming a type that JSON lacks."""
    if value is None or isinstance(value, (bool, int, float, str, os.PathLike)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, or an array of another library
        return _plain(value.tolist())
    raise TypeError(type(value).__name__)
