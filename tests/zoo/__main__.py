"""Run the zoo: ``python -m tests.zoo``, about ten minutes on two cores."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.zoo.cells import PRECISIONS, STRATEGIES, Cell, matrix
from tests.zoo.models import MODELS
from tests.zoo.running import line, run_all


def chosen() -> list[Cell]:
    """Return the cells that the command line leaves."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--model", nargs="*", choices=list(MODELS), help="default: all")
    parser.add_argument("--strategy", nargs="*", choices=list(STRATEGIES), help="default: all")
    parser.add_argument("--precision", nargs="*", choices=PRECISIONS, help="default: all")
    options = parser.parse_args()
    return [
        cell
        for cell in matrix()
        if cell.model in (options.model or MODELS)
        and cell.strategy in (options.strategy or STRATEGIES)
        and cell.precision in (options.precision or PRECISIONS)
    ]


def main() -> int:
    """Print a line for each cell; return 1 unless all that ran are green."""
    torch.set_num_threads(1)
    start, cells, verdicts = time.monotonic(), chosen(), []
    for number, verdict in enumerate(run_all(cells), start=1):
        verdicts.append(verdict)
        print(f"{number}/{len(cells)} {line(verdict)}", flush=True)
    done = [verdict for verdict in verdicts if verdict.reason is None]
    green = sum(verdict.green for verdict in done)
    print(
        f"{green} of {len(done)} cells green, {len(verdicts) - len(done)} not run; "
        f"{(time.monotonic() - start) / 60:.1f} min"
    )
    return 0 if done and green == len(done) else 1


if __name__ == "__main__":
    sys.exit(main())
