"""E1: the conformance table fits the code: names, parameters, defaults, tests."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import accel
import accel.utils
from accel import Accelerator
from tests.conformance.rows import REQUIRED, TESTS, Entry, Row, find, function_of, id_of
from tests.conformance.table import PARTS, entries
from tests.conformance.upstream import has

ENTRIES = entries()
ROWS = [row for entry in ENTRIES for row in entry.rows()]


# Public names without rows → why.
WITHOUT_ROWS = {
    "DistributedOperationException": "it is raised, and caught by its name: no call, no parameter",
    "is_torch_tensor": "in tests/test_public_api.py, as are constants",
    **dict.fromkeys(
        (
            *("check_device_same", "clean_device_map", "compute_module_total_buffer_size"),
            *("get_module_leaves", "get_non_persistent_buffers", "get_state_dict_from_offload"),
            *("get_state_dict_offloaded_model", "ConvertOutputsToFp32"),
        ),
        "the documentation does not list it; libraries import it from its module",
    ),
    **dict.fromkeys(filter(str.isupper, vars(accel.utils.constants)), "constants"),
}


def test_every_part_has_entries() -> None:
    assert PARTS
    assert all(entries(part) for part in PARTS)


def _root(row: Row) -> str:
    """Return the documented name of a row, or that of the class whose member it is."""
    module, _, path = row.name.partition(":")
    return f"{module}:{path.partition('.')[0]}"


def _public_names(package: ModuleType) -> list[str]:
    shown = [n for n in dir(package) if not n.startswith("_") and n != "annotations"]
    return [name for name in shown if not inspect.ismodule(getattr(package, name))]


@pytest.mark.parametrize("package", [accel, accel.utils], ids=lambda package: package.__name__)
def test_every_public_name_has_rows(package: ModuleType) -> None:
    """Names of classes count if a row is of the class or of one of its members."""
    covered = {id(find(root)) for root in map(_root, ROWS)}
    names = _public_names(package)
    assert {"Accelerator", "gather"} & set(names)
    missing = [name for name in names if id(getattr(package, name)) not in covered]
    assert sorted(set(missing) - WITHOUT_ROWS.keys()) == []


def test_names_without_rows_are_public_and_have_none() -> None:
    public = {*_public_names(accel), *_public_names(accel.utils)}
    assert WITHOUT_ROWS.keys() <= public
    assert {_root(row).partition(":")[2] for row in ROWS}.isdisjoint(WITHOUT_ROWS)


def test_every_member_of_the_accelerator_has_rows() -> None:
    prefix = "accel:Accelerator."
    rows = {str(row).removeprefix(prefix).partition("(")[0] for row in ROWS if prefix in str(row)}
    members = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert sorted(members - rows) == []


def test_no_row_is_there_twice() -> None:
    names = [str(row) for row in ROWS]
    assert sorted(names) == sorted(set(names))


def test_the_test_of_each_row_exists() -> None:
    tests = {row.test for row in ROWS}
    files = {id_of(test).partition("::")[0] for test in tests}
    assert all((TESTS.parent / file).is_file() for file in files)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_signatures_are_the_documented_ones(entry: Entry) -> None:
    """Documented parameters come first, in the documented order, with the documented defaults."""
    if not entry.parameters:
        assert entry.object() is not None
        return
    found = entry.object()
    signature = inspect.signature(found if inspect.isclass(found) else function_of(found))
    ours = [name for name in signature.parameters if name not in ("self", "cls")]
    documented = [name for name, parameter in entry.parameters.items() if not parameter.keyword]
    assert ours[: len(documented)] == documented
    for name in documented:
        default = entry.parameters[name].default
        parameter = signature.parameters[name]
        if default is REQUIRED:
            assert parameter.default is parameter.empty, name
        elif default is not dict:  # a factory of an empty dict shows as such
            assert parameter.default == default, name


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_attributes_and_values_exist(entry: Entry) -> None:
    assert [name for name in entry.attributes if not has(entry.object(), name)] == []
