"""C1: the key that a person meant is named: typos, names of other tools, another grammar."""

from __future__ import annotations

import re

import pytest

from accel.machine.errors import CheckpointError, ConfigError, Problem
from runner.recipe import keys, paths
from runner.recipe.factory import read
from runner.recipe.registry import register

KNOWN = [*keys.typed_keys(), "optimizer.lr"]


@pytest.mark.parametrize(
    ("key", "free"),
    [
        ("model.width", True),
        ("callbacks.early_stopping.patience", True),
        ("distributed.ddp.comm_state_option.matrix_approximation_rank", True),
        ("tracker.init_kwargs.wandb", True),
        ("trainer.epochs", False),
        ("precision.foo", False),
        ("model", False),
        ("optimzer.lr", False),
    ],
)
def test_which_keys_are_open(key: str, free: bool) -> None:
    assert keys.is_free(key) is free


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimzer.lr", "'optimizer.lr'"),
        ("lr", "'optimizer.lr'"),
        ("epochs", "'trainer.epochs'"),
        ("distributed.dpp.bucket_cap", "'distributed.ddp.bucket_cap_mb'"),
        ("batch_size", "'trainer.global_batch_size'"),
        (
            "precision.foo",
            "The keys of precision: autocast, fp8_te, fp8_torchao, mode, scaler, tf32, weights.",
        ),
        ("zzz", "The keys: callbacks, checkpoint"),
    ],
)
def test_the_key_that_was_meant(key: str, meant: str) -> None:
    assert meant in keys.suggestion(key, keys.known_keys({"optimizer": {"lr": 1}}))


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("--seed", "seed"),
        ("--trainer.max-steps", "trainer.max_steps"),
        ("epochs", "trainer.epochs"),
        ("--learning-rate", "optimizer.lr"),
        ("model.width:", "model.width"),
        ("--unheard-of", None),
        ("eval", None),
    ],
)
def test_the_key_that_a_word_stands_for(word: str, key: str | None) -> None:
    assert keys.key_for(word) == key


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("lr", "Did you mean 'optimizer.lr'?"),
        ("trainer.warmup_steps", "Did you mean 'scheduler.warmup'?"),
        ("trainer.per_device_train_batch_size", "Did you mean 'trainer.micro_batch_size'?"),
        ("logger", "Choose tracker=wandb"),
        ("trainer.gradient_checkpointing", "fsdp.activation_checkpointing=true"),
        ("optimizer._partial_", "Leave it out"),
    ],
)
def test_the_name_of_another_tool_has_a_remedy(key: str, remedy: str) -> None:
    assert remedy in keys.suggestion(key, KNOWN)


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
        assert (raised.value is error) is (text == expected)
