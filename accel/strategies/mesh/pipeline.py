"""Pipeline parallelism: each rank of the pp axis holds some stages of a model.

The schedules are those of `torch.distributed.pipelining`: the micro-batches of a window go through
the stages, whose `loss_fn` the last one computes. Outside of a window, one batch goes from stage to
stage, and every rank gets the output.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from accel.config.parallelism import STAGES_PER_RANK, V_SHAPED, ParallelismConfig
from accel.machine.errors import ConfigError, StateError
from accel.machine.memory import local
from accel.machine.tree import flatten
from accel.precision.wrapping import register_wrapper
from accel.strategies.mesh.stages import (
    Absent,
    Gate,
    StageEnd,
    StagePass,
    Wanted,
    divide,
    drop,
    gate_calls,
    gate_modules,
)
from accel.strategies.mesh.torch_internals import Models, pytree

if TYPE_CHECKING:
    from accel.checkpoint.optimizer_state import ParameterNames
    from accel.strategies.base import Accumulation

Call = Callable[[], Any]
MODEL = "model:"  # begins the keys of an optimizer's state
TRAIN = "accelerator.forward_backward(model, micro_batches, loss_fn)"


@register_wrapper
class Pipelined(nn.Module):
    """A model of which this rank holds some stages.

    Calls, without gradients, return the output of the last stage on every rank.

    Attributes:
        keeps_cache: whether a call may take the keys and values of an earlier one.
    """

    keeps_cache = False

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.module = pipeline.model
        self.pipeline = pipeline

    @property
    def scheduled(self) -> bool:
        """Whether the micro-batches of a window are being computed: a loss calls it once then."""
        return self.pipeline.gate.recomputes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, which goes from stage to stage."""
        return self.module(*args, **kwargs)


def pipelines(models: Models) -> Iterator[Pipeline]:
    """Yield the pipelines of those models that are in stages: of one, if any."""
    return (model.pipeline for model in models if isinstance(model, Pipelined))


def pipeline_of(models: Models, own: nn.Module) -> Pipeline | None:
    """Return the pipeline of a user's own module; None without any."""
    return next((one for one in pipelines(models) if one.model is own), None)


