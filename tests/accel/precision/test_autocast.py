"""Autocast lies over the casts of FSDP2 and ZeRO: what models compute inside is right, too (E3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.backends import mha

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.handlers import AutocastKwargs
from accel.machine.errors import ConfigError
from tests.accel.precision.float8 import needs_torchao
from tests.helpers import run_distributed

WIDTH, CLASSES, SIZE = 8, 20, 4


class OwnLoss(torch.nn.Module):
    """A classifier that computes its own loss, and notes the formats inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, CLASSES)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layer(inputs))
        loss = torch.nn.functional.cross_entropy(logits, targets)
        self.seen = {"weight": self.head.weight.dtype, "logits": logits.dtype, "loss": loss.dtype}
        return {"loss": loss, "logits": logits}


ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": {}},
    "checkpointed": {
        "fsdp_plugin": {
            "activation_checkpointing": True,
            "transformer_cls_names_to_wrap": ["Linear"],
        }
    },
    "zero0": {"deepspeed_plugin": {"zero_stage": 0}},
    "zero3": {"deepspeed_plugin": {"zero_stage": 3}},
}
PLUGINS = {"fsdp_plugin": FullyShardedDataParallelPlugin, "deepspeed_plugin": DeepSpeedPlugin}


def build(engine: str, **arguments: Any) -> Accelerator:
    plugins = {name: PLUGINS[name](**fields) for name, fields in ENGINES[engine].items()}
    return Accelerator(cpu=True, mixed_precision="bf16", **plugins, **arguments)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SIZE, WIDTH, generator=generator), torch.arange(SIZE)


def check_inside(engine: str, enabled: bool) -> None:
    handlers = [] if enabled else [AutocastKwargs(enabled=False)]
    accelerator = build(engine, kwargs_handlers=handlers)
    model = OwnLoss()
    with torch.no_grad():
        exact = model(*batch())["loss"]
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs, targets = batch()
    before = None
    for _ in range(3):
        outputs = prepared(inputs, targets)
        assert outputs["loss"].dtype == outputs["logits"].dtype == torch.float32
        before = outputs["loss"] if before is None else before
        accelerator.backward(outputs["loss"])
        optimizer.step()
        optimizer.zero_grad()
    assert before is not None
    assert outputs["loss"] < before
    low = torch.float32 if engine == "ddp" and not enabled else torch.bfloat16
    own = accelerator.unwrap_model(model)
    assert own.seen["logits"] == low
    assert own.seen["loss"] == (torch.float32 if enabled else low)
    rounded = torch.equal(before, before.bfloat16().float())
    assert rounded is (low is torch.bfloat16 and not enabled)
    assert abs(before - exact) < (2e-3 if enabled else 2e-2)
    layer = torch.nn.Linear(WIDTH, WIDTH)
    with accelerator.autocast():
        assert layer(inputs).dtype == (torch.bfloat16 if enabled else torch.float32)
        assert torch.equal(prepared(inputs, targets)["loss"], prepared(inputs, targets)["loss"])
    accelerator.end_training()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_inside_is_computed_in_fp32_unless_autocast_is_off(
    engine: str, enabled: bool
) -> None:
    run_distributed(check_inside, 2, engine, enabled)


def refuse_two_owners() -> None:
    plugin = DeepSpeedPlugin(
        {
            "zero_optimization": {"stage": 1},
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        }
    )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16",
        deepspeed_plugin=plugin,
        kwargs_handlers=[AutocastKwargs(enabled=False)],
    )
    model = OwnLoss()
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    text = str(caught.value)
    assert "AutocastKwargs(enabled=False) with " in text
    assert "torch_autocast.enabled=true" in text
    accelerator.end_training()


def test_one_of_two_owners_of_autocast_is_left_out() -> None:
    run_distributed(refuse_two_owners, 1)


# -- attention layers that evaluate on a CPU ----------------------------------------------------


@pytest.fixture
def _fast_path() -> Iterator[None]:
    yield
    mha.set_fastpath_enabled(True)


def encoder() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 2)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), stack, torch.nn.Linear(32, 32))


@pytest.mark.usefixtures("_fast_path")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=needs_torchao)])
def test_evaluation_computes_in_the_format_of_training(precision: str, compiled: bool) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(encoder())
    values = torch.randn(3, 6, 32)
    trained = model(values).detach()
    model.eval()
    call = torch.compile(model, backend="eager", fullgraph=precision == "bf16")
    with torch.no_grad():
        assert torch.equal((call if compiled else model)(values), trained)
