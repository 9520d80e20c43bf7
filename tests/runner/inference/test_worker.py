"""Processes of `runner eval` and `runner predict`: the request travels, rank 0 has the result.

Holds L1.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from runner.inference import worker
from runner.inference.session import Evaluation, Request, Worker
from runner.training.stopping import StopFlag


def test_a_request_is_read_as_it_was_written(tmp_path: Path) -> None:
    request = Request(
        tmp_path, ("model.width=3",), ("test",), "last", tmp_path / "p.jsonl", num_processes=2
    )
    worker.write_request(tmp_path, request)
    assert worker.read_request(tmp_path) == request
    worker.write_request(tmp_path, Request(tmp_path))
    assert worker.read_request(tmp_path) == Request(tmp_path)


@pytest.mark.parametrize(("rank", "written"), [("0", True), ("1", False), (None, True)])
def test_rank_0_writes_the_result(
    rank: str | None, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Evaluation({"test": {"loss": 0.5}}, tmp_path / "checkpoint_0", 3, 1.5, 2, [])
    monkeypatch.setattr(worker, "evaluate", lambda request, worker: found)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
    worker.write_request(tmp_path, Request(tmp_path, num_processes=2))
    assert worker.run(tmp_path, Worker(StopFlag(), nullcontext)) == 0
    assert (tmp_path / worker.RESULT).exists() is written
    if written:
        assert worker.read_result(tmp_path) == worker.plain(found)


def test_the_other_ranks_compute_predictions_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        worker, "predictions_dropped", lambda request, worker: calls.append("dropped")
    )
    monkeypatch.setattr(worker, "write_predictions", lambda request, worker: 7)
    request = Request(tmp_path, output=tmp_path / "p.jsonl", num_processes=2)
    assert worker.attempt(request, 1) is None
    assert worker.attempt(request, 0) == {"count": 7}
    assert calls == ["dropped"]
