"""Variables of the environment that would decide what a recipe decides. Free of torch.

A script on the engine follows them; a run does not, since its frozen recipe would not tell of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from accel.env import Environment
from accel.errors import Problem
from runner.config.schema import ENGINES, Recipe


def problems(recipe: Recipe, environment: Environment) -> list[Problem]:
    """Return the variables that would change what `recipe` describes.

    Args:
        recipe: the recipe.
        environment: what is set.
    """
    return [
        Problem(f"{variable} (environment)", "a run follows its recipe alone", remedy)
        for variable, remedy in _deciding(recipe, environment)
    ]


def _deciding(recipe: Recipe, environment: Environment) -> Iterator[tuple[str, str]]:
    """Yield (variable, what to write instead)."""
    for name in environment.engines:
        if getattr(recipe, name, None) is None:
            instead = f"choose {name}=…" if name in ENGINES else "choose another engine"
            yield f"ACCELERATE_USE_{name.upper()}", f"Unset it, and {instead}."
    if environment.dynamo_backend not in (None, "no", "NO"):
        yield (
            f"ACCELERATE_DYNAMO_BACKEND={environment.dynamo_backend}",
            ("Unset it, and choose compile=default."),
        )
    if environment.mixed_precision not in (None, recipe.precision.mode):
        yield (
            f"ACCELERATE_MIXED_PRECISION={environment.mixed_precision}",
            (f"Unset it, or choose precision={environment.mixed_precision}."),
        )
    if recipe.fsdp is not None:
        for name, text in environment.fsdp:
            yield f"FSDP_{name}={text}", "Unset it, and set the key of fsdp that it stands for."
    if recipe.deepspeed is not None:
        for name, text in environment.deepspeed.items():
            yield f"{name}={text}", "Unset it, and set the key of deepspeed that it stands for."
