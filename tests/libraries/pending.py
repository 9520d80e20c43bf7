"""Names that libraries import at their head and that accel does not have yet: stand-ins.

Each can be imported and asked about with `isinstance`, and raises when it is called. What is here
is what a user of these libraries misses; a name that accel has meanwhile is no stand-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

# Module -> names, all of the utilities for large models.
PENDING = {
    "accel": "dispatch_model infer_auto_device_map init_empty_weights",
    "accel.big_modeling": "",
    "accel.hooks": """
        AlignDevicesHook ModelHook add_hook_to_module remove_hook_from_module
        remove_hook_from_submodules
    """,
    "accel.utils": """
        CustomDtype
        get_balanced_memory get_max_memory infer_auto_device_map load_offloaded_weights
        named_module_tensors offload_state_dict offload_weight save_offload_index
        set_module_tensor_to_device
    """,
    "accel.utils.modeling": "clean_device_map get_max_layer_size",
}


def _stand_in(module: str, name: str) -> type:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{module}.{name} is not in accel yet")

    return type(name, (), {"__init__": refuse, "__module__": module})


def _module(name: str) -> ModuleType:
    if importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    parent, _, last = name.rpartition(".")
    module = ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    sys.modules[name] = module
    setattr(importlib.import_module(parent), last, module)
    return module


def fill(report: Callable[[str], object]) -> None:
    """Put a stand-in where accel lacks a name, and report each by its full name."""
    for place, names in PENDING.items():
        module = _module(place)
        for name in names.split():
            if not hasattr(module, name):
                setattr(module, name, _stand_in(place, name))
                report(f"{place}.{name}")
