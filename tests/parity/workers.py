"""What each process of a cell does: the same training through `accel`."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader

from accel import Accelerator
from accel.comm.ops import broadcast
from accel.config.fp8 import AORecipeKwargs
from accel.config.handlers import GradScalerKwargs, KwargsHandler
from accel.config.training import DataLoaderConfiguration
from accel.precision.fp8 import TorchaoPrecision, import_torchao
from accel.run.loss_normalization import global_weight, normalize_loss
from accel.strategies.context_parallel import _AllToAll
from accel.strategies.mesh.pipeline import Pipeline
from tests.accel.strategies.megatron.cuda_is_cpu import cuda_is_cpu
from tests.parity import fp8_layers
from tests.parity.cells import BACKENDS, Cell
from tests.parity.controls import DATA
from tests.parity.memory import Walk
from tests.parity.reference import IGNORED, Run, summed_loss
from tests.parity.task import Task, text

Batch = tuple[torch.Tensor, torch.Tensor]


def train(cell: Cell) -> dict[str, Any]:
    """Train `cell` on this process of its group.

    Returns:
        `run`: its `losses` are this process's shares, which add up over `replicas` of the data;
        `replica`: (index, count) of the data it read; `types`: of what was prepared; `layers`: what
        its linear layers did.
    """
    task = sabotaged(cell)
    torch.manual_seed(0)
    text(task.context)
    walk = Walk()
    if cell.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    spoilt = {
        "scale left out": _unscaled,
        "scale of small values left out": _small_unscaled,
        "scale inverted": _inverted,
        "nothing converted": _unconverted,
        "keys of another rank backwards": _keys_of_another_rank,
        "a stage left out of the norm": _norm_of_one_stage,
        "tied weight not summed": _unsummed,
    }
    on_cpu = cuda_is_cpu if cell.task.llama and cell.device == "cpu" else contextlib.nullcontext
    with spoilt.get(cell.sabotage, contextlib.nullcontext)(), on_cpu():
        return _train(cell, task, walk)


def _train(cell: Cell, task: Task, walk: Walk) -> dict[str, Any]:
    accelerator = make_accelerator(cell)
    model, loader = task.model(), make_loader(task, cell)
    optimizer = task.recipe.optimizer(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    layers = fp8_layers.watch(accelerator.unwrap_model(model))
    run = Run()
    dims = accelerator.parallel_dims
    # Context-parallel ranks compute the losses of other tokens, as replicas do of other samples.
    index, count = dims.dp_rank * dims.cp + dims.coordinates["cp"], dims.grad_size
    for number, window in enumerate(windows(task, cell, loader)):
        if cell.sabotage == "last window dropped" and number == task.num_steps - 1:
            break
        make = scheduled if cell.task.llama or dims.pp > 1 else step
        notes = (run, walk, number)
        run.losses.append(make(accelerator, model, optimizer, window, cell, notes))
    state = accelerator.get_state_dict(model)
    run.weights = {k: v.detach().float().cpu().clone() for k, v in (state or {}).items()}
    if cell.device == "cuda":
        run.num_bytes["peak"] = torch.cuda.max_memory_allocated()
    types = [type(model).__name__, type(optimizer).__name__]
    del model, optimizer, loader, walk, state
    accelerator.end_training()
    accelerator.free_memory()
    del accelerator
    gc.collect()
    return {"run": run, "replica": (index, count), "types": types, "layers": layers}


def _unscaled(size: float = 1.0) -> contextlib.AbstractContextManager[object]:
    """Return a context in which matrices are rounded to fp8 without being scaled.

    Their values are `size` times what they are, and divided by it afterwards.
    """
    scaling = import_torchao("torchao.float8.float8_scaling_utils")
    return patch.object(
        scaling, "tensor_to_scale", lambda tensor, *_: tensor.new_full((), size).float()
    )


def _small_unscaled() -> contextlib.AbstractContextManager[object]:
    """Return `_unscaled` of values so small that they become 0.

    Normalized inputs of a layer are below 2**5; the least number of e4m3 is 2**-9, and what is
    below half of it is rounded to 0. Weights and gradients are smaller than inputs.
    """
    return _unscaled(2.0**-16)


def _inverted() -> contextlib.AbstractContextManager[object]:
    """Return a context in which matrices are divided by their scales, and so mostly become 0."""
    scaling = import_torchao("torchao.float8.float8_scaling_utils")
    right = scaling.tensor_to_scale
    return patch.object(
        scaling, "tensor_to_scale", lambda *args, **kwargs: right(*args, **kwargs).reciprocal()
    )


def _unconverted() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no layer is converted: all compute in bf16."""
    return patch.object(TorchaoPrecision, "convert", lambda *args, **kwargs: None)


