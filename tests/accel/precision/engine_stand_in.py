"""A small stand-in for TransformerEngine, which needs a GPU even to be imported.

It has the documented classes and contexts, computes as torch does, and notes in what it computed.

Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accel.machine import imports

# (enabled, recipe) of the contexts that are open, and of each forward pass of a layer.
OPEN: list[tuple[bool, Any]] = []
SEEN: list[tuple[bool, Any]] = []


class _Base(torch.nn.Module):
    """Keeps a history of largest inputs, and scales by it; its extra state is a pickle.

    As release 2.x gives it: none before the first pass in fp8, then a dict of tensors, plain values
    and the recipe.
    """

    __module__ = "transformer_engine.pytorch.module.base"

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {}

    def get_extra_state(self) -> torch.Tensor:
        if not self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        entries = {
            "recipe": self.fp8_meta["recipe"],
            "amax_history_fwd": self.fp8_meta["amax_history"],
            "extra_fp8_variables": {"num_gemms": 1},
        }
        return torch.frombuffer(bytearray(pickle.dumps(entries)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel() == 0:
            return
        entries = pickle.loads(state.numpy().tobytes())
        self.fp8_meta = {
            "recipe": entries["recipe"],
            "amax_history": entries["amax_history_fwd"],
            **entries["extra_fp8_variables"],
        }

    def note(self) -> None:
        SEEN.append(OPEN[-1] if OPEN else (False, None))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` in 8 bits by the largest value of earlier passes, where fp8 is on."""
        enabled, recipe = OPEN[-1] if OPEN else (False, None)
        if not enabled:
            return x
        history = self.fp8_meta.get("amax_history", x.detach().abs().max().float().reshape(1))
        self.fp8_meta = {
            "recipe": recipe,
            "amax_history": torch.cat([history, x.detach().abs().max().float().reshape(1)])[-8:],
        }
        step = history.max().to(x.dtype) / 127
        return x + ((x / step).round() * step - x).detach()


class Linear(_Base):
    __module__ = _Base.__module__

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        like: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.zeros(out_features, in_features, **like))
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, **like))
        else:
            self.bias = torch.Tensor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        x = self.rounded(x)
        bias = self.bias if self.bias.numel() else None
        return torch.nn.functional.linear(x, self.weight, bias)


class LayerNorm(_Base):
    __module__ = _Base.__module__

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        self.eps = eps
        like: dict[str, Any] = {"dtype": params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape, **like))
        self.bias = torch.nn.Parameter(torch.zeros(normalized_shape, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note()
        return torch.nn.functional.layer_norm(
            x, self.weight.shape, self.weight, self.bias, self.eps
        )


class Format(enum.Enum):
    E4M3, E5M2, HYBRID = range(3)


class Recipe:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class DelayedScaling(Recipe):
    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str = "max",
    ) -> None:
        super().__init__(**{k: v for k, v in locals().items() if k not in ("self", "__class__")})


class MXFP8BlockScaling(Recipe):
    def __init__(self, margin: int = 0, fp8_format: Format = Format.E4M3) -> None:
        super().__init__(margin=margin, fp8_format=fp8_format)


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    OPEN.append((enabled, recipe))
    try:
        yield
    finally:
        OPEN.pop()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in, as of release 2.9, where the package would be, in this test."""
    recipes = {kind.__name__: kind for kind in (Format, DelayedScaling, MXFP8BlockScaling)}
    layers = {"Linear": Linear, "LayerNorm": LayerNorm, "autocast": autocast}
    inside: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": recipes,
        "transformer_engine.pytorch": layers,
    }
    for name, content in inside.items():
        package = types.ModuleType(name)
        vars(package).update(content)
        monkeypatch.setitem(sys.modules, name, package)
    known = imports.is_available
    monkeypatch.setattr(
        imports, "is_available", lambda name: name == "transformer_engine" or known(name)
    )
    SEEN.clear()
