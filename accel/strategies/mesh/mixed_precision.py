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
from accel.precision.base import COMPUTE_DTYPES

DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


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
    and the model returns fp32. So it does what a policy that names no param_dtype leaves open.

    Args:
        given: `FullyShardedDataParallelPlugin.mixed_precision_policy`.
        mixed_precision: no, bf16 or fp16.
    """
    standard = _standard(COMPUTE_DTYPES.get(mixed_precision))
    if given is None:
        return standard
    if isinstance(given, str):
        return _standard(_dtype(given))
    if isinstance(given, MixedPrecisionPolicy):
        formats = Formats(given, given)
    else:
        formats = _from_fields(given)
    root = formats.root
    if root.param_dtype is None:
        open_ = {n: getattr(standard.root, n) for n in DTYPE_FIELDS if getattr(root, n) is None}
        root = dataclasses.replace(root, **open_)
    # Between units, activations stay in the format of computation.
    units = dataclasses.replace(
        root, output_dtype=None, cast_forward_inputs=formats.units.cast_forward_inputs
    )
    return Formats(units, root, formats.buffers)


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
    dtypes = {name: _dtype(fields.get(name)) for name in DTYPE_FIELDS}
    inner = fields.get("cast_forward_inputs")
    inner = True if inner is None else inner
    outer = fields.get("cast_root_forward_inputs")
    outer = inner if outer is None else outer
    units = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=inner)
    root = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=outer)
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