class Stage(nn.Module):
    """The modules of one stage, as FSDP2 shards them and a `PipelineStage` calls them."""

    def __init__(self, pipeline: Pipeline, index: int, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules_ = nn.ModuleList(modules)
        self.index = index
        self._no_split_modules = getattr(pipeline.model, "_no_split_modules", None)
        self._compute = pipeline.compute

    def forward(self, *received: torch.Tensor, number: torch.Tensor) -> Any:
        """Return what the next stage receives; of the last stage, what the pass returns.

        Args:
            received: of the stage before.
            number: [1] of the micro-batch.
        """
        return self._compute(self.index, received, int(number))


class Pipeline:
    """The stages of a model on this rank, and how they compute together.

    Args:
        model: with its weights, or on the meta device; every rank gives the same.
        config: number of stages, schedule, and where the model is divided.
        group: the ranks of the pp axis.
        gate: of this model.

    Attributes:
        last_rank: which computes losses.
        stages: of this rank, by number.
        names: of the full model's state, in its order.
        first_names: the first name of each parameter, by the parameter as the user has it.
        groups: by optimizer, the names of all parameters that it was built of, by group.
    """

    def __init__(
        self, model: nn.Module, config: ParallelismConfig, group: dist.ProcessGroup, gate: Gate
    ) -> None:
        self.model, self.group, self.gate = model, group, gate
        self.rank, self.size = dist.get_rank(group), group.size()
        self.schedule = config.pp_schedule
        self.num_stages = self.size * STAGES_PER_RANK[self.schedule]
        self.last_rank = self.rank_of(self.num_stages - 1)
        self.names = list(model.state_dict())
        self._pieces = divide(model, self.num_stages, config.pp_split)
        self._name_parameters()
        gate_modules(model, self._pieces, gate)
        gate_calls(model, self._called)
        self.stages: dict[int, Stage] = {}
        self._wanted: dict[Any, list[list[Wanted]]] = {}
        self._calls: list[Call] = []
        self.losses: list[torch.Tensor] | None = None  # scaled, where a loss is computed
        self.groups: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[list[str]]]
        self.groups = weakref.WeakKeyDictionary()
        self._prepared: tuple[Any, Any] = None, None  # the newest schedule, and what it is for

    def _name_parameters(self) -> None:
        """Note the names of each parameter, and the ranks that hold it."""
        self._first: dict[str, str] = {}  # each name -> the first name of the parameter
        self._holders: dict[str, set[int]] = {}
        first: dict[int, str] = {}
        self.first_names = WeakIdKeyDictionary()  # of the parameters as the user has them
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            own = self._first[name] = first.setdefault(id(parameter), name)
            self.first_names[parameter] = own
            stages = [n for piece, n in self._pieces.items() if name.startswith(f"{piece}.")]
            ranks = map(self.rank_of, stages or range(self.num_stages))
            self._holders.setdefault(own, set()).update(ranks)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage: in turns, or there and back."""
        if self.schedule in V_SHAPED and stage >= self.size:
            return self.num_stages - 1 - stage
        return stage % self.size

    def take(self, materialize: Callable[[nn.Module], None], device: torch.device) -> None:
        """Materialize the model a module at a time, and keep those of this rank's stages."""
        held: dict[int, list[nn.Module]] = {}
        for name, stage in self._pieces.items():
            module = self.model.get_submodule(name)
            materialize(module)
            if self.rank_of(stage) == self.rank:
                held.setdefault(stage, []).append(module)
            else:
                drop(module)
        materialize(self.model)
        self.model.to(device)
        self.stages = {stage: Stage(self, stage, held[stage]) for stage in sorted(held)}

    # -- computing -------------------------------------------------------------------------

    def _called(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what a call of the model returns: in the pass under way, else of all stages."""
        current, grad = self.gate.current, torch.is_grad_enabled()
        if current is not None and grad == current.grad:
            return run(*args, **kwargs)
        if grad or self.gate.recomputes or kwargs.get("past_key_values") is not None:
            raise StateError(
                "A model of several pipeline stages is called with gradients, keys and values of "
                f"an earlier call, or inside of a loss. Train with {TRAIN}, evaluate under "
                "torch.no_grad(), generate with use_cache=False."
            )
        return self._evaluate(lambda: run(*args, **kwargs), (args, kwargs))

    def compute(self, stage: int, received: Sequence[torch.Tensor], number: int) -> Any:
        """Return what the next stage receives of a micro-batch; of the last stage, the result."""
        sends = self._sends[stage + 1] if stage + 1 < self.num_stages else []
        found = self._run(stage, self._calls[number], lambda _: received, sends)
        if stage + 1 < self.num_stages and torch.is_grad_enabled():
            # Frozen stages compute no gradients; torch's backward pass begins with some tensor.
            return tuple(x if x.grad_fn else x.requires_grad_(x.is_floating_point()) for x in found)
        return found

    def _run(
        self,
        stage: int,
        call: Call,
        receive: Callable[[list[Wanted]], Sequence[torch.Tensor]],
        sends: Sequence[Wanted],
    ) -> Any:
        """Run a forward pass as far as a stage goes; return what it sends, or the result."""
        before, current = self.gate.current, StagePass(stage, receive, sends)
        self.gate.current = current
        try:
            result = call()
        except StageEnd as end:
            return tuple(end.values)
        finally:
            self.gate.current = before
        absent = any(isinstance(leaf, Absent) for leaf in pytree.tree_leaves(result))
        if stage + 1 < self.num_stages or absent or not current.begun:
            value = (
                f"a forward pass that ends before pipeline stage {stage + 1 - absent} is computed"
            )
            rule = "each calls the model once, whose modules compute the result in order"
            remedy = "Return a loss of the model's output, or split elsewhere: pp_split=[…]."
            raise ConfigError.of(value, rule, remedy)
        return result

    def _negotiate(self, call: Call, inputs: Any) -> None:
        """Agree on what each stage receives, for inputs of these shapes. Every rank calls this."""
        key = (self.model.training, _shapes(inputs))
        if key not in self._wanted:
            # Also of the first stage: a loss may evaluate the model before it is computed.
            own = {stage: self._run(stage, call, _stop, ()) for stage in self.stages}
            found: list[Any] = [None] * self.size
            dist.all_gather_object(found, own, group=self.group)
            merged = {stage: wanted for answer in found for stage, wanted in answer.items()}
            self._wanted[key] = [merged[stage] for stage in range(self.num_stages)]
        self._sends = self._wanted[key]

    def _evaluate(self, call: Call, inputs: Any) -> Any:
        """Return the result of a forward pass through all stages, on every rank."""
        self._negotiate(call, inputs)
        self._calls = [call]
        result: Any = None
        for stage in sorted(self.stages):
            received = [wanted.empty(self.gate.device) for wanted in self._sends[stage]]
            before, after = self.rank_of(stage - 1), self.rank_of(stage + 1)
            if stage and before == self.rank:
                received = list(result)
            elif stage:
                for tensor in received:
                    dist.recv(tensor, group=self.group, group_src=before)
            result = self.stages[stage](*received, number=torch.tensor(0))
            if stage + 1 < self.num_stages and after != self.rank:
                for tensor in result:
                    dist.send(tensor, group=self.group, group_dst=after)
        own = {"result": result} if self.rank == self.last_rank else {}
        return self._merged(own)["result"]

    def forward_backward(
        self,
        model: nn.Module,
        micro_batches: Sequence[Any],
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        parts: Callable[[list[Any]], AbstractContextManager[list[Any]]],
        accumulation: Accumulation,
    ) -> list[torch.Tensor]:
        """Compute the gradients of a window; return its losses, detached, on every rank.

        Args:
            model: as it was prepared.
            micro_batches: all of one shape, on the device.
            loss_fn: as of `Accumulation.forward_backward`.
            parts: the context of this rank's part of micro-batches of one shape.
            accumulation: scales losses.
        """
        losses = torch.zeros(len(micro_batches), device=self.gate.device)
        own = list(micro_batches)

        def scaled_loss(number: int) -> torch.Tensor:
            loss = loss_fn(model, own[number])
            losses[number] = loss.detach()
            return self._scaled(loss, accumulation)

        calls = [functools.partial(scaled_loss, number) for number in range(len(losses))]
        if self.rank != self.last_rank:  # a scaler begins a window with its first loss
            self._scaled(losses.sum(), accumulation)
        self._train(calls, own, parts)
        dist.broadcast(losses, group=self.group, group_src=self.last_rank)
        return list(losses)

    def _scaled(self, loss: torch.Tensor, accumulation: Accumulation) -> torch.Tensor:
        """Return a loss as a backward pass would begin with it."""
        self.losses = []
        accumulation.backward(loss)
        (scaled,), self.losses = self.losses, None
        return scaled

    def backward(self, loss: torch.Tensor) -> None:
        """Take a scaled loss for the schedule; refuse one of a loop's own."""
        if self.losses is None:
            raise StateError(
                "accelerator.backward with several pipeline stages: the stages compute forward and "
                f"backward passes of a window in the order of a schedule. Train with {TRAIN}."
            )
        self.losses.append(loss)

    def _train(
        self,
        calls: Sequence[Call],
        inputs: list[Any],
        parts: Callable[[list[Any]], AbstractContextManager[list[Any]]],
    ) -> None:
        """Compute gradients of micro-batches; each call returns the loss of one of the inputs.

        Those of one shape go through the stages together, whatever number they are.
        """
        with self._set_aside():
            for shapes, group in itertools.groupby(range(len(calls)), lambda n: _shapes(inputs[n])):
                numbers = list(group)
                # Until the backward passes are done: they may compute attention again.
                with parts([inputs[n] for n in numbers]) as own:
                    inputs[numbers[0] : numbers[-1] + 1] = own
                    self._negotiate(calls[numbers[0]], own[0])
                    self._calls = list(calls)
                    self._step(self._scheduled(len(numbers), shapes), torch.tensor(numbers))
            self._sum_shared()

    def _step(self, schedule: Any, numbers: torch.Tensor) -> None:
        """Compute forward and backward passes of micro-batches of these numbers [M]."""
        self.gate.recomputes = True
        try:
            with self._set_aside():  # a schedule begins by dropping those that FSDP shards
                schedule.step(number=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:  # torch wraps what a stage raises
            raise error.__cause__ or error from None
        finally:
            self.gate.recomputes = False
            self._calls = []

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Take gradients away, and add them to the new ones afterwards."""
        before = [(one, one.grad) for one in self.model.parameters() if one.grad is not None]
        for parameter, _ in before:
            parameter.grad = None
        yield
        for parameter, gradient in before:
            new = parameter.grad
            parameter.grad = gradient if new is None else gradient.add_(new)

    def _scheduled(self, num_micro_batches: int, shapes: Any) -> Any:
        """Return the schedule of so many micro-batches; it holds buffers for what is received."""
        key = num_micro_batches, self.model.training, shapes
        if self._prepared[0] == key:
            return self._prepared[1]
        name = self.schedule
        if name == "1F1B" and num_micro_batches < self.num_stages:
            name = "GPipe"  # the same order then, and torch's 1F1B takes no fewer
        fixed, group = (self.num_stages, self.gate.device), self.group
        stages = [
            PipelineStage(stage, n, *fixed, self._examples(n), self._examples(n + 1), group=group)
            for n, stage in self.stages.items()
        ]
        given = stages if len(stages) > 1 else stages[0]
        try:
            schedule = get_schedule_class(name)(
                given, num_micro_batches, lambda loss, number: loss, scale_grads=False
            )
        except ValueError as error:
            value = (
                f"pp_schedule={name!r} with {num_micro_batches} micro-batches, {self.size} ranks"
            )
            remedy = "Divide a step into more micro-batches, or give pp_schedule='1F1B'."
            raise ConfigError.of(value, " ".join(str(error).split()), remedy) from error
        self._prepared = key, schedule
        return schedule

    def _examples(self, stage: int) -> tuple[torch.Tensor, ...]:
        """Return tensors like those that a stage receives; behind the last one, like a loss."""
        if stage == self.num_stages:
            return (torch.zeros((), device=self.gate.device, requires_grad=True),)
        found = [wanted.empty(self.gate.device) for wanted in self._sends[stage]]
        return tuple(x.requires_grad_(x.is_floating_point()) for x in found)

    # -- parameters of several ranks -------------------------------------------------------

    def _shared(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank that others hold, too, by their first name."""
        named = self.model.named_parameters(remove_duplicate=False)
        own = {self._first[name]: parameter for name, parameter in named}
        return {name: own[name] for name in sorted(own) if len(self._holders[name]) > 1}

    def counted_elsewhere(self) -> set[int]:
        """Return the ids of shared parameters that a rank before this one counts in norms."""
        shared = self._shared().items()
        return {id(one) for name, one in shared if min(self._holders[name]) < self.rank}

    @torch.no_grad()
    def _sum_shared(self) -> None:
        """Sum the gradients of shared parameters over their ranks, in the order of these."""
        for name, parameter in self._shared().items():
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor):  # laid out alike
                parameter.grad = grad.redistribute(placements=parameter.placements)
            own = local(parameter).new_zeros(local(parameter).numel() + 1)
            if parameter.grad is not None:
                own[:-1] = local(parameter.grad).reshape(-1)
                own[-1] = 1
            ranks = sorted(self._holders[name])
            parts = {rank: own if rank == self.rank else torch.empty_like(own) for rank in ranks}
            ops = [
                dist.P2POp(op, tensor, group=self.group, group_peer=rank)
                for rank in ranks
                if rank != self.rank
                for op, tensor in ((dist.isend, own), (dist.irecv, parts[rank]))
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            total = torch.stack([parts[rank] for rank in ranks]).sum(dim=0)
            if total[-1] == 0:  # no rank has a gradient
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            summed = local(parameter.grad)
            summed.copy_(total[:-1].view(summed.shape))

    # -- state -----------------------------------------------------------------------------

    def keep_held(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step the parameters of this rank's stages alone."""
        if optimizer in self.groups:
            return
        self.groups[optimizer] = []
        for group in optimizer.param_groups:
            names = [self.first_names.get(one, "") for one in group["params"]]
            kept = [self.rank in self._holders.get(name, (self.rank,)) for name in names]
            self.groups[optimizer].append([name for name in names if name])
            for key in {"params", "param_names"} & group.keys():
                group[key] = [one for one, keep in zip(group[key], kept, strict=True) if keep]

    def full_model(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the full model; tied weights are one tensor."""
        first = {self._first.get(name, name): value for name, value in own.items()}
        found = _on_host(self._merged(first))
        return {name: found[self._first.get(name, name)] for name in self.names}

    def part_of_model(self, state: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
        """Return what this rank loads of a full state, and what no stage knows."""
        known = set(self.names).difference(own)
        return {name: value for name, value in state.items() if name not in known}

    def named_optimizer(
        self, optimizer: torch.optim.Optimizer, own: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the state of this rank's stages by first names, in the groups of all stages."""
        state = {self.first_key(key): entry for key, entry in own["state"].items()}
        groups = [
            {**group, "params": [f"{MODEL}{name}" for name in names]}
            for group, names in zip(own["param_groups"], self.groups[optimizer], strict=True)
        ]
        return own | {"state": state, "param_groups": groups}

    def full_optimizer(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return the state of all stages, of what `named_optimizer` returned on each rank."""
        return named | {"state": _on_host(self._merged(named["state"]))}

    def others(self, optimizer: torch.optim.Optimizer, names: ParameterNames) -> set[str]:
        """Return the keys of those parameters of an optimizer that this rank does not hold."""
        every = {f"{MODEL}{name}" for group in self.groups[optimizer] for name in group}
        return every.difference(map(self.first_key, names.keys(optimizer)))

    def part_of_optimizer(
        self, optimizer: torch.optim.Optimizer, saved: dict[str, Any], names: ParameterNames
    ) -> dict[str, Any]:
        """Return what this rank loads of an optimizer's full state."""
        own = {self.first_key(key): key for key in names.keys(optimizer)}
        others = self.others(optimizer, names)
        state = {self.first_key(key): entry for key, entry in saved["state"].items()}
        return saved | {
            "state": {own.get(key, key): one for key, one in state.items() if key not in others},
            "param_groups": [
                group | {"params": [own.get(k, k) for k in group["params"] if k not in others]}
                for group in saved["param_groups"]
            ],
        }

    def first_key(self, key: str) -> str:
        """Return the key of a parameter by the first of its names."""
        name = key.removeprefix(MODEL)
        return f"{MODEL}{self._first[name]}" if name in self._first else key

    def _merged(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of all ranks, tensors included; every rank gives its own.

        Of an entry that several ranks give, the first rank's is taken.
        """
        leaves, spec = pytree.tree_flatten(dict(own))
        forms = list(leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                forms[index] = Wanted(index, leaf.shape, leaf.dtype)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, pytree.tree_unflatten(forms, spec), group=self.group)
        result: dict[str, Any] = {}
        for rank, entries in enumerate(found):

            def receive(form: Wanted, rank: int = rank) -> torch.Tensor:
                tensor = form.empty(self.gate.device)
                if rank == self.rank:
                    tensor.copy_(leaves[form.index])
                dist.broadcast(tensor, group=self.group, group_src=rank)
                return tensor

            lacking = {name: entry for name, entry in entries.items() if name not in result}
            result |= pytree.tree_map_only(Wanted, receive, lacking)
        return result


def _stop(wanted: list[Wanted]) -> NoReturn:
    """End the forward pass of a stage before its first module, with what that receives."""
    raise StageEnd(wanted)


def _on_host(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)


def _shapes(data: Any) -> Any:
    """Return the shapes and dtypes of nested tensors; of a dataclass, the first field is it."""
    if dataclasses.is_dataclass(data):
        data = getattr(data, dataclasses.fields(data)[0].name)
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in flatten(data)[0])
