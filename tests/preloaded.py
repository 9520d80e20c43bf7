"""What the processes of tests import: the fork server imports it once, and its forks have it.

Nothing here starts a thread or touches a device: a fork would not have the one and could not use
the other. Importing deepspeed looks for devices, so where there are some, it is left to the forks.
"""

from __future__ import annotations

import gc
import importlib

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.data

import accel.accelerator
from accel.machine.imports import is_available
from accel.strategies.deepspeed.initialize import import_deepspeed

assert accel.accelerator
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports much more
if is_available("deepspeed") and not torch.cuda.is_available():
    import_deepspeed(torch.device("cpu"))
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # its engines do
gc.collect()
gc.freeze()  # the collector writes to what it looks at, which would be copied
