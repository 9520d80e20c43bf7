"""Mixed precision of FSDP2: dtypes of all-gather, computation, gradient reduction and outputs.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from accel.config.fsdp import DTYPES
from accel.precision.base import COMPUTE_DTYPES
from accel.strategies.mesh.torch_internals import buffer_table

DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class Formats:
    """Policies of the units inside a model and of its root, whose outputs the user sees.

    `buffers` is the dtype of floating-point buffers; None: unchanged.
    """

    units: MixedPrecisionPolicy
    root: MixedPrecisionPolicy
    buffers: torch.dtype | None = None


def build_formats(given: object, mixed_precision: str) -> Formats:
    """Return the policies `given` in the plugin, or else those of the run's precision.

    Under a precision, parameters are gathered and multiplied in it, gradients are reduced in fp32,
    and the model returns fp32. The same holds for fields that a policy without param_dtype omits.
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
        omitted = {n: getattr(standard.root, n) for n in DTYPE_FIELDS if getattr(root, n) is None}
        root = dataclasses.replace(root, **omitted)
    # Between units, activations stay in the dtype of computation.
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


def _from_fields(given: object) -> Formats:
    """Return the policies of a dict, or of the older wrapper's `MixedPrecision`."""
    fields = dict(given) if isinstance(given, Mapping) else dict(vars(given))
    dtypes = {name: _dtype(fields.get(name)) for name in DTYPE_FIELDS}
    inner = fields.get("cast_forward_inputs")
    inner = True if inner is None else inner
    outer = fields.get("cast_root_forward_inputs")
    outer = inner if outer is None else outer
    units = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=inner)
    root = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=outer)
    return Formats(units, root, _dtype(fields.get("buffer_dtype")))


def _dtype(value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    name = DTYPES[str(value).removeprefix("torch.").lower()]
    return None if name is None else getattr(torch, name)


def cast_buffers(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Cast floating-point buffers of `model` to `dtype`; None: they are not cast."""
    if dtype is None:
        return
    for module in model.modules():
        buffers = buffer_table(module)
        for name, buffer in buffers.items():
            if buffer is not None and buffer.is_floating_point():
                buffers[name] = buffer.to(dtype)
