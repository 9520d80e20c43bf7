"""Measure a checkout: ``python -m tests.structure [ROOT] [--names]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.structure.naming import naming_lines
from tests.structure.sizes import sizes, table
from tests.structure.source import PACKAGES, read

HERE = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=HERE, help="of a checkout; this one")
    parser.add_argument("--names", action="store_true", help="list the lines that name a strategy")
    given = parser.parse_args()
    if given.names:
        for one in naming_lines(read(given.root, *PACKAGES)):
            print(f"{one.place}:{one.line} {one.kind}: {one.text}")
        return 0
    print(table(sizes(given.root)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
