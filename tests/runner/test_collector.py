"""Garbage is looked for rarely while a command imports, and as before once it trains."""

from __future__ import annotations

import gc

from runner import collector


def test_it_is_rare_and_then_as_before() -> None:
    before = gc.get_threshold()
    collector.collect_rarely()
    try:
        assert gc.get_threshold()[0] > 10 * before[0]
    finally:
        collector.collect_usually()
    assert gc.get_threshold() == before


def test_what_the_users_code_has_set_stays() -> None:
    before = gc.get_threshold()
    collector.collect_rarely()
    try:
        gc.set_threshold(12_345, 10, 10)
        collector.collect_usually()
        assert gc.get_threshold() == (12_345, 10, 10)
    finally:
        gc.set_threshold(*before)
