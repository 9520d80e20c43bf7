"""The printed matrix and the printed controls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from tests.parity.cells import BACKENDS, Cell
from tests.parity.gates import Difference, Verdict, allowed_share, fullest, noise_floor, plain

MATRIX_CAPTION = (
    "gradients twice: with its optimizer in the host's memory, ZeRO-3 keeps the gradients that it "
    "adds to and the optimizer's copy of them; 5/4 of the others' share are allowed."
)
CONTROLS_CAPTION = (
    "Controls run in fp32, those of fp8 against the plain loop in fp8. The prescribed gate of bf16 "
    "weights that the engine owns, 1e-2, notices less: 'weight decay off' stays green there (FSDP2 "
    "full_shard: loss 1.4e-3, weights 1.7e-3)."
)


def matrix_table(verdicts: Sequence[Verdict]) -> Table:
    """Return the table of all cells, those that did not run with their reason."""
    table = Table(
        title="Parity with a plain PyTorch loop",
        title_justify="left",
        caption=MATRIX_CAPTION,
        caption_justify="left",
    )
    for name in ("backend", "precision", "processes", "accumulation"):
        table.add_column(name)
    for name in ("loss", "gate", "weights", "gate", "MB/rank", "of replica", "s"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    previous = None
    for (cell, _), group in groupby(verdicts, key=_row_key):
        if previous is not None and previous != cell.backend:
            table.add_section()
        previous = cell.backend
        members = list(group)
        if members[0].reason is None:
            table.add_row(*_run_row(members[0]))
        else:
            table.add_row(*_missing_row(members))
    return table


def _row_key(verdict: Verdict) -> tuple[Cell, str]:
    """Return what cells of one row have in common: all of it if they ran, else the reason."""
    cell = verdict.cell
    if verdict.reason is None:
        return cell, ""
    return Cell(cell.backend, cell.precision), verdict.reason


def _run_row(verdict: Verdict) -> list[str | Text]:
    cell = verdict.cell
    note = BACKENDS[cell.backend].note
    return [
        *_names(cell),
        str(cell.world_size),
        f"{cell.accumulation} {cell.variant}".strip(),
        *_numbers(verdict),
        _megabytes(verdict),
        _share(verdict),
        f"{verdict.seconds:.1f}",
        _outcome(verdict).append(note and f" ({note})", style="default"),
    ]


def _megabytes(verdict: Verdict) -> str:
    """Return what the fullest process holds, and on a GPU the peak of what was allocated there."""
    if "after" not in verdict.num_bytes:
        return ""
    held = f"{fullest(verdict.num_bytes) / 1e6:.2f}"
    peak = verdict.num_bytes.get("peak")
    return held if peak is None else f"{held} (peak {peak / 1e6:.2f})"


def _share(verdict: Verdict) -> str:
    most = allowed_share(verdict.cell)
    gate = "" if most is None else f" ≤ {most:.3g}"
    return "" if verdict.share is None else f"{verdict.share:.2f}{gate}"


def _missing_row(verdicts: Sequence[Verdict]) -> list[str | Text]:
    cells = [verdict.cell for verdict in verdicts]
    sizes = sorted({cell.world_size for cell in cells})
    kinds = dict.fromkeys(f"{cell.accumulation} {cell.variant}".strip() for cell in cells)
    return [
        *_names(cells[0]),
        " ".join(map(str, sizes)),
        ", ".join(kinds),
        *[""] * 7,
        Text(f"not run: {verdicts[0].reason}", style="yellow"),
    ]


def _names(cell: Cell) -> list[str | Text]:
    backend = BACKENDS[cell.backend]
    owner = "engine" if backend.owns_bf16 else "autocast"
    precision = {"no": "fp32", "bf16": f"bf16 {owner}", "fp16": "fp16", "fp8": "fp8"}[
        cell.precision
    ]
    return [backend.label, precision]


def _numbers(verdict: Verdict) -> list[str | Text]:
    found, gate = verdict.difference, verdict.gate
    if found is None or gate is None:
        return [""] * 4
    return [f"{value:.1e}" for value in (found.loss, gate.loss, found.weight, gate.weight)]


def _outcome(verdict: Verdict) -> Text:
    if verdict.green:
        return Text("green", style="green")
    return Text("RED: " + "; ".join(verdict.failures), style="bold red")


def line(verdict: Verdict) -> str:
    """Return one line on a cell that has just run."""
    cell = verdict.cell
    special = " ".join(filter(None, (cell.variant, cell.sabotage)))
    name = f"{cell.backend} {cell.precision} ×{cell.world_size} /{cell.accumulation} {special}"
    return f"{name.strip()}: {_outcome(verdict)} ({verdict.seconds:.1f} s)"


def controls_table(verdicts: Sequence[Verdict]) -> Table:
    """Return the table of the controls: green is what must not be."""
    table = Table(
        title="Negative controls: loss or weights of each, or layers in fp8, must be red",
        title_justify="left",
        caption=CONTROLS_CAPTION,
        caption_justify="left",
    )
    for name in ("mistake", "backend", "processes", "accumulation"):
        table.add_column(name)
    for name in ("loss", "gate", "weights", "gate"):
        table.add_column(name, justify="right")
    table.add_column("verdict", overflow="fold")
    for mistake, group in groupby(sorted(verdicts, key=_mistake), key=_mistake):
        for verdict in group:
            cell = verdict.cell
            outcome = _outcome(verdict) if verdict.caught else _unnoticed(verdict)
            table.add_row(
                mistake,
                BACKENDS[cell.backend].label,
                str(cell.world_size),
                f"{cell.accumulation} {cell.variant}".strip(),
                *_numbers(verdict),
                outcome,
            )
        table.add_section()
    return table


def _unnoticed(verdict: Verdict) -> Text:
    """Return why a control shows nothing: it was not compared, or neither gate caught it."""
    told = "NOT COMPARED" if verdict.difference is None else "NEITHER LOSS NOR WEIGHTS NOTICE"
    return Text(": ".join([told, *filter(None, ["; ".join(verdict.failures)])]), style="bold red")


def _mistake(verdict: Verdict) -> str:
    return verdict.cell.sabotage or ""


def floors_table(cells: Iterable[Cell]) -> Table:
    """Return the noise floors that fp32 cells are held to, and the bytes of a replica."""
    table = Table(title="The plain loop against itself, its batches cut", title_justify="left")
    for name in ("task", "pieces", "loss", "weights", "first loss", "last loss", "MB/rank"):
        table.add_column(name, justify="left" if name == "task" else "right")
    rows: dict[tuple[str, int], tuple[Cell, Difference]] = {}
    for cell in cells:
        if cell.precision == "no":
            pieces = max(2, cell.world_size * cell.accumulation)
            rows[cell.variant or "even", pieces] = cell, noise_floor(cell)
    for (name, pieces), (cell, floor) in sorted(rows.items()):
        whole = plain(cell.task, 1, cell.device)
        first, last = (f"{whole.losses[index]:.4f}" for index in (0, -1))
        size = f"{fullest(whole.num_bytes) / 1e6:.2f}"
        table.add_row(
            name, str(pieces), f"{floor.loss:.1e}", f"{floor.weight:.1e}", first, last, size
        )
    return table
