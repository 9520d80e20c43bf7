"""Dotted keys of a recipe: which are free, and which one was meant."""

from __future__ import annotations

import pytest

from runner.recipe import keys


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
