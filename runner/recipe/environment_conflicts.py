"""Variables of the environment that would decide what a recipe decides. Free of torch.

A script on the engine follows them; a run does not, since its frozen recipe would not tell of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from accel.machine.env import Environment
from accel.machine.errors import Problem
from accel.strategies.table import plugins
from runner.recipe.schema import Recipe


def problems(recipe: Recipe, environment: Environment) -> list[Problem]:
    """Return the variables that would change what `recipe` describes."""
    return [
        Problem(f"{variable} (environment)", "a run follows its recipe alone", remedy)
        for variable, remedy in _deciding(recipe, environment)
    ]


def _deciding(recipe: Recipe, environment: Environment) -> Iterator[tuple[str, str]]:
    """Yield (variable, what to write instead)."""
    for plugin in plugins():
        if plugin.switch and environment.flag(plugin.switch) and plugin.name not in recipe.plugins:
            instead = f"{plugin.name}=…" if plugin.kind is not None else "another strategy"
            yield plugin.switch, f"Unset it, and choose {instead}."
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
    for plugin in plugins():
        if plugin.name in recipe.plugins:
            remedy = f"Unset it, and set the key of {plugin.name} that it stands for."
            for name, text in plugin.variables(environment).items():
                yield f"{name}={text}", remedy
