"""Fuzz the prepared loaders: ``python -m tests.loaders --count 500 [--seed 0] [--jobs 2]``."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.loaders.fuzz import Case, Found, cores, drawn, reproducer, run_jobs

SECONDS_BETWEEN_LINES = 15.0


class Score:
    """Prints what is wrong, and how far it is."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.judged = self.right = 0
        self.cpu = 0.0
        self.began = self.told = time.monotonic()

    def take(self, place: int, case: Case, found: Found) -> None:
        wrong, cpu = found
        self.judged += 1
        self.right += not wrong
        self.cpu += cpu
        if wrong:
            print(f"FAILED {place}: {reproducer(case)}")
            for line in wrong[:4]:
                print(f"    {line}")
        if wrong or time.monotonic() - self.told > SECONDS_BETWEEN_LINES:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        print(
            f"{self.right} right of {self.judged} ({self.count} in all), "
            f"{self.told - self.began:.0f} s ({self.cpu:.0f} s of processor time)",
            flush=True,
        )


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
    score = Score(len(cases))
    run_jobs(cases, given.jobs, score.take)
    score.tell()
    return int(score.right < len(cases))


if __name__ == "__main__":
    sys.exit(main())
