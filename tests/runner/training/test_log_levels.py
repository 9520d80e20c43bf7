"""Log levels: set in the context, and nowhere else."""

from __future__ import annotations

import logging

import pytest

from runner.training import log_levels


def test_named_loggers_speak_and_are_silent_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "level", logging.WARNING)
    for name in ("own.levels", "other.levels"):
        monkeypatch.setattr(logging.getLogger(name), "_cache", {})
    logger, other = logging.getLogger("own.levels"), logging.getLogger("other.levels")
    root = logging.getLogger()
    before = root.level, list(root.handlers), logger.level
    with log_levels.applied({"own.levels": "DEBUG"}):
        logger.debug("heard")
        other.debug("not heard")
    assert (root.level, list(root.handlers), logger.level) == before
    told = capsys.readouterr().err
    assert "][own.levels][DEBUG] - heard\n" in told
    assert "not heard" not in told


def test_the_root_means_all(capsys: pytest.CaptureFixture[str]) -> None:
    with log_levels.applied({"": "INFO"}):
        logging.getLogger("any.levels").info("heard")
    assert "heard" in capsys.readouterr().err


def test_without_levels_nothing_changes() -> None:
    before = list(logging.getLogger().handlers)
    with log_levels.applied({}):
        assert logging.getLogger().handlers == before
