"""Train with every library under both packages: ``python -m tests.libraries``."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.table import Table

from tests.libraries.cells import matrix
from tests.libraries.running import Comparison, compare


def losses(numbers: list) -> str:
    """Return the first and the last loss of rank 0, and how many there are."""
    found = numbers[0].get("loss", []) if numbers else []
    return f"{found[0]:.6f} … {found[-1]:.6f} ({len(found)})" if found else "–"


def verdict(one: Comparison) -> str:
    """Return "equal", or what failed or differs, and by how much."""
    if one.ours.error or one.public.error:
        return f"error: {one.ours.error or '–'} | {one.public.error or '–'}"
    told = "; ".join(f"{name}: {how}" for name, how in one.differences.items())
    count = sum(map(len, one.ours.numbers[0].values()))
    same = f"within {one.largest:.2g}" if one.cell.tolerance else "equal"
    return told or f"{same} ({count} values)"


def main() -> int:
    """Print a row for each cell; return 1 unless all that run are equal."""
    parser = argparse.ArgumentParser(prog="python -m tests.libraries", description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    given, start = parser.parse_args(), time.monotonic()
    cells = [cell for cell in matrix() if given.only in cell.name]
    table = Table("library", "setting", "processes", "losses: accel", "losses: public", "compared")
    for cell in cells:
        reason = cell.reason_not_to_run()
        if reason is not None:
            table.add_row(cell.library, cell.setting, str(cell.num_processes), "", "", reason)
    rows = compare(cell for cell in cells if cell.reason_not_to_run() is None)
    for one in rows:
        both = (losses(outcome.numbers) for outcome in (one.ours, one.public))
        cell = one.cell
        name = cell.library, cell.setting, str(cell.num_processes)
        table.add_row(*name, *both, verdict(one))
    console = Console(width=max(150, Console().width), highlight=False)
    console.print(table)
    equal = sum(one.is_equal for one in rows)
    minutes = (time.monotonic() - start) / 60
    console.print(f"{equal} of {len(rows)} cells equal; {minutes:.1f} min", markup=False)
    return 0 if rows and equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
