"""Autocast that attention layers keep to when they evaluate, on devices whose fast path ignores it.

Without gradients, `torch.nn.TransformerEncoder` and `torch.nn.MultiheadAttention` call one kernel
that reads their weights: past autocast, and past linear layers that compute in fp8. torch itself
turns that off under the autocast of CUDA alone.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.backends import mha

CHECKED = "cuda"  # whose autocast torch's modules look at


def autocast(
    device_type: str, dtype: torch.dtype | None, enabled: bool, cache_enabled: bool | None
) -> AbstractContextManager[object]:
    """Return `torch.autocast` of these arguments, in which no fast path of attention is taken."""
    if device_type == CHECKED or not enabled:
        return torch.autocast(
            device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled
        )
    return _without_fast_path(device_type, dtype, cache_enabled)


@contextlib.contextmanager
def _without_fast_path(
    device_type: str, dtype: torch.dtype | None, cache_enabled: bool | None
) -> Iterator[None]:
    own = torch.autocast(device_type, dtype=dtype, cache_enabled=cache_enabled)
    with WithoutFastPath(), own:
        yield


class _Users:
    """Contexts of all threads that want the fast path off; the last that ends restores it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.before = True

    def enter(self) -> None:
        with self.lock:
            if self.number == 0:
                self.before = mha.get_fastpath_enabled()
                mha.set_fastpath_enabled(False)
            self.number += 1

    def leave(self) -> None:
        with self.lock:
            self.number -= 1
            if self.number == 0:
                mha.set_fastpath_enabled(self.before)


_USERS = _Users()


class WithoutFastPath:
    """A context inside which attention takes no fast path; in code that is compiled, too."""

    def __init__(self) -> None:
        self._compiled_before: bool | None = None  # None: not entered in code that is compiled

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():  # dynamo traces neither locks nor torch's setter
            self._compiled_before = mha._is_fastpath_enabled
            mha._is_fastpath_enabled = False
        else:
            _USERS.enter()

    def __exit__(self, *_: object) -> None:
        if self._compiled_before is None:
            _USERS.leave()
        else:
            mha._is_fastpath_enabled = self._compiled_before
