"""Models of the tests of large models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel import disk_offload, dispatch_model
from accel.hooks import AlignDevicesHook

Dispatch = Callable[[nn.Module, Path], nn.Module]
# Ways to send a model, or a part of it, to the disk.
TO_DISK: list[Dispatch] = [
    lambda model, folder: disk_offload(model, folder, "cpu"),
    lambda model, folder: disk_offload(model, folder, "cpu", offload_buffers=True),
    lambda model, folder: dispatch_model(model, {"0": "disk", "1": "cpu"}, offload_dir=folder),
]


class Block(nn.Module):
    """A module with parameters of its own, submodules and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(x)) * self.scale + self.get_buffer("shift")
        return out if factor is None else out * factor


class Tied(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.block = Block()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.embedding(tokens)))
        return out


class Direct(nn.Module):
    """A module that uses a submodule's weight without calling the submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.weight


def net() -> nn.Sequential:
    """Return two blocks in evaluation mode, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).eval()


def inputs() -> torch.Tensor:
    """Return two samples for `net`."""
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def on_meta(model: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers without memory."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in tensors if tensor.is_meta}


def hook_of(module: nn.Module) -> AlignDevicesHook:
    """Return the one hook of a module."""
    hook: Any = module._hf_hook
    assert isinstance(hook, AlignDevicesHook)
    return hook
