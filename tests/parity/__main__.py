"""Run the parity matrix and its controls: ``python -m tests.parity`` or ``make parity``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

import torch

from tests import helpers
from tests.parity.cells import Cell, matrix, reason_not_to_run
from tests.parity.controls import controls
from tests.parity.gates import Verdict
from tests.parity.running import line, run
from tests.parity.task import Task


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of a cell")
    parser.add_argument("--only", default="", help="backends whose name contains this")
    parser.add_argument("--world", type=int, nargs="*", help="numbers of processes; default: all")
    parser.add_argument("--precision", nargs="*", help="no, bf16, fp16, fp8; default: all")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "xla"), default=None, help="default: a GPU"
    )
    parser.add_argument("--no-controls", action="store_true", help="the matrix alone")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that `options` leave."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return [
        cell
        for cell in matrix(Task(num_steps=options.steps), device)
        if options.only in cell.backend
        and (not options.world or cell.world_size in options.world)
        and (not options.precision or cell.precision in options.precision)
    ]


def run_all(cells: Iterable[Cell], num_gpus: int, what: str) -> list[Verdict]:
    """Return a verdict for each of `cells`, in order; workers of one world size live at a time."""
    cells = list(cells)
    verdicts = {}
    size = 0
    order = sorted(cells, key=lambda cell: cell.world_size)
    for number, cell in enumerate(order, start=1):
        reason = reason_not_to_run(cell, num_gpus)
        if reason is None and cell.world_size != size:
            helpers.close_pools()
            size = cell.world_size
        verdicts[cell] = run(cell) if reason is None else Verdict(cell, reason)
        print(f"{what} {number}/{len(order)} {line(verdicts[cell])}", flush=True)
    helpers.close_pools()
    return [verdicts[cell] for cell in cells]


def main() -> int:
    """Print a line for each cell; return 1 unless all that run are green and each control red."""
    options, start = parse(), time.monotonic()
    torch.set_num_threads(1)
    num_gpus = torch.cuda.device_count()
    verdicts = run_all(chosen(options), num_gpus, "matrix")
    done = [verdict for verdict in verdicts if verdict.reason is None]
    spoiled = [] if options.no_controls else list(controls(verdict.cell for verdict in done))
    reds = run_all(spoiled, num_gpus, "controls")
    green, red = sum(v.green for v in done), sum(v.caught for v in reds)
    print(
        f"{green} of {len(done)} cells green, {len(verdicts) - len(done)} not run; "
        f"{red} of {len(reds)} controls red; {(time.monotonic() - start) / 60:.1f} min"
    )
    return 0 if done and green == len(done) and red == len(reds) else 1


if __name__ == "__main__":
    sys.exit(main())
