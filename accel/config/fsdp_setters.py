"""Setters of the FSDP plugin, for libraries that shard models by themselves."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from accel.config.fsdp_state_dicts import SHARDED
from accel.machine.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    import torch

DTYPES = {
    "no": None,
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}


@dataclass
class ShardingSetters:
    """Setters of fields, and checks of what was assigned to them."""

    if TYPE_CHECKING:  # fields of the plugin
        mixed_precision_policy: Any
        auto_wrap_policy: Any
        cpu_offload: Any
        state_dict_type: Any
        transformer_cls_names_to_wrap: Any
        min_num_params: int | None

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its own shards."""
        return vars(self)["state_dict_type"] == SHARDED

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Replace the name of a wrapping policy by torch's function for the units of a model.

        A callable, None and no_wrap stay as they are.

        Args:
            model: names its blocks (``_no_split_modules``) where `transformer_cls_names_to_wrap`
                does not.

        Raises:
            ConfigError: naming every class that the model does not have.
        """
        wrap = importlib.import_module("torch.distributed.fsdp.wrap")
        if self.auto_wrap_policy == "size_based_wrap":
            self.auto_wrap_policy = functools.partial(
                wrap.size_based_auto_wrap_policy, min_num_params=int(self.min_num_params or 0)
            )
        elif self.auto_wrap_policy == "transformer_based_wrap":
            self.auto_wrap_policy = functools.partial(
                wrap.transformer_auto_wrap_policy, transformer_layer_cls=self._blocks(model)
            )
        else:
            return
        self.transformer_cls_names_to_wrap = self.min_num_params = None  # they are in it

    def _blocks(self, model: torch.nn.Module) -> set[type[torch.nn.Module]]:
        names = self.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None)
        found = {name: get_module_class_from_name(model, name) for name in names or ()}
        present = {type(module).__name__ for module in model.modules()}
        problems = [
            unknown_choice("transformer_cls_names_to_wrap", name, sorted(present))
            for name, kind in found.items()
            if kind is None
        ]
        ConfigError.raise_if(problems)
        return {kind for kind in found.values() if kind is not None}

    def set_mixed_precision(
        self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set `mixed_precision_policy` from a precision.

        Args:
            mixed_precision: fp16, bf16 or fp32, of computation; gradients are reduced in fp32, and
                the model returns fp32.
            buffer_autocast: whether floating-point buffers are cast, too.
            override: whether a policy that is set is replaced.

        Raises:
            ConfigError: for another precision.
        """
        name = str(mixed_precision).removeprefix("torch.").lower()
        if DTYPES.get(name) is None:
            known = [name for name, dtype in DTYPES.items() if dtype is not None]
            raise ConfigError(unknown_choice("mixed_precision", mixed_precision, known))
        if self.mixed_precision_policy is not None and not override:
            return
        if buffer_autocast:
            fields = ("param_dtype", "buffer_dtype")
            self.mixed_precision_policy = dict.fromkeys(fields, DTYPES[name])
            return
        torch = importlib.import_module("torch")
        policy = importlib.import_module("torch.distributed.fsdp").MixedPrecisionPolicy
        full = torch.float32
        self.mixed_precision_policy = policy(
            param_dtype=getattr(torch, str(DTYPES[name])), reduce_dtype=full, output_dtype=full
        )

    def set_state_dict_type(self, state_dict_type: str | None = None) -> None:
        """Set `state_dict_type`.

        Args:
            state_dict_type: FULL_STATE_DICT or SHARDED_STATE_DICT, as a name or torch's enum; None:
                as it is, or the first.

        Raises:
            ConfigError: for one that FSDP2 cannot follow.
        """
        wanted = state_dict_type or self.state_dict_type or "FULL_STATE_DICT"
        self.state_dict_type = replace(self, state_dict_type=wanted).state_dict_type

    def set_cpu_offload(self) -> None:
        """Replace a `cpu_offload` that is true or false by torch's `OffloadPolicy`."""
        fsdp = importlib.import_module("torch.distributed.fsdp")
        if isinstance(self.cpu_offload, bool):
            offloads = self.cpu_offload
            self.cpu_offload = fsdp.CPUOffloadPolicy() if offloads else fsdp.OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise `ConfigError` if `cpu_offload` is neither true, false nor torch's policy."""
        replace(self, cpu_offload=self.cpu_offload)

    def validate_mixed_precision_policy(self) -> None:
        """Raise `ConfigError` if `mixed_precision_policy` is none that FSDP2 can follow."""
        replace(self, mixed_precision_policy=self.mixed_precision_policy)


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """Return the class of that name of a module or one inside it; None where there is none.

    Args:
        module: any module.
        name: of a class, without its package.
    """
    return next((type(m) for m in module.modules() if type(m).__name__ == name), None)
