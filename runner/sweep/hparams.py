"""TensorBoard's HParams: the swept values of each job with its metrics, one session group a job.

Written as a command ends to ``<sweep directory>/tensorboard/<job>/``, also for jobs of a command
that was killed before it came to that, with the API of TensorBoard's plugin: the values
and the status of a session, and its metrics as scalars.
Source: https://www.tensorflow.org/tensorboard/hyperparameter_tuning_with_hparams
"""

from __future__ import annotations

import io
import os
import platform
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import directory as checkpoints
from runner.run_dir.sweep_records import FINISHED
from runner.sweep.journal import FAILED
from runner.sweep.table import Results, Row

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER, PARTIAL = "tensorboard", ".tensorboard-"
VERSION = "brain.Event:2"  # of TensorBoard's files of events


def write(folder: Path, found: Results, jobs: Sequence[int]) -> None:
    """Write the sessions of `jobs` that have ended, in place of earlier ones, and the experiment.

    `folder` is the sweep directory. Sessions of other jobs that have ended are written where they
    are missing.

    Raises:
        OSError: if they cannot be written.
    """
    root, named = folder / FOLDER, set(jobs)
    there = {path.name for path in os.scandir(root)} if root.is_dir() else set()
    ended = (row for row in found.rows if row.state.ended)
    rows = [row for row in ended if row.job in named or row.run_dir not in there]
    if not rows:
        return
    root.mkdir(exist_ok=True)
    before = list(root.glob("events.*"))
    _write_events(root, [(_experiment(found), 0)])
    for old in before:
        old.unlink(missing_ok=True)
    for row in rows:
        # In one piece: a session that was cut off would count as written.
        hidden = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
        try:
            _write_events(hidden, _session(row, found))
            _put(hidden, root / row.run_dir)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise


def _session(row: Row, found: Results) -> list[tuple[Summary, int]]:
    scalars = [(_scalar(tag, value), step) for tag, (step, value) in _metrics(row).items()]
    return [(_session_start(row, found), 0), *scalars, (_session_end(row), _step(row, "step"))]


def _put(hidden: Path, place: Path) -> None:
    hidden.chmod(place.parent.stat().st_mode & 0o777)
    shutil.rmtree(place, ignore_errors=True)
    try:
        hidden.rename(place)
    except OSError:  # another command has just written the same
        shutil.rmtree(hidden, ignore_errors=True)


def _write_events(folder: Path, summaries: Sequence[tuple[Summary, int]]) -> None:
    """Write a file of events with (summary, step) in one piece.

    TensorBoard's own writer has a thread, whose errors cannot be caught.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    now, content = time.time(), io.BytesIO()
    events = [Event(wall_time=now, step=step, summary=summary) for summary, step in summaries]
    writer = RecordWriter(content)
    for event in (Event(wall_time=now, file_version=VERSION), *events):
        writer.write(event.SerializeToString())
    place = f"{platform.node()}.{os.getpid()}.{secrets.token_hex(4)}"
    name = f"events.out.tfevents.{int(now):010}.{place}"
    checkpoints.write_atomically(folder / name, content.getvalue())


def _metrics(row: Row) -> dict[str, tuple[int, float]]:
    """Return the metrics of a job, each with the step that it was measured at.

    They are the objective, the validation metrics of the best step and those of other splits.
    """
    values: dict[str, tuple[int, float]] = {}
    objective, step = row.state.objective, _step(row, "objective_step", "best_step", "step")
    for index, value in enumerate(objective if isinstance(objective, list) else [objective]):
        if value is not None:
            values["objective" if not index else f"objective_{index}"] = step, value
    for split, (at, named) in _measured(row).items():
        values |= {f"{split}/{name}": (at, float(value)) for name, value in named.items()}
    return values


def _measured(row: Row) -> dict[str, tuple[int, Mapping[str, Any]]]:
    measured: Any = row.state.ended.get("measured")
    if isinstance(measured, dict) and measured:
        return {split: (int(one["step"]), one["metrics"]) for split, one in measured.items()}
    # A journal of an earlier version has the last values alone.
    metrics: Any = row.state.ended.get("metrics")
    last = _step(row, "step", "best_step")
    return {split: (last, named) for split, named in (metrics or {}).items()}


def _step(row: Row, *names: str) -> int:
    """Return the first of these steps that the journal has of a job; 0: it has none."""
    return next((int(str(step)) for name in names if (step := row.field(name)) != ""), 0)


def _typed(value: str) -> float | str | bool:
    """Return an override's value as HParams has it: a number, true or false, or text."""
    if value in ("true", "false"):
        return value == "true"
    try:
        return float(value)
    except ValueError:
        return value


def _experiment(found: Results) -> Summary:
    from tensorboard.plugins.hparams import summary_v2 as api

    hparams = [api.HParam(key) for key in found.swept]
    tags = dict.fromkeys(tag for row in found.rows for tag in _metrics(row))
    return api.hparams_config_pb(hparams=hparams, metrics=[api.Metric(tag) for tag in tags])


def _session_start(row: Row, found: Results) -> Summary:
    from tensorboard.plugins.hparams import summary_v2 as api

    values = {key: _typed(row.values[key]) for key in found.swept if key in row.values}
    return api.hparams_pb(values or {"job": float(row.job)}, trial_id=f"{row.job:04}")


def _session_end(row: Row) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    known = {FINISHED: api_pb2.STATUS_SUCCESS, FAILED: api_pb2.STATUS_FAILURE}
    status = known.get(row.state.status, api_pb2.STATUS_UNKNOWN)
    ended = float(str(row.field("time") or 0.0))
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=ended)
    data = plugin_data_pb2.HParamsPluginData(session_end_info=info)
    described = metadata.create_summary_metadata(data)
    return Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=described)])


def _scalar(tag: str, value: float) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value)])
