"""What a process imports before it is forked into processes of runs. Free of torch at import.

It computes nothing, starts no thread and touches no device, so that a fork is like a fresh process
that has its imports behind it.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections.abc import Sequence

from accel.machine.imports import is_available

# What a run imports whatever its recipe. None of it starts a thread or asks for devices.
RUN = (
    *("torch", "torch._dynamo", "torch.utils.data", "torch.utils.tensorboard"),
    *("accel.accelerator", "accel.checkpoint.session", "accel.strategies.base"),
    *("runner.training.build", "runner.recipe.engine", "runner.training.loop"),
    *("runner.launch.worker", "runner.launch.hangs", "runner.recipe.hydra_setup"),
    "runner.builtin.optimizers",
    *("runner.data.batches", "rich.progress"),
    *("accel.checkpoint.save", "accel.checkpoint.load", "accel.comm.local"),
)
# What built-in factories import when they are called.
OF_FACTORIES = {
    "runner.builtin.digits:digits": ("sklearn.datasets", "sklearn.model_selection"),
}


def preload(modules: Sequence[str]) -> None:
    """Import modules, those that are installed, and keep the collector away from them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in modules:
            if is_available(name.partition(".")[0]):
                importlib.import_module(name)
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # it imports much more
    finally:
        gc.freeze()  # the collector writes to the objects that it looks at, which would be copied
        if collects:
            gc.enable()


def forget_random_state() -> None:
    """Draw other random numbers than every other fork, as a fresh process does."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