def _keys_of_another_rank() -> contextlib.AbstractContextManager[object]:
    """Return a context in which gradients of attention come from the wrong rank."""
    right = _AllToAll.backward

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        found, *others = right(ctx, gradient)
        joined = ctx.back[1]
        return found.roll(found.shape[joined] // 2, joined), *others

    return patch.object(_AllToAll, "backward", staticmethod(backward))


def _norm_of_one_stage() -> contextlib.AbstractContextManager[object]:
    """Return a context in which the second stage counts nothing in norms."""

    def counted_elsewhere(pipeline: Pipeline) -> set[int]:
        return {id(p) for p in pipeline.model.parameters()} if pipeline.rank else set()

    return patch.object(Pipeline, "counted_elsewhere", counted_elsewhere)


def _unsummed() -> contextlib.AbstractContextManager[object]:
    """Return a context in which stages that share a weight have gradients of their own."""
    return patch.object(Pipeline, "_sum_shared", lambda pipeline: None)


def _every_linear(layer: torch.nn.Module, name: str) -> bool:
    return isinstance(layer, torch.nn.Linear)


def sabotaged(cell: Cell) -> Task:
    """Return the task of `cell` as a control spoils it."""
    task = cell.task
    if cell.sabotage == "clipping off":
        return replace(task, recipe=replace(task.recipe, max_norm=None))
    if cell.sabotage == "weight decay off":
        return replace(task, recipe=replace(task.recipe, weight_decay=0.0))
    return replace(task, tied=False) if cell.sabotage == "tied weight untied" else task


def make_accelerator(cell: Cell) -> Accelerator:
    """Return the engine of `cell`; batches are those of the whole step, split over processes."""
    arguments = BACKENDS[cell.backend].arguments(cell)
    handlers: list[KwargsHandler] = []
    if "deepspeed_plugin" not in arguments:  # its engine has a scaler of its own
        handlers.append(GradScalerKwargs(init_scale=1024.0))
    if cell.precision == "fp8":
        every = _every_linear if cell.sabotage == "head converted" else None
        handlers.append(AORecipeKwargs(module_filter_func=every))
    return Accelerator(
        device=cell.device,
        mixed_precision=cell.precision,
        gradient_accumulation_steps=cell.accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=handlers or None,
        **arguments,
    )


def make_loader(task: Task, cell: Cell) -> DataLoader[Batch]:
    """Return the loader of the micro-batches of all processes together."""
    return DataLoader(task.data(), task.batch_size // cell.accumulation)


def windows(task: Task, cell: Cell, loader: DataLoader[Batch]) -> Iterator[list[Batch]]:
    """Yield this process's micro-batches of each optimizer step."""
    for _ in range(task.num_passes):
        window: list[Batch] = []
        for values, targets in loader:
            window.append((values, targets))
            if len(window) == cell.accumulation:
                yield window
                window = []
        if window:
            yield window


def step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    window: list[Batch],
    cell: Cell,
    notes: tuple[Run, Walk, int],
) -> float:
    """Make one optimizer step; return this process's share of its loss."""
    recipe = sabotaged(cell).recipe
    dims = accelerator.parallel_dims
    weight = global_weight([(t != IGNORED).sum() for _, t in window], accelerator)
    twice = cell.sabotage == "gradients divided by W twice"
    divisor = accelerator.num_processes if twice else 1
    share = 0.0
    for index, (values, targets) in enumerate(window):
        last = index == len(window) - 1
        if cell.sabotage == "a part counted twice" and dims.coordinates["cp"] == 0:
            divisor = 0.5
        with (
            accelerator.accumulate(model, sync_gradients=last),
            accelerator.maybe_context_parallel([values, targets], [1, 1]),
        ):
            if cell.task.own_loss:
                total = model(values, targets)
                notes[0].rounded.append(bool(total == total.bfloat16()))
            else:
                total = summed_loss(model(values), targets)
            scaled = normalize_loss(
                total / divisor,
                weight,
                grad_size=dims.grad_size,
                num_steps=accelerator.gradient_accumulation_steps,
            )
            accelerator.backward(scaled)
            share += (total.detach().double() / weight).item()
            del total, scaled
            if last and recipe.max_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), recipe.max_norm)
            if last:
                _note("before", notes)
            optimizer.step()
            if last:
                _note("after", notes)
            optimizer.zero_grad()
    return share


def scheduled(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    window: list[Batch],
    cell: Cell,
    notes: tuple[Run, Walk, int],
) -> float:
    """Make one optimizer step by the strategy's schedule; return this replica's share of its loss.

    The ranks of a replica have the same one.
    """
    recipe, dims = sabotaged(cell).recipe, accelerator.parallel_dims
    if cell.sabotage == DATA:
        window = [broadcast(batch) for batch in window]
    weight = global_weight([(t != IGNORED).sum() for _, t in window], accelerator)
    factors = {"grad_size": dims.grad_size, "num_steps": accelerator.gradient_accumulation_steps}

    def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        own = cell.task.own_loss
        total = model(*batch) if own else summed_loss(model(batch[0]), batch[1])
        return normalize_loss(total, weight, **factors)

    losses = accelerator.forward_backward(model, window, loss_of)
    if recipe.max_norm is not None:
        accelerator.clip_grad_norm_(model.parameters(), recipe.max_norm)
    if not cell.task.llama:
        _note("before", notes)
    optimizer.step()
    if not cell.task.llama:
        _note("after", notes)
    optimizer.zero_grad()
    return float(torch.stack(losses).double().sum()) / math.prod(factors.values())


def _note(moment: str, notes: tuple[Run, Walk, int]) -> None:
    run, walk, number = notes
    num_bytes = walk.count(number, moment)
    if num_bytes is not None:
        run.num_bytes[moment] = num_bytes
