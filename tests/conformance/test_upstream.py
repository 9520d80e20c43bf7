"""E1: each documented name of the upstream release is there, or its absence has a reason."""

from __future__ import annotations

from functools import cache

import pytest

from tests.conformance.upstream import Documented, Gap, documented, gaps_of, totals
from tests.conformance.upstream_gaps import REASONS


@cache
def _gaps() -> tuple[Gap, ...]:
    return tuple(gap for name in documented() for gap in gaps_of(name))


def test_the_list_is_complete() -> None:
    assert totals() == {"name": 145, "member": 612, "parameter": 668, "argument": 285}


@pytest.mark.parametrize("name", documented(), ids=lambda name: name.path)
def test_a_name_is_there_with_its_members_or_has_a_reason(name: Documented) -> None:
    assert [gap.where for gap in gaps_of(name) if not gap.reason] == []


def test_no_reason_is_left_over() -> None:
    used = {start for gap in _gaps() for start in REASONS if gap.where.startswith(start)}
    assert set(REASONS) - used == set()
