"""Where ZeRO keeps weights and state: without a second copy, changed by hand, and on disk (R5).

DeepSpeed's asynchronous I/O is compiled at the first use on a machine (minutes), into the folder
that torch has for such ops: a slow test does it, and others use it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from tests import commands
from tests.helpers import ROOT, run_distributed

# -- on disk ---------------------------------------------------------------------------------


NUM_STEPS = 3


WIDTH = 1024  # DeepSpeed leaves what is smaller than 1 MiB per process in memory


OP = "AsyncIOBuilder"


UNABLE = "libaio's development files are not installed (Debian: libaio-dev)"


def asks(question: str) -> bool:
    """The answer of a process of its own, as deepspeed is imported for it."""
    code = (
        "import torch\nfrom accel.strategies.deepspeed import initialize\n"
        "known = initialize.import_deepspeed(torch.device('cpu'))\n"
        f"raise SystemExit(not ({question}))"
    )
    return commands.run("-c", code, cwd=ROOT, environment=os.environ).returncode == 0


@pytest.fixture(scope="module")
def able() -> None:
    """Skip where DeepSpeed's asynchronous I/O, which takes minutes to compile, cannot be built."""
    if not asks(f"known.accelerator.get_accelerator().create_op_builder({OP!r}).is_compatible()"):
        pytest.skip(UNABLE)


def build_wide() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(512, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 512)
    )


def started_on(folder: Path | None) -> tuple[Any, ...]:
    """Accelerator, model and optimizer under ZeRO-3, in memory or on disk."""
    on_disk = {}
    for what in ("optimizer", "param") if folder is not None else ():
        on_disk |= {f"offload_{what}_device": "nvme", f"offload_{what}_nvme_path": str(folder)}
    plugin = DeepSpeedPlugin(zero_stage=3, **on_disk)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = build_wide()
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
    accelerator, model, optimizer = started_on(None)
    losses = [step(accelerator, model, optimizer, number) for number in range(NUM_STEPS)]
    weights = accelerator.get_state_dict(model)
    accelerator.save_state(root / "in_memory")
    after = step(accelerator, model, optimizer, NUM_STEPS)
    accelerator.end_training()

    accelerator, model, optimizer = started_on(root / "swap")
    found = [step(accelerator, model, optimizer, number) for number in range(NUM_STEPS)]
    assert found == pytest.approx(losses, rel=1e-5)
    state = accelerator.get_state_dict(model)
    assert max((state[n] - weights[n]).abs().max().item() for n in weights) < 1e-5
    held = [p.ds_tensor for p in model.parameters() if len(p.ds_shape) > 1]
    assert [tensor.final_location.value for tensor in held] == ["nvme", "nvme"]
    rank = accelerator.process_index
    files = {path.name: path.stat().st_size for path in (root / "swap").rglob(f"*rank{rank}/*.swp")}
    per_rank = 4 * 512 * WIDTH // accelerator.num_processes
    assert sum(name.endswith("_param.tensor.swp") for name in files) == 2
    assert [size >= 2 * per_rank for name, size in files.items() if "exp_avg" in name] == [True] * 2
    accelerator.save_state(root / "on_disk")
    assert step(accelerator, model, optimizer, NUM_STEPS) == pytest.approx(after, rel=1e-5)

    for source in ("in_memory", "on_disk"):
        accelerator.load_state(root / source)
        assert step(accelerator, model, optimizer, NUM_STEPS) == pytest.approx(after, rel=1e-5)
        again = step(accelerator, model, optimizer, NUM_STEPS + 1)
    accelerator.end_training()

    accelerator, model, optimizer = started_on(None)
    accelerator.load_state(root / "on_disk")
    assert step(accelerator, model, optimizer, NUM_STEPS) == pytest.approx(after, rel=1e-5)
    assert step(accelerator, model, optimizer, NUM_STEPS + 1) == pytest.approx(again, rel=1e-5)
    accelerator.end_training()


@pytest.mark.long
@pytest.mark.timeout(1900)
@pytest.mark.usefixtures("able")
def test_parameters_and_optimizer_state_rest_on_disk(tmp_path: Path) -> None:
    run_distributed(trains_on_disk, 2, str(tmp_path), timeout=1800)
