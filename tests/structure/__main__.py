"""Measure a checkout: ``python -m tests.structure [ROOT]``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.structure.sizes import sizes, table

HERE = Path(__file__).resolve().parent.parent.parent

if __name__ == "__main__":
    print(table(sizes(Path(sys.argv[1]) if sys.argv[1:] else HERE)))
