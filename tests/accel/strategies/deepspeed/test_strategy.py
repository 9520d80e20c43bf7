"""An engine of DeepSpeed trains as a plain loop does; several models have a plugin each (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin, get_active_deepspeed_plugin
from accel.machine.errors import ConfigError
from accel.state import AcceleratorState
from tests.accel.strategies.deepspeed.helpers import (
    GLOBAL_BATCH,
    STEPS,
    adamw,
    build,
    data,
    error_of,
    largest,
    plain,
)
from tests.helpers import run_distributed


def trained(
    plugin: DeepSpeedPlugin, accumulation: int = 1, precision: str = "no", clip: float | None = None
) -> tuple[list[float], dict[str, Any], Any]:
    """Losses, weights and engine of the documented loop."""
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=plugin,
        gradient_accumulation_steps=accumulation,
        mixed_precision=precision,
    )
    size = GLOBAL_BATCH // accelerator.num_processes // accumulation
    model = build()
    model, optimizer, loader = accelerator.prepare(model, adamw(model), data(size))
    losses, window = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = error_of(model(inputs), targets)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), clip)
                assert norm > 0
            optimizer.step()
            optimizer.zero_grad()
            window.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            losses.append(sum(window) / len(window))
            window = []
    state = accelerator.get_state_dict(model)
    assert not accelerator.optimizer_step_was_skipped
    accelerator.end_training()
    return losses, state, model


def trains_equally(cases: list[dict[str, Any]]) -> None:
    import deepspeed

    for case in cases:
        options = dict(case)
        fields = {k: options.pop(k) for k in list(options) if k in DeepSpeedPlugin.__annotations__}
        clip = options.get("clip") or fields.get("gradient_clipping")
        losses, weights, _ = plain(clip)
        found, state, engine = trained(DeepSpeedPlugin(**fields), **options)
        tolerance = 1e-2 if options.get("precision") == "bf16" else 1e-5
        assert type(engine) is deepspeed.DeepSpeedEngine
        assert engine.zero_optimization_stage() == fields["zero_stage"]
        assert len(found) == STEPS
        worst = max(abs(a - b) / b for a, b in zip(found, losses, strict=True))
        assert worst < tolerance, (case, worst)
        assert largest(state, weights) < tolerance, case
        assert all(tensor.dtype == torch.float32 for tensor in state.values())


def test_accumulation_clipping_and_offload_train_as_a_plain_loop() -> None:
    cases: list[dict[str, Any]] = [
        {"zero_stage": stage, "accumulation": 2, "clip": 0.3} for stage in range(4)
    ]
    cases += [
        {"zero_stage": 2, "gradient_clipping": 0.3, "clip": 0.3, "offload_optimizer_device": "cpu"},
        {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
    ]
    run_distributed(trains_equally, 2, cases)


# -- several models --------------------------------------------------------------------------


def a_student_and_a_teacher() -> None:
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    state = AcceleratorState()
    assert state.deepspeed_plugin is state.get_deepspeed_plugin("student") is plugins["student"]
    assert state.deepspeed_plugins == plugins
    assert get_active_deepspeed_plugin(state) is plugins["student"]
    model = build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.select_deepspeed_plugin("teacher")
    torch.manual_seed(0)
    whole = torch.nn.Linear(5, 3)
    inputs = torch.ones(2, 5)
    expected = whole(inputs)
    teacher = accelerator.prepare(whole)
    assert accelerator.unwrap_model(teacher) is whole
    assert all(hasattr(p, "ds_tensor") for p in whole.parameters())
    with torch.no_grad():
        assert torch.allclose(teacher(inputs), expected)
    accelerator.backward(error_of(model(inputs), expected.detach()))
    optimizer.step()
    with pytest.raises(ConfigError, match="a second model with one plugin under DeepSpeed"):
        accelerator.prepare(torch.nn.Linear(5, 3))
    with pytest.raises(ConfigError, match="'assistant'"):
        state.select_deepspeed_plugin("assistant")
    accelerator.end_training()


def two_models_that_train() -> None:
    plugins = {"a": DeepSpeedPlugin(zero_stage=1), "b": DeepSpeedPlugin(zero_stage=3)}
    first = Accelerator(cpu=True, deepspeed_plugins=plugins)
    second = Accelerator(cpu=True)
    batch = next(iter(data(4)))
    prepared = []
    for accelerator, name in ((first, "a"), (second, "b")):
        accelerator.state.select_deepspeed_plugin(name)
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared.append((accelerator, *accelerator.prepare(model, optimizer)))
    states = []
    for accelerator, model, optimizer in prepared:
        accelerator.backward(error_of(model(batch[0]), batch[1]))
        optimizer.step()
        states.append(accelerator.get_state_dict(model))
    assert [model.zero_optimization_stage() for _, model, _ in prepared] == [1, 3]
    assert largest(*states) < 1e-6
    first.end_training()


def models() -> None:
    a_student_and_a_teacher()
    two_models_that_train()


def test_several_models_have_a_plugin_each() -> None:
    run_distributed(models, 2)


# -- compilation -----------------------------------------------------------------------------


def as_documented() -> None:
    """E1: what scripts of the public package ask of an `Accelerator` under DeepSpeed."""
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    plugin = DeepSpeedPlugin(config, zero_stage=2, offload_param_device="cpu")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=plugin)
    assert plugin.deepspeed_config["bf16"]["enabled"] is True
    assert plugin.deepspeed_config["fp16"]["enabled"] is False
    assert accelerator.deepspeed_config is plugin.deepspeed_config
    assert accelerator.deepspeed_engine_wrapped is None
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    assert model.gradient_clipping() == 1.0
    accelerator.backward(model(torch.ones(2, 5)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    accelerator.deepspeed_engine_wrapped.backward(model(torch.ones(2, 5)).sum())
    assert not all(map(torch.equal, before, model.parameters()))
    accelerator.end_training()


def test_an_accelerator_shows_its_engine_as_documented() -> None:
    run_distributed(as_documented, 2)
