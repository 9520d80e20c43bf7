"""Make mistakes and judge what is said to them: ``python -m tests.mistakes --count 300``."""

from __future__ import annotations

import argparse
import os
import random
import secrets
import sys
from collections import Counter

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: forks need a process without threads

from tests.mistakes import found as found_before
from tests.mistakes import listed, live, running, users
from tests.mistakes.cases import Mistake, wrong

LEAST = 0.99


def draw(count: int, seed: int) -> list[Mistake]:
    """Return `count` mistakes: from the lists as many as fit in three fifths, the others drawn."""
    rng = random.Random(seed)
    fixed = [*listed.ALL, *users.ALL, *found_before.ALL]
    chosen = rng.sample(fixed, min(len(fixed), count * 3 // 5))
    drawn = [live.draw(rng) for _ in range(count - len(chosen))]
    mistakes = [*chosen, *drawn]
    rng.shuffle(mistakes)
    return mistakes


def main() -> int:
    """Return 0 if at least 99 of 100 answers are right."""
    parser = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="kinds or lines that contain this")
    parser.add_argument("--found", action="store_true", help="those once answered wrongly, all")
    parser.add_argument("--show", action="store_true", help="print what is answered")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    running.prepare()
    mistakes = [
        mistake
        for mistake in (found_before.ALL if options.found else draw(options.count, seed))
        if options.only in mistake.kind or options.only in mistake.line
    ]
    kinds, right = Counter(mistake.kind for mistake in mistakes), Counter()
    for mistake, answer in running.answers(mistakes, options.jobs):
        found = wrong(mistake, answer)
        right[mistake.kind] += not found
        if found or options.show:
            code = mistake.files.get("mine.py", "")
            print(f"--- [{mistake.kind}] {mistake.line}", "".join(f"\n    ! {f}" for f in found))
            if code:
                print("    " + str(code).removeprefix(users.BASE).strip().replace("\n", "\n    "))
            lines = answer.err.splitlines()
            print(*(f"    | {line[:220]}" for line in lines[:14]), sep="\n")
            if len(lines) > 14:
                print(f"    | … {len(lines) - 14} more lines, the last: {lines[-1][:200]}")
    for kind, count in sorted(kinds.items()):
        print(f"{kind:<20} {right[kind]:>4} of {count}")
    total, good = len(mistakes), right.total()
    print(f"seed {seed}: {good} of {total} answers are right ({good / max(total, 1):.1%})")
    return 0 if good >= LEAST * total else 1


if __name__ == "__main__":
    sys.exit(main())
