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


def controls(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yield the controls of each backend among `cells` that runs on two processes in fp32."""
    for cell in cells:
        if (cell.precision, cell.world_size, cell.accumulation) != ("no", 2, 2):
            continue
        for sabotage in SABOTAGES:
            if (sabotage == "last window dropped") == (cell.variant == "short") and (
                cell.variant != "ragged"
            ):
                yield replace(cell, sabotage=sabotage)
