"""C1: the key that a person meant is named: typos, names of other tools, another grammar."""

from __future__ import annotations

import re

import pytest

from accel.machine.errors import CheckpointError, ConfigError, Problem
from runner.recipe import keys, paths
from runner.recipe.factory import read, register

KNOWN = [*keys.typed_keys(), "optimizer.lr"]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epochs", "'trainer.epochs'"),
        ("distributed.dpp.bucket_cap", "'distributed.ddp.bucket_cap_mb'"),
        (
            "precision.foo",
            "The keys of precision: autocast, fp8_te, fp8_torchao, mode, scaler, tf32, weights.",
        ),
        ("zzz", "The keys: callbacks, checkpoint"),
    ],
)
def test_the_key_that_was_meant(key: str, meant: str) -> None:
    assert meant in keys.suggestion(key, keys.known_keys({"optimizer": {"lr": 1}}))


def test_every_target_of_a_habit_exists() -> None:
    files = {f"{path.parent.name}/{path.name}" for path in paths.conf_folder().glob("*/*.yaml")}
    known = set(keys.typed_keys())
    for node in ("optimizer", "scheduler"):
        for name in getattr(register, node).names():
            factory = getattr(register, node).get(name)
            known |= {f"{node}.{argument}" for argument in read(factory).parameters}
    for found in keys.HABITS.values():
        if " " not in found:
            assert found in known, found
        for key, value in re.findall(r"(?<![\w/])([\w.]+)=(\w+)", found):
            assert key in known or f"{key}/{value}.yaml" in files, found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DeepSpeedPlugin(zero_stage=3) with it", "deepspeed.zero_stage=3 with it"),
        ("FullyShardedDataParallelPlugin.dp_replicate_size=3", "fsdp.dp_replicate_size=3"),
        ("GradientAccumulationPlugin(num_steps=2)", "trainer.accumulation.num_steps=2"),
        ("Accelerator with mixed_precision='bf16'", "Accelerator with precision=bf16"),
        ("a DeepSpeedPlugin for each", "a DeepSpeedPlugin for each"),
        ("ProfileKwargsX(a=1)", "ProfileKwargsX(a=1)"),
    ],
)
def test_an_error_of_the_engine_names_keys(text: str, expected: str) -> None:
    assert keys.in_keys(text) == expected
    for error in (CheckpointError(text), ConfigError(Problem(text, "a rule", "a remedy"))):
        with pytest.raises(type(error)) as raised:
            with keys.of_the_recipe():
                raise error
        assert str(raised.value).startswith(expected)
        assert raised.value is error
