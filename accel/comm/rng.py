"""Random number generators: seed them, make ranks agree, save and restore them."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from accel.config.checks import check_whole
from accel.machine import env
from accel.machine.device import default_device_type, device_kind
from accel.machine.enums import RNGType
from accel.machine.errors import CheckpointError, ConfigError, unknown_choice
from accel.machine.imports import require
from accel.state import AcceleratorState, PartialState

# NumPy takes seeds of 32 bits.
SEED_LIMIT = 2**32
_MASK = (1 << 64) - 1


def mix_seeds(*values: int) -> int:
    """Return a well-mixed seed in [0, 2**63) that is a function of `values` and their order.

    Unlike a sum, neighbouring seeds and epochs share no seed.

    Source: the finaliser of SplitMix64, https://prng.di.unimi.it/splitmix64.c
    """
    state = 0
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (on every device).

    Args:
        seed: the seed.
        device_specific: whether each process adds its index, so that all draw differently. Under
            tensor parallelism (call it after the `Accelerator` is built) processes that compute
            parts of the same matrices draw the same.
        deterministic: whether torch uses only deterministic algorithms, and raises where it has
            none.

    Raises:
        ConfigError: if `seed` is no whole number.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    check_whole(seed, "seed", "Give set_seed(42), say.")
    seed = int(seed) + (_draw_rank() if device_specific else 0)
    random.seed(seed)
    np.random.seed(seed % SEED_LIMIT)
    torch.manual_seed(seed)
    device_kind(_accelerator()[0]).seed(seed)
    if deterministic:
        if torch.cuda.is_available() and env.read("CUBLAS_WORKSPACE_CONFIG") is None:
            env.set_values({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})  # cuBLAS needs it, see Source
        torch.use_deterministic_algorithms(True)


def _draw_rank() -> int:
    """Return the rank of this process's draws; without an `Accelerator`, its rank."""
    if not AcceleratorState._shared_state:
        return PartialState().process_index
    return AcceleratorState().plan.parallel_dims.draw_rank


def _accelerator() -> tuple[str, ModuleType | None]:
    """Return the kind of this process's device, and the module of its generator, if it has one."""
    built = bool(PartialState._shared_state)
    kind = PartialState().device.type if built else default_device_type()
    return kind, device_kind(kind).generator()


# -- ranks agree -------------------------------------------------------------------------------


def _get_state(rng_type: str, generator: torch.Generator | None) -> torch.Tensor:
    if rng_type == RNGType.TORCH:
        return torch.get_rng_state()
    if rng_type == RNGType.GENERATOR:
        return _require(generator).get_state()
    state = _device_module(rng_type).get_rng_state()
    if isinstance(state, torch.Tensor):
        return state
    return torch.tensor([state], dtype=torch.uint64).view(torch.uint8)


def _set_state(rng_type: str, generator: torch.Generator | None, state: torch.Tensor) -> None:
    if rng_type == RNGType.TORCH:
        torch.set_rng_state(state)
    elif rng_type == RNGType.GENERATOR:
        _require(generator).set_state(state)
    else:
        number = rng_type == RNGType.XLA  # the state of an XLA device is one integer
        value = int(state.view(torch.uint64)) if number else state
        _device_module(rng_type).set_rng_state(value)


def _device_module(rng_type: str) -> ModuleType:
    """Return the module with the generator of a kind of device (`torch.cuda`, …)."""
    if rng_type not in RNGType.list():
        raise ConfigError(unknown_choice("rng_type", rng_type, RNGType.list()))
    if rng_type == RNGType.XLA:
        return require("torch_xla.core.xla_model", "rng_type='xla'", package="torch_xla")
    found: ModuleType = getattr(torch, rng_type)
    return found


def _require(generator: torch.Generator | None) -> torch.Generator:
    if generator is None:
        raise ConfigError.of(
            "rng_type='generator' without a generator",
            "it stands for the generator that is handed over",
            "Give generator=…, or another rng_type.",
        )
    return generator


