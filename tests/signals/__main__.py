"""The matrix of signals: ``python -m tests.signals`` prints a table and a score."""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.signals.cells import Cell, cells, run
from tests.signals.oracle import Result


def main() -> int:
    """Run the cells, print each, and return 0 if all are as expected."""
    parser = argparse.ArgumentParser(prog="python -m tests.signals", description=__doc__)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 1], help="training ones")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("words", nargs="*", help="only cells whose line has all of these words")
    asked = parser.parse_args()
    chosen = [
        cell for cell in cells(tuple(asked.processes)) if set(asked.words) <= set(str(cell).split())
    ]
    print(
        "signal  target loaders phase   procs   exit  made saved resumable orphans seconds",
        flush=True,
    )
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = list(pool.map(_told, chosen))
    good = sum(results)
    print(f"{good} of {len(chosen)} cells as expected")
    return 0 if good == len(chosen) else 1


def _told(cell: Cell) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        result = run(cell, Path(folder))
    problems = result.problems(cell.expected)
    told = [_line(cell, result), *(f"    {problem}" for problem in problems)]
    if problems:
        output = result.output if result.resumed is None else result.resumed.output
        told += [f"    | {line}" for line in output.splitlines()[-8:]]
    print("\n".join(told), flush=True)
    return not problems


def _line(cell: Cell, result: Result) -> str:
    made = max((steps[-1] for steps in result.made if steps), default=0)
    saved = "no" if result.after.saved is None else str(result.after.saved)
    resumable = "no" if result.after.wrong else "yes"
    if result.resumed is not None:
        resumable = "wrong" if result.resumed.problems(result.after.saved) else "done"
    return (
        f"{cell} {result.code:5} {made:5} {saved:5} {resumable:9} "
        f"{len(result.orphans):7} {result.seconds:7.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
