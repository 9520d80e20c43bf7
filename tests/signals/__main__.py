"""The matrix of signals: ``python -m tests.signals`` prints a table and a score."""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.signals.cells import Cell, Result, cells, run


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
    print("signal  target loaders phase   procs   exit saved resumable orphans seconds", flush=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = list(pool.map(_told, chosen))
    good = sum(results)
    print(f"{good} of {len(chosen)} cells as expected")
    return 0 if good == len(chosen) else 1


def _told(cell: Cell) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        result = run(cell, Path(folder))
    fits = result.fits(cell)
    print(_line(cell, result), "" if fits else f"expected {cell.expected}", flush=True)
    if not fits:
        print("    " + "\n    ".join(result.output.splitlines()[-8:]), flush=True)
    return fits


def _line(cell: Cell, result: Result) -> str:
    saved, resumable = ("yes" if flag else "no" for flag in (result.saved, result.resumable))
    return (
        f"{cell} {result.code:5} {saved:5} {resumable:9} {result.orphans:7} {result.seconds:7.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
