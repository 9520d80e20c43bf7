"""Pipeline stages of a traced model: where it is cut, what a stage takes, gives and returns.

A stage takes and returns a flat tuple of tensors: the activations and inputs of the model that it
or a later stage uses. So any stage may use an input of the model, and any may make an output.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from accel.machine.errors import ConfigError, nearest
from accel.weights.sizes import layers_of, own_parts
from accel.weights.tensors import find_tied_parameters, held_in


def balanced_split_points(
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


def check_split_points(calls: Sequence[str], split_points: Sequence[str], num_stages: int) -> None:
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


class FlatModel(nn.Module):
    """A model that takes and returns its tensors alone, as flat tuples.

    Args:
        model: the model.
        example: ``(args, kwargs)`` of a call of it.
    """

    def __init__(self, model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        super().__init__()
        self.model = model
        self.inputs = Structure.of(example)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the model's outputs, given those of its inputs."""
        return Structure.of(self.outputs(tensors)).tensors

    def outputs(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the model's outputs, given the tensors of its inputs."""
        args, kwargs = self.inputs.filled(tensors)
        return self.model(*args, **kwargs)


@dataclass(frozen=True)
class Structure:
    """Nested containers: their tensors, and what is around them.

    Attributes:
        leaves: in the order of torch's trees; None is one.
        spec: containers around them.
    """

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @classmethod
    def of(cls, data: object) -> Structure:
        """Return the structure of nested containers."""
        leaves, spec = pytree.tree_flatten(data)
        return cls(tuple(leaves), spec)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The leaves that are tensors."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def filled(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the containers with other tensors in the place of theirs."""
        fresh = iter(tensors)
        leaves = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return self.around(leaves)

    def around(self, leaves: Iterable[Any]) -> Any:
        """Return the containers with other leaves."""
        return pytree.tree_unflatten(leaves, self.spec)


class Stage(nn.Module):
    """A stage: it calls its part of the model, and selects what the next stage takes.

    Every tensor has a dimension of size 1 before its own, so that micro-batches of any shapes are
    chunks along dim 0.

    Args:
        part: the traced part of the model.
        takes: which of the stage's inputs go to `part`.
        gives: which of the inputs, followed by what `part` returns, are the stage's outputs.
    """

    def __init__(self, part: nn.Module, takes: Sequence[int], gives: Sequence[int]) -> None:
        super().__init__()
        self.part = part
        self.takes = tuple(takes)
        self.gives = tuple(gives)

    def forward(self, *carried: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the stage's outputs, each [1, ...], given its inputs, each [1, ...]."""
        inputs = [tensor.squeeze(0) for tensor in carried]
        found = self.part(*[inputs[index] for index in self.takes])
        values = [*inputs, *(found if isinstance(found, (tuple, list)) else (found,))]
        return tuple(values[index].unsqueeze(0).contiguous() for index in self.gives)


class Layout:
    """What each stage of a traced model takes and gives.

    Args:
        split: `Pipe.split_gm`, whose graph has placeholders, a call of each stage, and the output.

    Attributes:
        parts: the traced part of the model, by stage.
        takes: as of `Stage`, by stage.
        gives: as of `Stage`, by stage.
        carried: tensors without data that each stage is given, [1, ...]; then the model's outputs.
    """

    def __init__(self, split: fx.GraphModule) -> None:
        nodes = list(split.graph.nodes)
        calls = [node for node in nodes if node.op == "call_module"]
        self.parts = [_part(split, call) for call in calls]
        self.takes: list[list[int]] = []
        self.gives: list[list[int]] = []
        data = {node: node.meta["val"] for node in nodes if node.op == "placeholder"}
        given = list(data)
        self.carried = [_ghosts(data, given)]
        returned = nodes[-1].args[0]
        for position, (call, part) in enumerate(zip(calls, self.parts, strict=True)):
            made = _results(call, part)
            data |= dict(made)
            values = [*given, *(node for node, _ in made)]
            later = {*returned, *(node for after in calls[position + 1 :] for node in after.args)}
            self.takes.append([given.index(node) for node in call.args])
            given = returned if call is calls[-1] else [node for node in values if node in later]
            self.gives.append([values.index(node) for node in given])
            self.carried.append(_ghosts(data, given))


def _part(split: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    part = split.get_submodule(str(call.target))
    assert isinstance(part, fx.GraphModule)
    return part


def _results(call: fx.Node, part: fx.GraphModule) -> list[tuple[fx.Node, torch.Tensor]]:
    """Return the node of each tensor that a stage returns, in their order, and the tensor."""
    items = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    leaves = pytree.tree_leaves(part.graph.output_node().args)
    return [(items.get(index, call), leaf.meta["val"]) for index, leaf in enumerate(leaves)]


def _ghosts(data: dict[fx.Node, torch.Tensor], nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    return [torch.empty((1, *data[n].shape), dtype=data[n].dtype, device="meta") for n in nodes]


def as_stage(part: fx.GraphModule, takes: Sequence[int], gives: Sequence[int]) -> Stage:
    """Return the stage of a traced part, which is called with positional tensors."""
    part.graph.set_codegen(fx.graph.CodeGen())
    part.recompile()
    return Stage(part, takes, gives)


# -- devices and weights -------------------------------------------------------------------


def move(stage: Stage, device: torch.device) -> None:
    """Move the weights and constants of a stage to a device, on which it computes then.

    A traced graph makes its tensors (`torch.arange`, …) on the device of the trace.
    """

    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for module in stage.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):  # a constant
                setattr(module, name, value.to(device))
        graph = getattr(module, "graph", None)
        for node in graph.nodes if isinstance(graph, fx.Graph) else ():
            node.args = fx.node.map_aggregate(node.args, moved)
            node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
        if isinstance(module, fx.GraphModule):
            module.recompile()
    stage.to(device)


def take_buffers(stage: Stage, model: nn.Module, prefix: str) -> None:
    """Give a stage the model's own buffers: those that a trace assigned have no data.

    Args:
        stage: a stage.
        model: that was traced, with its buffers as before.
        prefix: as of `keep_only`.
    """
    own = dict(model.named_buffers(remove_duplicate=False))
    for name, _ in list(stage.part.named_buffers(remove_duplicate=False)):
        if name.removeprefix(prefix) in own:
            held, key = held_in(stage.part, name)
            held[key] = own[name.removeprefix(prefix)]


def keep_only(model: nn.Module, stage: Stage, prefix: str) -> None:
    """Let a model keep the weights of one stage, and the others' shapes on the meta device.

    Args:
        model: that was traced.
        stage: the stage of this process.
        prefix: of the names in the stage: that of the model in what was traced.
    """
    tensors = {**dict(stage.part.named_parameters()), **dict(stage.part.named_buffers())}
    kept = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for group in find_tied_parameters(model):
        held = [kept[name] for name in group if name in kept]
        kept |= dict.fromkeys(group, held[0]) if held else {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    for name in names:
        owner, key = held_in(model, name)
        owner[key] = kept[name] if name in kept else _on_meta(owner[key])


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.to("meta")
    return nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)


# -- tracing -------------------------------------------------------------------------------


@contextmanager
def calls_recorded(model: nn.Module) -> Iterator[list[str]]:
    """Within the context, list the full names of the submodules that are called, by time."""
    calls: list[str] = []

    def recorder(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    hooks = [m.register_forward_pre_hook(recorder(name)) for name, m in model.named_modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def forwards_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """After the context, give modules back the `forward` that `pipeline` replaces in them."""
    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        yield
    finally:
        for module, forward in before:
            for name in ("forward", "_orig_forward"):
                vars(module).pop(name, None)
            if forward is not None:
                module.forward = forward


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """After the context, give the modules of a model back the buffers and tensors that they had.

    A forward pass that is traced may add to statistics, or keep tensors without data.
    """
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, attributes, buffers in before:
            own = vars(module)
            for name in [n for n, value in own.items() if isinstance(value, torch.Tensor)]:
                del own[name]
            kept = {n: value for n, value in attributes.items() if isinstance(value, torch.Tensor)}
            own.update(kept)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
