"""What an engine of DeepSpeed saves and loads, takes from its configuration, and refuses."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from accel import Accelerator, DataLoaderConfiguration
from accel.errors import ConfigError, StateError
from accel.state import AcceleratorState
from accel.utils import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    get_active_deepspeed_plugin,
)
from tests.accel.strategies.deepspeed.test_strategy import (
    GLOBAL_BATCH,
    adamw,
    build,
    data,
    error_of,
    largest,
    plain,
)
from tests.helpers import reset_accel, run_distributed


def started(plugin: DeepSpeedPlugin | None, **options: Any) -> tuple[Any, ...]:
    """An accelerator with model, optimizer, scheduler and loader of ten steps."""
    split = DataLoaderConfiguration(split_batches=True)  # one step of the schedule for each step
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, dataloader_config=split, **options)
    model = build()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = data(GLOBAL_BATCH)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def train(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, batches: Any
) -> list[float]:
    losses = []
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = error_of(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def runs(start: int, stop: int, source: str | None, target: str | None, **fields: Any) -> Any:
    """Steps `start` to `stop` of a run that loads `source` and saves `target`."""
    options = {"mixed_precision": fields.pop("precision")} if "precision" in fields else {}
    plugin = DeepSpeedPlugin(**fields) if fields else None
    accelerator, model, optimizer, scheduler, loader = started(plugin, **options)
    if source is not None:
        if plugin is not None:  # what is loaded is neither the first state nor an empty one
            batch = next(iter(data(4)))
            train(accelerator, model, optimizer, scheduler, [batch])
        accelerator.load_state(source)
    batches = list(loader)[start:stop]
    losses = train(accelerator, model, optimizer, scheduler, batches)
    if target is not None:
        accelerator.save_state(target)
    weights, rate = accelerator.get_state_dict(model), scheduler.get_last_lr()[0]
    assert optimizer.param_groups[0]["lr"] == rate
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    accelerator.end_training()
    return losses, weights, rate


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_state_leaves_zero_3_for_one_process_and_comes_back(
    tmp_path: Path, precision: str
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    losses, weights, rate = run_distributed(whole, 1)[0]
    tolerance = 1e-5 if precision == "no" else 1e-2
    begun = run_distributed(begins, 2, first, precision)[0]
    middle, _, _ = run_distributed(runs, 1, 4, 7, first, second)[0]
    ended, found, found_rate = run_distributed(ends, 2, second, precision)[0]
    together = [*begun, *middle, *ended]
    assert max(abs(a - b) for a, b in zip(together, losses, strict=True)) < tolerance
    assert largest(found, weights) < tolerance
    assert found_rate == rate < 0.001


def whole() -> Any:
    """Ten steps of torch alone, the learning rate halved at each third."""
    model = build()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    losses = []
    for inputs, targets in data(GLOBAL_BATCH):
        loss = error_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict(), scheduler.get_last_lr()[0]


def begins(target: str, precision: str) -> Any:
    return runs(0, 4, None, target, zero_stage=3, precision=precision)[0]


def ends(source: str, precision: str) -> Any:
    """Go on under stages 3 and 1, which must agree; return the former."""
    other = runs(7, 10, source, None, zero_stage=1, precision=precision)
    result = runs(7, 10, source, None, zero_stage=3, precision=precision)
    tolerance = 1e-6 if precision == "no" else 1e-3
    assert largest(other[1], result[1]) < tolerance
    stage_0 = runs(7, 10, source, None, zero_stage=0, precision=precision)
    assert largest(stage_0[1], result[1]) < tolerance
    return result


# -- what the configuration brings ---------------------------------------------------------


def takes_both_from_the_configuration() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0.0,
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "gradient_clipping": "auto",
    }
    plugin = DeepSpeedPlugin(config, zero_stage=1)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = build()
    optimizer = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.0)
    size = accelerator.num_processes
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4 * size)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, data(GLOBAL_BATCH // size)
    )
    assert isinstance(optimizer.optimizer, torch.optim.AdamW)
    rates = []
    for inputs, targets in loader:
        train(accelerator, model, optimizer, scheduler, [(inputs, targets)])
        rates.append(scheduler.get_last_lr()[0])
    assert rates[:5] == pytest.approx([0.0, 0.005, 0.01, 0.015, 0.02], abs=1e-9)
    assert model.gradient_clipping() == 0.0
    accelerator.end_training()


def takes_the_optimizer_from_the_configuration_and_a_schedule_of_torch() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config, zero_stage=2))
    model = build()
    optimizer = DummyOptim(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batch = next(iter(data(4)))
    train(accelerator, model, optimizer, scheduler, [batch, batch])
    assert isinstance(optimizer.optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (2 * accelerator.num_processes)
    accelerator.end_training()


def takes_a_schedule_that_is_built_from_the_optimizer() -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def halving(inner: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)

    scheduler = DummyScheduler(optimizer, lr_scheduler_callable=halving)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    batch = next(iter(data(4)))
    train(accelerator, model, optimizer, scheduler, [batch, batch])
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    accelerator.end_training()


def configurations() -> None:
    takes_both_from_the_configuration()
    takes_the_optimizer_from_the_configuration_and_a_schedule_of_torch()
    takes_a_schedule_that_is_built_from_the_optimizer()


def test_optimizer_and_schedule_come_from_either_side() -> None:
    run_distributed(configurations, 2)


# -- several models ------------------------------------------------------------------------


def a_student_and_a_teacher() -> None:
    plugins = {
        "student": DeepSpeedPlugin(zero_stage=2),
        "teacher": DeepSpeedPlugin(zero_stage=3),
    }
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


# -- parameters that are sharded while they are built --------------------------------------


def built_in_parts() -> None:
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
    run_distributed(built_in_parts, 2)


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


# -- accumulation, clipping and what is refused --------------------------------------------


def norms_and_windows() -> None:
    """The norm before clipping is that of the whole gradient, and a window may be held open."""
    for stage in range(4):
        plugin = DeepSpeedPlugin(zero_stage=stage)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
        model = build()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        inputs, targets = next(iter(data(GLOBAL_BATCH)))
        own = slice(accelerator.process_index, None, accelerator.num_processes)
        reference = build()
        inner = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            (2 * error_of(reference(inputs), targets)).backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.4)
            inner.step()
            inner.zero_grad()
            with accelerator.no_sync(model):
                accelerator.backward(error_of(model(inputs[own]), targets[own]))
            accelerator.backward(error_of(model(inputs[own]), targets[own]))
            found = accelerator.clip_grad_norm_(model.parameters(), 0.4)
            assert found.item() == pytest.approx(norm.item(), rel=1e-5), stage
            optimizer.step()
            optimizer.zero_grad()
        assert largest(accelerator.get_state_dict(model), reference.state_dict()) < 1e-5
        accelerator.end_training()


def refuses() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    first, second = build(), build()
    with pytest.raises(ConfigError, match="2 models in one call under DeepSpeed"):
        accelerator.prepare(first, second, adamw(first))
    with pytest.raises(ConfigError, match="an optimizer without its model"):
        accelerator.prepare(adamw(first))
    with pytest.raises(ConfigError, match="parameters of the optimizer are in no prepared model"):
        accelerator.prepare(first, adamw(second))
    with pytest.raises(StateError, match="trains no model yet"):
        accelerator.backward(torch.zeros(1, requires_grad=True).sum())
    model, optimizer = accelerator.prepare(first, adamw(first))
    with pytest.raises(ConfigError, match="a second model with one plugin"):
        accelerator.prepare(second, adamw(second))
    with pytest.raises(ConfigError, match="clips gradients by their norm alone"):
        accelerator.clip_grad_value_(model.parameters(), 0.1)
    with pytest.raises(ConfigError) as error:
        accelerator.clip_grad_norm_(list(model.parameters())[:1], 0.5, norm_type=1)
    text = str(error.value)
    assert "DeepSpeedPlugin(gradient_clipping=1.0)" in text
    assert "norm of order 2" in text
    assert "5 of them are not given" in text
    with pytest.raises(ConfigError, match=r"step\(closure\) under DeepSpeed"):
        optimizer.step(lambda: None)
    with pytest.raises(ConfigError, match=r"backward\(create_graph=…\)"):
        accelerator.backward(torch.zeros(1, requires_grad=True).sum(), create_graph=True)
    with pytest.warns(UserWarning, match="same number of batches"):
        with accelerator.strategy.sync.join([model]):
            pass
    accelerator.end_training()


def refuses_devices() -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=2, offload_param_device="cpu", transformer_moe_cls_names="Expert"
    )
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = build()
    with pytest.raises(ConfigError, match="only stage 3 shards a model that is not trained"):
        accelerator.prepare(model)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    with pytest.raises(ConfigError) as error:
        accelerator.prepare(second := build(), adamw(second))
    assert "offload_param_device='cpu' with ZeRO 2" in str(error.value)
    assert "no module of class Expert" in str(error.value)
    accelerator.end_training()
    plugin = DeepSpeedPlugin(offload_optimizer_device="nvme", offload_optimizer_nvme_path="/")
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    without_libaio = patch("accel.strategies.deepspeed.checks.can_build", return_value=False)
    with without_libaio, pytest.raises(ConfigError, match="asynchronous I/O cannot be built"):
        accelerator.prepare(third := build(), adamw(third))
    accelerator.end_training()


def compiles() -> None:
    for stage in (1, 3):
        plugin = DeepSpeedPlugin(zero_stage=stage)
        accelerator, model, optimizer, scheduler, loader = started(plugin, dynamo_backend="eager")
        assert accelerator.unwrap_model(model)._compiled_call_impl is not None
        losses = train(accelerator, model, optimizer, scheduler, loader)
        assert max(abs(a - b) for a, b in zip(losses, whole()[0], strict=True)) < 1e-5
        accelerator.end_training()


def small_things() -> None:
    norms_and_windows()
    refuses()
    refuses_devices()
    compiles()


@pytest.mark.parametrize("world_size", [1, 2])
def test_windows_norms_and_refusals(world_size: int) -> None:
    run_distributed(small_things, world_size)
