"""Fields of the FSDP plugin that read as torch's own objects, which this module does not import.

Each is a descriptor: the plugin holds a text, or None, and torch is imported by whoever reads it.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, final

SHARDED: Final = "SHARDED_STATE_DICT"


@final
class StateDictTypeField:
    """A field that holds the name of a `StateDictType`, and reads as its member."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plugin: object, owner: type | None = None) -> Any:
        held = None if plugin is None else vars(plugin)[self._name]
        if held is None:
            return None  # the field's default, too
        kinds = importlib.import_module("torch.distributed.fsdp").StateDictType
        return getattr(kinds, held, held)

    def __set__(self, plugin: object, value: object) -> None:
        name = None if value is None else str(getattr(value, "name", value)).strip().upper()
        vars(plugin)[self._name] = name


@final
class StateDictConfigField:
    """A field that reads, unless another value was given, as the config of the state dict type.

    Args:
        kind: "" of models, "Optim" of optimizers.
    """

    def __init__(self, kind: str = "") -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plugin: object, owner: type | None = None) -> Any:
        held = None if plugin is None else vars(plugin)[self._name]
        if held is not None or plugin is None or vars(plugin)["state_dict_type"] is None:
            return held
        fsdp = importlib.import_module("torch.distributed.fsdp")
        if vars(plugin)["state_dict_type"] == SHARDED:
            return getattr(fsdp, f"Sharded{self._kind}StateDictConfig")(offload_to_cpu=True)
        config = getattr(fsdp, f"Full{self._kind}StateDictConfig")
        return config(offload_to_cpu=True, rank0_only=True)

    def __set__(self, plugin: object, value: object) -> None:
        vars(plugin)[self._name] = value


def is_translatable(config: object) -> bool:
    """Return whether a state dict config is of full or sharded state dicts."""
    return type(config).__name__.startswith(("Full", "Sharded"))


def says_what_holds(config: object) -> bool:
    """Return whether a translatable config asks for what is always done: shards rest on the host.

    Full state dicts are written by rank 0.
    """
    return bool(getattr(config, "offload_to_cpu", False) and getattr(config, "rank0_only", True))
