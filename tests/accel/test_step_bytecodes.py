"""What a micro-batch costs over the hand-written loop, counted: time differs between machines."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import accel
from accel import Accelerator

PACKAGE = str(Path(accel.__file__).parent)
BATCHES = 20
# Python 3.11 counts 166 instructions in 8 calls per micro-batch; other versions differ somewhat.
MOST_INSTRUCTIONS, MOST_CALLS = 200, 8


def test_a_micro_batch_costs_few_instructions_and_calls() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    loader = DataLoader(TensorDataset(torch.ones(BATCHES + 2, 2)))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counted: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted[event] += 1
        return trace

    before = sys.gettrace()
    for number, (inputs,) in enumerate(loader):
        if number == BATCHES:  # the last ones look ahead for the end
            sys.settrace(before)
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if number == 0:
            sys.settrace(trace)
    assert counted["opcode"] / BATCHES <= MOST_INSTRUCTIONS
    assert counted["call"] / BATCHES <= MOST_CALLS
