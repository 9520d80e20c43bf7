"""Whether code or data has changed since jobs of a sweep ran. Free of torch.

Each attempt records digests of the user's packages, and the states of the files that its data
factory is given, in the journal, so that no run directory needs to be read. Mending code after a
failure is the normal case: nothing is refused, all is said.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from runner.recipe import trust
from runner.run_dir import data_files, provenance
from runner.run_dir.json_files import Fields
from runner.sweep.journal import JobState

DIGITS = 16
MOST_NAMED = 5
Jobs = dict[tuple[str, ...], list[int]]  # which ones, by the names of what has changed since


def of_project() -> dict[str, str]:
    """Return short digests of the Python files of the user's packages, by name."""
    found = provenance.package_digests(trust.trusted())
    return {name: digest[:DIGITS] for name, digest in found.items() if digest}


def lines(states: Mapping[int, JobState]) -> list[str]:
    """Return what has changed since which jobs ran, a sentence each, and the remedy.

    Data that is not there, as on another node's disk, has not changed: a sentence of its own says
    so. Empty: nothing has, or no job has recorded its code or data. `states` are those of the
    journal, by number.
    """
    state_now = functools.cache(_state)
    code, data = _changed_code(states), _changed_data(states, state_now)
    absent = _absent_data(states, state_now)
    if not code and not data:
        return absent
    found = [
        f"The Python code of {_plural('package', packages)} {', '.join(packages)} has changed "
        f"since {named(numbers)} ran."
        for packages, numbers in code.items()
    ]
    found += [
        f"The data in {_listed(paths)} has changed since {named(numbers)} ran."
        for paths, numbers in data.items()
    ]
    changed = {number for jobs in (code, data) for numbers in jobs.values() for number in numbers}
    new = f"new {' and '.join(['code'] * bool(code) + ['data'] * bool(data))}"
    kept = any(states[number].is_complete for number in changed)
    others = any(not states[number].is_complete for number in changed)
    ends = ["Finished jobs are kept."] if kept else []
    ends += [f"Jobs that are not finished go on with the {new}."] if others else []
    return [
        *found,
        f"{' '.join(ends)} sweep.dir=<a new directory> trains all with the {new}.",
        *absent,
    ]


def _changed_code(states: Mapping[int, JobState]) -> Jobs:
    recorded = {number: state for number, state in states.items() if state.code}
    if not recorded:
        return {}
    now = {"code": of_project()}
    return _by_change(
        (number, provenance.changed_packages({"code": state.code}, now))
        for number, state in recorded.items()
    )


def _changed_data(states: Mapping[int, JobState], state_now: Callable[[str], Fields]) -> Jobs:
    def changed(path: str, then: Fields) -> bool:
        now = state_now(path)
        return bool(now) and data_files.is_changed(then, now)

    return _by_data(states, changed)


def _absent_data(states: Mapping[int, JobState], state_now: Callable[[str], Fields]) -> list[str]:
    """Return that data is not there, in one sentence: each job may have had a copy of its own."""
    jobs = _by_data(states, lambda path, then: not state_now(path))
    if not jobs:
        return []
    paths = list(dict.fromkeys(path for found in jobs for path in found))
    numbers = sorted(number for found in jobs.values() for number in found)
    return [
        f"The data in {_listed(paths)}, which {named(numbers)} read, is not there on this machine."
    ]


def _by_data(states: Mapping[int, JobState], counts: Callable[[str, Fields], bool]) -> Jobs:
    """Return jobs by those of their files that count; what jobs share is looked at once."""
    shared = {id(state.data): state.data for state in states.values()}
    found = {
        key: [path for path, then in _files(data) if counts(path, then)]
        for key, data in shared.items()
    }
    return _by_change((number, found[id(state.data)]) for number, state in states.items())


def _files(data: Mapping[str, Fields]) -> Iterator[tuple[str, Fields]]:
    for found in data.values():
        if isinstance(found, Mapping) and isinstance(path := found.get("path"), str):
            yield path, found


def _state(path: str) -> Fields:
    """Return the state of data; empty: it is not there."""
    return data_files.state(path) if os.path.exists(path) else {}


def _by_change(found: Iterator[tuple[int, Sequence[str]]]) -> Jobs:
    jobs: Jobs = {}
    for number, changed in sorted(found):
        if changed:
            jobs.setdefault(tuple(changed), []).append(number)
    return jobs


def say(states: Mapping[int, JobState]) -> None:
    """Print `lines`."""
    for line in lines(states):
        print(line, file=sys.stderr, flush=True)


def named(numbers: Sequence[int]) -> str:
    """Return e.g. "jobs 0000, 0002"; of many jobs the first ones."""
    return f"{_plural('job', numbers)} {_listed([f'{number:04}' for number in numbers])}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _plural(noun: str, found: Sequence[object]) -> str:
    return noun if len(found) == 1 else f"{noun}s"
