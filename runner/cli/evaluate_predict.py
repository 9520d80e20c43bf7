"""Command lines of ``runner eval`` and ``runner predict``. Free of torch until a run is loaded."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from accel.machine.env import Environment
from accel.machine.errors import AccelError, ConfigError
from runner.cli.arguments import CommandParser, Exit
from runner.exit_codes import DONE, FAILED, OF_SIGNAL
from runner.inference import predict as together
from runner.inference.load import WORDS, Placement, parse_limits
from runner.inference.session import Request
from runner.recipe import processes
from runner.recipe.schema import SPLITS, Recipe
from runner.runs.json_files import Fields, JsonObject, read_json
from runner.training.stopping import Progress, StopFlag

WORKER = "runner.cli.evaluate_predict:work"
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def evaluate_runs(arguments: Sequence[str]) -> int:
    """Measure runs on their data sets, print the metrics, and write them to eval.json of each.

    Returns:
        0; 1 if a run failed and another was measured; else the highest code of a run.

    Raises:
        ConfigError: if a folder holds no run, or an option is refused.
    """
    from runner.launch import failures
    from runner.runs import record

    request, folders = _parse("eval", arguments)
    code, runs = DONE, record.require_runs(folders)
    measured: list[tuple[Path, JsonObject | None]] = []
    for run in runs:
        one = replace(request, run_dir=run.path)
        try:
            found = _done(one)
        except AccelError as error:  # it does not keep the other runs from being measured
            code = max(code, failures.report(error))
        except Exit as end:
            if end.code >= OF_SIGNAL:  # also Ctrl-C
                raise
            code = max(code, end.code)
        else:
            measured.append((run.path, found))
            if found is not None:
                _record(one, found)
    _show([(path, found) for path, found in measured if found is not None])  # else another rank
    return FAILED if code and measured else code


def _show(rows: Sequence[tuple[Path, JsonObject]]) -> None:
    """Print the metrics of runs, a run a row."""
    from runner.reporting import run_table
    from runner.reporting.filters import leaves
    from runner.training.console import number

    metrics = [
        {" ".join(key): number(value) for key, value in leaves(found["metrics"])}
        for _, found in rows
    ]
    names = list(dict.fromkeys(name for one in metrics for name in one))
    table = run_table.table("run", "step", *names)
    for (path, found), values in zip(rows, metrics, strict=True):
        shown = (values.get(name, "") for name in names)
        table.add_row(run_table.relative(path), run_table.cell(found["step"]), *shown)
    if rows:
        run_table.console_for_tables().print(table)


def _done(request: Request) -> JsonObject | None:
    """Evaluate or predict on as many processes as requested; return the result on rank 0."""
    place = processes.adopted()
    if request.num_processes > 1 and place is None:
        return _by_processes(request)
    return together.attempt(request, 0 if place is None else place.rank)


def _record(request: Request, found: Fields) -> None:
    """Add an evaluation to the run's eval.json."""
    from runner.runs import environment, json_files

    checkpoint = os.path.relpath(found["checkpoint"], os.path.realpath(request.run_dir))
    evaluation = {
        **{name: found[name] for name in ("step", "metrics", "num_processes", "notes")},
        "checkpoint": found["checkpoint"] if checkpoint.startswith("..") else checkpoint,
        "overrides": list(request.overrides),
        "seconds": round(found["seconds"], 3),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "versions": environment.versions(),
    }
    try:
        json_files.add_evaluation(request.run_dir, evaluation)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        # Somebody else's run.
        place = request.run_dir / json_files.EVALUATIONS
        print(f"{place} is not written ({error.strerror}).", file=sys.stderr)


def predict(arguments: Sequence[str]) -> int:
    """Write a run's predictions for a data set, one JSON object per sample and line.

    Raises:
        ConfigError: if the run, an override or the output is refused.
        CheckpointError: if the checkpoint is missing or incomplete.
    """
    request, folders = _parse("predict", arguments)
    if len(folders) > 1:
        rule = "the predictions of one run are written"
        raise ConfigError.of(" ".join(folders), rule, "Name one run.")
    request = replace(request, run_dir=Path(folders[0]))
    found = _done(request)
    if found is not None:
        print(f"{found['count']} predictions written to {request.output}")
    return DONE


