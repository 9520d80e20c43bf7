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
from pathlib import Path

from tests.resume_matrix.cells import USES, Cell

SIZES = (0, 4, 8, 16, 32, 64, 96, 128, 192)  # kB


def states(folder: Path, every: int, offset: int, sizes: int) -> Iterator[list[Cell]]:
    """Yield the cells of each state."""
    from tests.resume_matrix import states as ends
    from tests.resume_matrix import warm
    from tests.resume_matrix.cells import cells

    templates = ends.Templates(folder)
    templates.get("finished")
    templates.get("stopped", "trainer.stop_after=3")
    yield cells("finished", templates.copy("finished", "end"))
    for state, kind, overrides in (
        ("failed in load", "stopped", ("model.width=4",)),
        ("finished, failed in load", "finished", ("model.width=4", "trainer.epochs=3")),
        ("failed in build", "stopped", ("model.width=-3",)),
        ("failed in the first step", "stopped", ("data=stdlib_bytes",)),
    ):
        copy = templates.copy(kind, state.replace(" ", "-").replace(",", ""))
        wrong = ends.failed_resume(copy, *overrides)
        yield [Cell(state, "itself", wrong), *cells(state, copy)]
    for state, override in (
        ("a start that fails in build", "model.width=-3"),
        ("a start that is refused late", "checkpoint.monitor=none_such"),
        ("a start without a plan", "tensor_parallel=default"),
    ):
        empty = folder / state.replace(" ", "-")
        empty.mkdir()
        yield [Cell(state, "itself", ends.failed_start(empty, override)), *cells(state, empty)]
    copy = templates.copy("stopped", "two")
    yield [Cell("two at once", "itself", ends.two_at_once(copy)), *cells("two at once", copy)]
    yield from _killed(folder, templates, every, offset)
    try:
        for number, size in enumerate(SIZES[::-1][:: max(1, len(SIZES) // sizes)]):
            start = folder / f"disk-start-{number}"
            answer = ends.out_of_disk_in_a_start(start, 8 + size)
            yield from _after_full(f"full disk in a start ({8 + size} kB)", start, answer)
            copy = templates.copy("stopped", f"disk-resume-{number}")
            answer = ends.out_of_disk_in_a_resume(copy, size)
            yield from _after_full(f"full disk in a resume ({size} kB)", copy, answer)
    except OSError as error:
        print(f"full disk: skipped ({error})", flush=True)
    assert warm.run(["--version"], folder).code == 0


def _after_full(state: str, folder: Path, answer: object) -> Iterator[list[Cell]]:
    from tests.resume_matrix.cells import cells, runs
    from tests.resume_matrix.warm import Answer

    assert isinstance(answer, Answer)
    complete = any((run_dir / "summary.json").exists() for run_dir in runs(folder))
    wrong = "" if answer.code in (1, 2) or complete else f"code {answer.code}"
    yield [Cell(state, "itself", wrong), *cells(state, folder)]


def _killed(folder: Path, templates: object, every: int, offset: int) -> Iterator[list[Cell]]:
    from tests.resume_matrix import states as ends
    from tests.resume_matrix import warm
    from tests.resume_matrix.cells import cells

    assert isinstance(templates, ends.Templates)
    reason = warm.cannot_trace()
    if reason is not None:
        print(f"killed at a system call: skipped ({reason})", flush=True)
        return
    empty = folder / "traced"
    empty.mkdir()
    for kind, calls in (
        ("start", ends.trace_start(empty)),
        ("resume", ends.trace_resume(templates.copy("stopped", "traced-resume"))),
    ):
        print(f"a {kind} changes files by {len(calls)} system calls", flush=True)
        killed = [0, 0]
        for number, call in list(enumerate(calls))[offset::every]:
            if kind == "start":
                place = folder / f"killed-start-{number}"
                place.mkdir()
                line = ends.start_line()
            else:
                place = templates.copy("stopped", f"killed-resume-{number}")
                line = ends.resume_line(place)
            answer = warm.killed_at(call, line, place)
            killed[answer.code == -9] += 1
            wrong = "" if answer.code in (-9, 0) else f"code {answer.code}: {answer.output[-200:]}"
            state = f"killed in a {kind} at {number}: {call.name} {call.number}"
            yield [Cell(state, "itself", wrong), *cells(state, place)]
            shutil.rmtree(place)
        print(f"{killed[True]} of {sum(killed)} commands were killed there", flush=True)


def main() -> int:
    """Print each state, what does not hold, and the score; 1 if anything does not hold."""
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
    for use, found in kinds.items():
        print(f"{use:<12} {sum(not cell.wrong for cell in found)} of {len(found)}")
    print(f"resume matrix: {good} of {len(done)} cells hold", flush=True)
    return int(good < len(done))


if __name__ == "__main__":
    sys.exit(main())
