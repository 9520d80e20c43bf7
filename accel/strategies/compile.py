"""`torch.compile` for prepared models: the whole model, or each of its repeated blocks.

Blocks are compiled in place, so that names of parameters and the classes of modules stay as they
are; blocks of one class share their compiled code.

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html,
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import torch

from accel.config.training import TorchDynamoPlugin, is_compiling
from accel.logging import get_logger
from accel.machine.errors import ConfigError, unknown_choice
from accel.precision.wrapping import is_compiled_module

logger = get_logger(__name__)

CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


def compile_model(
    model: torch.nn.Module, plugin: TorchDynamoPlugin, hooks_inside: bool = False
) -> torch.nn.Module:
    """Return `model` compiled as `plugin` says; as it is if that is "no", or it is compiled.

    Args:
        model: on its device; what wraps it afterwards is not compiled.
        plugin: what is compiled and how.
        hooks_inside: whether an engine has put hooks between the layers. Each of them breaks the
            graph, so blocks are then compiled unless the plugin wants the whole model, of which
            torch leaves uncompiled what it cannot resume (a loop that calls a hook); and the class
            of the model is the engine's, so it is compiled in place.

    Returns:
        `model` itself where it was compiled in place, else ``torch.compile(model)``.

    Raises:
        ConfigError: if torch does not have the backend here, or the options contradict each other.
    """
    if not is_compiling(plugin) or is_compiled_module(model):
        return model
    arguments = compile_arguments(plugin)
    regional = plugin.use_regional_compilation
    if regional or (regional is None and hooks_inside):
        blocks = repeated_blocks(model)
        if blocks:
            for block in blocks:
                block.compile(**arguments)
            return model
        logger.warning(
            "%s repeats no layer class, so the whole model is compiled.", type(model).__name__
        )
    if not hooks_inside:
        return cast("torch.nn.Module", torch.compile(model, **arguments))
    if plugin.fullgraph:
        raise ConfigError.of(
            "TorchDynamoPlugin(fullgraph=True) for a whole sharded model",
            "the engine's work between layers breaks the graph",
            "Set use_regional_compilation=True, or fullgraph=False.",
        )
    model.compile(**arguments)
    return model


def compile_arguments(plugin: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the plugin's `torch.compile` arguments; `ConfigError` if torch lacks the backend."""
    known = torch.compiler.list_backends(exclude_tags=())
    backend = str(plugin.backend)
    if backend not in known:
        raise ConfigError(unknown_choice("TorchDynamoPlugin.backend", backend, known))
    return {
        "backend": backend,
        "mode": None if plugin.mode == "default" else plugin.mode,
        "fullgraph": plugin.fullgraph,
        "dynamic": plugin.dynamic,
        "options": None if plugin.options is None else dict(plugin.options),
        "disable": plugin.disable,
    }


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the outermost modules whose class is repeated in one container of `model`.

    These are the layers that the model names itself in `_no_split_modules`, else those of a list,
    dict or sequence in which their class, with submodules of its own, stands at least twice.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    found: list[torch.nn.Module] = []
    _collect(model, named, found)
    return found


def _collect(module: torch.nn.Module, named: set[str], found: list[torch.nn.Module]) -> None:
    children = list(module.children())
    classes = Counter(type(child) for child in children)
    for child in children:
        if named:
            # An engine may have put a class of its own before the user's.
            is_block = any(kind.__name__ in named for kind in type(child).__mro__)
        else:
            repeated = isinstance(module, CONTAINERS) and classes[type(child)] > 1
            is_block = repeated and next(child.children(), None) is not None
        if is_block:
            found.append(child)
        else:
            _collect(child, named, found)
