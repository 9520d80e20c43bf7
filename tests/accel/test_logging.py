"""Loggers that know their process (E1)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from accel.logging import MultiProcessAdapter, get_logger
from accel.machine import env
from accel.machine.errors import ConfigError
from accel.state import PartialState
from tests.helpers import run_distributed

NAME = "accel.tests.logging"


class Recorder(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Record the test's logger and leave it as it was."""
    logger, handler = logging.getLogger(NAME), Recorder()
    levels = logger.level, logger.root.level
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(levels[0])
    logger.root.setLevel(levels[1])


def log_everywhere() -> list[str]:
    state = PartialState(cpu=True)
    handler = Recorder()
    logging.getLogger(NAME).addHandler(handler)
    logger = get_logger(NAME, "info")
    logger.info("main %s", "only")
    logger.info("everybody", main_process_only=False)
    logger.error("in turn", main_process_only=False, in_order=True)
    logger.debug("too low", main_process_only=False)
    logging.getLogger(NAME).removeHandler(handler)
    logger.logger.setLevel(logging.NOTSET)
    logger.logger.root.setLevel(logging.WARNING)
    state.destroy_process_group()
    return handler.texts()


@pytest.mark.parametrize("size", [1, 2])
def test_who_logs(size: int) -> None:
    main, *others = run_distributed(log_everywhere, size)
    assert main == ["main only", "everybody", "in turn"]
    assert others == [["everybody", "in turn"]] * (size - 1)


def order_of_lines() -> list[float]:
    state = PartialState(cpu=True)
    handler = Recorder()
    logging.getLogger(NAME).addHandler(handler)
    get_logger(NAME).warning("x", main_process_only=False, in_order=True)
    logging.getLogger(NAME).removeHandler(handler)
    times: list[float] = state.comm.all_gather_object(handler.records[0].created)
    state.destroy_process_group()
    return times


def test_in_order_goes_by_rank() -> None:
    times = run_distributed(order_of_lines, 3)[0]
    assert times == sorted(times)


def test_level(recorder: Recorder) -> None:
    with env.patched(ACCELERATE_LOG_LEVEL="DEBUG"):
        logger = get_logger(NAME)
    assert logger.logger.level == logger.logger.root.level == logging.DEBUG
    get_logger(NAME, log_level="ERROR").info("no")
    assert recorder.texts() == []


@pytest.mark.parametrize("argument", [None, "BLAH"])
def test_an_unknown_level_is_refused(argument: str | None) -> None:
    before = logging.root.level
    where = "log_level" if argument else "ACCELERATE_LOG_LEVEL"
    with (
        env.patched(ACCELERATE_LOG_LEVEL="BLAH"),
        pytest.raises(ConfigError, match=rf"{where}='BLAH': it is one of .*WARNING"),
    ):
        get_logger(NAME, log_level=argument)
    assert logging.root.level == before


def test_warning_once(recorder: Recorder) -> None:
    logger = get_logger(NAME)
    for _ in range(3):
        logger.warning_once("again %s", 1)
    logger.warning_once("again %s", 2)
    assert recorder.texts() == ["again 1", "again 2"]


def test_the_callers_line_is_reported(recorder: Recorder) -> None:
    PartialState(cpu=True)
    logger = get_logger(NAME)
    logger.warning("plain")
    logger.warning("in order", main_process_only=False, in_order=True)
    logger.warning_once("once")
    here = ("test_logging.py", "test_the_callers_line_is_reported")
    assert [(record.filename, record.funcName) for record in recorder.records] == [here] * 3


def test_before_the_state_is_built_the_launcher_tells_who_is_main(recorder: Recorder) -> None:
    logger: MultiProcessAdapter = get_logger(NAME)
    with env.patched(RANK="1"):
        logger.warning("second")
    with env.patched(RANK="0"):
        logger.warning("main")
    logger.error("alone")
    assert recorder.texts() == ["main", "alone"]
    assert not PartialState._shared_state
