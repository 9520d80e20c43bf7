"""Models that are partitioned while they are built, and ops that are compiled once."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.env import patched, read
from accel.machine.errors import ConfigError
from accel.strategies.deepspeed import initialize
from tests.accel.strategies.deepspeed.helpers import (
    GLOBAL_BATCH,
    adamw,
    build,
    data,
    plain,
    train,
)
from tests.helpers import reset_accel, run_distributed


def builds_partitioned() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    with accelerator.strategy.init_context():
        model = build()
        with pytest.raises(ConfigError, match="fill_ on a parameter of shape"):
            torch.nn.init.ones_(next(model.parameters()))
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    with plugin.zero3_init_context_manager(enable=False), accelerator.strategy.init_context():
        assert not any(hasattr(p, "ds_id") for p in build().parameters())
    model, optimizer, loader = accelerator.prepare(
        model, adamw(model), data(GLOBAL_BATCH // accelerator.num_processes)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0)
    losses = train(accelerator, model, optimizer, scheduler, loader)
    assert max(abs(a - b) for a, b in zip(losses, plain()[0], strict=True)) < 1e-5
    accelerator.end_training()


def test_a_model_is_sharded_while_it_is_built() -> None:
    run_distributed(builds_partitioned, 2)


def built_on_any_cpu() -> None:
    """DeepSpeed asks what the CPU can compute; what a model is built in is the run's choice."""
    kind = type(importlib.import_module("deepspeed.accelerator").get_accelerator())
    for fp16_is_supported in (True, False):
        for precision, dtype in (("no", torch.float32), ("bf16", torch.bfloat16)):
            plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
            accelerator = Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=plugin)
            answer = patch.object(
                kind, "is_fp16_supported", lambda self, yes=fp16_is_supported: yes
            )
            with answer, accelerator.strategy.init_context():
                model = torch.nn.Linear(2, 1)
            assert {p.dtype for p in model.parameters()} == {dtype}
            accelerator.end_training()
            reset_accel()


def test_the_format_of_sharded_parameters_does_not_depend_on_the_cpu() -> None:
    run_distributed(built_on_any_cpu, 2)


def assigns(weight: torch.Tensor) -> None:
    weight.data[:] = 7.0


def scales(weight: torch.Tensor) -> None:
    weight.data *= 7.0


class Initialised(torch.nn.Module):
    """A model that writes to its layer's weights once that is built."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 5)
        write(self.layer.weight)


def refuses_writes_to_what_is_cut() -> None:
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    )
    writes = {
        "fill_": lambda weight: weight.data.fill_(7.0),
        "normal_": lambda weight: torch.nn.init.normal_(weight.data),
        "zero_": lambda weight: weight.detach().zero_(),
        "__setitem__": assigns,
        "mul_": scales,
    }
    with accelerator.strategy.init_context():
        for name, write in writes.items():
            with pytest.raises(ConfigError, match=rf"{name} on a parameter of shape \(5, 5\)"):
                Initialised(write)
        read = Initialised(lambda weight: weight.data.float())
    assert hasattr(read.layer.weight, "ds_id")
    accelerator.end_training()


def test_writes_to_partitioned_parameters_are_refused() -> None:
    run_distributed(refuses_writes_to_what_is_cut, 2)


def check_that_later_models_compute_with_torch() -> None:
    linear = torch.nn.functional.linear
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    model, reference = build(), build()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.nn.functional.linear is not linear  # the one that keeps less in memory
    inputs = torch.ones(GLOBAL_BATCH, 5)
    torch.testing.assert_close(model(inputs), reference(inputs))
    accelerator.end_training()
    assert torch.nn.functional.linear is linear


def test_models_after_zero_3_compute_with_torchs_own_functions() -> None:
    run_distributed(check_that_later_models_compute_with_torch, 1)


# -- compiled ops ----------------------------------------------------------------------------


OP = "AsyncIOBuilder"


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
        initialize.build_op(pretended(), OP)


def test_one_process_compiles_and_a_dead_one_is_not_waited_for(tmp_path: Path) -> None:
    with patched(TORCH_EXTENSIONS_DIR=tmp_path):
        done = initialize.op_folder(pretended(), OP)
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
        folders.add(initialize.op_folder(installed, OP))
    assert len(folders) == 3
