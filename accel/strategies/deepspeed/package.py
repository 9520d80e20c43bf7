"""The package itself: imported when the engine is on, on the run's device and process group.

Source: https://deepspeed.readthedocs.io/en/latest/
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import inspect
import os
import shutil
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from accel import env
from accel.errors import ConfigError, Problem
from accel.imports import require
from accel.wrapping import register_wrapper

COMPLETE = "complete"  # the file that says that an op's folder is
# The group that DeepSpeed's own caches of groups belong to.
_GROUPS: list[weakref.ref[Any]] = []


def load(device: torch.device) -> ModuleType:
    """Return the package `deepspeed`, computing on devices of the kind of `device`.

    Raises:
        ConfigError: if this process already uses it on another kind of device.
        MissingPackageError: if it is not installed.
    """
    with env.patched(DS_ACCELERATOR=device.type):  # it chooses once, while it is imported
        package = require("deepspeed", "deepspeed_plugin")
        kind = package.accelerator.get_accelerator().device_name()
    if kind.partition(":")[0] != device.type:
        raise ConfigError(
            Problem(
                f"device={device} with deepspeed_plugin",
                f"DeepSpeed computes on {kind} in this process, and that cannot change",
                "Start a new process.",
            )
        )
    # Its collectives in shared memory are compiled at first use, by every process for itself; one
    # that is killed meanwhile leaves a lock which all later ones wait for. gloo does as well.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    register_wrapper(package.DeepSpeedEngine)
    # Its engines switch autocast off that is on around them, and warn of that; the one that lies
    # around the model inside of them is on all the same.
    nested: Any = importlib.import_module(f"{package.__name__}.runtime.torch_autocast")
    nested._WARNED_NESTED_AUTOCAST = True
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
        category=FutureWarning,
    )
    return package


@contextlib.contextmanager
def own_formats(package: ModuleType) -> Iterator[None]:
    """Context in which DeepSpeed's partitioning keeps the format that DeepSpeed itself gives it.

    Where fp16 is not supported, `zero.Init` takes any `dtype` for bf16 (its conditional expression
    binds so): fp32 parameters would be swapped to disk through buffers of bf16.

    Args:
        package: deepspeed.
    """
    device = package.accelerator.get_accelerator()
    if device.is_fp16_supported():
        yield
        return
    device.is_fp16_supported = lambda: True  # fp16 itself is refused before
    try:
        yield
    finally:
        del device.is_fp16_supported


def join_group(package: ModuleType, local_world_size: int) -> None:
    """Let DeepSpeed talk through the process group of the run.

    It keeps groups in globals; those of an earlier run's process group are dropped.

    Args:
        package: deepspeed.
        local_world_size: number of processes on this node.
    """
    # As its own launcher says it. On CPUs it would count devices anew, by a program that it starts,
    # at every reduction of ZeRO-3.
    env.set_values({"LOCAL_SIZE": local_world_size})
    world = dist.group.WORLD
    if _GROUPS and _GROUPS[0]() is world and package.comm.comm.cdb is not None:
        return
    leave_group(package)
    package.comm.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
    _GROUPS[:] = [weakref.ref(world)]


def leave_group(package: ModuleType) -> None:
    """Drop what DeepSpeed keeps of a process group."""
    package.utils.groups._release_process_group_references(None)
    package.comm.comm.cdb = None
    _GROUPS.clear()
    # Some of its methods take the group of the moment of import for a default; None is the present.
    transport = importlib.import_module(f"{package.__name__}.comm.torch").TorchBackend
    for method in map(inspect.unwrap, vars(transport).values()):
        defaults = getattr(method, "__defaults__", None) or ()
        if any(isinstance(value, dist.ProcessGroup) for value in defaults):
            method.__defaults__ = tuple(
                None if isinstance(value, dist.ProcessGroup) else value for value in defaults
            )


def restore_linear(package: ModuleType) -> None:
    """Give torch its own `linear` back, which ZeRO-3 replaces by one of less memory, for good.

    Args:
        package: deepspeed.
    """
    stage_3 = importlib.import_module(f"{package.__name__}.runtime.zero.partition_parameters")
    if torch.nn.functional.linear is stage_3.zero3_linear_wrap:
        torch.nn.functional.linear = stage_3.InsertPostInitMethodToModuleSubClasses.linear_bk


def can_build(package: ModuleType, builder: str) -> bool:
    """Return whether this machine has what compiling an op of DeepSpeed takes.

    Args:
        package: deepspeed.
        builder: name of the op's builder class, such as ``"AsyncIOBuilder"``.
    """
    found = package.accelerator.get_accelerator().create_op_builder(builder)
    return found is not None and bool(found.is_compatible(verbose=False))


def build(package: ModuleType, builder: str) -> None:
    """Load an op of DeepSpeed, compiling it (minutes) where that was not done before.

    torch's own lock is a file, which one that is killed while it compiles leaves behind, and which
    all later ones wait for. So the lock around it is one that the system takes back from the dead,
    and what was not compiled to its end is thrown away.

    Args:
        package: deepspeed.
        builder: name of the op's builder class.
    """
    folder = op_folder(package, builder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built(package, builder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        for left in folder.glob("*/lock"):  # by one that was killed while it loaded
            left.unlink()
        programs = env.read("PATH", os.defpath), str(Path(sys.executable).parent)  # ninja's
        with env.patched(TORCH_EXTENSIONS_DIR=folder, PATH=os.pathsep.join(map(str, programs))):
            package.accelerator.get_accelerator().create_op_builder(builder).load(verbose=False)
        (folder / COMPLETE).touch()


def is_built(package: ModuleType, builder: str) -> bool:
    """Return whether an op was compiled to its end on this machine.

    Args:
        package: deepspeed.
        builder: name of the op's builder class.
    """
    return (op_folder(package, builder) / COMPLETE).exists()


def op_folder(package: ModuleType, builder: str) -> Path:
    """Return where an op for these packages is compiled, below torch's own folder.

    Their places and times are in its name, as ninja compiles again what was made with other or
    older files: two environments of the same versions would undo each other's work, and one that
    was installed anew would compile where an op was said to be there.

    Args:
        package: deepspeed.
        builder: name of the op's builder class.
    """
    from torch.utils.cpp_extension import get_default_build_root

    root = env.read("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    kind = package.accelerator.get_accelerator().device_name().partition(":")[0]
    versions = f"deepspeed-{package.__version__}-torch-{torch.__version__}-{kind}"
    files = [Path(str(module.__file__)) for module in (torch, package)]
    places = "\n".join(f"{file} {file.stat().st_mtime_ns}" for file in files)
    digest = hashlib.sha256(places.encode()).hexdigest()[:8]
    name = f"{sys.implementation.cache_tag}-{versions}-{digest}"
    return Path(root) / "accel" / name / builder
