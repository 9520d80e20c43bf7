"""Command lines of ``runner eval`` and ``runner predict``. Free of torch until a run is loaded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from accel.errors import ConfigError
from runner.cli.arguments import CommandParser
from runner.config.schema import SPLITS
from runner.inference.placement import WORDS, Placement, parse_limits
from runner.inference.session import Request, is_stream, measure, write_predictions


def main(command: str, arguments: Sequence[str]) -> int:
    """Run ``runner <command> <arguments>`` and return the exit code."""
    return {"eval": evaluate, "predict": predict}[command](arguments)


def evaluate(arguments: Sequence[str]) -> int:
    """Measure a run on its data sets and print a table.

    Raises:
        ConfigError: if the run or an override is refused.
        CheckpointError: if the checkpoint is missing or incomplete.
    """
    from runner.reporting.console import Display, number

    request = _parse_evaluate(arguments)
    for split, metrics in measure(request).items():
        rows = [(name, number(value)) for name, value in metrics.items()]
        Display().final(f"{request.run_dir.name} · {split}", rows)
    return 0


def predict(arguments: Sequence[str]) -> int:
    """Write a run's predictions for a data set, one JSON object per sample and line.

    Raises:
        ConfigError: if the run, an override or the output is refused.
        CheckpointError: if the checkpoint is missing or incomplete.
    """
    request = _parse_predict(arguments)
    count = write_predictions(request)
    streamed = request.output is not None and is_stream(request.output)  # perhaps standard output
    stream = sys.stderr if streamed else sys.stdout
    print(f"{count} predictions written to {request.output}", file=stream)
    return 0


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = CommandParser(prog=f"runner {command}", description=description, allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run directory")
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="changes to the run's recipe"
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


def _parse_evaluate(arguments: Sequence[str]) -> Request:
    parser = _parser("eval", "Measure a trained run.")
    parser.add_argument(
        "--split",
        action="append",
        choices=SPLITS,
        default=[],
        help="data set to measure, may be repeated (default: validation and test)",
    )
    found = parser.parse_intermixed_args(list(arguments))
    return Request(
        run_dir=found.run_dir,
        overrides=tuple(found.overrides),
        splits=tuple(found.split),
        checkpoint=found.checkpoint,
        placement=_placement(found),
    )


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
    )
