"""What the processes of tests import: the fork server imports it once, and its forks have it.

Nothing here starts a thread or touches a device: a fork would not have the one and could not use
the other. Importing deepspeed looks for devices, so it is left to those that need it.
"""

from __future__ import annotations

import gc

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.data

import accel.accelerator

assert accel.accelerator
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports much more
gc.collect()
gc.freeze()  # the collector writes to what it looks at, which would be copied
