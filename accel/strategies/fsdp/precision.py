"""The number formats of a sharded model: what is gathered, computed and reduced in which dtype.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel.config.fsdp import DTYPES
from accel.errors import ConfigError, Problem

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Formats:
    """The policies of a model.

    Attributes:
        units: of the units inside.
        root: of the whole, whose outputs the user sees.
        buffers: of floating buffers; None: as they are.
    """

    units: MixedPrecisionPolicy
    root: MixedPrecisionPolicy
    buffers: torch.dtype | None = None


def build_formats(given: Any, mixed_precision: str) -> Formats:
    """Return the formats that a plugin or else the run's precision ask for.

    Under a precision, matrices are gathered and multiplied in it, gradients are reduced in fp32,
    and the model returns fp32.

    Args:
        given: `FullyShardedDataParallelPlugin.mixed_precision_policy`.
        mixed_precision: no, bf16 or fp16.

    Raises:
        ConfigError: if the two name different formats.
    """
    if given is None or isinstance(given, str):
        dtype = COMPUTE.get(mixed_precision) if given is None else _dtype(given)
        formats = _standard(dtype)
    elif isinstance(given, MixedPrecisionPolicy):
        # Between units, activations stay in the format of computation.
        formats = Formats(dataclasses.replace(given, output_dtype=None), given)
    else:
        formats = _from_fields(given)
    wanted = COMPUTE.get(mixed_precision)
    if wanted is not None and formats.units.param_dtype != wanted:
        raise ConfigError(
            Problem(
                f"mixed_precision={mixed_precision!r} with mixed_precision_policy={given!r}",
                "both name the format of computation, and they disagree",
                "Give one of them.",
            )
        )
    return formats


def _standard(dtype: torch.dtype | None) -> Formats:
    if dtype is None or dtype == torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        return Formats(policy, policy)
    units = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    root = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    return Formats(units, root)


def _from_fields(given: Any) -> Formats:
    """Return the formats of a dict, or of the older wrapper's `MixedPrecision`."""
    fields = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    dtypes = {n: _dtype(fields.get(n)) for n in ("param_dtype", "reduce_dtype", "output_dtype")}
    cast = fields.get("cast_forward_inputs")
    if not isinstance(given, Mapping):  # there, it spoke of inner modules alone
        cast = True
    cast = True if cast is None else bool(cast)
    units = MixedPrecisionPolicy(
        dtypes["param_dtype"], dtypes["reduce_dtype"], None, cast_forward_inputs=cast
    )
    root = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=cast)
    return Formats(units, root, _dtype(fields.get("buffer_dtype")))


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    name = DTYPES[str(value).removeprefix("torch.").lower()]
    return None if name is None else getattr(torch, name)


def cast_buffers(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Turn floating buffers of `model` into `dtype`; None leaves them."""
    if dtype is None:
        return
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
