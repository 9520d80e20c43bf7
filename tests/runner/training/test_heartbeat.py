"""How far the main thread has come, as the watchdog reads it."""

from __future__ import annotations

import pytest

from runner.training.heartbeat import Progress


def test_the_first_step_ends_the_slow_start() -> None:
    progress = Progress()
    assert (progress.phase, progress.is_slow) == ("start-up", True)
    progress.step()
    assert (progress.phase, progress.is_slow, progress.count) == ("training", False, 1)
    progress.batch()
    assert progress.count == 2


def test_a_slow_phase_ends_where_it_began_also_after_an_error() -> None:
    progress = Progress()
    progress.step()
    with progress.slow_phase("evaluation"):
        assert (progress.phase, progress.is_slow) == ("evaluation", True)
        with pytest.raises(ValueError, match="within"), progress.slow_phase("saving"):
            raise ValueError("within")
        assert (progress.phase, progress.is_slow) == ("evaluation", True)
    assert (progress.phase, progress.is_slow, progress.count) == ("training", False, 5)
