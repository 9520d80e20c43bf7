"""Print the matrix and its score.

python -m tests.resume_matrix              # every system call: about half an hour
python -m tests.resume_matrix --every 40   # every 40th
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tests.resume_matrix.cells import USES, Cell
from tests.resume_matrix.warm import Answer

if TYPE_CHECKING:
    from tests.resume_matrix.held import Held, Known
    from tests.resume_matrix.states import Templates

SIZES = (0, 4, 8, 16, 32, 64, 96, 128, 192)  # kB
SKIPPED: list[str] = []


def states(folder: Path, every: int, offset: int, sizes: int) -> Iterator[list[Cell]]:
    """Yield the cells of each state; what cannot be had here is appended to `SKIPPED`."""
    from tests.resume_matrix import states as ends
    from tests.resume_matrix import warm
    from tests.resume_matrix.cells import cells
    from tests.resume_matrix.held import Held, held

    templates = ends.Templates(folder)
    known = _made(templates)
    yield from _mutilated(templates, known)
    for kind in ("finished", "older finished", "older stopped"):
        copy = templates.copy(kind, f"{kind.replace(' ', '-')}-end")
        yield cells(kind, copy, held(copy), known)
    for state, kind, overrides in (
        ("failed in load", "stopped", ("model.width=4",)),
        ("finished, failed in load", "finished", ("model.width=4", ends.LONGER)),
        ("failed in build", "stopped", ("model.width=-3",)),
        ("failed in the first step", "stopped", ("data=stdlib_bytes",)),
    ):
        copy = templates.copy(kind, state.replace(" ", "-").replace(",", ""))
        before = held(copy)
        wrong = ends.failed_resume(copy, *overrides)
        yield [Cell(state, "itself", wrong), *cells(state, copy, before, known)]
    for state, override in (
        ("a start that fails in build", "model.width=-3"),
        ("a start that is refused late", "checkpoint.monitor=none_such"),
        ("a start without a plan", "tensor_parallel=default"),
    ):
        empty = folder / state.replace(" ", "-")
        empty.mkdir()
        wrong = ends.failed_start(empty, override)
        yield [Cell(state, "itself", wrong), *cells(state, empty, Held({}), known)]
    for state in ("two at once", "two at once by resume=auto"):
        copy = templates.copy("stopped", state.replace(" ", "-"))
        before = Held(dict.fromkeys(held(copy).runs, ends.LAST), held(copy).best)
        auto = [*ends.start_line(), ends.LONGER, "resume=auto"]
        line = auto if "auto" in state else ends.resume_line(copy)
        wrong = ends.two_at_once(copy, line, known)
        yield [Cell(state, "itself", wrong), *cells(state, copy, before, known)]
    yield from _killed(folder, templates, known, every, offset)
    yield from _full(folder, templates, known, sizes)
    assert warm.run(["--version"], folder).code == 0


def _made(templates: Templates) -> Known:
    stopped = ("trainer.stop_after=3",)
    templates.make("finished", ())
    templates.make("stopped", stopped)
    templates.make("older finished", (), stopped)
    templates.make("older stopped", stopped, ())
    return templates.known()


def _mutilated(templates: Templates, known: Known) -> Iterator[list[Cell]]:
    """Yield the cells that tell whether the oracles see what no command may do."""
    from tests.resume_matrix import states as ends
    from tests.resume_matrix import warm
    from tests.resume_matrix.cells import cells
    from tests.resume_matrix.held import held, kept, runs
    from tests.resume_matrix.mutilations import MUTILATIONS

    for state, mutilate in MUTILATIONS.items():
        copy = templates.copy("stopped", state.partition(": ")[2].replace(" ", "-"))
        before = held(copy)
        mutilate(copy)
        found = cells(state, copy, before, known)
        yield [_seen(state, cell.use, cell.wrong) for cell in found]
    copy = templates.copy("finished", "other-steps")
    others = list(known.values())[1:] + list(known.values())[:1]
    mixed = {
        name: replace(other, step=weights.step)
        for (name, weights), other in zip(known.items(), others, strict=True)
    }
    state = "mutilated: what other weights give"
    found = cells(state, copy, held(copy), mixed, ("eval", "predict"))
    (run_dir,) = runs(copy)
    answer = warm.run(["load", str(run_dir), str(kept(run_dir)[3])], copy)  # the best is step 6
    found.append(Cell(state, "load", "" if answer.code == 0 else answer.output))
    yield [_seen(state, cell.use, cell.wrong) for cell in found]
    copy = templates.copy("stopped", "codes")
    for code in (0, -11, 99):
        answer = Answer(code, "the disk is full")
        wrong = ends.ended_by_disk(answer, copy, held(copy), known)
        yield [_seen(f"mutilated: a full disk, code {code}", "itself", wrong)]


def _seen(state: str, use: str, wrong: str) -> Cell:
    return Cell(state, f"{use} is red", "" if wrong else "the oracle does not see it")


def _full(folder: Path, templates: Templates, known: Known, sizes: int) -> Iterator[list[Cell]]:
    from tests.resume_matrix import states as ends
    from tests.resume_matrix.cells import cells
    from tests.resume_matrix.held import Held, held

    for number, size in enumerate(SIZES[::-1][:: max(1, len(SIZES) // sizes)]):
        start = folder / f"disk-start-{number}"
        copy = templates.copy("stopped", f"disk-resume-{number}")
        has = held(copy)
        for state, place, before, command, room in (
            ("a start", start, Held({}, more=1), ends.out_of_disk_in_a_start, 8 + size),
            ("a resume", copy, has, ends.out_of_disk_in_a_resume, size),
        ):
            name = f"full disk in {state} ({room} kB)"
            try:
                answer = command(place, room)
            except ends.NoSmallDiskError as error:
                SKIPPED.append(f"full disk: {error}")
                return
            wrong = ends.ended_by_disk(answer, place, before, known)
            yield [Cell(name, "itself", wrong), *cells(name, place, before, known)]


def _killed(
    folder: Path, templates: Templates, known: Known, every: int, offset: int
) -> Iterator[list[Cell]]:
    from tests.resume_matrix import states as ends
    from tests.resume_matrix import warm
    from tests.resume_matrix.cells import cells
    from tests.resume_matrix.held import Held, held

    reason = warm.cannot_trace()
    if reason is not None:
        SKIPPED.append(f"killed at a system call: {reason}")
        return

    def place_of(kind: str, name: str) -> tuple[Path, list[str], Held]:
        if kind == "start":
            place = folder / name
            place.mkdir()
            return place, ends.start_line(), Held({}, more=1)
        place = templates.copy("finished" if "finished" in kind else "stopped", name)
        return place, ends.resume_line(place), held(place)

    for kind in ("start", "resume", "resume of a finished run"):
        short = kind.replace(" ", "-")
        place, line, before = place_of(kind, f"traced-{short}")
        calls = ends.trace(line, place)
        print(f"a {kind} changes files by {len(calls)} system calls", flush=True)
        killed = [0, 0]
        for number, call in list(enumerate(calls))[offset::every]:
            place, line, before = place_of(kind, f"killed-{short}-{number}")
            answer, trace = warm.killed_at(call, line, place)
            killed[answer.code == -9] += 1
            wrong = "" if answer.code in (-9, 0) else f"code {answer.code}: {answer.output[-200:]}"
            if answer.code == 0:
                wrong = ends.complete(place, before, known)
            state = f"killed in a {kind} at {number}: {call.name} {call.number}"
            found = cells(state, place, before.plus(trace), known)
            yield [Cell(state, "itself", wrong), *found]
            shutil.rmtree(place)
        told = f"{killed[True]} of {sum(killed)} commands were killed there"
        wrong = "" if killed[True] > sum(killed) // 2 else told
        yield [Cell(f"killed in a {kind}: {told}", "itself", wrong)]


def main() -> int:
    """Print each state, what does not hold, and the score.

    Returns:
        1 if anything does not hold; else 2 if something could not be tried here; else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.resume_matrix")
    parser.add_argument("--every", type=int, default=1, help="kill at every n-th call")
    parser.add_argument("--offset", type=int, default=0, help="begin with this call")
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many disk sizes")
    chosen = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="100")
    from tests.resume_matrix import warm

    warm.import_everything()
    done: list[Cell] = []
    folder = Path(tempfile.mkdtemp(prefix="resume-matrix-"))
    try:
        for found in states(folder, chosen.every, chosen.offset, chosen.sizes):
            row = "  ".join(f"{cell.use}: {'no' if cell.wrong else 'ok'}" for cell in found)
            print(f"{found[0].state:<44} {row}", flush=True)
            for cell in found:
                if cell.wrong:
                    print(f"    {cell.use}: {cell.wrong}", flush=True)
            done += found
    finally:
        shutil.rmtree(folder)
    good = sum(not cell.wrong for cell in done)
    kinds = {use: [cell for cell in done if cell.use == use] for use in ("itself", *USES)}
    seen = [cell for cell in done if cell.use.endswith(" is red")]
    kinds["mutilated"] = seen
    for use, found in kinds.items():
        print(f"{use:<12} {sum(not cell.wrong for cell in found)} of {len(found)}")
    print(f"resume matrix: {good} of {len(done)} cells hold", flush=True)
    for reason in SKIPPED:
        print(f"skipped: {reason}", flush=True)
    return 1 if good < len(done) else 2 if SKIPPED else 0


if __name__ == "__main__":
    sys.exit(main())
