"""Optimizers whose update of an element depends on other elements of its tensor.

A strategy that gives an optimizer shards or one flat tensor in place of each weight turns them into
other algorithms, or makes them fail. So it is with state that is quantized by blocks of elements.
"""

from __future__ import annotations

import torch

# By class name: norms or factors of whole tensors, orthogonal updates, one estimate for all.
WHOLE_TENSOR = frozenset(
    (
        *("Adafactor", "AdaLomo", "AdamMini", "Adam_mini", "CAME", "CAMEAdamW", "DAdaptAdam"),
        *("DAdaptAdaGrad", "DAdaptLion", "DAdaptSGD", "DistributedShampoo", "Fromage"),
        *("FusedLAMB", "FusedLamb", "FusedNovoGrad", "GaLoreAdafactor", "GaLoreAdamW", "Kron"),
        *("LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon", "Nero", "NovoGrad", "NvNovoGrad"),
        *("OnebitLamb", "PSGD", "Prodigy", "ProdigyOpt", "SM3", "SOAP", "Scion", "Shampoo"),
    )
)
# By class name: each element is stepped by its own gradient and state alone.
ELEMENTWISE = frozenset(
    (
        *("ASGD", "AdEMAMix", "AdaBelief", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("CPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion"),
        *("DummyOptim", "FusedAdam", "FusedLion", "FusedSGD", "Lion", "NAdam", "RAdam"),
        *("RMSprop", "RoundingAdamW", "Rprop", "SGD", "Sophia", "SophiaG"),
    )
)
# What torch's DTensor has no rule for, as of the versions that accel runs on: `step` fails.
NO_DTENSOR = frozenset({"Adafactor", "LBFGS", "Rprop"})
# Packages whose optimizers keep state in 8 bits and less.
QUANTIZING = ("torchao.optim", "bitsandbytes.optim")


def whole_tensor_kind(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name by which the class of `optimizer`, or a base, is in `WHOLE_TENSOR`."""
    return _kind(optimizer, WHOLE_TENSOR)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the `step` of `optimizer` is that of a class in `ELEMENTWISE`."""
    for kind in type(optimizer).__mro__:
        if "step" in vars(kind):
            return kind.__name__ in ELEMENTWISE
    return False


def _kind(optimizer: torch.optim.Optimizer, names: frozenset[str]) -> str | None:
    return next((k.__name__ for k in type(optimizer).__mro__ if k.__name__ in names), None)


def fails_on_shards(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name under which the class of `optimizer`, or a base of it, is in `NO_DTENSOR`."""
    return _kind(optimizer, NO_DTENSOR)


def quantized_kind(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of an optimizer that quantizes its state by blocks; None for others.

    Blocks that a shard cuts have other scales; and which state is quantized depends on the size of
    a shard, which differs between ranks.
    """
    kind = type(optimizer)
    module = next((k.__module__ for k in kind.__mro__ if k.__module__.startswith(QUANTIZING)), None)
    if module is None or getattr(optimizer, "block_size", None) == float("inf"):
        return None
    return f"{module.partition('.')[0]}'s {kind.__name__}"
