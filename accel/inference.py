"""Inference over pipeline stages, one on each process: `prepare_pippy`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from accel.comm.base import exchange_flat
from accel.machine.errors import ConfigError, Problem, Problems
from accel.state import PartialState
from accel.weights.device_map import as_classes
from accel.weights.pipeline import (
    FlatModel,
    Layout,
    Structure,
    as_stage,
    balanced_split_points,
    buffers_restored,
    calls_recorded,
    check_split_points,
    forwards_restored,
    keep_only,
    move,
    take_buffers,
)

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

_AUTO = "auto"


def prepare_pippy(
    model: nn.Module,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: Collection[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Spread a model over the processes as pipeline stages, for inference.

    Each process calls the model that is returned; the inputs of the first one count, and others
    may give none. The batch is cut into micro-batches of the size of the example, of which
    `num_chunks` go through the stages at a time (GPipe); the last one is padded by repeating its
    last sample, and the outputs are cut to the length of the batch. Outputs are on the last
    process, None on others. Nothing is differentiated. On one process there is one stage: the model
    itself, in evaluation mode on its device.

    Args:
        model: with weights, the same on every process, on the CPU; put into evaluation mode.
            Afterwards it has those of this process's stage, and its others are on the meta device.
        split_points: full names of the submodules that stages but the first begin with; "auto" and
            None: such that the stage with the most bytes has as few as possible.
        no_split_module_classes: names of classes whose instances go to one stage as a whole; None:
            those that a model of transformers names.
        example_args: positional inputs, whose first tensor has the micro-batch as dim 0. Calls
            have inputs of the same shapes but for dim 0, and of the same dtypes.
        example_kwargs: keyword inputs: calls have the same keys.
        num_chunks: micro-batches in the pipeline at a time; None: the number of processes.
        gather_output: whether the outputs are sent to all processes.

    Returns:
        The model. Outputs of it that have no micro-batch as dim 0 come stacked: [micro-batches,
        ...]; those whose dim 0 is as long as the micro-batch count as batches.

    Raises:
        ConfigError: under autocast; for examples without a tensor, split points that make another
            number of stages than there are processes, or a model that torch cannot trace as one
            graph. In calls: on every process, for inputs that differ from the example.

    Example:
        >>> model = prepare_pippy(model, example_args=(torch.zeros(2, 128, dtype=torch.long),))
        >>> logits = model(tokens)  # [6, 128] on 3 processes
        >>> if PartialState().is_last_process:
        ...     print(logits.shape)

    Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
    """
    state = PartialState()
    example = (tuple(example_args or ()), dict(example_kwargs or {}))
    _check(model, example, split_points, num_chunks, state.num_processes)
    model.eval()
    if state.num_processes == 1:
        return model.to(state.device)
    _check_autocast(state.device.type)
    if no_split_module_classes is None:
        no_split_module_classes = getattr(model, "_no_split_modules", None)
    pipeline = _Pipeline(model, example, split_points, as_classes(no_split_module_classes), state)
    pipeline.num_chunks = num_chunks or state.num_processes
    pipeline.gathers = bool(gather_output)
    model.forward = pipeline
    return model


def _check(
    model: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    split_points: str | Sequence[str] | None,
    num_chunks: int | None,
    num_processes: int,
) -> None:
    problems = Problems()
    tensors = Structure.of(example).tensors
    if num_processes > 1 and not (tensors and tensors[0].ndim and len(tensors[0])):
        rule = "the first tensor of the example has the micro-batch as dim 0"
        given = [_described(leaf) for leaf in Structure.of(example).leaves]
        problems.add(f"example_args, example_kwargs: {given}", rule, "Pass inputs of a call.")
    if isinstance(split_points, str) and split_points != _AUTO:
        rule = 'it is "auto", or a list of names of submodules'
        problems.add(f"split_points={split_points!r}", rule, f"Pass [{split_points!r}].")
    elif num_processes == 1 and split_points and split_points != _AUTO:
        rule = "one process has one stage"
        remedy = f"Start {len(split_points) + 1} processes."
        problems.add(f"split_points={list(split_points)!r}", rule, remedy)
    if num_chunks is not None and num_chunks < 1:
        remedy = "Leave it out for one micro-batch per process."
        problems.add(f"num_chunks={num_chunks}", "it is at least 1", remedy)
    lacking = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lacking:
        remedy = "Load a checkpoint into it first."
        problems.add(f"{lacking[0]} is on the meta device", "stages have weights", remedy)
    problems.raise_if()


