"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator

import pytest

from accel._lazy import attribute

PLACES = {"dumps": "json", "place": "os:getcwd", "missing": "json:not_there"}


@pytest.fixture
def package() -> Iterator[types.ModuleType]:
    module = types.ModuleType("a_lazy_package")
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_a_name_is_looked_up_once_and_kept(package: types.ModuleType) -> None:
    assert attribute(package.__name__, PLACES, "dumps") is json.dumps
    assert attribute(package.__name__, PLACES, "place") is os.getcwd
    assert vars(package)["dumps"] is json.dumps
    assert "missing" not in vars(package)


@pytest.mark.parametrize("name", ["unknown", "missing"])
def test_a_name_that_is_not_there_is_an_attribute_error(
    name: str, package: types.ModuleType
) -> None:
    with pytest.raises(AttributeError, match=r"no attribute '(unknown|not_there)'"):
        attribute(package.__name__, PLACES, name)
