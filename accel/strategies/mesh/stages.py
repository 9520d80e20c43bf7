"""Stages of a pipeline: where a model is divided, and what a rank computes of its forward pass.

Every rank runs the model's own forward pass. A module of an earlier stage answers with `Absent`
tensors, which have a shape and no values. When the first module of this rank's stage is called, its
absent arguments are replaced by tensors of the stage before. When the first module of the next
stage is called, its arguments are what that stage needs, and the forward pass ends. So a model is
not rewritten in stages, and what it computes between its modules (positions, masks) is computed on
each rank. A tensor that takes another way from stage to stage is refused, as it stays absent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel.machine.errors import ConfigError, StateError, nearest
from accel.strategies.mesh.torch_internals import buffer_table, fake_mode, parameter_table, pytree
from accel.weights.pipeline import balanced_split_points

# Names of the modules that stages but the first begin with; or a function of the model and the
# number of stages, which returns the names of the modules of each stage.
Split = Sequence[str] | Callable[[nn.Module, int], Sequence[Sequence[str]]] | None


def divide(model: nn.Module, num_stages: int, split: Split) -> dict[str, int]:
    """Return the stage of each module that a model is divided into, by full name.

    Modules without a state are in none: every rank computes them. Parameters and buffers of modules
    that are divided further belong to all stages.

    Args:
        model: on any device, also meta.
        num_stages: at least 2.
        split: where; None: at the model's repeated blocks, the largest stage as small as can be.

    Raises:
        ConfigError: if there are too few blocks or names, or a name is of no module.
    """
    if callable(split):
        given = [list(names) for names in split(model, num_stages)]
    else:
        begins, given = split or _balanced(model, num_stages), [[]]
        for name, _ in _pieces(model, _around(model, begins)):
            if name in begins:
                given.append([])
            given[-1].append(name)
    stages = {name: stage for stage, names in enumerate(given) for name in names}
    pieces = dict(_pieces(model, _around(model, stages)))
    weighty = {name for name, piece in pieces.items() if piece.state_dict()}
    numbers = {stages.get(name) for name in weighty}
    if numbers != set(range(num_stages)) or stages.keys() - pieces.keys():
        raise ConfigError.of(
            f"pp_split={given if callable(split) else split!r} of {type(model).__name__}",
            f"it makes {num_stages} stages, and each module with weights is in one",
            f"Name the {num_stages - 1} modules that stages but the first begin with, in the order "
            "of the model, or return the names of all modules of each stage.",
        )
    return {name: stage for name, stage in stages.items() if name in weighty}


def _around(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of the modules around those that are named; refuse unknown ones."""
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            rule = f"{type(model).__name__} has no such module"
            raise ConfigError.of(f"pp_split: {name!r}", rule, nearest(name, known))
    parts = [name.split(".") for name in names]
    return {".".join(part[:count]) for part in parts for count in range(len(part))}


def _pieces(
    model: nn.Module, opened: set[str], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in model.named_children():
        name = f"{prefix}{child_name}"
        if name in opened:
            yield from _pieces(child, opened, f"{name}.")
        else:
            yield name, child


def _balanced(model: nn.Module, num_stages: int) -> list[str]:
    """Return the repeated blocks that stages begin with."""
    blocks: list[str] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        children = list(module.children())
        is_list = isinstance(module, nn.ModuleList | nn.Sequential) and bool(module.state_dict())
        if not is_list or any(name.startswith(f"{outer}.") for outer in lists):
            continue
        lists.append(name)
        if len({type(child) for child in children}) == 1 and len(children) > len(blocks):
            blocks = [f"{name}.{child}".lstrip(".") for child, _ in module.named_children()]
    if len(blocks) < num_stages:
        value = f"{type(model).__name__} in {num_stages} pipeline stages"
        rule = f"each has at least one of its repeated blocks, and it has {len(blocks)}"
        remedy = "Name the modules that stages begin with: pp_split=[…], or lower pp_size."
        raise ConfigError.of(value, rule, remedy)
    kind = type(model.get_submodule(blocks[0])).__name__
    return balanced_split_points(model, blocks, num_stages, {kind})


# -- the forward pass of a stage -----------------------------------------------------------


class Absent(torch.Tensor):
    """A tensor that an earlier stage computes: of the right shape, dtype and device, of zeros.

    What is computed from it is absent, too.

    Attributes:
        received: what it stands for, once that was received.
    """

    received: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in READS:
            value = f"Tensor.{func.__name__} of a tensor that an earlier pipeline stage computes"
            rule = "a stage knows its shape, and no values"
            remedy = "Read values within a block, or split elsewhere: pp_split=[…]."
            raise ConfigError.of(value, rule, remedy)
        return super().__torch_function__(func, types, args, kwargs or {})


# What turns a tensor into values of Python.
READS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__bool__),
    *(torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__),
}


