"""Parameters and optimizer state that rest on disk train as those in memory do.

DeepSpeed's asynchronous I/O is compiled at the first use on a machine (a minute), into the folder
that torch has for such things.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.utils import DeepSpeedPlugin
from tests.helpers import run_distributed

STEPS = 3
WIDTH = 1024  # DeepSpeed leaves what is smaller than 1 MiB per process in memory


def asynchronous_io() -> bool:
    """Whether this machine can compile DeepSpeed's asynchronous I/O (asked for elsewhere: it
    imports deepspeed)."""
    code = (
        "import os; os.environ['DS_ACCELERATOR'] = 'cpu'\n"
        "from deepspeed.ops.op_builder.cpu import AsyncIOBuilder\n"
        "raise SystemExit(not AsyncIOBuilder().is_compatible())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def built() -> None:
    """Compile the op once, outside the time limits of the tests' processes."""
    if not asynchronous_io():
        pytest.skip("libaio's development files are not installed (Debian: libaio-dev)")
    run_distributed(build_op, 1, timeout=400)


def build_op() -> None:
    from accel.strategies.deepspeed import package

    package.build(package.load(torch.device("cpu")), "AsyncIOBuilder")


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(512, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 512)
    )


def started(folder: Path | None) -> tuple[Any, ...]:
    """Accelerator, model and optimizer under ZeRO-3, in memory or on disk."""
    on_disk = {}
    for what in ("optimizer", "param") if folder is not None else ():
        on_disk |= {f"offload_{what}_device": "nvme", f"offload_{what}_nvme_path": str(folder)}
    plugin = DeepSpeedPlugin(zero_stage=3, **on_disk)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (accelerator, *accelerator.prepare(model, optimizer))


def step(accelerator: Any, model: Any, optimizer: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(4 * accelerator.num_processes, 512, generator=generator)
    own = inputs[accelerator.process_index :: accelerator.num_processes]
    loss = (model(own) - own).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), "mean"))


def trains_on_disk(folder: str) -> None:
    """Losses, weights and states agree; files lie where they were asked for."""
    root = Path(folder)
    accelerator, model, optimizer = started(None)
    losses = [step(accelerator, model, optimizer, number) for number in range(STEPS)]
    weights = accelerator.get_state_dict(model)
    accelerator.save_state(root / "in_memory")
    after = step(accelerator, model, optimizer, STEPS)
    accelerator.end_training()

    accelerator, model, optimizer = started(root / "swap")
    found = [step(accelerator, model, optimizer, number) for number in range(STEPS)]
    assert found == pytest.approx(losses, rel=1e-5)
    state = accelerator.get_state_dict(model)
    assert max((state[n] - weights[n]).abs().max().item() for n in weights) < 1e-5
    held = [p.ds_tensor for p in model.parameters() if p.dim() > 1]
    assert [tensor.numel() for tensor in held] == [1, 1]  # what is left in memory of each
    rank = accelerator.process_index
    files = {path.name: path.stat().st_size for path in (root / "swap").rglob(f"*rank{rank}/*.swp")}
    per_rank = 4 * 512 * WIDTH // accelerator.num_processes
    assert sum(name.endswith("_param.tensor.swp") for name in files) == 2
    assert [size >= 2 * per_rank for name, size in files.items() if "exp_avg" in name] == [True] * 2
    accelerator.save_state(root / "on_disk")
    assert step(accelerator, model, optimizer, STEPS) == pytest.approx(after, rel=1e-5)

    for source in ("in_memory", "on_disk"):
        accelerator.load_state(root / source)
        assert step(accelerator, model, optimizer, STEPS) == pytest.approx(after, rel=1e-5)
        again = step(accelerator, model, optimizer, STEPS + 1)
    accelerator.end_training()

    accelerator, model, optimizer = started(None)
    accelerator.load_state(root / "on_disk")
    assert step(accelerator, model, optimizer, STEPS) == pytest.approx(after, rel=1e-5)
    assert step(accelerator, model, optimizer, STEPS + 1) == pytest.approx(again, rel=1e-5)
    accelerator.end_training()


@pytest.mark.timeout(500)
@pytest.mark.usefixtures("built")
def test_parameters_and_optimizer_state_rest_on_disk(tmp_path: Path) -> None:
    run_distributed(trains_on_disk, 2, str(tmp_path), timeout=110)
