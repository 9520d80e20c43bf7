"""Loader workers outlive what asks a run to stop, and never their training process (R3)."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accel.data.prepare import prepare_data_loader
from tests.helpers import python

ROOT = Path(__file__).resolve().parents[3]
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Pids(Dataset[Any]):
    """Each sample names the process that has read it and what its `worker_init_fn` has set."""

    mark = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), Pids.mark, index])


class Stuck(Pids):
    """Its first sample is read, then it hangs."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index:
            time.sleep(600)
        return super().__getitem__(index)


def set_mark(worker_id: int) -> None:
    Pids.mark = 7 + worker_id


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """A training process that handles the stop signals."""
    seen: list[int] = []
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        signal.signal(number, lambda number, frame: seen.append(number))
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def prepared(dataset: Dataset[Any], **options: Any) -> Any:
    loader = DataLoader(dataset, batch_size=1, num_workers=1, worker_init_fn=set_mark, **options)
    return prepare_data_loader(loader, torch.device("cpu"))


@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", False), ("fork", True), pytest.param("spawn", True, marks=pytest.mark.slow)],
)
def test_a_worker_outlives_the_signals_that_its_parent_handles(
    method: str, persistent: bool, handled: list[int]
) -> None:
    loader = prepared(Pids(), multiprocessing_context=method, persistent_workers=persistent)
    for _ in range(2):
        rows = []
        for batch in loader:
            rows.append(batch[0].tolist())
            for number in STOPS if len(rows) < 32 else ():  # near the end it may be gone
                os.kill(rows[0][0], number)
        assert [row[1:] for row in rows] == [[7, index] for index in range(64)]
        assert rows[0][0] != os.getpid()
    assert loader.worker_init_fn is set_mark
    assert handled == []


def test_a_worker_that_hangs_is_ended(handled: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    batches = DataLoader.__iter__(prepared(Stuck()))
    pid = int(next(batches)[0, 0])
    del batches
    deadline = time.monotonic() + 20.0  # older torch kills it without waiting
    while pid in {child.pid for child in multiprocessing.active_children()}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from accel.data.prepare import prepare_data_loader
from tests.accel.data.test_worker_signals import Pids, Stuck
signal.signal(signal.SIGTERM, lambda number, frame: None)
for dataset in (Pids(), Stuck()):
    loader = DataLoader(dataset, batch_size=1, num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(loader, torch.device("cpu"))
    batches = DataLoader.__iter__(loader)
    print(int(next(batches)[0, 0]), flush=True)
    kept = globals().setdefault("kept", []); kept.append((loader, batches))
    if sys.argv[1] == "exit":
        break
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("ending", "code"), [pytest.param("exit", 0, marks=pytest.mark.slow), ("kill", -signal.SIGKILL)]
)
def test_no_worker_outlives_its_parent(ending: str, code: int) -> None:
    ended = subprocess.run(
        python("-c", SCRIPT, ending), cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stderr) == (code, "")
    deadline = time.monotonic() + 60
    left = [int(pid) for pid in ended.stdout.split()]
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        time.sleep(0.05)
    assert left == []
