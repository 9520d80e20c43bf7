"""Optimizers that step whole weights, where a strategy gives them shards or flat tensors (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.errors import ConfigError
from accel.precision.fp8 import import_torchao
from accel.utils import DummyOptim, FullyShardedDataParallelPlugin
from tests.accel.precision.float8 import needs_torchao
from tests.accel.strategies.training import BATCH, Model, build, data, difference, loss_of
from tests.helpers import run_distributed


class Lamb(torch.optim.AdamW):
    """A class of that name: its step is not looked at."""


class Own(torch.optim.SGD):
    """One whose step nobody knows."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def of_transformers(model: torch.nn.Module) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters(), lr=0.01, relative_step=False, scale_parameter=False)


KINDS: dict[str, Any] = {
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Adafactor ": of_transformers,
    "Muon": lambda model: torch.optim.Muon(matrices(model)),
    "Lamb": lambda model: Lamb(model.parameters()),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
}


def zero(stage: int, precision: str = "no", **config: Any) -> Accelerator:
    plugin = DeepSpeedPlugin({"zero_optimization": {"stage": stage}, **config})
    return Accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=plugin)


def refusal(accelerator: Accelerator, make: Any) -> str:
    """Return what `prepare` says to an optimizer."""
    model = Model(frozen=False)
    try:
        accelerator.prepare(model, make(model))
    except ConfigError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


def refuse_under_zero() -> None:
    for kind, make in KINDS.items():
        for stage in (1, 3):
            told = refusal(zero(stage), make)
            assert f"prepare: {kind.strip()} under ZeRO {stage}" in told
            assert "zero_allow_untested_optimizer" in told
    assert "prepare: Muon under ZeRO 0" in refusal(zero(0, "bf16"), KINDS["Muon"])  # flat, too
    described = {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.1}}}
    told = refusal(zero(1, **described), lambda model: DummyOptim(model.parameters()))
    assert "prepare: OnebitLamb under ZeRO 1" in told


def test_zero_refuses_what_it_would_turn_into_another_algorithm() -> None:
    run_distributed(refuse_under_zero, 1)


def steps(accelerator: Accelerator, model: Any, optimizer: Any, count: int = 3) -> None:
    for step in range(count):
        tokens, targets = data()[step * BATCH : (step + 1) * BATCH]
        accelerator.backward(loss_of(model, tokens, targets))
        optimizer.step()
        optimizer.zero_grad()


def take_as_the_user_says() -> None:
    for stage, config in ((0, {}), (1, {"zero_allow_untested_optimizer": True})):
        accelerator = zero(stage, **config)
        model = Model(frozen=False)
        model, optimizer = accelerator.prepare(model, KINDS["Adafactor"](model))
        steps(accelerator, model, optimizer, 1)
        accelerator.end_training()


def test_stage_0_and_the_users_own_word_take_any_optimizer() -> None:
    run_distributed(take_as_the_user_says, 1)


def warn_of_the_unknown() -> int:
    told = []
    from accel.strategies.deepspeed import settings as checks

    log, checks.logger.warning_once = checks.logger.warning_once, told.append  # type: ignore
    try:
        for make in (Own, torch.optim.RMSprop, torch.optim.AdamW):
            assert refusal(zero(1), lambda model, make=make: make(model.parameters(), lr=0.1)) == ""
        allowed = zero(1, zero_allow_untested_optimizer=True)
        assert refusal(allowed, lambda model: Own(model.parameters(), lr=0.1)) == ""
    finally:
        checks.logger.warning_once = log  # type: ignore[method-assign]
    assert "Own under ZeRO 1" in str(told[0])
    return len(told)


def test_zero_warns_of_an_optimizer_that_nobody_knows() -> None:
    assert run_distributed(warn_of_the_unknown, 1) == [1]


def refuse_on_shards(arguments: dict[str, Any]) -> None:
    name = "fsdp" if "fsdp" in arguments else "tp"
    rprop = {"Rprop": lambda model: torch.optim.Rprop(model.parameters())}
    for kind, make in {**KINDS, **rprop}.items():
        told = refusal(build(**arguments), make)
        fails = kind.strip() in ("Adafactor", "Rprop", "LBFGS")
        assert (f"prepare: {kind.strip()} with {name}" in told) is fails, told


@pytest.mark.parametrize("arguments", [{"fsdp": {}}, {"tp": {"tp_size": 2}}])
def test_what_fails_on_shards_is_refused(arguments: dict[str, Any]) -> None:
    run_distributed(refuse_on_shards, 2, arguments)


def muon_on_shards() -> None:
    accelerator = build(fsdp={})
    models = [Model(frozen=False), Model(frozen=False)]
    own, plain = (torch.optim.Muon(matrices(model), lr=1e-2) for model in models)
    model, optimizer = accelerator.prepare(models[0], own)
    steps(accelerator, model, optimizer)
    for step in range(3):
        tokens, targets = data()[step * BATCH : (step + 1) * BATCH]
        loss_of(models[1], tokens, targets).backward()
        plain.step()
        plain.zero_grad()
    weights, expected = accelerator.get_state_dict(model), models[1].state_dict()
    # Newton and Schulz's iteration is in bf16: each step is good to some hundredths of its size.
    assert difference(weights, expected) < 0.1 * 3 * 1e-2
    accelerator.end_training()


def test_muon_steps_whole_matrices_under_fsdp() -> None:
    run_distributed(muon_on_shards, 2)


# -- state that is quantized by blocks ---------------------------------------------------------


def low_bit(model: torch.nn.Module) -> torch.optim.Optimizer:
    make: Any = import_torchao("torchao.optim").AdamW8bit
    made: torch.optim.Optimizer = make(model.parameters())
    return made


def prepare_low_bit(engine: str) -> str:
    plugins: dict[str, Any] = {
        "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        "deepspeed": {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)},
    }
    accelerator = Accelerator(cpu=True, **plugins[engine])
    model = Model(frozen=False)
    with pytest.raises(ConfigError) as refused:
        accelerator.prepare(model, low_bit(model), DataLoader(data(), batch_size=2))
    return str(refused.value)


@needs_torchao
@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_shards_do_not_cut_its_blocks(engine: str) -> None:
    for text in run_distributed(prepare_low_bit, 2, engine):
        assert "torchao's AdamW8bit" in text
        assert "quantizes its state by blocks" in text
        assert "Use torch.optim.AdamW" in text
