"""Print what each script's metrics are under accel and under the documented package.

python -m tests.comparison --only lora
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.comparison.running import Result, result, table
from tests.examples.scripts import SCRIPTS


def main() -> None:
    """Run the scripts that were asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.comparison", description=__doc__)
    parser.add_argument("--only", default="", help="scripts whose name contains this")
    parser.add_argument("--small", action="store_true", help="their small runs")
    options = parser.parse_args()
    results: list[Result] = []
    for script in SCRIPTS:
        if options.only in script.name:
            print(script.name, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                results.append(result(script, Path(folder), options.small))
    print(table(results))


if __name__ == "__main__":
    main()
