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
# Of cells in fp8, on one process and on two. On one, losses and weights tell, which equal those of
# the plain loop in fp8; on several, the layers do (`fp8_layers`).
FLOAT8_SABOTAGES = (
    "nothing converted",
    "scale left out",
    "scale of small values left out",
    "head converted",
    "scale inverted",
)
# Those that losses and weights show on several processes, too, and in fp32. With the small weights
# of a new model, whose largest value is near to 1, a scale that is left out, or a head that is
# rounded, costs no more bits than the format. Where the largest value is 2**-16 of that, below the
# least number of the format, all becomes 0.
FAR_FROM_FP32 = ("scale of small values left out", "scale inverted")
# Of sequences that are divided.
SEQUENCES = ("a part counted twice", "keys of another rank backwards")
# Of data-parallel ranks, of which one reads what another one is to read.
DATA = "data of another rank"
# Of stages of a pipeline.
STAGES = ("a stage left out of the norm", "tied weight not summed")
# One of each engine; the others of its family share the code that the mistakes are in.
BACKENDS = ("ddp", "fsdp_full_shard", "tp", "zero2", "zero3", "xla")


def controls(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yield the controls of cells in fp8, and of `BACKENDS` on two processes in fp32."""
    for cell in cells:
        if cell.precision == "fp8":
            every = cell.world_size <= 2
            mistakes = FLOAT8_SABOTAGES if every else FLOAT8_SABOTAGES[:1]
            yield from (replace(cell, sabotage=sabotage) for sabotage in mistakes)
        kind = cell.precision, cell.world_size, cell.accumulation
        if (cell.backend, *kind, cell.variant) == ("cp", "no", 2, 2, ""):
            yield from (replace(cell, sabotage=sabotage) for sabotage in SEQUENCES)
        if (cell.backend, *kind, cell.variant) == ("pp", "no", 2, 2, ""):
            yield from (replace(cell, sabotage=sabotage) for sabotage in STAGES)
        alone = cell.backend == "xla"  # one process drives all devices
        if (cell.backend, *kind, cell.variant) == ("megatron_dp", "no", 2, 2, ""):
            yield replace(cell, sabotage=DATA)
        if cell.backend not in BACKENDS or kind != ("no", 1 if alone else 2, 2):
            continue
        for sabotage in SABOTAGES[alone:]:
            if (sabotage == "last window dropped") == (cell.variant == "short") and (
                cell.variant != "ragged"
            ):
                yield replace(cell, sabotage=sabotage)
