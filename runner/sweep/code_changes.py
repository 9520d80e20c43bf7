"""Whether the project's Python code has changed since jobs of a sweep ran. Free of torch.

Each attempt records digests of the user's packages in the journal, so that no run directory needs
to be read. Mending code after a failure is the normal case: nothing is refused, all is said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from runner.config import trust
from runner.run_dir import provenance
from runner.sweep.journal import JobState

DIGITS = 16
MOST_JOBS = 5


def of_project() -> dict[str, str]:
    """Return short digests of the Python files of the user's packages, by name."""
    found = provenance.package_digests(trust.trusted())
    return {name: digest[:DIGITS] for name, digest in found.items() if digest}


def lines(states: Mapping[int, JobState]) -> list[str]:
    """Return which packages have changed since which jobs ran, a sentence each, and the remedy.

    Empty: none has, or no job has recorded its code. `states` are those of the journal, by number.
    """
    recorded = {number: state for number, state in states.items() if state.code}
    if not recorded:
        return []
    now = {"code": of_project()}
    jobs: dict[tuple[str, ...], list[int]] = {}
    for number, state in sorted(recorded.items()):
        changed = provenance.changed_packages({"code": state.code}, now)
        if changed:
            jobs.setdefault(tuple(changed), []).append(number)
    if not jobs:
        return []
    found = [
        f"The Python code of {_plural('package', packages)} {', '.join(packages)} has changed "
        f"since {named(numbers)} ran."
        for packages, numbers in jobs.items()
    ]
    kept = any(states[number].is_complete for numbers in jobs.values() for number in numbers)
    others = any(not states[number].is_complete for numbers in jobs.values() for number in numbers)
    ends = ["Finished jobs are kept."] if kept else []
    ends += ["Jobs that are not finished go on with the new code."] if others else []
    return [*found, f"{' '.join(ends)} sweep.dir=<a new directory> trains all with the new code."]


def say(states: Mapping[int, JobState]) -> None:
    """Print `lines`."""
    for line in lines(states):
        print(line, file=sys.stderr, flush=True)


def named(numbers: Sequence[int]) -> str:
    """Return e.g. "jobs 0000, 0002"; of many jobs the first ones."""
    shown = ", ".join(f"{number:04}" for number in numbers[:MOST_JOBS])
    more = f" and {len(numbers) - MOST_JOBS} more" if len(numbers) > MOST_JOBS else ""
    return f"{_plural('job', numbers)} {shown}{more}"


def _plural(noun: str, found: Sequence[object]) -> str:
    return noun if len(found) == 1 else f"{noun}s"
