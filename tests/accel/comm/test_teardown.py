"""Scripts on several processes end: none hangs, none aborts, however they leave (R9).

A gloo process whose threads outlive the interpreter dies of "terminate called without an active
exception", sometimes, and the more often the busier the machine is. So each way of leaving is taken
many times, to the very end of the process. Every process is a fresh one: the fault, which other
engines have, never showed in processes forked from one that had imported torch.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import free_port, python

ROOT = Path(__file__).resolve().parents[3]
MANY_RUNS = int(os.environ.get("TEARDOWN_RUNS", "200"))  # in the slow test; 5 in CI
AT_A_TIME = 2
SECONDS = 200.0  # until a run counts as hanging

SCRIPT = """
import sys

import torch
from accel import Accelerator


def train(accelerator):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.utils.data.TensorDataset(torch.randn(9, 3))
    loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared
    gathered = 0
    for step, (inputs,) in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        gathered += len(accelerator.gather_for_metrics(inputs))
        if MODE == "raised" and step == 1 and accelerator.process_index == 1:
            raise RuntimeError("raised on purpose")
    print(gathered, flush=True)
    return prepared


MODE = sys.argv[1]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
if MODE == "local":  # what was prepared is gone before the end
    train(accelerator)
    accelerator.end_training()
elif MODE == "ended":  # all is still there at the exit
    model, optimizer, loader, scheduler = train(accelerator)
    accelerator.end_training()
elif MODE == "freed":
    model, optimizer, loader, scheduler = train(accelerator)
    model, optimizer, loader, scheduler = accelerator.free_memory(
        model, optimizer, loader, scheduler
    )
    accelerator.end_training()
elif MODE == "forgotten":
    model, optimizer, loader, scheduler = train(accelerator)
elif MODE == "held":  # by each other and by a module, in the middle of a pass
    sys.held = [accelerator, *train(accelerator)]
    sys.held += [sys.held, iter(sys.held[3])]
    next(sys.held[-1])
    sys.held.append(sys.held[1](torch.ones(2, 3)))
elif MODE == "exited":
    train(accelerator)
    sys.exit(3)
elif MODE == "raised":
    train(accelerator)
    accelerator.end_training()
"""
ENDS = {
    "raised": ([1, 1], None),
    "held": ([0, 0], "9\n"),
    "forgotten": ([0, 0], "9\n"),
    "local": ([0, 0], "9\n"),
    "ended": ([0, 0], "9\n"),
    "freed": ([0, 0], "9\n"),
    "exited": ([3, 3], "9\n"),
}


def script(folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def problems(mode: str, codes: list[int], outputs: list[str]) -> list[str]:
    """Return what is wrong with how a run ended."""
    expected, printed = ENDS[mode]
    found = [] if codes == expected else [f"{mode}: exit codes {codes}: {outputs}"]
    for output in outputs:
        if "terminate called" in output or "Fatal Python error" in output:
            found.append(f"{mode}: {output}")
        if printed is not None and output != printed:
            found.append(f"{mode}: printed {output!r}")
    if mode == "raised" and "raised on purpose" not in outputs[1]:
        found.append(f"{mode}: the error was not told: {outputs[1]}")
    return found


def run(mode: str, path: str) -> list[str]:
    """Return what was wrong with a run of two processes."""
    try:
        codes, outputs = run_pair(path, mode)
    except subprocess.TimeoutExpired:
        return [f"{mode}: no end within {SECONDS} s"]
    return problems(mode, codes, outputs)


def run_pair(*command: str) -> tuple[list[int], list[str]]:
    """Return exit codes and outputs of two processes, started as a shell starts them."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), PYTHONPATH=str(ROOT))
    processes = [
        subprocess.Popen(
            python(*command),
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], outputs


def run_many(runs: int, folder: Path) -> list[str]:
    """Return what was wrong with any of `runs` runs, whose modes take turns."""
    path = script(folder)
    modes = itertools.islice(itertools.cycle(ENDS), runs)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        results = list(pool.map(lambda mode: run(mode, path), modes))
    assert len(results) == runs
    return [problem for result in results for problem in result]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_one_of_many_runs_ends(tmp_path: Path) -> None:
    assert run_many(MANY_RUNS, tmp_path) == []
