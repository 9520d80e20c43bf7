"""Code lines that name a particular strategy where code should not know which one is on.

**The rule.** Counted are lines of `accel/` and `runner/` with at least one token (a name, or a
string with the parts of an f-string) that names a strategy, outside of `ROOMS`: the strategies'
rooms with their table, and the modules of `accel/config/` that describe one strategy's
configuration. Comments and docstrings do not count; messages of errors and documented names
(`fsdp_plugin`, `DistributedDataParallelKwargs`) do. A token of several lines counts once for each
line with a name.

A token names a strategy if it holds one of these, in any case:

* ``fsdp``, ``FullyShardedDataParallel``, ``fully_shard``
* ``deepspeed``, ``deep_speed``
* ``ddp`` as a word (``ddp_handler``, ``DDPStrategy``), ``DistributedDataParallel``
* ``tensor_parallel``, ``TensorParallel``, ``tensor-parallel``, ``tp_plan``, ``torch_tp``,
  ``DistributedType.TP``
* ``megatron``
* ``ZeRO`` (so written), ``zero`` followed by a digit, ``_stage``, ``_optimization``, ``_init`` or
  a full stop and ``Init``

The axes of `ParallelDims` (`tp`, `tp_size`, `dp_shard`) are topology, not strategies; ``zero_grad``
and ``zeros`` are arithmetic; names that other libraries fix (`OF_OTHERS`) ask for no strategy.

Each line has one category, the first that fits:

* ``facade``: in `accel/__init__.py`, `accel/utils/__init__.py`, `runner/__init__.py`
* ``ddp``: names DistributedDataParallel only, which is the default where nothing else is on
* ``import``: an import of a name from another module
* ``variable``: environment variables only
* ``documented``: names that the documentation of the API fixes only, such as `fsdp_plugin`
* ``other``: the rest

`counted` leaves out ``facade`` and ``ddp``.
"""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.structure.source import STRINGS, Source

ROOMS = re.compile(
    r"accel/strategies/.*"
    r"|accel/config/(fsdp|deepspeed|tensor_parallel|megatron)\w*\.py"
    r"|accel/config/parallel\.py"  # `tensor_parallel.py`, as it was once called
    r"|accel/_exports\.py|accel/utils/\w+\.py"  # the table of documented names, and constants
)
# The same without the files that all strategies share, where none is to be named either.
OWN_FILES = re.compile(
    r"accel/strategies/(mesh|deepspeed|megatron)/.*"
    r"|accel/strategies/(table|default_specs|ddp\w*|single)\.py"
    r"|accel/config/(fsdp|deepspeed|tensor_parallel|megatron)\w*\.py"
    r"|accel/_exports\.py|accel/utils/\w+\.py"
)
NAMES = re.compile(
    r"fsdp|fully_?shard|deep_?speed|megatron|(?<![a-z])ddp(?![a-z])|distributed_?data_?parallel"
    r"|tensor[_\- ]?parallel|(?<![a-z])tp_plan|torch_tp|zero(\d|_stage|_optimization|_init|\.init)",
    re.IGNORECASE,
)
# A field of torchao's fp8 recipe, and the attribute by which models of transformers bring a plan.
OF_OTHERS = re.compile(r"enable_fsdp_float8_all_gather|(?<![\w.])_tp_plan")
AS_WRITTEN = re.compile(r"ZeRO|DDP")
DEFAULT = re.compile(r"(?<![a-z])ddp(?![a-z])|distributed_?data_?parallel", re.IGNORECASE)
# Names that the documentation of the API fixes: arguments, classes, members, modules.
DOCUMENTED = re.compile(
    r"(fsdp|deepspeed|megatron_lm|torch_tp)_plugins?|ddp_handler|\w*Plugin|\w*Kwargs"
    r"|DDPCommunicationHookType|Dummy(Optim|Scheduler)|(get_active|get|select)_deepspeed_plugin"
    r"|is_deepspeed_available|is_megatron_lm_available|HfDeepSpeedConfig"
    r"|DistributedType\.\w+|FSDP|DEEPSPEED|MEGATRON_LM|MULTI_\w+"
)
FACADES = ("accel/__init__.py", "accel/utils/__init__.py", "runner/__init__.py")
LEFT_OUT = ("facade", "ddp")


@dataclass(frozen=True)
class Naming:
    """A line that names a strategy.

    Attributes:
        place: the file.
        line: its number, from 1.
        kind: the category.
        text: the line.
    """

    place: str
    line: int
    kind: str
    text: str


def names_strategy(text: str) -> bool:
    """Return whether the text of a token names a strategy."""
    text = OF_OTHERS.sub("", text)
    return bool(NAMES.search(text) or AS_WRITTEN.search(text))


def names_default_only(text: str) -> bool:
    """Return whether the text of a token names DistributedDataParallel and no other strategy."""
    rest = DEFAULT.sub("", text).replace("DDP", "")
    return rest != text and not names_strategy(rest)


def naming_tokens(source: Source) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of names, and of lines of strings, that name a strategy."""
    before = ("", "")
    for token in source.code_tokens:
        if token.type == tokenize.NAME:
            full = "".join((*before, token.string))
            if names_strategy(token.string) or full == "DistributedType.TP":
                yield token.start[0], full if full == "DistributedType.TP" else token.string
        elif token.type in STRINGS:
            for offset, text in enumerate(token.string.split("\n")):
                if names_strategy(text):
                    yield token.start[0] + offset, text
        before = (before[1], token.string)


def kind_of(source: Source, line: str, found: list[str]) -> str:
    """Return the category of a line by the tokens that name a strategy in it."""
    if source.place in FACADES:
        return "facade"
    if all(names_default_only(text) for text in found):
        return "ddp"
    if re.match(r"\s*(from|import)\s", line):
        return "import"
    if all(re.search(r"ACCELERATE_|FSDP_|DEEPSPEED_|MEGATRON_", text) for text in found):
        return "variable"
    if all(DOCUMENTED.fullmatch(text.strip("'\"")) for text in found):
        return "documented"
    return "other"


def naming_lines(sources: Iterable[Source], rooms: re.Pattern[str] = ROOMS) -> list[Naming]:
    """Return the lines of `sources` outside of `rooms` that name a strategy."""
    found = []
    for source in sources:
        if rooms.fullmatch(source.place):
            continue
        by_line: dict[int, list[str]] = {}
        for line, text in naming_tokens(source):
            by_line.setdefault(line, []).append(text)
        lines = source.text.split("\n")
        found += [
            Naming(source.place, at, kind_of(source, lines[at - 1], texts), lines[at - 1].strip())
            for at, texts in sorted(by_line.items())
        ]
    return found


def counted(found: Iterable[Naming]) -> list[Naming]:
    """Return the lines that count: those of facades and of the default do not."""
    return [one for one in found if one.kind not in LEFT_OUT]
