"""Fuzz the prepared loaders: ``python -m tests.loaders --count 500 [--seed 0]``."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.helpers import close_pools
from tests.loaders.fuzz import drawn, reproducer, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loaders", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many configurations")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draw; a fresh one if left out"
    )
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    began = time.monotonic()
    cases = drawn(seed, given.count)
    found = run(cases)
    for case, wrong in zip(cases, found, strict=True):
        if wrong:
            print(f"FAILED {reproducer(case)}")
            for line in wrong[:4]:
                print(f"    {line}")
    right = sum(not wrong for wrong in found)
    resumed = sum(case.stops_after > 0 for case in cases)
    print(
        f"seed {seed}: {right} of {len(cases)} configurations right "
        f"({resumed} of them resumed in mid-epoch), {time.monotonic() - began:.0f} s"
    )
    close_pools()
    return int(right < len(cases))


if __name__ == "__main__":
    sys.exit(main())
