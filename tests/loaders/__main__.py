"""Fuzz the prepared loaders: ``python -m tests.loaders --count 500 [--seed 0] [--jobs 2]``."""

from __future__ import annotations

import argparse
import random
import sys

from tests.loaders.fuzz import Case, Found, cores, drawn, reproducer, run_jobs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loaders", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many configurations")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draw; a fresh one if left out"
    )
    parser.add_argument(
        "--jobs", type=int, default=cores(), help="configurations at the same time; one per core"
    )
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    cases = drawn(seed, given.count)
    resumed = sum(case.stops_after > 0 for case in cases)
    print(f"seed {seed}: {len(cases)} configurations, {resumed} of them resumed in mid-epoch")
    wrong, seconds = 0, 0.0

    def take(place: int, case: Case, found: Found) -> None:
        nonlocal wrong, seconds
        lines, cpu = found
        seconds += cpu
        if lines:
            wrong += 1
            print(f"FAILED {place}: {reproducer(case)}", *lines[:4], sep="\n    ", flush=True)

    run_jobs(cases, given.jobs, take)
    print(f"{len(cases) - wrong} right of {len(cases)}, {seconds:.0f} s of processor time")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
