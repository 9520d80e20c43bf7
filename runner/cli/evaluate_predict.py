"""Command lines of ``runner eval`` and ``runner predict``. Free of torch until a run is loaded."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accel.machine.env import Environment
from accel.machine.errors import AccelError, ConfigError
from runner.cli.arguments import CommandParser, Exit
from runner.exit_codes import DONE, FAILED, OF_SIGNAL
from runner.inference import worker
from runner.inference.load import WORDS, Placement, parse_limits
from runner.inference.session import Request, Worker
from runner.recipe import processes
from runner.recipe.schema import SPLITS, Recipe
from runner.runs.json_files import Fields, JsonObject
from runner.training.stopping import StopFlag

WORKER = "runner.cli.evaluate_predict:work"
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


class _Failed(Exit):
    """Processes of an evaluation have failed, which has been printed."""

    def __init__(self, code: int, cause: str) -> None:
        super().__init__(code)
        self.cause = cause


def evaluate_runs(arguments: Sequence[str]) -> int:
    """Measure runs on their data sets, print a table, and write it to eval.json of each.

    Returns:
        0; 1 if a run of several failed and another was measured; the highest code if all failed.

    Raises:
        ConfigError: if the only run or an override is refused.
        CheckpointError: if its checkpoint is missing or incomplete.
    """
    from runner.reporting import run_table
    from runner.runs import discovery

    request, folders = _parse_evaluate(arguments)
    requests = [replace(request, run_dir=run.path) for run in discovery.require_runs(folders)]
    if len(requests) == 1:
        found = _evaluated(requests[0])
        if found is not None:
            _show_one(requests[0], found)
        return DONE
    results = [(one.run_dir, _tried(one)) for one in requests]
    rows = [(path, one.cause if isinstance(one, _Failed) else one) for path, one in results if one]
    if len(rows) == len(results):  # else another process prints
        run_table.show_evaluations(rows, run_table.console_for_tables())
    codes = [one.code for _, one in results if isinstance(one, _Failed)]
    return FAILED if codes and len(codes) < len(results) else max(codes, default=DONE)


def _tried(request: Request) -> Fields | _Failed | None:
    """Evaluate one run of several: a failure does not keep the others from it."""
    from runner.launch import failures

    try:
        return _evaluated(request)
    except _Failed as failure:
        if failure.code >= OF_SIGNAL:  # also Ctrl-C
            raise
        return failure
    except AccelError as error:
        return _Failed(failures.report(error), str(error).splitlines()[0])


def _evaluated(request: Request) -> Fields | None:
    """Measure a run, write the result to its eval.json, and return it."""
    found = _done(request)
    if found is not None:
        _record(request, found)
    return found


def _done(request: Request) -> JsonObject | None:
    """Evaluate or predict on as many processes as requested; return the result on rank 0."""
    place = processes.adopted()
    if request.num_processes > 1 and place is None:
        return _by_processes(request)
    return worker.attempt(request, 0 if place is None else place.rank)


def _record(request: Request, found: Fields) -> None:
    from runner.runs import environment, evaluations

    checkpoint = os.path.relpath(found["checkpoint"], os.path.realpath(request.run_dir))
    inside = not checkpoint.startswith("..")
    try:
        evaluations.add(
            request.run_dir,
            {
                "checkpoint": checkpoint if inside else found["checkpoint"],
                "step": found["step"],
                "metrics": found["metrics"],
                "overrides": list(request.overrides),
                "num_processes": found["num_processes"],
                "seconds": round(found["seconds"], 3),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
                "versions": environment.versions(),
                **({"notes": found["notes"]} if found["notes"] else {}),
            },
        )
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        # Somebody else's run.
        place = request.run_dir / evaluations.EVAL
        print(f"{place} is not written ({error.strerror}).", file=sys.stderr)


def _show_one(request: Request, found: Fields) -> None:
    from runner.training.console import Display, number

    for split, metrics in found["metrics"].items():
        rows = [(name, number(value)) for name, value in metrics.items()]
        Display(enabled=True).final(f"{request.run_dir.name} · {split}", rows)


def predict(arguments: Sequence[str]) -> int:
    """Write a run's predictions for a data set, one JSON object per sample and line.

    Raises:
        ConfigError: if the run, an override or the output is refused.
        CheckpointError: if the checkpoint is missing or incomplete.
    """
    request = _parse_predict(arguments)
    found = _done(request)
    if found is not None:
        print(f"{found['count']} predictions written to {request.output}")
    return DONE


def _by_processes(request: Request) -> JsonObject:
    """Let fresh processes do what a request asks for, and return what rank 0 has found.

    Raises:
        _Failed: if one of them fails, which has been reported.
        ConfigError: if the request is refused.
    """
    from runner.launch import launcher
    from runner.training import run_log

    run_log.announce(request.run_dir.name)
    with tempfile.TemporaryDirectory(prefix="runner-inference-") as place:
        folder = Path(place)
        output = None if request.output is None else Path(os.path.abspath(request.output))
        run_dir = Path(os.path.abspath(request.run_dir))
        worker.write_request(folder, replace(request, run_dir=run_dir, output=output))
        ended = launcher.run_group(folder, request.num_processes, Path.cwd(), WORKER)
        if ended.code != DONE:
            message = "" if ended.cause is None else ended.cause.message
            lines = message.splitlines() or ["its processes failed"]
            raise _Failed(ended.code, lines[0])
        return worker.read_result(folder)


def work(folder: Path, stop: StopFlag) -> int:
    """Be one of the processes, and do what the folder's request asks for."""

    def watch(recipe: Recipe) -> contextlib.AbstractContextManager[None]:
        from runner.launch import hangs  # once the number of threads is set

        here = Environment.read()
        return hangs.watching(recipe, folder, stop, here.rank or 0, here.world_size)

    return worker.run(folder, Worker(stop, watch))