class StageEnd(BaseException):
    """Ends the forward pass of a stage. No error: a model's ``except Exception`` lets it pass."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.values = values


@dataclass(frozen=True)
class Wanted:
    """A tensor that a stage receives: which argument of its first module it is, and its form."""

    index: int
    shape: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of that form."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass
class StagePass:
    """The forward pass of one stage, as it is under way.

    Attributes:
        stage: its number.
        receive: returns the tensors that take the places of absent arguments of its first module.
        sends: what the next stage receives.
        begun: whether a module of the stage was called.
        grad: whether it is a part of training; a call of the model without gradients then is an
            evaluation of its own.
    """

    stage: int
    receive: Callable[[list[Wanted]], Sequence[torch.Tensor]]
    sends: Sequence[Wanted] = ()
    begun: bool = False
    grad: bool = field(default_factory=torch.is_grad_enabled)

    def call(
        self, piece: Piece, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a module of this stage; answer for one of an earlier stage; end at the next."""
        if piece.stage < self.stage and not self.begun:
            return piece.absent(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if piece.stage == self.stage:
            if not self.begun:
                self._begin(leaves)
            return piece.run(run, leaves, spec)
        if piece.stage == self.stage + 1 and self.begun:
            raise StageEnd([self._sent(piece, leaves[one.index], one) for one in self.sends])
        value = f"{piece.name} of pipeline stage {piece.stage} is called in stage {self.stage}"
        rule = "a loss calls the model once, and the model its modules in the order of the stages"
        remedy = "Give pp_split a function that lists the modules of each stage as they are called."
        raise ConfigError.of(value, rule, remedy)

    def _begin(self, leaves: list[Any]) -> None:
        self.begun = True
        absent = [(n, leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, Absent)]
        wanted = [Wanted(n, leaf.shape, leaf.dtype) for n, leaf in absent]
        for one, tensor in zip(wanted, self.receive(wanted), strict=True):
            leaves[one.index].received = tensor

    def _sent(self, piece: Piece, leaf: Any, wanted: Wanted) -> torch.Tensor:
        tensor: torch.Tensor = piece.present(leaf)
        if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
            raise ConfigError.of(
                f"{piece.name} gets {tensor.dtype} {tuple(tensor.shape)}",
                f"stage {piece.stage} expects {wanted.dtype} {tuple(wanted.shape)} by the shapes "
                "of its inputs",
                "Let the model compute shapes and dtypes from those of its inputs alone.",
            )
        return tensor.contiguous()


class Gate:
    """What the modules of all stages ask when they are called.

    Args:
        device: where the model computes.
        dtype: to which floating-point parameters and inputs of modules are cast; None: uncast.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device, self.dtype = device, dtype
        self.fakes = fake_mode()
        self.current: StagePass | None = None
        self.recomputes = False  # whether backward passes may call modules again

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor without data, as the model computes with it."""
        dtype = self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype
        with self.fakes:
            made = torch.empty(tensor.shape, dtype=dtype, device=self.device)
            return nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made


@dataclass(eq=False)
class Piece:
    """A module of one stage, and a copy without data that tells the shapes of its outputs."""

    name: str
    stage: int
    gate: Gate
    module: nn.Module
    ghost: nn.Module
    _outputs: dict[Any, Any] = field(default_factory=dict)

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the module, or what stands for it in the pass under way."""
        if self.gate.current is not None:
            return self.gate.current.call(self, run, args, kwargs)
        if self.gate.recomputes:  # activation checkpointing around the module
            return self.run(run, *pytree.tree_flatten((args, kwargs)))
        raise StateError(
            f"{self.name} is a module of pipeline stage {self.stage}, and is called by itself. "
            "Call the prepared model, under torch.no_grad(); train with "
            "accelerator.forward_backward(model, micro_batches, loss_fn)."
        )

    def run(self, run: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
        """Compute the module of arguments in which nothing is absent."""
        args, kwargs = pytree.tree_unflatten([self.present(one) for one in leaves], spec)
        return run(*args, **kwargs)

    def absent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return absent tensors of the shapes that the module would return."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shapes = [(x.shape, x.dtype) for x in leaves if isinstance(x, torch.Tensor)]
        key = (self.module.training, *shapes)
        if key not in self._outputs:
            self.ghost.train(self.module.training)
            fakes = [self.gate.fake(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(fakes, spec)
            with self.gate.fakes, torch.no_grad():
                self._outputs[key] = self.ghost(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _absent, self._outputs[key])

    def present(self, leaf: Any) -> Any:
        """Return what an argument of the module stands for; refuse one that no stage sends."""
        if not isinstance(leaf, Absent):
            return leaf
        if leaf.received is None:
            value = f"{self.name} in pipeline stage {self.stage} takes a tensor of an earlier stage"
            remedy = "Hand the tensor on through each block, or split elsewhere: pp_split=[…]."
            raise ConfigError.of(
                value, "a stage receives the arguments of its first module", remedy
            )
        return leaf.received


def _absent(fake: torch.Tensor) -> Absent:
    return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device).as_subclass(Absent)


class _Gated:
    """Mixed into the class of a module whose calls, hooks included, wait for `called`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called: Callable[..., Any] = vars(self)["pipeline_called"]
        return called(super().__call__, args, kwargs)  # type: ignore[misc]


def gate_calls(module: nn.Module, called: Callable[..., Any]) -> None:
    """Let `called`, given the call of a module and its arguments, decide what it returns."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (_Gated, kind), {"__module__": kind.__module__})
    vars(module)["pipeline_called"] = called


def gate_modules(model: nn.Module, stages: Mapping[str, int], gate: Gate) -> None:
    """Let the modules of all stages answer as the stage under way needs it."""
    tensors = [*model.parameters(), *model.buffers()]
    fakes: dict[int, Any] = {id(tensor): gate.fake(tensor) for tensor in tensors}
    for name, stage in stages.items():
        module = model.get_submodule(name)
        ghost = copy.deepcopy(module, dict(fakes))
        gate_calls(module, Piece(name, stage, gate, module, ghost).call)


def drop(module: nn.Module) -> None:
    """Free the tensors of a module that other ranks hold; attributes keep their shapes."""
    for owner in module.modules():
        vars(owner)["pipeline_dropped"] = True
        for table in (parameter_table(owner), buffer_table(owner)):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    del table[name]
                    vars(owner)[name] = tensor.detach().to("meta")


def is_dropped(module: nn.Module) -> bool:
    """Return whether other ranks hold a module, or what it is a part of."""
    return "pipeline_dropped" in vars(module)
