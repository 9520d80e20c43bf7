"""Recipes of fp8 training, one class an engine; `FP8RecipeKwargs` is the older one for two engines.

In the constructors None stands for the documented default, which the object then holds.

Source: https://huggingface.co/docs/accelerate/usage_guides/low_precision_training
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel.config.checks import check_choice, check_minimum, check_types, import_callable
from accel.config.handlers import KwargsHandler
from accel.machine.errors import Problems

DELAYED_SCALING: dict[str, object] = {
    "use_autocast_during_eval": False,
    "margin": 0,
    "interval": 1,
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
}
MXFP8_OFF: dict[str, object] = {"use_mxfp8_block_scaling": False}
OPT_LEVELS = ("O1", "O2")
OPT_LEVEL = "O2"
# torchao's `Float8LinearRecipeName`.
AO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def _fill(owner: object, defaults: Mapping[str, object]) -> None:
    for name, default in defaults.items():
        if getattr(owner, name) is None:
            setattr(owner, name, default)


def _check_delayed_scaling(owner: TERecipeKwargs, problems: Problems) -> None:
    check_types(owner, problems)
    check_choice(owner, "fp8_format", ("HYBRID", "E4M3", "E5M2"), problems)
    check_choice(owner, "amax_compute_algo", ("max", "most_recent"), problems)
    check_minimum(owner, "interval", 1, problems)
    check_minimum(owner, "amax_history_len", 1, problems)
    given = owner.override_linear_precision
    switches = tuple(given) if isinstance(given, list | tuple) else None
    if switches is not None and len(switches) == 3 and all(isinstance(s, bool) for s in switches):
        owner.override_linear_precision = switches
    else:
        problems.add(
            f"{type(owner).__name__}.override_linear_precision={given!r}",
            "it is three booleans: fprop, dgrad, wgrad",
            "Give (False, False, True), say.",
        )


@dataclass
class TERecipeKwargs(KwargsHandler):
    """The recipe of fp8 training with TransformerEngine: delayed scaling.

    Args:
        use_autocast_during_eval: whether evaluation computes in fp8, too. None: False.
        margin: margin of the scaling factor, powers of two. None: 0.
        interval: how often the scaling factor is recomputed, steps. None: 1.
        fp8_format: HYBRID (E4M3 forward, E5M2 backward), E4M3 or E5M2. None: HYBRID.
        amax_history_len: length of the history for the scaling factor, steps. None: 1024.
        amax_compute_algo: which maximum of the history is taken, max or most_recent. None:
            most_recent.
        override_linear_precision: whether fprop, dgrad and wgrad run in higher precision. None:
            none of them.
        use_mxfp8_block_scaling: whether blocks of 32 values have a scale of their own. None: False.

    Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: Any = None
    amax_history_len: int | None = None
    amax_compute_algo: Any = None
    override_linear_precision: Any = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        _fill(self, {**DELAYED_SCALING, **MXFP8_OFF})
        problems = Problems()
        _check_delayed_scaling(self, problems)
        problems.raise_if()


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """The recipe of fp8 training with MS-AMP.

    Args:
        opt_level: tensors in 8 bits: O1 (weight gradients and their all-reduce) or O2 (states of
            the optimizer, too). None: O2.

    Source: https://azure.github.io/MS-AMP/docs/user-tutorial/optimization-level
    """

    opt_level: Any = None

    def __post_init__(self) -> None:
        _fill(self, {"opt_level": OPT_LEVEL})
        problems = Problems()
        check_choice(self, "opt_level", OPT_LEVELS, problems)
        problems.raise_if()


def _check_filter(function: object, problems: Problems) -> None:
    """Add a problem if a function cannot be called with a module and its name."""
    if not callable(function):
        return
    try:
        inspect.signature(function).bind("module", "name")
    except TypeError as error:
        problems.add(
            f"AORecipeKwargs.module_filter_func={getattr(function, '__name__', function)}",
            f"it is called with a module and its name ({error})",
            "Define it as def wanted(module, name) -> bool.",
        )
    except ValueError:  # it has no signature
        return


@dataclass
class AORecipeKwargs(KwargsHandler):
    """The recipe of fp8 training with torchao.

    Args:
        config: a `torchao.float8.Float8LinearConfig`, or the name of one of torchao's recipes:
            tensorwise, rowwise or rowwise_with_gw_hp. None: tensorwise.
        module_filter_func: called with a module and its name; whether that is converted. A callable
            or the dotted name of one. None: all linear layers but the first, the last and the head,
            whose sizes are multiples of 16.
        pad_inner_dim: whether inner dims are padded to the multiples of 16 that the kernels need,
            so that a batch may have any number of tokens. None: they are.
        enable_fsdp_float8_all_gather: whether FSDP all-gathers weights in fp8, with one scale a
            weight. None: it gathers them in bf16.

    Source: https://docs.pytorch.org/ao/stable/generated/torchao.float8.Float8LinearConfig.html
    """

    config: Any = None
    module_filter_func: Any = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        import_callable(self, "module_filter_func")
        problems = Problems()
        check_types(self, problems)
        _check_filter(self.module_filter_func, problems)
        if isinstance(self.config, str):
            check_choice(self, "config", AO_RECIPES, problems)
            if self.config in AO_RECIPES[1:] and self.enable_fsdp_float8_all_gather:
                problems.add(
                    f"AORecipeKwargs.enable_fsdp_float8_all_gather=True with {self.config!r}",
                    "a weight that is gathered in fp8 has one scale",
                    "Use config='tensorwise', or leave enable_fsdp_float8_all_gather out.",
                )
        elif self.config is not None:
            for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
                if getattr(self, name) is not None:
                    problems.add(
                        f"AORecipeKwargs.{name}={getattr(self, name)!r} with config",
                        "given in two places with different values",
                        f"Give {name} only in the Float8LinearConfig.",
                    )
        problems.raise_if()


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The recipe of fp8 training with TransformerEngine or MS-AMP; older than a class for each.

    Args:
        opt_level: MS-AMP's optimization level, O1 or O2. None: O2.
        use_autocast_during_eval: whether evaluation computes in fp8, too. None: False.
        margin: margin of the scaling factor, powers of two. None: 0.
        interval: how often the scaling factor is recomputed, steps. None: 1.
        fp8_format: HYBRID (E4M3 forward, E5M2 backward), E4M3 or E5M2. None: HYBRID.
        amax_history_len: length of the history for the scaling factor, steps. None: 1024.
        amax_compute_algo: which maximum of the history is taken, max or most_recent. None:
            most_recent.
        override_linear_precision: whether fprop, dgrad and wgrad run in higher precision. None:
            none of them.
        use_mxfp8_block_scaling: whether blocks of 32 values have a scale of their own. None: False.
        backend: the engine, TE or MSAMP (also in small letters). None: TE.
    """

    backend: Any = None

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.backend = str(self.backend).upper()
        problems = Problems()
        check_choice(self, "backend", ("TE", "MSAMP"), problems)
        problems.raise_if()
        TERecipeKwargs.__post_init__(self)
        MSAMPRecipeKwargs.__post_init__(self)


RECIPES: tuple[type[KwargsHandler], ...] = (TERecipeKwargs, MSAMPRecipeKwargs, AORecipeKwargs)
