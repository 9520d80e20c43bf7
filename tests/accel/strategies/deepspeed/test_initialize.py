"""Models that are partitioned while they are built, and ops that are compiled once (E3)."""

from __future__ import annotations

import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from tests.accel.strategies.deepspeed.helpers import GLOBAL_BATCH, adamw, build, data, plain, train
from tests.helpers import run_distributed


def builds_partitioned() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    with accelerator.strategy.init_context():
        model = build()
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
