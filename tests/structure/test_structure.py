"""E6, X1: budgets of code lines, names of strategies and circles of imports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.structure import sizes
from tests.structure.imports import cycles, graph
from tests.structure.naming import naming_lines
from tests.structure.source import PACKAGES, Source, read

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = {package: read(ROOT, package) for package in PACKAGES}
BOTH = [source for sources in SOURCES.values() for source in sources]

# Lines that may name a strategy outside of its room, by file: documented arguments, members and
# attributes, the documented name of a folder, and a kind of optimizer.
NAMING = {
    "accel/accelerator.py": 10,
    "accel/checkpoint/directory.py": 1,
    "accel/config/parallelism.py": 3,
    "accel/machine/enums.py": 3,
    "accel/machine/imports.py": 2,
    "accel/run/settings.py": 12,
    "accel/state.py": 28,
    "accel/strategies/optimizers.py": 1,
    "runner/language/adapters.py": 1,
}


def test_code_outside_its_room_names_no_strategy() -> None:
    everywhere = naming_lines(BOTH)
    assert Counter(one.place for one in everywhere) == NAMING, everywhere


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str) -> None:
    assert cycles(graph(SOURCES[package])) == []


def test_the_code_keeps_its_budgets() -> None:
    assert sizes.over_budget(sizes.sizes(ROOT)) == []


# -- what measures, measured ---------------------------------------------------------------


def source(text: str, place: str = "accel/_step_api.py") -> Source:
    return Source(place, text)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = f'under {name} DeepSpeed {y}'", [1]),
        ("raise E('ZeRO-3 does not')", [1]),
        ("kind = DistributedType.TP", [1]),
        ('x = """a\nfsdp\nb\nddp fsdp"""', [2, 4]),
        ("ddp_handler = DistributedDataParallelKwargs()", []),
        ('# fsdp\ndef f():\n    """Under DeepSpeed."""', []),
        ("optimizer.zero_grad(); torch.zeros(2); dims.tp_size * dims['tp']", []),
    ],
)
def test_a_line_that_names_a_strategy_is_found(text: str, lines: list[int]) -> None:
    assert [one.line for one in naming_lines([source(text)])] == lines


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from accel.b import x",
        "if TYPE_CHECKING:\n    import accel.b",
        "from . import b",
    ],
)
def test_a_cycle_of_any_kind_is_found(text: str) -> None:
    b, c = source("import accel.a", "accel/b.py"), source("import accel.a", "accel/c.py")
    assert cycles(graph([source(text, "accel/a.py"), b, c])) == [["accel.a", "accel.b"]]
