"""Let "cuda" be the CPU, so that megatron-core's own classes run unchanged over gloo in tests.

megatron-core writes "cuda" into its code: buffers of its DDP, counters of its schedules, `.type()`
of gradients. Nothing of it is replaced but where it sets states of GPU generators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

RANDOM = "megatron.core.tensor_parallel.random"


def _is_cuda(value: object) -> bool:
    named = isinstance(value, str) and value.startswith("cuda")
    return named or (isinstance(value, torch.device) and value.type == "cuda")


class CudaIsCpu(TorchFunctionMode):
    """Every torch function that is given the device "cuda" gets the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if _is_cuda(value) else value for value in args)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


class _Stream:
    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Let "cuda" be the CPU in the context."""
    answers = {
        "current_device": lambda: "cpu",
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: _Stream(),
        "Stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "FloatTensor": torch.FloatTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "HalfTensor": torch.HalfTensor,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        for name in ("range_push", "range_pop"):
            stack.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_: None))
        stack.enter_context(CudaIsCpu())
        stack.enter_context(patch("accel.strategies.megatron.spec.DEVICE", "cpu"))
        get, put = (lambda *_, **__: torch.get_rng_state()), torch.set_rng_state
        stack.enter_context(patch(f"{RANDOM}._get_cuda_rng_state", get))
        stack.enter_context(
            patch(f"{RANDOM}._set_cuda_rng_state", lambda state, *_, **__: put(state))
        )
        yield
