"""Recipes of fp8 training (E1, E5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.utils import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)

DELAYED = {
    "use_autocast_during_eval": (False, True),
    "margin": (0, 3),
    "interval": (1, 2),
    "fp8_format": ("HYBRID", "E4M3"),
    "amax_history_len": (1024, 16),
    "amax_compute_algo": ("most_recent", "max"),
    "override_linear_precision": ((False, False, False), (False, True, False)),
}


BLOCKS = {"use_mxfp8_block_scaling": (False, True)}
OPT_LEVEL = {"opt_level": ("O2", "O1")}


FIELDS: dict[type[KwargsHandler], dict[str, tuple[Any, Any]]] = {
    FP8RecipeKwargs: {"backend": (None, "TE"), **DELAYED, **BLOCKS, **OPT_LEVEL},
    TERecipeKwargs: {**DELAYED, **BLOCKS},
    MSAMPRecipeKwargs: OPT_LEVEL,
    AORecipeKwargs: {
        "config": (None, object()),
        "module_filter_func": (None, torch.equal),
        "pad_inner_dim": (None, True),
        "enable_fsdp_float8_all_gather": (None, False),
    },
}


@pytest.mark.parametrize("kind", FIELDS)
def test_each_field_of_a_recipe(kind: Any) -> None:
    for name, (default, other) in FIELDS[kind].items():
        assert getattr(kind(), name) == default
        assert getattr(kind(**{name: other}), name) == other
        assert kind(**{name: other}).to_kwargs() == {name: other}
        assert kind(**{name: default}).to_kwargs() == {}


@pytest.mark.parametrize("backend", ["TE", "MSAMP", "te", "msamp"])
def test_both_engines_have_the_older_recipe(backend: str) -> None:
    assert FP8RecipeKwargs(backend=backend).backend == backend.upper()


@pytest.mark.parametrize("kind", [FP8RecipeKwargs, TERecipeKwargs])
def test_the_formats_and_histories_of_a_recipe(kind: Any) -> None:
    for name in ("HYBRID", "E4M3", "E5M2"):
        assert kind(fp8_format=name).fp8_format == name
    for name in ("max", "most_recent"):
        assert kind(amax_compute_algo=name).amax_compute_algo == name


@pytest.mark.parametrize("kind", [FP8RecipeKwargs, MSAMPRecipeKwargs])
def test_the_levels_of_a_recipe(kind: Any) -> None:
    for name in ("O1", "O2"):
        assert kind(opt_level=name).opt_level == name
