"""The enumerations hold the documented values, by name, by value, and as strings (E1)."""

from __future__ import annotations

import pytest

from tests.conformance.rows import find
from tests.conformance.table.utilities import ENUMERATIONS


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_values(name: str) -> None:
    kind = find(name)
    for member_name, value in ENUMERATIONS[name].items():
        member = getattr(kind, member_name)
        assert kind[member_name] is kind(value) is member
        assert member == value == str(member) == f"{member}"
        assert value in kind
        assert value in kind.list()
    assert "no such value" not in kind
    with pytest.raises(ValueError, match="no such value"):
        kind("no such value")
