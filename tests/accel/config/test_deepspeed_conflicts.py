"""Values of DeepSpeed's configuration that are given in several places must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel.config.deepspeed import Claims, DeepSpeedPlugin
from accel.machine.errors import ConfigError
from tests.accel.strategies.deepspeed.helpers import completed


def test_every_mismatch_is_told_in_one_error_that_names_both_places(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    config = {
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": False},
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 16,
        "train_batch_size": 99,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    path.write_text(json.dumps(config))
    plugin = DeepSpeedPlugin(
        str(path), gradient_clipping=1.0, zero_stage=2, offload_optimizer_device="none"
    )
    with pytest.raises(ConfigError) as error:
        completed(plugin, [8], gradient_accumulation_steps=2, mixed_precision="bf16")
    text = str(error.value)
    assert len(error.value.problems) == 7
    for place, source in (
        ("gradient_accumulation_steps=4", "Accelerator(gradient_accumulation_steps=2)"),
        ("bf16.enabled=False", "Accelerator(mixed_precision='bf16')"),
        ("gradient_clipping=0.5", "DeepSpeedPlugin(gradient_clipping=1.0)"),
        ("train_micro_batch_size_per_gpu=16", "batch_size=8 of the prepared loaders"),
        ("train_batch_size=99", "16 samples × 2 micro-batches × 2 processes"),
        ("zero_optimization.stage=3", "DeepSpeedPlugin(zero_stage=2)"),
        ("offload_optimizer.device='cpu'", "DeepSpeedPlugin(offload_optimizer_device='none')"),
    ):
        assert f"{path}: " in text
        assert place in text
        assert source in text


def test_values_that_agree_are_no_problem() -> None:
    plugin = DeepSpeedPlugin({"gradient_clipping": 1}, gradient_clipping=1.0)
    claims = Claims(plugin)
    claims.claim("optimizer.params.betas", [0.9, 0.95], "the optimizer")
    claims.claim("optimizer.params.betas", (0.9, 0.95 + 1e-12), "DummyOptim")
    claims.default("gradient_clipping", 0.0)
    assert claims.problems == []
    assert claims.config["gradient_clipping"] == 1
    claims.claim("optimizer.params.betas", [0.9], "another optimizer")
    (problem,) = claims.problems
    assert problem.value == "the optimizer with another optimizer"
    assert "optimizer" not in plugin.deepspeed_config
