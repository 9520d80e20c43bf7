"""Training in fp16: on a CPU behind the refusal, which DeepSpeed's own kernels would not need.

Holds E3.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from accel.strategies.deepspeed import spec
from tests.helpers import run_distributed
from tests.parity import gates, workers
from tests.parity.cells import Cell
from tests.parity.task import Task


def train_in_fp16(cell: Cell) -> dict[str, object]:
    """Train `cell` as on a GPU."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    formats = [torch.float, torch.bfloat16, torch.float16]
    with (
        patch.object(spec, "_refused_format", return_value=None),
        patch.object(CPU_Accelerator, "supported_dtypes", return_value=formats),
    ):
        return workers.train(cell)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_are_scaled_and_unscaled_once(stage: int) -> None:
    """Stage 0 divided by a scale that nothing was multiplied with."""
    cell = Cell(f"zero{stage}", "fp16", 1, 2, Task(num_steps=4))
    verdict = gates.judge(cell, run_distributed(train_in_fp16, 1, cell), 0.0)
    assert verdict.green, verdict.failures
