"""Code lines that name a particular strategy where code should not know which one is on.

Counted are lines of `accel/` and `runner/` with at least one token (a name, or a string with the
parts of an f-string) that `NAMES` finds, outside of the strategies' own files. Comments and
docstrings do not count; messages of errors and documented names (`fsdp_plugin`) do. A token of
several lines counts once for each line with a name. The axes of `ParallelDims` (`tp`, `tp_size`,
`dp_shard`) are topology, not strategies; names that other libraries fix (`OF_OTHERS`) ask for no
strategy. Lines that name DistributedDataParallel alone do not count: it is the default.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.structure.source import STRINGS, Source

OWN_FILES = re.compile(
    r"accel/strategies/(mesh|deepspeed|megatron)/.*"
    r"|accel/strategies/(table|default_specs|ddp\w*|single)\.py"
    r"|accel/config/(fsdp|deepspeed|tensor_parallel|megatron)\w*\.py"
    r"|accel/_exports\.py|accel/utils/\w+\.py"  # the table of documented names, and constants
    r"|(accel|runner)/__init__\.py"
)
NAMES = re.compile(
    r"(?i:fsdp|fully_?shard|deep_?speed|megatron|tensor[_\- ]?parallel|(?<![a-z])tp_plan|torch_tp"
    r"|zero(\d|_stage|_optimization|_init|\.init))|ZeRO|DistributedType\.TP"
)
# A field of torchao's fp8 recipe, and the attribute by which models of transformers bring a plan.
OF_OTHERS = re.compile(r"enable_fsdp_float8_all_gather|(?<![\w.])_tp_plan")


@dataclass(frozen=True)
class Naming:
    """A line that names a strategy.

    Attributes:
        place: the file.
        line: its number, from 1.
    """

    place: str
    line: int


def naming_lines(sources: Iterable[Source]) -> list[Naming]:
    """Return the lines of `sources` outside of the strategies' files that name a strategy."""
    return [
        Naming(source.place, line)
        for source in sources
        if not OWN_FILES.fullmatch(source.place)
        for line in sorted(set(_lines(source)))
    ]


def _lines(source: Source) -> Iterator[int]:
    before = ("", "")
    for token in source.code_tokens:
        if token.type == tokenize.NAME:
            whole = "".join((*before, token.string))
            text = whole if whole == "DistributedType.TP" else token.string
        else:
            text = token.string if token.type in STRINGS else ""
        for offset, part in enumerate(text.split("\n")):
            if NAMES.search(OF_OTHERS.sub("", part)):
                yield token.start[0] + offset
        before = (before[1], token.string)
