"""DeepSpeed's engine trains as a plain loop does; states go out and in by parameter name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator
from accel.utils import DeepSpeedPlugin
from tests.helpers import run_distributed

STEPS = 10
GLOBAL_BATCH = 8
RATE, DECAY = 0.003, 0.1


def build() -> torch.nn.Module:
    """A model whose parameters do not divide by the number of processes."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3)
    )


def data(batch_size: int, steps: int = STEPS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(steps * GLOBAL_BATCH, 5, generator=generator)
    targets = torch.randn(steps * GLOBAL_BATCH, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    dims = {p: len(getattr(p, "ds_shape", p.shape)) for p in model.parameters()}
    decayed = [p for p, dim in dims.items() if dim > 1]
    others = [p for p, dim in dims.items() if dim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)


def error_of(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(prediction.float(), target.float())


def plain(clip: float | None = None, steps: int = STEPS) -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of a loop of torch alone over the global batches."""
    model = build()
    optimizer = adamw(model)
    losses = []
    for inputs, targets in data(GLOBAL_BATCH, steps):
        loss = error_of(model(inputs), targets)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max((found[n].float() - expected[n].float()).abs().max().item() for n in expected)


def trained(
    plugin: DeepSpeedPlugin,
    accumulation: int = 1,
    precision: str = "no",
    clip: float | None = None,
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


# -- the same losses and weights as a plain loop -------------------------------------------


def trains_equally(cases: list[dict[str, Any]]) -> None:
    import deepspeed

    for case in cases:
        options = dict(case)
        fields = {k: options.pop(k) for k in list(options) if k in DeepSpeedPlugin.__annotations__}
        clip = options.get("clip") or fields.get("gradient_clipping")
        losses, weights = plain(clip)
        found, state, engine = trained(DeepSpeedPlugin(**fields), **options)
        tolerance = 1e-2 if options.get("precision") == "bf16" else 1e-5
        assert type(engine) is deepspeed.DeepSpeedEngine
        assert engine.zero_optimization_stage() == fields["zero_stage"]
        assert len(found) == STEPS
        worst = max(abs(a - b) / b for a, b in zip(found, losses, strict=True))
        assert worst < tolerance, (case, worst)
        assert largest(state, weights) < tolerance, case
        assert all(tensor.dtype == torch.float32 for tensor in state.values())


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_stage_trains_as_a_plain_loop(world_size: int) -> None:
    cases: list[dict[str, Any]] = [{"zero_stage": stage} for stage in range(4)]
    run_distributed(trains_equally, world_size, cases)


def test_accumulation_clipping_and_offload_train_as_a_plain_loop() -> None:
    cases: list[dict[str, Any]] = [
        {"zero_stage": stage, "accumulation": 2, "clip": 0.3} for stage in range(4)
    ]
    cases += [
        {"zero_stage": 2, "gradient_clipping": 0.3, "clip": 0.3, "offload_optimizer_device": "cpu"},
        {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
    ]
    run_distributed(trains_equally, 2, cases)


def test_bf16_of_the_engine_is_near_a_plain_loop() -> None:
    cases: list[dict[str, Any]] = [{"zero_stage": stage, "precision": "bf16"} for stage in range(4)]
    run_distributed(trains_equally, 2, cases)


@pytest.mark.slow  # two do above
def test_four_processes_train_as_a_plain_loop() -> None:
    run_distributed(trains_equally, 4, [{"zero_stage": 3, "accumulation": 2}])


# -- no second copy ------------------------------------------------------------------------


def steps_the_weights_themselves(fields: dict[str, Any], precision: str, shared: bool) -> None:
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(**fields), mixed_precision=precision
    )
    model = build()
    model[3].bias.requires_grad_(False)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), data(4))
    held = {p.ds_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    flats = model.optimizer.fp32_partitioned_groups_flat
    assert len(flats) >= 2
    assert {flat.untyped_storage().data_ptr() in held for flat in flats} == {shared}
    bytes_of = accelerator.strategy.state.footprint([model], [optimizer])
    inputs, targets = next(iter(loader))
    before = accelerator.get_state_dict(model)
    accelerator.backward(error_of(model(inputs), targets))
    optimizer.step()
    assert {flat.untyped_storage().data_ptr() in held for flat in flats} == {shared}
    moments = sum(2 * flat.nbytes + 4 for flat in flats)
    assert bytes_of.optimizer_state == moments + (0 if shared else sum(f.nbytes for f in flats))
    kept = [p for p in model.parameters() if p.ds_persist]  # whole after a pass
    assert sum(p.nbytes for p in kept) == sum(p.ds_numel * p.element_size() for p in kept)
    parts = sum(p.ds_tensor.nbytes for p in model.parameters())
    assert bytes_of.parameters == parts + sum(p.nbytes for p in kept)
    assert bool(kept) == ("zero_stage" in fields)
    after = accelerator.get_state_dict(model)
    assert largest(after, before) > 0
    accelerator.unwrap_model(model)
    with accelerator.strategy.package.zero.GatheredParameters(list(model.parameters())):
        gathered = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    assert largest(gathered, after) < (1e-9 if precision == "no" else 1e-2)
    accelerator.end_training()


def weights_and_copies() -> None:
    one = {"stage3_param_persistence_threshold": 0, "sub_group_size": 20, "stage": 3}
    for options in ({"zero_stage": 3}, {"hf_ds_config": {"zero_optimization": one}}):
        steps_the_weights_themselves(options, "no", shared=True)
    steps_the_weights_themselves({"zero_stage": 3}, "bf16", shared=False)


def test_stage_3_in_fp32_keeps_no_second_copy_of_the_weights() -> None:
    run_distributed(weights_and_copies, 2)
