"""Parameters and optimizer state that rest on disk train as those in memory do.

DeepSpeed's asynchronous I/O is compiled at the first use on a machine (minutes), into the folder
that torch has for such things: a slow test does it, and others take what is there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.env import patched, read
from accel.strategies.deepspeed import package
from accel.utils import DeepSpeedPlugin
from tests import commands
from tests.helpers import ROOT, run_distributed

STEPS = 3
WIDTH = 1024  # DeepSpeed leaves what is smaller than 1 MiB per process in memory
OP = "AsyncIOBuilder"
UNABLE = "libaio's development files are not installed (Debian: libaio-dev)"


def asks(question: str) -> bool:
    """The answer of a process of its own, as deepspeed is imported for it."""
    code = (
        "import torch\nfrom accel.strategies.deepspeed import package\n"
        f"known = package.load(torch.device('cpu'))\nraise SystemExit(not ({question}))"
    )
    return commands.run("-c", code, cwd=ROOT, environment=os.environ).returncode == 0


@pytest.fixture(scope="module")
def compiled() -> None:
    """The op, where it was compiled on this machine before."""
    if not asks(f"package.can_build(known, {OP!r})"):
        pytest.skip(UNABLE)
    if not asks(f"package.is_built(known, {OP!r})"):
        pytest.skip("DeepSpeed's asynchronous I/O is not compiled yet: make test ARGS='-m slow'")


def build_op() -> None:
    package.build(package.load(torch.device("cpu")), OP)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_op_is_compiled_once_and_used(tmp_path: Path) -> None:
    if not asks(f"package.can_build(known, {OP!r})"):
        pytest.skip(UNABLE)
    run_distributed(build_op, 2, timeout=1800)
    assert asks(f"package.is_built(known, {OP!r})")
    run_distributed(trains_on_disk, 2, str(tmp_path))


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
    held = [p.ds_tensor for p in model.parameters() if len(p.ds_shape) > 1]
    assert [tensor.final_location.value for tensor in held] == ["nvme", "nvme"]
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


@pytest.mark.usefixtures("compiled")
def test_parameters_and_optimizer_state_rest_on_disk(tmp_path: Path) -> None:
    run_distributed(trains_on_disk, 2, str(tmp_path))


# -- compiling -----------------------------------------------------------------------------


class Builder:
    """Compiles nothing, as torch's builder would: under a lock that is a file."""

    def load(self, verbose: bool) -> None:
        folder = Path(read("TORCH_EXTENSIONS_DIR") or "") / "some_op"
        folder.mkdir(exist_ok=True)
        lock = folder / "lock"
        assert not lock.exists(), "torch would wait for this for ever"
        lock.touch()
        op = folder / "op.so"
        if not op.exists() or op.read_text() != str(folder):  # one that was moved is not taken
            time.sleep(0.2)
            with (folder.parents[1] / "compilations").open("a") as log:
                log.write("x")
            op.write_text(str(folder))
        lock.unlink()


def pretended() -> Any:
    device = SimpleNamespace(create_op_builder=lambda name: Builder(), device_name=lambda: "cpu")
    accelerator = SimpleNamespace(get_accelerator=lambda: device)
    return SimpleNamespace(__version__="0", __file__=__file__, accelerator=accelerator)


def builds(folder: str) -> None:
    with patched(TORCH_EXTENSIONS_DIR=folder):
        package.build(pretended(), OP)


def test_one_process_compiles_and_a_dead_one_is_not_waited_for(tmp_path: Path) -> None:
    with patched(TORCH_EXTENSIONS_DIR=tmp_path):
        done = package.op_folder(pretended(), OP)
    (done / "some_op").mkdir(parents=True)  # by one that was killed while it compiled
    (done / "some_op" / "lock").touch()
    (done / "some_op" / "op.so").touch()
    run_distributed(builds, 2, str(tmp_path))
    assert (done.parent / "compilations").read_text() == "x"
    assert (done / "some_op" / "op.so").exists()
    (done / "some_op" / "lock").touch()  # by one that was killed while it loaded
    builds(str(tmp_path))
    assert not (done / "some_op" / "lock").exists()
    assert (done.parent / "compilations").read_text() == "x"


def test_another_installation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = set()
    for place, seconds in (("one", 1), ("two", 1), ("two", 2)):
        file = tmp_path / place
        file.touch()
        os.utime(file, (seconds, seconds))
        installed = pretended()
        installed.__file__ = str(file)
        folders.add(package.op_folder(installed, OP))
    assert len(folders) == 3
