"""E6, X1: budgets of code lines, names of strategies and circles of imports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.structure import naming, sizes
from tests.structure.imports import cycles, graph
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
    "accel/run/settings.py": 13,
    "accel/state.py": 25,
    "accel/strategies/optimizers.py": 1,
}


def test_code_outside_its_room_names_no_strategy() -> None:
    everywhere = naming.counted(naming.naming_lines(BOTH, naming.OWN_FILES))
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
    ("text", "kind"),
    [
        ("if plan.strategy == 'fsdp': ...", "other"),
        ("x = f'under {name} DeepSpeed {y}'", "other"),
        ("raise E('ZeRO-3 does not')", "other"),
        ("kind = DistributedType.TP", "documented"),
        ("def f(deepspeed_plugin=None): ...", "documented"),
        ("from accel.config.fsdp import Plugin", "import"),
        ("ddp_handler = DistributedDataParallelKwargs()", "ddp"),
        ("x = env['ACCELERATE_USE_FSDP']", "variable"),
        ("zero_stage = 2", "other"),
    ],
)
def test_a_line_that_names_a_strategy_is_found(text: str, kind: str) -> None:
    assert [one.kind for one in naming.naming_lines([source(text)])] == [kind]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("# fsdp", "accel/state.py"),
        ('def f():\n    """Under DeepSpeed."""', "accel/state.py"),
        ("optimizer.zero_grad(); torch.zeros(2)", "accel/state.py"),
        ("dims.tp_size * dims['tp']", "accel/state.py"),
        ("enable_fsdp_float8_all_gather = True", "accel/config/fp8.py"),
        ("_tp_plan = {}", "runner/builtin/bytes_gpt.py"),
        ("fsdp = 1", "accel/strategies/mesh/units.py"),
        ("fsdp = 1", "accel/config/fsdp_legacy.py"),
    ],
)
def test_these_lines_name_no_strategy(text: str, place: str) -> None:
    assert naming.naming_lines([source(text, place)]) == []


def test_a_string_of_several_lines_counts_by_line() -> None:
    found = naming.naming_lines([source('x = """a\nfsdp\nb\nddp fsdp"""')])
    assert [one.line for one in found] == [2, 4]


def test_code_lines_are_those_without_comments_and_docstrings() -> None:
    text = '"""Doc.\n\nMore."""\n\n# why\nx = [\n    1,  # one\n]\n'
    assert source(text).code_lines == {6, 7, 8}


@pytest.mark.parametrize(
    "text",
    [
        "from accel import b",
        "import accel.b",
        "def f():\n    from accel.b import x",
        "if TYPE_CHECKING:\n    from accel.b import x",
        "from . import b",
        "from .b import x",
    ],
)
def test_a_cycle_of_any_kind_is_found(text: str) -> None:
    b, c = source("import accel.a", "accel/b.py"), source("import accel.a", "accel/c.py")
    assert cycles(graph([source(text, "accel/a.py"), b, c])) == [["accel.a", "accel.b"]]


def test_nodes_are_those_without_docstrings() -> None:
    assert sizes.num_nodes(source('"""Doc."""\nx = 1\n')) == sizes.num_nodes(source("x = 1\n"))


def test_a_budget_that_is_exceeded_is_named() -> None:
    small = sizes.Size(1, 1, 1)
    found = {"accel": small, "runner": small, "tests": small}
    assert sizes.over_budget(found) == []
    large = sizes.Size(sizes.BUDGETS["runner"] + 1, 1, sizes.MAX_FILES)
    assert [text.split()[0] for text in sizes.over_budget({**found, "runner": large})] == [
        "runner",
        "accel",
    ]
