"""The end of a sweep's command: results written and shown, failed jobs named. Free of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from runner.exit_codes import DONE, FAILED
from runner.launch import failures
from runner.recipe import paths
from runner.run_dir.sweep_records import FINISHED, PRUNED
from runner.sweep import changes, hparams, table, task
from runner.sweep.directory import Sweep
from runner.sweep.journal import FAILED as FAILURE
from runner.sweep.journal import INTERRUPT, PENDING, STOP, JobState
from runner.sweep.table import Results
from runner.training.console import PipedConsole

_GOOD = (FINISHED, PRUNED, STOP, INTERRUPT)


def nothing_left(sweep: Sweep, config_name: str, states: Mapping[int, JobState]) -> int:
    """Show a sweep in which nothing is left to do, and return the exit code."""
    found = table.results(sweep, states)
    code = _written(sweep, found, ())
    _show(found, config_name)
    changes.say(states)
    code = max(code, _without_a_number(found))
    print(f"{sweep.path} is finished. Nothing is left to do; sweep.dir=DIR begins a new one.")
    return code


def _show(found: Results, config_name: str) -> None:
    """Print the table; where nobody reads it any more, what follows on standard error counts."""
    try:
        table.show(found, config_name, PipedConsole(highlight=False))
    except BrokenPipeError:
        failures.drop_stdout()


def _written(sweep: Sweep, found: Results, begun: Sequence[int]) -> int:
    """Write the results of a sweep to files; return the code that says whether it was possible.

    What cannot be written is told, and hides neither the table nor which jobs have failed.
    """
    writers: dict[str, Callable[[], object]] = {
        table.FILE: lambda: table.write_csv(sweep, found),
        f"{hparams.FOLDER}/ (HParams)": lambda: hparams.write(sweep.path, found, begun),
    }
    code = DONE
    for name, write in writers.items():
        try:
            write()
        except OSError as error:
            code = FAILED
            told = f"Warning: {name} is not written: {paths.failure(error)} ({sweep.path})"
            print(f"{told}. The same command again writes it.", file=sys.stderr, flush=True)
    return code


def conclude(
    config_name: str,
    sweep: Sweep,
    numbers: Sequence[int],
    before: Mapping[int, JobState],
    *,
    is_search: bool = False,
) -> int | None:
    """Write and show the results; print which jobs failed, and return the code of the sweep.

    It is that of a failure as soon as one job has failed, however other jobs have ended.
    None: no job was to be run, and all has been written. `numbers` are the jobs that were to be
    run, `before` the states before the command. Of a search all failed jobs count: it does not try
    those again whose objective is no number.
    """
    begun = [n for n, state in sweep.journal.states().items() if _is_new(state, before.get(n))]
    task.record_deaths(sweep.path, begun)
    states = sweep.journal.states()
    found = table.results(sweep, states)
    others = [n for n, state in states.items() if is_search and state.status == FAILURE]
    mine = sorted({*numbers, *begun, *others})
    written = _written(sweep, found, begun)
    _show(found, config_name)
    changes.say({number: states[number] for number in begun})  # of earlier jobs it was said
    written = max(written, _without_a_number(found))
    ended = {number: states.get(number, JobState()) for number in mine}
    bad = {number: state for number, state in ended.items() if state.status not in _GOOD}
    unstarted = [number for number, state in bad.items() if state.status == PENDING]
    failed = [number for number in bad if number not in unstarted]
    for some, what in ((failed, "failed"), (unstarted, "were not started")):
        if some:
            names = ", ".join(f"{number:04}" for number in some)
            print(f"{len(some)} of {len(found.rows)} jobs {what}: {names}", file=sys.stderr)
    if bad or written != DONE:
        return FAILED
    return max(map(_code_of, ended.values()), default=None)


def _without_a_number(found: Results) -> int:
    """Say which finished jobs have an objective that is NaN or infinite, and return the code."""
    rows = [row.job for row in found.rows if row.state.status == FINISHED and row.is_no_number]
    if not rows:
        return DONE
    names = ", ".join(f"{job:04}" for job in sorted(rows))
    told = "their objectives are no finite numbers, and the same command does not train them again"
    print(f"{len(rows)} of {len(found.rows)} jobs finished, but {told}: {names}", file=sys.stderr)
    return FAILED


def _is_new(state: JobState, before: JobState | None) -> bool:
    return before is None or state.attempt != before.attempt or state.status != before.status


def _code_of(state: JobState) -> int:
    if state.is_complete:
        return DONE
    code = state.ended.get("code")
    return code if isinstance(code, int) and code != DONE else FAILED
