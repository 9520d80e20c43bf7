"""Negative controls: runs with one known mistake. Each must turn its cell red."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tests.parity.cells import Cell

SABOTAGES = (
    "gradients divided by W twice",
    "last window dropped",
    "clipping off",
    "weight decay off",
    "tied weight untied",
)
# Of a cell in fp8, on one process, which is equal to the plain loop in fp8.
FLOAT8_SABOTAGES = (
    "scale left out",
    "scale of small values left out",
    "head converted",
    "scale inverted",
)
# Those that fp32 shows, too, and the tolerance of several processes. With the small weights of a
# new model, whose largest value is near to 1, a scale that is left out, or a head that is rounded,
# costs no more bits than the format. Where the largest value is 2**-16 of that, below the least
# number of the format, all becomes 0.
FAR_FROM_FP32 = ("scale of small values left out", "scale inverted")
# One of each engine; the others of its family share the code that the mistakes are in.
BACKENDS = ("ddp", "fsdp_full_shard", "tp", "zero2", "zero3")


def controls(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yield the controls of `BACKENDS` among `cells`: two processes, two micro-batches, fp32."""
    for cell in cells:
        if (cell.backend, cell.precision) == ("single", "fp8"):
            yield from (replace(cell, sabotage=sabotage) for sabotage in FLOAT8_SABOTAGES)
        if cell.backend in BACKENDS and (cell.precision, cell.world_size) == ("fp8", 2):
            yield from (replace(cell, sabotage=sabotage) for sabotage in FAR_FROM_FP32)
        kind = cell.precision, cell.world_size, cell.accumulation
        if cell.backend not in BACKENDS or kind != ("no", 2, 2):
            continue
        for sabotage in SABOTAGES:
            if (sabotage == "last window dropped") == (cell.variant == "short") and (
                cell.variant != "ragged"
            ):
                yield replace(cell, sabotage=sabotage)
