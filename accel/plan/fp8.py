"""Which library computes in fp8, and by which recipe: as given, as launched, else as installed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from accel.config.fp8 import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accel.config.handlers import KwargsHandler
from accel.machine import imports
from accel.machine.enums import FP8BackendType
from accel.machine.env import parse_bool
from accel.machine.errors import ConfigError, Problem, Problems, unknown_choice

AO, TE, MSAMP = FP8BackendType.AO, FP8BackendType.TE, FP8BackendType.MSAMP
BACKENDS = (AO, TE, MSAMP)
KINDS = {AO: AORecipeKwargs, TE: TERecipeKwargs, MSAMP: MSAMPRecipeKwargs}
INSTEAD = "torchao: precision=fp8_torchao, in a script AORecipeKwargs()"
PREFIX = "ACCELERATE_FP8_"


@dataclass(frozen=True)
class Float8:
    """The library that computes in fp8, and its recipe; NO and None in other formats."""

    backend: FP8BackendType = FP8BackendType.NO
    recipe: KwargsHandler | None = None


def resolve_fp8(
    given: Sequence[KwargsHandler],
    mixed_precision: str,
    source: str,
    device_type: str,
    variables: Mapping[str, str],
    found: Problems,
) -> Float8:
    """Return the library and the recipe of a run.

    Args:
        given: the recipes among the handlers.
        mixed_precision: of the run.
        source: where it was given, for messages.
        device_type: where the run computes: TransformerEngine does on CUDA alone.
        variables: of the environment; `accel launch` writes ``ACCELERATE_FP8_*``.
        found: gets what contradicts itself or is not installed.
    """
    _check_recipes([type(recipe).__name__ for recipe in given], mixed_precision, found)
    if mixed_precision != "fp8":
        return Float8()
    try:
        recipe = given[0] if given else from_variables(variables)
    except ConfigError as error:
        found.take(error)
        return Float8()
    backend = _installed(device_type) if recipe is None else backend_of(recipe)
    if backend is None:
        found.add(
            f"{source}='fp8'",
            "it needs torchao, or TransformerEngine on a CUDA device, and neither is installed",
            "Run pip install torchao, or use bf16.",
        )
        return Float8()
    value = f"{source}='fp8'" if recipe is None else type(recipe).__name__
    _check_backend(backend, value, device_type, found)
    return Float8(backend, recipe or (AORecipeKwargs() if backend == AO else TERecipeKwargs()))


def backend_of(recipe: KwargsHandler) -> FP8BackendType:
    """Return the library that a recipe is of."""
    if isinstance(recipe, FP8RecipeKwargs):
        return FP8BackendType(recipe.backend or TE)
    return next(backend for backend, kind in KINDS.items() if isinstance(recipe, kind))


def _installed(device_type: str) -> FP8BackendType | None:
    if device_type == "cuda" and imports.is_transformer_engine_available():
        return TE
    return AO if imports.is_torchao_available() else None


def _check_backend(backend: FP8BackendType, value: str, device_type: str, found: Problems) -> None:
    if backend == MSAMP:
        found.add(
            f"{value} of MS-AMP",
            "MS-AMP has had no release since 2023, and none for a torch that this package supports",
            "Use AORecipeKwargs() (torchao) or TERecipeKwargs() (TransformerEngine).",
        )
    elif backend == AO and not imports.is_torchao_available():
        found.add(value, "torchao is not installed", "Run pip install torchao.")
    elif backend == TE and not imports.is_transformer_engine_available():
        found.add(
            value,
            "TransformerEngine is not installed",
            f"Run pip install transformer-engine[pytorch], or use {INSTEAD}.",
        )
    elif backend == TE and device_type != "cuda":
        found.add(
            f"{value} on {device_type}",
            "TransformerEngine computes on CUDA devices alone",
            f"Use {INSTEAD}, which emulates fp8 where there is no hardware for it.",
        )


def _check_recipes(given: Sequence[str], mixed_precision: str, found: Problems) -> None:
    if len(given) > 1:
        found.add(
            f"kwargs_handlers: {' and '.join(given)}",
            "there is one recipe of fp8 training",
            "Give the one of the engine that is to be used.",
        )
    if given and mixed_precision != "fp8":
        found.add(
            f"kwargs_handlers: {given[0]} with mixed_precision={mixed_precision!r}",
            "a recipe of fp8 training needs fp8",
            "Give mixed_precision='fp8', or leave the recipe out.",
        )


# -- the environment -----------------------------------------------------------------------


def _flag(text: str) -> bool:
    value = parse_bool(text)
    if value is None:
        raise ValueError(text)
    return value


def _flags(text: str) -> tuple[bool, ...]:
    return tuple(_flag(part.strip(" ()[]'\"")) for part in text.split(","))


# By the name of a field, and of the variable of the environment: how it is read.
_FIELDS: dict[str, Callable[[str], object]] = {
    "use_autocast_during_eval": _flag,
    "margin": int,
    "interval": int,
    "fp8_format": str.upper,
    "amax_history_len": int,
    "amax_compute_algo": str,
    "override_linear_precision": _flags,
    "use_mxfp8_block_scaling": _flag,
    "opt_level": str,
    "enable_fsdp_float8_all_gather": _flag,
    "pad_inner_dim": _flag,
}
# The settings of `accel launch` (``fp8_config`` of its file, ``--fp8_*``) and their variables.
LAUNCHED = {
    "fp8_backend": f"{PREFIX}BACKEND",
    **{
        f"fp8_{name.removeprefix('fp8_')}": PREFIX + name.removeprefix("fp8_").upper()
        for name in _FIELDS
    },
}


def check_launched(settings: Mapping[str, object], flags: Collection[str]) -> list[Problem]:
    """Return what is wrong with the settings of fp8 that `accel launch` hands to a script.

    Args:
        settings: of its file and its flags together.
        flags: names of the settings that were given on the command line: none may be ignored. A
            file has those of all backends.
    """
    found = Problems()
    texts = {LAUNCHED[n]: _text(v) for n, v in settings.items() if n in LAUNCHED and v is not None}
    precision = str(settings.get("mixed_precision") or "fp8").strip().lower()
    try:
        recipe = from_variables(texts)
    except ConfigError as error:
        return list(error.problems)
    for name in (name for name in flags if name in LAUNCHED):
        if precision != "fp8":
            rule = "a recipe of fp8 training needs fp8"
            remedy = "Give --mixed_precision=fp8, or leave it out."
            found.add(f"--{name} with mixed_precision={precision}", rule, remedy)
        elif recipe is None:
            rule, remedy = "no backend would read it", "Give --fp8_backend=AO, TE or MSAMP."
            found.add(f"--{name} without --fp8_backend", rule, remedy)
        elif name != "fp8_backend" and not hasattr(recipe, _field_of(name)):
            rule = f"{type(recipe).__name__} has no such field"
            found.add(f"--{name}", rule, "Leave it out.")
    if isinstance(recipe, MSAMPRecipeKwargs):
        _check_backend(MSAMP, "--fp8_backend=MSAMP", "cuda", found)
    return found


def _field_of(setting: str) -> str:
    return next(n for n in _FIELDS if n.removeprefix("fp8_") == setting.removeprefix("fp8_"))


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def from_variables(variables: Mapping[str, str]) -> KwargsHandler | None:
    """Return the recipe that ``ACCELERATE_FP8_*`` describe; None: no backend is named.

    Values that the recipe of the backend has no field for are those of another: `accel config`
    writes all of them. Raise `ConfigError` for a value that makes no sense.
    """
    backend = variables.get(f"{PREFIX}BACKEND", "").strip().upper()
    if not backend:
        return None
    if backend not in BACKENDS:
        raise ConfigError(unknown_choice(f"{PREFIX}BACKEND", backend, BACKENDS))
    kind = KINDS[FP8BackendType(backend)]
    fields: dict[str, object] = {}
    for name, read in _FIELDS.items():
        variable = LAUNCHED[f"fp8_{name.removeprefix('fp8_')}"]
        text = variables.get(variable, "").strip()
        if not text or not hasattr(kind(), name):
            continue
        try:
            fields[name] = read(text)
        except ValueError as error:
            rule = f"{name} of {kind.__name__} cannot be read from it"
            raise ConfigError.of(f"{variable}={text!r}", rule, "Correct it.") from error
    return kind(**fields)
