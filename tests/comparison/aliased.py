"""Run a script with another package in accel's place, its text unchanged.

python -m tests.comparison.aliased accelerate examples/scripts/local_sgd.py --cpu
"""

from __future__ import annotations

import importlib
import runpy
import sys

MODULES = ("", ".utils", ".local_sgd")  # that scripts import from


def main() -> None:
    """Run the script of the command line as the main program."""
    package, *sys.argv = sys.argv[1:]
    if package != "accel":
        for name in MODULES:
            sys.modules[f"accel{name}"] = importlib.import_module(f"{package}{name}")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