def _run_dirs(words: Sequence[str]) -> list[str]:
    """Return the words that name runs: folders, and paths whose first "=" follows a "/"."""
    return [
        word
        for word in words
        if "=" not in word or os.path.isdir(word) or os.sep in word.partition("=")[0]
    ]


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"runner {command}", description=description, allow_abbrev=False)
    if command == "eval":
        what = "run directories, a sweep's, or folders of them; and changes to their recipes"
        parser.add_argument("words", metavar="RUN_DIR|KEY=VALUE", nargs="+", help=what)
    else:
        parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run directory")
        changes = parser.add_argument(
            "overrides", metavar="KEY=VALUE", nargs="*", help="changes to the run's recipe"
        )
        changes.required = False  # argparse names it among what is missing
    parser.add_argument(
        "--processes",
        type=int,
        default=None,
        metavar="N",
        help="compute on N processes: one per GPU, or on the CPU (default: 1)",
    )
    parser.add_argument(
        "--checkpoint", help="best, last, or a checkpoint's name or path (default: best, else last)"
    )
    parser.add_argument(
        "--device-map",
        choices=WORDS,
        help="spread a model that is larger than a device over accelerators, memory and disk",
    )
    parser.add_argument(
        "--max-memory",
        action="append",
        default=[],
        metavar="DEVICE=SIZE",
        help="of --device-map, as 0=20GB or cpu=4GB; may be repeated (default: what is free)",
    )
    return parser


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


def _parse_evaluate(arguments: Sequence[str]) -> tuple[Request, list[str]]:
    parser = _parser("eval", "Measure a trained run.")
    parser.add_argument(
        "--split",
        action="append",
        choices=SPLITS,
        default=[],
        help="data set to measure, may be repeated (default: validation and test)",
    )
    found = parser.parse_intermixed_args(list(arguments))
    folders = _run_dirs(found.words)
    if not folders:
        parser.error("the following arguments are required: RUN_DIR")
    request = Request(
        run_dir=Path(),
        overrides=tuple(word for word in found.words if word not in folders),
        splits=tuple(found.split),
        checkpoint=found.checkpoint,
        placement=_placement(found),
        num_processes=_num_processes(found),
    )
    return request, folders


def _parse_predict(arguments: Sequence[str]) -> Request:
    parser = _parser("predict", "Write a trained run's predictions as JSON lines.")
    parser.add_argument(
        "--split",
        choices=SPLITS,
        help="data set (default: test, or validation where there is none)",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="the .jsonl file to write"
    )
    found = parser.parse_intermixed_args(list(arguments))
    return Request(
        run_dir=found.run_dir,
        overrides=tuple(found.overrides),
        splits=(found.split,) if found.split else (),
        checkpoint=found.checkpoint,
        output=found.output,
        placement=_placement(found),
        num_processes=_num_processes(found),
    )
