"""Run cells under both packages, and compare their numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT, free_port
from tests.libraries.cells import Cell

ENGINES = ("accel", "accelerate")
SECONDS_PER_CELL = 120


@dataclass(frozen=True)
class Outcome:
    """What a cell gave under one package.

    Attributes:
        numbers: by rank, and then by name, what the program returned.
        error: the last line of what a rank raised, "" if none did.
    """

    numbers: list[Mapping[str, list]]
    error: str = ""


@dataclass(frozen=True)
class Comparison:
    """The two outcomes of a cell."""

    cell: Cell
    ours: Outcome
    public: Outcome

    @property
    def differences(self) -> dict[str, str]:
        """The names whose values differ on any rank by more than is allowed, each with how."""
        found: dict[str, str] = {}
        for ours, public in zip(self.ours.numbers, self.public.numbers, strict=True):
            for name in sorted({*ours, *public}):
                pair = ours.get(name, []), public.get(name, [])
                if pair[0] != pair[1] and not self._is_close(*pair):
                    found[name] = difference(*pair)
        return found

    def _is_close(self, ours: list, public: list) -> bool:
        bound = self.cell.tolerance
        if any(isinstance(value, str) for value in (*ours, *public)):
            return bound > 0  # digests of weights, and names of files
        if len(ours) != len(public):
            return False
        return all(abs(a - b) <= bound for a, b in zip(ours, public, strict=True))

    @property
    def largest(self) -> float:
        """The largest absolute difference of two numbers on any rank."""
        pairs = [
            (a, b)
            for ours, public in zip(self.ours.numbers, self.public.numbers, strict=True)
            for name in {*ours} & {*public}
            for a, b in zip(ours[name], public[name], strict=False)
            if isinstance(a, float) and isinstance(b, float)
        ]
        return max((abs(a - b) for a, b in pairs), default=0.0)

    @property
    def is_equal(self) -> bool:
        """Whether both trained, and every number is equal, or as close as the cell allows."""
        return not (self.ours.error or self.public.error or self.differences)


def difference(ours: list, public: list) -> str:
    """Return in words how two lists differ."""
    if len(ours) != len(public):
        extra, lacking = set(ours) - set(public), set(public) - set(ours)
        return f"{len(ours)} | {len(public)} entries; more {sorted(extra)}, less {sorted(lacking)}"
    if all(isinstance(value, float) for value in (*ours, *public)):
        return f"{max(abs(a - b) for a, b in zip(ours, public, strict=True)):.3g}"
    return f"{sorted(set(ours) - set(public))} | {sorted(set(public) - set(ours))}"


def compare(cells: Iterable[Cell]) -> list[Comparison]:
    """Run cells under both packages; those of one number of processes share their imports."""
    cells = list(cells)
    outcomes: dict[tuple[str, Cell], Outcome] = {}
    for size in sorted({cell.num_processes for cell in cells}):
        group = [cell for cell in cells if cell.num_processes == size]
        for engine in ENGINES:
            for cell, outcome in zip(group, _run(engine, group, size), strict=True):
                outcomes[engine, cell] = outcome
    return [Comparison(cell, *(outcomes[engine, cell] for engine in ENGINES)) for cell in cells]


def _run(engine: str, cells: list[Cell], size: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory(prefix=f"{engine}-") as name:
        folder = Path(name)
        work = [
            {
                "name": cell.name,
                "program": cell.program,
                "options": dict(cell.options),
                "port": free_port(),
            }
            for cell in cells
        ]
        (folder / "cells.json").write_text(json.dumps(work))
        start = [sys.executable]
        if size > 1:
            port = str(free_port())
            start += ["-m", "torch.distributed.run", f"--nproc_per_node={size}"]
            start += ["--master_port", port]
        command = [*start, "-m", "tests.libraries.worker", "--engine", engine]
        command += ["--cells", str(folder / "cells.json"), "--folder", name]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=120 + SECONDS_PER_CELL * len(cells),
        )
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return [_outcome(folder / cell.name, size, str(tail)) for cell in cells]


def _environment() -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_DISABLED": "true"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    return {**kept, **offline, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def _outcome(folder: Path, size: int, tail: str) -> Outcome:
    answers = []
    for rank in range(size):
        path = folder / f"rank{rank}.json"
        missing = {"error": f"rank {rank} wrote nothing: {tail}"}
        answers.append(json.loads(path.read_text()) if path.exists() else missing)
    errors = [str(one["error"]).strip().splitlines()[-1] for one in answers if "error" in one]
    return Outcome([one.get("numbers", {}) for one in answers], errors[0] if errors else "")