def synchronize_rng_states(
    rng_types: Sequence[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Give every process the generator states of the main process, in one exchange.

    Args:
        rng_types: torch, generator, or a kind of device (cuda, xla, …).
        generator: what "generator" stands for.

    Raises:
        ConfigError: if there is no such generator.
    """
    names = [str(name) for name in rng_types]
    states = [_get_state(name, generator) for name in names]
    comm = PartialState().comm
    if comm.world_size == 1 or not states:
        return
    received = comm.broadcast(torch.cat(states)).split([state.numel() for state in states])
    for name, state in zip(names, received, strict=True):
        _set_state(name, generator, state.clone())


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """Give every process one generator state of the main process.

    Args:
        rng_type: torch, generator, or a kind of device (cuda, xla, …); None: torch.
        generator: what "generator" stands for.

    Raises:
        ConfigError: if there is no such generator.
    """
    synchronize_rng_states([rng_type or RNGType.TORCH], generator)


# -- save and restore --------------------------------------------------------------------------


def capture() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators.

    The accelerator's is that of the current device. Plain containers and tensors, so that
    ``torch.load(weights_only=True)`` reads them.
    """
    kind, accelerator = _accelerator()
    if accelerator is None:
        return {**capture_host(), "accelerator": None}
    return {
        **capture_host(),
        "accelerator": {"kind": kind, "state": accelerator.get_rng_state()},
    }


def capture_host() -> dict[str, object]:
    """Return the states of Python's, NumPy's and torch's CPU generators, in plain containers."""
    return as_plain(random.getstate(), np.random.get_state(legacy=True), torch.get_rng_state())


def restore_host(state: Mapping[str, Any]) -> None:
    """Set those of the generators of `capture_host` whose state is in `state`."""
    if "python" in state:
        python = state["python"]
        words = tuple(int(word) for word in python["words"])
        random.setstate((int(python["version"]), words, python["gauss"]))
    if "numpy" in state:
        numpy = state["numpy"]
        keys = np.asarray(numpy["keys"]).astype(np.uint32)
        extra = (numpy["position"], numpy["has_gauss"], numpy["cached"])
        np.random.set_state((numpy["name"], keys, *extra))
    if "torch" in state:
        torch.set_rng_state(state["torch"])


def as_plain(python: tuple[Any, ...], numpy: Any, torch_state: torch.Tensor) -> dict[str, object]:
    """Return generator states in the form that `restore_host` takes.

    They are those of `random.getstate`, `numpy.random.get_state(legacy=True)` and
    `torch.get_rng_state`.
    """
    version, words, gauss = python
    name, keys, position, has_gauss, cached = numpy
    return {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch_state,
    }


def restore(state: Mapping[str, Any]) -> None:
    """Set all generators to what `capture` returned.

    Warns where the state of an accelerator belongs to another kind of device. Raises
    `CheckpointError` if a part is missing or does not fit.
    """
    try:
        restore_host({name: state[name] for name in ("python", "numpy", "torch")})
        _restore_accelerator(state["accelerator"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The state of the random number generators cannot be restored: {error!r}. "
            "It is incomplete, or was not written by capture()."
        ) from error


def _restore_accelerator(state: Mapping[str, Any] | None) -> None:
    here, accelerator = _accelerator()
    there = "cpu" if state is None else state["kind"]
    if accelerator is not None and state is not None and here == there:
        accelerator.set_rng_state(state["state"])
    elif here != there:
        warnings.warn(
            f"The random state was saved on {there} and this run computes on {here}: draws on the "
            "device continue from its present state.",
            stacklevel=3,
        )


def torch_states() -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states of torch's CPU generator and the accelerator's; None without one."""
    _, accelerator = _accelerator()
    return torch.get_rng_state(), None if accelerator is None else accelerator.get_rng_state()


def set_torch_states(states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Set torch's generators to what `torch_states` returned on this machine."""
    torch.set_rng_state(states[0])
    _, accelerator = _accelerator()
    if accelerator is not None and states[1] is not None:
        accelerator.set_rng_state(states[1])


@contextlib.contextmanager
def preserved(device: bool = True) -> Iterator[None]:
    """Context after which the generators are as before; without `device`, only the host's are."""
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    of_torch = torch_states() if device else (torch.get_rng_state(), None)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        set_torch_states(of_torch)
