"""Where a model is cut into pipeline stages of about equal bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import nn

from accel.machine.errors import ConfigError, nearest
from accel.weights.sizes import layers_of, own_parts


def balanced(
    model: nn.Module, calls: Sequence[str], num_stages: int, no_split: Collection[str]
) -> list[str]:
    """Return the layers that pipeline stages begin with, so that the largest stage is smallest.

    Args:
        model: on any device, also meta.
        calls: full names of its submodules in the order of their calls in a forward pass.
        num_stages: the number of stages, at least 1.
        no_split: names of classes whose instances go to one stage as a whole.

    Returns:
        Full names of `num_stages` - 1 submodules, in the order of their calls.

    Raises:
        ConfigError: if the forward pass calls fewer layers than there are stages.
    """
    sizes = _layer_bytes(model, calls, no_split)
    if len(sizes) < num_stages:
        raise ConfigError.of(
            f"{type(model).__name__} on {num_stages} processes",
            f"its forward pass calls {len(sizes)} layers once, and each stage has at least one",
            "Start fewer processes, or name fewer classes in no_split_module_classes.",
        )
    names = list(sizes)
    return [names[start] for start in _starts(list(sizes.values()), num_stages)]


def check(calls: Sequence[str], split_points: Sequence[str], num_stages: int) -> None:
    """Check the split points of a user.

    Args:
        calls: full names of the submodules in the order of their calls in a forward pass.
        split_points: full names of the submodules that stages begin with.
        num_stages: the number of stages.

    Raises:
        ConfigError: unless they are `num_stages` - 1 submodules, each called once.
    """
    times = Counter(calls)
    value = f"split_points={list(split_points)!r}"
    if len(set(split_points)) != num_stages - 1:
        raise ConfigError.of(
            value,
            f"{num_stages} processes take {num_stages} stages, which {num_stages - 1} points split",
            f'Name {num_stages - 1} submodules, or pass split_points="auto".',
        )
    for name in split_points:
        if times[name] != 1:
            rule = f"the forward pass calls {name!r} {times[name]} times, and a stage begins once"
            once = [call for call in times if call and times[call] == 1]
            raise ConfigError.of(value, rule, nearest(name, once))


def _layer_bytes(
    model: nn.Module, calls: Sequence[str], no_split: Collection[str]
) -> dict[str, int]:
    """Return the bytes of each layer that is called once, by name in the order of the calls.

    Weights outside such layers count where they are defined: with the layer before them.
    """
    times = Counter(calls)
    sizes: dict[str, int] = {}
    early, last = 0, ""
    for name, part in layers_of(own_parts(model), no_split):
        size = _bytes(part)
        if isinstance(part, nn.Module) and times[name] == 1:
            sizes[name], last = size + early, name
            early = 0
        elif last:
            sizes[last] += size
        else:
            early += size
    return {name: sizes[name] for name in calls if name in sizes}


def _bytes(part: nn.Module | torch.Tensor) -> int:
    tensors = [part] if isinstance(part, torch.Tensor) else [*part.parameters(), *part.buffers()]
    return sum(tensor.nbytes for tensor in tensors)


def _starts(sizes: Sequence[int], num_stages: int) -> list[int]:
    """Return where stages but the first begin, such that the largest is as small as can be.

    The largest of the first stages grows with the layers that they have, the next stage shrinks:
    the best boundary is where they meet (dynamic programming, n · stages · log n).
    """
    total = [0, *accumulate(sizes)]
    largest = [list[float](total)]  # [stages - 1][layers]: bytes of the largest stage
    cut: list[list[int]] = [[0] * len(total)]
    for stages in range(2, num_stages + 1):
        before = largest[-1]
        row, at = [float("inf")] * len(total), [0] * len(total)
        for end in range(stages, len(total)):
            cuts = range(stages - 1, end)
            meet = bisect_left(cuts, True, key=lambda c: before[c] >= total[end] - total[c])
            near = cuts[max(0, meet - 1) : meet + 1]
            at[end] = min(near, key=lambda c: max(before[c], total[end] - total[c]))
            row[end] = max(before[at[end]], total[end] - total[at[end]])
        largest.append(row)
        cut.append(at)
    starts, end = list[int](), len(sizes)
    for stages in range(num_stages, 1, -1):
        end = cut[stages - 1][end]
        starts.append(end)
    return starts[::-1]
