"""Adapters of peft on a model, the `peft` node of a recipe: LoRA, DoRA and others.

The weights that the model had are frozen. Where they were read from files (the model's
`base_path`), a state dict of the model leaves them out, under every strategy, and `base_weights`
names the folder for the checkpoints.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from accel.machine.errors import ConfigError, Problems, listed, nearest, text_of
from accel.machine.imports import require

if TYPE_CHECKING:
    from torch.nn.modules.module import _IncompatibleKeys

PLAN = "tp_plan"  # attribute of transformers' models: how layers are divided, by name
TASKS = ("CausalLM", "SequenceClassification")  # ends of class names of transformers
# Initial values of LoRA that leave the weights of the base as they are.
PLAIN_INITS = (True, False, "gaussian", "orthogonal")


def wrap(model: torch.nn.Module, config: Any, place: str) -> torch.nn.Module:
    """Return a model with adapters, which alone are trained.

    Args:
        model: any; its modules are replaced in place.
        config: of peft, such as `peft.LoraConfig`.
        place: of the node in the recipe, for messages.

    Raises:
        ConfigError: if the configuration names modules that the model does not have, or is none.
    """
    peft = require("peft", place, extra="hf")
    if not isinstance(config, peft.PeftConfig):
        rule = f"it gives a configuration of peft, not {type(config).__name__}"
        raise ConfigError.of(place, rule, "Choose peft=lora.")
    folder = getattr(model, "base_path", None)
    _require_modules(model, config, place)
    if folder is not None and getattr(config, "init_lora_weights", True) not in PLAIN_INITS:
        rule = "it changes the weights of the base, which checkpoints of adapters leave out"
        value = f"peft.init_lora_weights={config.init_lora_weights}"
        raise ConfigError.of(value, rule, "Set peft.init_lora_weights=true.")
    base = {id(parameter) for parameter in model.parameters()}
    quantized = getattr(model, "is_quantized", False)
    if quantized:
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=model.is_gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
        for module in model.modules():
            # An evaluation would pack the weights for inference, and training go on with them.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.__dict__["support_avx512bf16_for_cpu"] = False
    if config.task_type is None:  # it keeps the new head of a classifier trainable
        named = zip(TASKS, ("CAUSAL_LM", "SEQ_CLS"), strict=True)
        config.task_type = next((t for end, t in named if type(model).__name__.endswith(end)), None)
    try:
        with warnings.catch_warnings():  # peft asks models by a name that transformers gives up
            warnings.simplefilter("ignore", FutureWarning)
            wrapped: torch.nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        remedy = f"Choose peft.target_modules from: {listed(_layers(model))}."
        raise ConfigError.of(place, text_of(error).splitlines()[0].rstrip("."), remedy) from error
    whole = {"quantized weights": quantized, "DoRA": getattr(config, "use_dora", False)}
    wrapped.__dict__["kept_whole"] = next((what for what, is_so in whole.items() if is_so), None)
    if plan := getattr(model, PLAN, None):
        wrapped.__dict__[PLAN] = _plan_with_adapters(wrapped, plan)
    if folder is not None:
        wrapped.base_weights = folder
        parameters = wrapped.named_parameters(remove_duplicate=False)
        _leave_out(wrapped, {n for n, p in parameters if id(p) in base and not p.requires_grad})
    return wrapped.train()  # the layers of a base that was read from files are in eval mode


def _require_modules(model: torch.nn.Module, config: Any, place: str) -> None:
    """Refuse names of modules that the model does not have: peft takes one that it finds."""
    problems, names = Problems(), [name for name, _ in model.named_modules()]
    for field in ("target_modules", "modules_to_save", "exclude_modules"):
        given = getattr(config, field, None)
        for wanted in given if isinstance(given, (list, set, tuple)) else ():
            if not any(f".{name}".endswith(f".{wanted}") for name in names):
                rule = "the model has no module of that name"
                problems.add(f"peft.{field}: {wanted}", rule, nearest(wanted, _layers(model)))
    problems.raise_if()


def _layers(model: torch.nn.Module) -> list[str]:
    """Return the last parts of the names of modules that have weights of two or more dims."""
    found = (
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    )
    return list(dict.fromkeys(found))


def _plan_with_adapters(model: torch.nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the plan by which a base is divided for the names of the modules that wrap it.

    Of LoRA the matrix at the divided side of a layer is divided as the layer is.
    """
    found = {}
    for name, module in model.named_modules():
        own = name.removeprefix("base_model.model.")
        style = next((plan[one] for one in plan if fnmatchcase(own, one)), None)
        if style is None:
            continue
        if not hasattr(module, "base_layer"):
            found[name] = style
            continue
        found[f"{name}.base_layer"] = style
        matrix = {"colwise": "lora_B", "rowwise": "lora_A"}.get(style.partition("_")[0])
        for adapter in getattr(module, matrix, ()) if matrix else ():
            found[f"{name}.{matrix}.{adapter}"] = style
    return found


def _leave_out(model: torch.nn.Module, names: Collection[str]) -> None:
    """Leave parameters, and what quantization keeps below their names, out of state dicts."""

    def is_left_out(name: str) -> bool:
        heads = itertools.accumulate(name.split("."), "{}.{}".format)
        return any(head in names for head in heads)

    def drop(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and name in names:
                rule = "it is trained, and checkpoints of adapters leave it out"
                raise ConfigError.of(f"the parameter {name}", rule, "Name it in modules_to_save.")
        for name in [name for name in state if is_left_out(name.removeprefix(prefix))]:
            del state[name]

    def forget(module: torch.nn.Module, found: _IncompatibleKeys) -> None:
        found.missing_keys[:] = [name for name in found.missing_keys if not is_left_out(name)]

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(forget)
