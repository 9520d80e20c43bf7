"""JSON that a run leaves: metrics, summary, evaluations and small state files. Free of torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from accel.checkpoint import directory as checkpoints
from accel.machine.errors import ConfigError
from runner.recipe import paths

logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]  # with values of types that JSON has
Fields = Mapping[str, Any]  # the same, to be read

METRICS = "metrics.jsonl"
MEDIA = "media"  # folder of text, pictures and tables, by step
HISTOGRAM = ("from", "to", "count")  # columns of a histogram there
SUMMARY = "summary.json"
SWEEP = "sweep.json"  # describes a folder of runs
EVALUATIONS = "eval.json"  # what `runner eval` has measured
# What tells one evaluation from another: a later one of the same replaces the earlier.
IDENTITY = ("checkpoint", "step", "overrides", "notes")
# In the test's line of metrics.jsonl and in summary.json: the step whose weights were tested.
WEIGHTS_STEP = "weights_step"
WEIGHTS_ONLY = "weights_only"  # of a checkpoint's metadata: it was reduced to its weights
TIME_IS_UP = "max_time"  # in summary.json, and of a stop: it was trainer.max_time
# Keys of a line of metrics.jsonl that are no values: where and when they were measured.
PLACE = ("step", "epoch", "samples", "tokens", "split", WEIGHTS_STEP, "time")
# Values of such a line that the run itself measures, beside learning rates.
RATES = ("samples_per_second", "tokens_per_second", "flops_per_second", "mfu")
OF_RUN = ("lr", *RATES, "skipped_steps", "slowest_rank", "slowest_rank_ratio")
TIME_SHARE = "time/"  # before the name of a phase, in such a line: its share of the time
INFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@contextlib.contextmanager
def writable(value: str, remedy: str) -> Iterator[None]:
    """Raise a ConfigError about `value` where a run cannot be written in the context."""
    try:
        yield
    except OSError as error:
        rule = f"a run is written there, and that failed ({paths.failure(error)})"
        raise ConfigError.of(value, rule, remedy) from error


def digest(content: object) -> str:
    """Return the SHA-256 of plain containers, equal for equal content."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def number(value: object) -> float | None:
    """Return a value as a float; None: it is no number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def loads(content: bytes) -> JsonObject:
    """Return a mapping from JSON; numbers that JSON does not know are read back from words.

    Raises:
        ValueError: if it is damaged, or no mapping.
    """
    found = _restored(json.loads(content))
    if not isinstance(found, dict):
        raise ValueError("it is no mapping")
    return found


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return INFINITE.get(value, value)
    if isinstance(value, dict):
        return {name: _restored(one) for name, one in value.items()}
    return [_restored(one) for one in value] if isinstance(value, list) else value


def read_json(path: Path) -> JsonObject:
    """Return the mapping that a file holds; empty: it is missing or damaged."""
    try:
        return loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def read_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the mappings of a file with one a line; lines that were cut off are passed over."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield loads(line)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON in one piece; numbers that JSON does not know become strings."""
    text = json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False)
    checkpoints.write_atomically(path, f"{text}\n".encode("utf-8", errors="replace"))


class MetricsFile:
    """Appends to a run's `metrics.jsonl`, one JSON object a line, flushed at once.

    Numbers that JSON does not know are strings: "NaN", "Infinity", "-Infinity". The run resumes
    from the optimizer step `step` (None: from the beginning). Lines of later steps are removed,
    since these steps are made again, and so is a last line that was cut off. The splits `repeated`
    are measured again at `step`: their lines of it are removed, too.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        step: int | None = None,
        repeated: Collection[str] = (),
    ) -> None:
        self.path = Path(run_dir) / METRICS
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if step is not None and _belongs(line, step, repeated)]
            checkpoints.write_atomically(self.path, "".join(f"{line}\n" for line in kept).encode())
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, object]) -> None:
        """Append one line."""
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; calling it twice is fine."""
        self._file.close()


def _belongs(line: str, step: int, repeated: Collection[str]) -> bool:
    try:
        record = json.loads(line)
        return int(record["step"]) <= step - (record.get("split") in repeated)
    except (ValueError, KeyError, TypeError):
        logger.warning("Removing a truncated line of %s: %s", METRICS, line[:80])
        return False


def finite(value: object) -> object:
    """Return `value` in types that JSON knows."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value


# -- evaluations ---------------------------------------------------------------------------


def read_evaluations(run_dir: Path) -> list[JsonObject]:
    """Return the evaluations of a run, oldest first; a damaged file holds none."""
    return list(read_json(run_dir / EVALUATIONS).get("evaluations") or ())


def add_evaluation(run_dir: Path, evaluation: Fields) -> None:
    """Add an evaluation to a run's, in one piece.

    Splits that it has measured replace those of the same checkpoint under the same overrides, with
    the same notes.

    Raises:
        OSError: if the run directory cannot be written.
    """
    with _one_at_a_time(run_dir):
        others: list[JsonObject] = []
        same: JsonObject = {}
        for one in read_evaluations(run_dir):
            if _identity(one) == _identity(evaluation):
                same |= one.get("metrics") or {}
            else:
                others.append(one)
        merged = {**evaluation, "metrics": {**same, **evaluation["metrics"]}}
        write_json(run_dir / EVALUATIONS, {"evaluations": [*others, merged]})


def _identity(evaluation: Fields) -> list[object]:
    return [evaluation.get(key) for key in IDENTITY]


@contextlib.contextmanager
def _one_at_a_time(run_dir: Path) -> Iterator[None]:
    """Let no other process change the file in the context, where the file system has locks."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a network file system without locks of folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
