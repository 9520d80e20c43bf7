"""Budgets of the structure, which may only go down, and checks of what measures it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.structure import mirror, naming, sizes, words
from tests.structure.imports import cycles, graph
from tests.structure.report import measures, table
from tests.structure.source import PACKAGES, Source, read

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = {package: read(ROOT, package) for package in PACKAGES}
BOTH = [source for sources in SOURCES.values() for source in sources]

# What is there now. Lower a number where code gets below it; the aim is in the comment.
MAX_NAMING = 45
# Such lines by file, with the files that all strategies share: documented arguments, members and
# attributes, the documented name of a folder, and a kind of optimizer.
NAMING = {
    "accel/accelerator.py": 5,
    "accel/checkpoint/directory.py": 1,
    "accel/config/parallelism.py": 3,
    "accel/enums.py": 3,
    "accel/imports.py": 2,
    "accel/run_settings.py": 9,
    "accel/state.py": 22,
    "accel/strategies/non_elementwise_optimizers.py": 1,
}
MAX_MEMBERS = 17  # 14
MAX_CYCLES = {"accel": 0, "runner": 0}
MAX_LONG_FILES = {"accel": 0, "runner": 0}  # over 500 lines
MAX_ANY = {"accel": 16.0, "runner": 6.5}  # per 1,000 lines
MAX_UNTESTED = {"accel": 14, "runner": 0}  # 0, 0
MAX_MEDIAN, MAX_P90 = 7, 21


def test_code_outside_its_room_names_no_strategy() -> None:
    everywhere = naming.counted(naming.naming_lines(BOTH, naming.OWN_FILES))
    found = [one for one in everywhere if not naming.ROOMS.fullmatch(one.place)]
    assert len(found) <= MAX_NAMING, Counter(one.place for one in found)
    assert Counter(one.place for one in everywhere) == NAMING, everywhere


def test_the_interface_of_a_strategy_is_small() -> None:
    assert len(sizes.public_members(SOURCES["accel"], "Strategy")) <= MAX_MEMBERS


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str) -> None:
    found = cycles(graph(SOURCES[package]))
    assert len(found) <= MAX_CYCLES[package], found


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short(package: str) -> None:
    found = sizes.longer(SOURCES[package], 500)
    assert len(found) <= MAX_LONG_FILES[package], found


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_known(package: str) -> None:
    assert sizes.any_per_thousand_lines(SOURCES[package]) <= MAX_ANY[package]


def test_functions_are_short() -> None:
    median, p90 = sizes.median_and_p90([one.num_lines for one in sizes.functions(BOTH)])
    assert median <= MAX_MEDIAN
    assert p90 <= MAX_P90


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_is_tested_under_its_name(package: str) -> None:
    missing = mirror.untested(ROOT, SOURCES[package])
    assert len(missing) <= MAX_UNTESTED[package], missing


def test_no_module_is_excused_in_vain() -> None:
    places = {source.place for source in BOTH}
    tested = {place for place in mirror.EXCUSED if (ROOT / mirror.test_of(place)).exists()}
    assert set(mirror.EXCUSED) <= places
    assert tested == set()


@pytest.mark.slow  # each subject has a test of its own
def test_the_table_has_every_subject() -> None:
    text = table(measures(ROOT))
    for subject in ("lines that name a strategy", "Strategy", "files of accel", "README"):
        assert subject in text


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


def test_overriders_are_found_through_classes_between() -> None:
    base = source("class Strategy:\n    x: int\n    def a(self): ...\n    def _b(self): ...\n")
    below = source("class Mesh(base.Strategy): ...\nclass Fsdp(Mesh):\n    def a(self): ...\n")
    assert sizes.overriders([base, below], "Strategy") == {"x": [], "a": ["Fsdp"]}


def test_attributes_of_instances_are_members() -> None:
    text = "class Strategy:\n    def __init__(self, y):\n        self.y, self._z = y, 1\n"
    assert sizes.public_members([source(text)], "Strategy") == ["y"]


def test_lengths() -> None:
    text = "def long():\n    a = 1\n    b = 2\n    def short(): ...\n"
    assert [one.num_lines for one in sizes.functions([source(text)])] == [4, 1]
    assert sizes.median_and_p90([*range(1, 11)]) == (5.5, 10)


def test_any_is_counted_where_it_is_used() -> None:
    text = "from typing import Any\ndef f(x: Any) -> 'dict[str, typing.Any]': ...\ny: typing.Any\n"
    assert sizes.num_any(source(text)) == 2


@pytest.mark.parametrize(
    ("text", "word", "number"),
    [
        ("dp: data-parallel rank, data parallel size, data_parallel", "data parallel", 3),
        ("nn.DistributedDataParallel", "data parallel", 0),
        ("# of the process\n    # group", "process group", 1),
        ("Reshard, shards, unshard; sharding", "shard", 4),
        ("load_state_dict state-dicts", "state dict", 2),
        ("tied weights; tied_parameters", "tied weights", 2),
    ],
)
def test_words_of_the_field_are_counted(text: str, word: str, number: int) -> None:
    assert words.counts([text], words.FIELD)[word] == number


@pytest.mark.parametrize(
    ("text", "word", "number"),
    [
        ("the whole state, whole_state; wholesale", "whole", 2),
        ("settle, settled_arguments, unsettled", "settle…", 2),
        ("goes\n    on; go on; going on", "go on, goes on", 2),
    ],
)
def test_words_that_are_replaced_are_counted(text: str, word: str, number: int) -> None:
    assert words.counts([text], words.REPLACED)[word] == number


def test_what_is_counted_in_prose_only() -> None:
    text = '"""What is trained."""\nwhat = 1  # of what lies\nx = f"what {y}"\nwhat = what\n'
    assert words.num_what([source(text)]) == 3


def test_the_test_of_a_module_has_its_name() -> None:
    assert mirror.test_of("accel/data/pass_tracking.py") == "tests/accel/data/test_pass_tracking.py"
    assert mirror.test_of("accel/_step_api.py") == "tests/accel/test_step_api.py"