def _by_processes(request: Request) -> JsonObject:
    """Let fresh processes do what a request asks for, and return what rank 0 has found.

    Raises:
        Exit: if one of them fails, which has been reported.
        ConfigError: if the request is refused.
    """
    from runner.launch import launcher
    from runner.training import run_log

    run_log.announce(request.run_dir.name)
    with tempfile.TemporaryDirectory(prefix="runner-inference-") as place:
        folder = Path(place)
        output = None if request.output is None else Path(os.path.abspath(request.output))
        run_dir = Path(os.path.abspath(request.run_dir))
        together.write_request(folder, replace(request, run_dir=run_dir, output=output))
        ended = launcher.run_group(folder, request.num_processes, Path.cwd(), WORKER)
        if ended.code != DONE:
            raise Exit(ended.code)
        return read_json(folder / together.RESULT)


def work(folder: Path, stop: StopFlag) -> int:
    """Be one of the processes, and do what the folder's request asks for."""

    @contextlib.contextmanager
    def watch(recipe: Recipe) -> Iterator[Progress]:
        from runner.launch import hangs  # once the number of threads is set

        here = Environment.read()
        with hangs.watching(recipe, folder, stop, here.rank or 0, here.world_size):
            yield stop.progress

    return together.run(folder, watch)


def _run_dirs(words: Sequence[str]) -> list[str]:
    """Return the words that name runs: folders, and paths whose first "=" follows a "/"."""
    return [
        word
        for word in words
        if "=" not in word or os.path.isdir(word) or os.sep in word.partition("=")[0]
    ]


def _placement(found: argparse.Namespace) -> Placement | None:
    limits = parse_limits(found.max_memory)
    if found.device_map is None and limits:
        rule = "it limits what --device-map gives to a device"
        raise ConfigError.of("--max-memory without --device-map", rule, "Add --device-map auto.")
    return None if found.device_map is None else Placement(found.device_map, limits)


def _num_processes(found: argparse.Namespace) -> int:
    """Return how many processes compute: as --processes says, or as a launcher has started."""
    place, asked = processes.adopted(), found.processes
    if asked is not None and asked < 1:
        raise ConfigError.of(f"--processes {asked}", "it is at least 1", "Give --processes 2.")
    if place is not None and asked not in (None, place.world_size):
        rule = f"the launcher has started {place.world_size} processes"
        raise ConfigError.of(f"--processes {asked}", rule, "Leave --processes out.")
    number = place.world_size if place is not None else asked or 1
    if number > 1 and found.device_map is not None:
        rule = "a model that is spread over devices is used by one process"
        raise ConfigError.of(f"{number} processes with --device-map", rule, "Leave one out.")
    return number


def _parse(command: str, arguments: Sequence[str]) -> tuple[Request, list[str]]:
    """Return what a command line asks for, and the folders of runs that it names."""
    measures = command == "eval"
    parser = CommandParser(command, "Measure runs." if measures else "Write a run's predictions.")
    add = parser.add_argument
    what = "run directories, a sweep's, or folders of them; and changes to their recipes"
    add("words", metavar="RUN_DIR|KEY=VALUE", nargs="*", help=what)
    if measures:
        what = "data set to measure, may be repeated (default: validation and test)"
        add("--split", action="append", choices=SPLITS, default=[], help=what)
    else:
        what = "data set (default: test, or validation where there is none)"
        add("--split", nargs=1, choices=SPLITS, default=[], help=what)
        what = "the .jsonl file to write"
        add("--output", type=Path, required=True, metavar="FILE", help=what)
    what = "compute on N processes: one per GPU, or on the CPU (default: 1)"
    add("--processes", type=int, metavar="N", help=what)
    what = "best, last, or a checkpoint's name or path (default: best, else last)"
    add("--checkpoint", help=what)
    what = "spread a model that is larger than a device over accelerators, memory and disk"
    add("--device-map", choices=WORDS, help=what)
    what = "of --device-map, as 0=20GB or cpu=4GB; may be repeated (default: what is free)"
    add("--max-memory", action="append", default=[], metavar="DEVICE=SIZE", help=what)
    found = parser.parse_intermixed_args(list(arguments))
    folders = _run_dirs(found.words)
    if not folders:
        parser.error("the following arguments are required: RUN_DIR")
    request = Request(
        run_dir=Path(),
        overrides=tuple(word for word in found.words if word not in folders),
        splits=tuple(found.split),
        checkpoint=found.checkpoint,
        output=None if measures else found.output,
        placement=_placement(found),
        num_processes=_num_processes(found),
    )
    return request, folders
