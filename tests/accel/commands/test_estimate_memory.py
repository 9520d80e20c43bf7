"""``accel estimate-memory``: estimates, beside what a process does hold (E4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.commands.estimate_memory import Estimate, Footprint, estimates, layouts
from accel.commands.program import REFUSED, main
from accel.machine.errors import ConfigError
from accel.machine.memory import local
from accel.strategies.deepspeed.fragments import fragments
from accel.utils import DeepSpeedPlugin
from tests.helpers import run_distributed

STRATEGIES = [layout.name for layout in layouts()]


def model() -> nn.Module:
    """Return a model with a buffer and a frozen layer; rows divide by two."""
    made = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 8))
    made[2].requires_grad_(False)
    return made


def estimate(format: str, strategy: str, num_processes: int = 1, **given: Any) -> Estimate:
    with torch.device("meta"):
        made = given.pop("model", model)()
    return estimates(made, num_processes, [format], [strategy], **given)[0]


def bytes_of(tensors: Any) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


# -- one process ---------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["fp32", "pure_bf16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
def test_a_replicated_model_is_measured(format: str, optimizer: str) -> None:
    own = model()
    dtype = torch.bfloat16 if format == "pure_bf16" else torch.float32
    own.to(dtype)
    trainable = [parameter for parameter in own.parameters() if parameter.requires_grad]
    stepped = getattr(torch.optim, optimizer)(trainable)
    own(torch.randn(4, 64, dtype=dtype)).sum().backward()
    stepped.step()
    state = [value for entry in stepped.state.values() for value in entry.values()]
    found = estimate(format, "ddp", 8, optimizer=optimizer)
    assert found.footprint == Footprint(
        bytes_of([*own.parameters(), *own.buffers()]),
        bytes_of(parameter.grad for parameter in trainable),
        bytes_of(value for value in state if isinstance(value, torch.Tensor)),
    )
    assert found.largest_layer == bytes_of(own[0].parameters())
    assert found.total == sum(vars(found.footprint).values())


# -- several processes -----------------------------------------------------------------------


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))


def held(strategy: str, mixed_precision: str) -> Footprint:
    """Return what a strategy holds of `wide` on this process."""
    given: dict[str, Any] = {}
    if strategy.startswith("zero"):
        stage = int(strategy.removeprefix("zero"))
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_accumulation_steps=1)
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        given["deepspeed_plugin"] = plugin
    elif strategy == "fsdp":
        given["fsdp_plugin"] = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, **given)
    made = wide()
    made, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters()))
    weights = [getattr(p, "ds_tensor", p) for p in made.parameters()]
    accelerator.backward(made(torch.randn(2, 512)).sum())
    gradients, copies = bytes_of(weights), 0
    if strategy.startswith("zero"):
        found = fragments(optimizer.engine)
        if strategy != "zero1":
            gradients = sum(found[id(p)].length * p.element_size() for p in made.parameters())
        flats = {one.flat.data_ptr(): one.flat for one in found.values()}
        own = {weight.data_ptr() for weight in weights}
        copies = bytes_of(flat for place, flat in flats.items() if place not in own)
    else:
        gradients = bytes_of(p.grad for p in weights)
    optimizer.step()
    state = [value for entry in optimizer.optimizer.state.values() for value in entry.values()]
    moments = bytes_of(value for value in state if isinstance(value, torch.Tensor))
    measured = Footprint(bytes_of(weights), gradients, moments + copies)
    accelerator.end_training()
    return measured


SLOW = {"zero1", "zero3"}


@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=[pytest.mark.slow] if s in SLOW else []) for s in STRATEGIES]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_estimate_is_what_a_strategy_holds(strategy: str, precision: str) -> None:
    mixed = "no" if precision == "fp32" else precision
    measured = run_distributed(held, 2, strategy, mixed)[0]
    found = estimate(precision, strategy, 2, model=wide).footprint
    assert found.gradients == measured.gradients
    assert measured.optimizer_state is not None
    # Some train flat buffers, with one count of steps; some keep small weights (biases) unsharded.
    assert found.optimizer_state == pytest.approx(measured.optimizer_state, abs=16)
    assert found.parameters == pytest.approx(measured.parameters, rel=0.01)


# -- choices -------------------------------------------------------------------------------


def test_a_format_that_no_strategy_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"have fp32 master weights there. .*format='bf16'"):
        estimates(model(), formats=["pure_bf16"], strategies=["zero1"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"formats": ["fp31"]}, "format='fp31': it is one of fp32"),
        ({"strategies": ["zero4"]}, "strategy='zero4': it is one of ddp"),
        ({"optimizer": "Adamw"}, "optimizer='Adamw': torch.optim has no.*mean 'AdamW'"),
        ({"optimizer": "Muon"}, "optimizer='Muon': it does not take the model"),
        ({"num_processes": 0}, "num_processes=0: it is at least 1"),
    ],
)
def test_what_does_not_exist_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimates(model(), **given)


# -- the command ---

SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 50}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}


def estimated(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["estimate-memory", *arguments, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["estimate-memory", *arguments]) == REFUSED
    return capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import GPT2Config  # seconds, in each process that collects this file

    config = GPT2Config(**SIZES, **SPECIAL)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    own = GPT2LMHeadModel(GPT2Config(**SIZES, **SPECIAL))
    tensors = [*own.parameters(), *own.buffers()]  # the head has the embedding's weight
    held = sum(tensor.nbytes for tensor in tensors)
    options = ("--format", "fp32", "--strategy", "ddp")
    for place in (folder, folder / "config.json"):
        (found,) = estimated(capsys, str(place), *options)
        assert found["parameters"] == held
        assert found["gradients"] == sum(parameter.nbytes for parameter in own.parameters())
        assert found["total"] == held + found["gradients"] + found["optimizer_state"]


CNN = "runner.builtin.digits.cnn"


def test_what_makes_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it holds no config.json" in refused(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert "transformers makes no model" in refused(capsys, str(tmp_path))
    assert "has all that is to know" in refused(capsys, str(tmp_path), "n_layer=2")
    assert "package.module.factory" in refused(capsys, "cnnn")
    assert "there is no such folder" in refused(capsys, "./cnnn")
    assert "there is no such folder" in refused(capsys, str(tmp_path / "v1.5"))
    assert "it is KEY=VALUE" in refused(capsys, CNN, "wide")
    assert "width=[: the value is YAML" in refused(capsys, CNN, "width=[")
    assert "widht" in refused(capsys, CNN, "widht=2")
    assert "not a torch.nn.Module" in refused(capsys, "os.getcwd")
    assert "format='fp31'" in refused(capsys, CNN, "--format", "fp31")
    assert "'AdamW'" in refused(capsys, CNN, "--optimizer", "adamw")