def _check_autocast(device_type: str) -> None:
    """Refuse autocast: stages exchange tensors of the dtypes that the model itself computes in."""
    if torch.is_autocast_enabled(device_type):
        raise ConfigError.of(
            "prepare_pippy: autocast is on",
            "stages pass on what the model computes in the dtype of its weights",
            "Leave the context, and convert the model before: model.to(torch.bfloat16).",
        )


class _Pipeline:
    """The forward pass of a model over the stages of all processes."""

    num_chunks: int
    gathers: bool

    def __init__(
        self,
        model: nn.Module,
        example: tuple[tuple[Any, ...], dict[str, Any]],
        split_points: str | Sequence[str] | None,
        no_split: Collection[str],
        state: PartialState,
    ) -> None:
        functools.update_wrapper(self, model.forward)
        self.state = state
        self.schedules: dict[int, ScheduleGPipe] = {}
        self.signature = inspect.signature(model.forward)
        flat = FlatModel(model, self._canonical(*example))
        self.example = flat.inputs
        self.micro_batch = len(self.example.tensors[0])
        try:
            with buffers_restored(model):
                self.output, calls = _dry_run(flat, self.example.tensors)
                pipe = _split(flat, calls, split_points, no_split, state.num_processes)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError.of(
                f"{type(model).__name__} with the example's inputs",
                f"torch cannot trace its forward pass as one graph ({_reason(error)})",
                "Take what depends on data out of it (use_cache=False, for a language model).",
            ) from error
        self.batched = tuple(_is_batch(one, self.micro_batch) for one in self.output.tensors)
        self.stage = self._stage(pipe, model)

    def _stage(self, pipe: fx.GraphModule, model: nn.Module) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        layout = Layout(pipe)
        rank, device = self.state.process_index, self.state.device
        stage = as_stage(layout.parts[rank], layout.takes[rank], layout.gives[rank])
        take_buffers(stage, model, "model.")
        move(stage, device)
        keep_only(model, stage, "model.")
        given, made = (tuple(layout.carried[at]) for at in (rank, rank + 1))
        return PipelineStage(stage, rank, self.state.num_processes, device, given, made)

    # -- a call ----------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _check_autocast(self.state.device.type)
        given = None
        answer: int | list[Problem] = []
        if self.state.is_main_process:
            try:
                given = Structure.of(self._canonical(args, kwargs))
                answer = self._problems(given) or _num_rows(given)
            except ConfigError as error:
                answer = list(error.problems)
        num_rows = self._agreed(answer)
        total = -(-num_rows // self.micro_batch)
        inputs = [] if given is None else self._stacked(given.tensors, num_rows, total)
        rounds = []
        for start in range(0, total, self.num_chunks):
            count = min(self.num_chunks, total - start)
            with torch.no_grad():
                chunks = [tensor[start : start + count].contiguous() for tensor in inputs]
                found = self._schedule(count).step(*chunks)
            self.stage.clear_runtime_states()
            rounds.append(found)
        merged = self._merged(rounds, num_rows) if self.state.is_last_process else None
        if self.gathers:
            merged = self._sent(merged, num_rows, total)
        return None if merged is None else self.output.filled(merged)

    def _schedule(self, count: int) -> ScheduleGPipe:
        from torch.distributed.pipelining import ScheduleGPipe

        if count not in self.schedules:
            self.schedules[count] = ScheduleGPipe(self.stage, count)
        return self.schedules[count]

    def _canonical(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call in the order of the signature, by name where they must."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            value = f"inputs: {error}"
            raise ConfigError.of(value, f"they are {self.signature}", "Pass those.") from error
        return bound.args, bound.kwargs

    def _agreed(self, found: int | list[Problem]) -> int:
        """Return the batch size that the first process found; all raise its problems, if any."""
        [answer] = self.state.comm.broadcast_objects([found])
        if isinstance(answer, list):
            raise ConfigError(*answer)
        return answer

    def _problems(self, given: Structure) -> list[Problem]:
        remedy = "Call it with inputs like the example's, or prepare it with others."
        if given.spec != self.example.spec:
            found = [_described(leaf) for leaf in given.leaves]
            return [Problem(f"inputs {found}", "they are nested like the example's", remedy)]
        rows = _num_rows(given)
        problems = [] if rows else [Problem("an empty batch", "it has samples", remedy)]
        for position, (leaf, like) in enumerate(
            zip(given.leaves, self.example.leaves, strict=True)
        ):
            if not self._fits(leaf, like, rows):
                wanted = f"the example's is {_described(like)}, of which dim 0 may be another"
                problems.append(Problem(f"input {position}: {_described(leaf)}", wanted, remedy))
        return problems

    def _fits(self, leaf: Any, like: Any, num_rows: int) -> bool:
        if not isinstance(like, torch.Tensor) or not isinstance(leaf, torch.Tensor):
            return type(leaf) is type(like) and bool(leaf == like)
        batches = _is_batch(leaf, num_rows) and _is_batch(like, self.micro_batch)
        fits = leaf.shape == like.shape or (batches and leaf.shape[1:] == like.shape[1:])
        return fits and leaf.dtype == like.dtype

    def _stacked(
        self, given: Sequence[torch.Tensor], num_rows: int, total: int
    ) -> list[torch.Tensor]:
        """Return the inputs as micro-batches [total, ...]."""
        stacked = []
        for tensor, like in zip(given, self.example.tensors, strict=True):
            tensor = tensor.detach().to(self.state.device)
            if not (_is_batch(tensor, num_rows) and _is_batch(like, self.micro_batch)):
                stacked.append(tensor.expand(total, *tensor.shape))
                continue
            missing = total * self.micro_batch - num_rows
            padding = tensor[-1:].expand(missing, *tensor.shape[1:])
            stacked.append(torch.cat([tensor, padding]).unflatten(0, (total, self.micro_batch)))
        return stacked

    # -- outputs ---------------------------------------------------------------------------

    def _merged(self, rounds: Sequence[Any], num_rows: int) -> list[torch.Tensor]:
        """Return each output of all rounds, of the length of the batch."""
        outputs = [found if isinstance(found, (tuple, list)) else (found,) for found in rounds]
        return [
            torch.cat(parts).flatten(0, 1)[:num_rows] if is_batch else torch.cat(parts)
            for parts, is_batch in zip(zip(*outputs, strict=True), self.batched, strict=True)
        ]

    def _sent(
        self, merged: list[torch.Tensor] | None, num_rows: int, total: int
    ) -> list[torch.Tensor]:
        """Return the last process's outputs on every process."""
        comm, device = self.state.comm, self.state.device
        if merged is None:
            merged = [
                torch.empty(
                    (num_rows, *like.shape[1:]) if is_batch else (total, *like.shape),
                    dtype=like.dtype,
                    device=device,
                )
                for like, is_batch in zip(self.output.tensors, self.batched, strict=True)
            ]
        last = self.state.num_processes - 1
        sent = exchange_flat(merged, lambda tensor: comm.broadcast(tensor, last))
        return [tensor.squeeze(0) for tensor in sent]


def _num_rows(given: Structure) -> int:
    """Return the batch size: dim 0 of the first tensor; 0 without one."""
    first = next(iter(given.tensors), None)
    return 0 if first is None or first.ndim == 0 else len(first)


def _is_batch(tensor: torch.Tensor, size: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == size


def _described(leaf: object) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
    return repr(leaf)


def _reason(error: BaseException) -> str:
    """Return the first line of the error that an error was raised from first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# -- tracing -------------------------------------------------------------------------------


def _dry_run(flat: FlatModel, tensors: Sequence[torch.Tensor]) -> tuple[Structure, list[str]]:
    """Return the model's outputs, without data, and the names of the submodules by their calls."""
    from torch._subclasses import FakeTensorMode

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [mode.from_tensor(tensor) for tensor in tensors]
        with calls_recorded(flat.model) as calls:
            outputs = Structure.of(flat.outputs(inputs))
    leaves = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in outputs.leaves]
    return Structure(tuple(leaves), outputs.spec), calls


def _split(
    flat: FlatModel,
    calls: Sequence[str],
    split_points: str | Sequence[str] | None,
    no_split: Collection[str],
    num_stages: int,
) -> fx.GraphModule:
    """Trace a model, split at some submodules; return one call for each stage."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    if split_points is None or isinstance(split_points, str):
        split_points = balanced_split_points(flat.model, calls, num_stages, no_split)
    else:
        check_split_points(calls, split_points, num_stages)
    begins = {f"model.{name}": SplitPoint.BEGINNING for name in split_points}
    with torch.no_grad(), forwards_restored(flat.get_submodule(name) for name in begins):
        pipe = pipeline(flat, flat.inputs.tensors, split_spec=begins)
    if pipe.num_stages != num_stages:
        rule = f"the forward pass makes {pipe.num_stages} stages of it for {num_stages} processes"
        remedy = "Name submodules that have others before them."
        raise ConfigError.of(f"split_points={list(split_points)!r}", rule, remedy)
    split: fx.GraphModule = pipe.split_gm
    return split
