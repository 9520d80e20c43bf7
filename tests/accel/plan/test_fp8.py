"""Which library computes in fp8, and by which recipe (E1, E5)."""

from __future__ import annotations

from typing import Any

import pytest

from accel.config.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel.machine import imports
from accel.machine.enums import FP8BackendType
from accel.machine.errors import ConfigError, Problems
from accel.plan.fp8 import LAUNCHED, Float8, from_variables, resolve_fp8

AO, TE = FP8BackendType.AO, FP8BackendType.TE


def found(
    *given: Any, device: str = "cuda", precision: str = "fp8", **variables: str
) -> tuple[Float8, str]:
    """Return the decision and the problems of a run."""
    problems = Problems()
    named = {f"ACCELERATE_FP8_{name.upper()}": text for name, text in variables.items()}
    answer = resolve_fp8(given, precision, "mixed_precision", device, named, problems)
    return answer, "\n".join(map(str, problems))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The packages that are installed; both libraries."""
    packages = {"torchao", "transformer_engine"}
    monkeypatch.setattr(imports, "is_available", packages.__contains__)
    return packages


def test_the_library_is_the_installed_one(installed: set[str]) -> None:
    assert found() == (Float8(TE, TERecipeKwargs()), "")
    assert found(device="cpu") == (Float8(AO, AORecipeKwargs()), "")
    installed.remove("transformer_engine")
    assert found() == (Float8(AO, AORecipeKwargs()), "")
    installed.clear()
    answer, text = found()
    assert answer == Float8()
    assert "mixed_precision='fp8': it needs torchao" in text
    assert "pip install torchao" in text


@pytest.mark.usefixtures("installed")
def test_a_recipe_names_its_library() -> None:
    for recipe, backend in (
        (AORecipeKwargs(), AO),
        (TERecipeKwargs(), TE),
        (FP8RecipeKwargs(), TE),
        (FP8RecipeKwargs(backend="te"), TE),
    ):
        answer, text = found(recipe)
        assert (answer.backend, text) == (backend, "")
        assert answer.recipe is recipe


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("recipe", [MSAMPRecipeKwargs(), FP8RecipeKwargs(backend="msamp")])
def test_ms_amp_is_refused_by_name_with_an_alternative(recipe: Any) -> None:
    _, text = found(recipe)
    assert f"{type(recipe).__name__} of MS-AMP: MS-AMP has had no release since 2023" in text
    assert "AORecipeKwargs()" in text


def test_what_is_not_installed_or_not_for_the_device_is_refused(installed: set[str]) -> None:
    assert (
        "TransformerEngine computes on CUDA devices alone"
        in found(TERecipeKwargs(), device="cpu")[1]
    )
    installed.clear()
    assert "AORecipeKwargs: torchao is not installed" in found(AORecipeKwargs())[1]
    told = found(TERecipeKwargs())[1]
    assert "TERecipeKwargs: TransformerEngine is not installed" in told
    assert "precision=fp8_torchao" in told


@pytest.mark.usefixtures("installed")
def test_other_formats_have_none() -> None:
    assert found(precision="bf16", backend="TE") == (Float8(), "")
    assert "there is one recipe" in found(AORecipeKwargs(), TERecipeKwargs())[1]


# -- the environment ---------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
def test_a_launched_recipe_is_read_unless_one_is_given() -> None:
    recipe = TERecipeKwargs(margin=2)
    launched = {"backend": "ao", "pad_inner_dim": "false", "margin": "3"}
    answer, _ = found(**launched)
    assert answer == Float8(AO, AORecipeKwargs(pad_inner_dim=False))
    assert found(recipe, **launched)[0].recipe is recipe


def test_every_field_has_a_variable() -> None:
    text = {
        "ACCELERATE_FP8_BACKEND": "te",
        "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "True",
        "ACCELERATE_FP8_MARGIN": "1",
        "ACCELERATE_FP8_INTERVAL": "2",
        "ACCELERATE_FP8_FORMAT": "e4m3",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
        "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
        "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION": "(false, False, true)",
        "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "1",
        "ACCELERATE_FP8_OPT_LEVEL": "O1",
        "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "true",
        "ACCELERATE_FP8_PAD_INNER_DIM": "no",
    }
    assert set(text) == set(LAUNCHED.values())
    assert from_variables(text) == TERecipeKwargs(
        use_autocast_during_eval=True,
        margin=1,
        interval=2,
        fp8_format="E4M3",
        amax_history_len=16,
        amax_compute_algo="max",
        override_linear_precision=(False, False, True),
        use_mxfp8_block_scaling=True,
    )
    other = from_variables(text | {"ACCELERATE_FP8_BACKEND": "AO"})
    assert other == AORecipeKwargs(enable_fsdp_float8_all_gather=True, pad_inner_dim=False)
    assert from_variables(text | {"ACCELERATE_FP8_BACKEND": "msamp"}) == MSAMPRecipeKwargs("O1")
    assert from_variables({"ACCELERATE_FP8_MARGIN": "1"}) is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("BACKEND", "TEE", "it is one of AO, TE, MSAMP"),
        ("MARGIN", "much", "ACCELERATE_FP8_MARGIN='much'"),
        ("USE_AUTOCAST_DURING_EVAL", "perhaps", "use_autocast_during_eval of TERecipeKwargs"),
        ("INTERVAL", "0", "at least 1"),
    ],
)
def test_a_variable_that_makes_no_sense(name: str, text: str, message: str) -> None:
    variables = {"ACCELERATE_FP8_BACKEND": "TE", f"ACCELERATE_FP8_{name}": text}
    with pytest.raises(ConfigError, match=message):
        from_variables(variables)
    assert message in found(**{"backend": "TE", name.lower(): text})[1]
