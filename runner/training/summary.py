"""Reports of a run: the rows of its header and of its final table, and summary.json."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.config.training import is_compiling
from runner.recipe.units import counted
from runner.runs import directory
from runner.runs.json_files import TIME_IS_UP, WEIGHTS_STEP
from runner.training import base_weights
from runner.training.console import clock, number, shown_rates, shown_shares
from runner.training.speed import SLOW, slowest_rank

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.training.run import Run

Row = tuple[str, str]


def header_rows(loop: Run) -> list[Row]:
    """Return the rows of the header, shown before a run starts."""
    plan = loop.plan
    replicas = "replica" if loop.accelerator.parallel_dims.model_size > 1 else "process"
    sizes = loop.data.sizes().items()
    rows = [
        ("directory", str(loop.run_dir)),
        ("device", device_line(loop.accelerator)),
        ("engine", engine_line(loop.accelerator)),
        ("model", model_line(loop)),
        ("data", " · ".join(f"{name} {'stream' if n is None else f'{n:,}'}" for name, n in sizes)),
        (
            "batch",
            f"global batch {plan.global_batch} = {counted(plan.dp_size, replicas)}"
            f" × {plan.micro_batch} × {plan.accumulation} accumulated",
        ),
        ("length", length_line(loop)),
    ]
    rows += [("note", note) for note in loop.accelerator.plan.notes]
    if loop.recipe.tags:
        rows.append(("tags", ", ".join(loop.recipe.tags)))
    if loop.resume_from is not None:
        epochs = loop.recipe.trainer.epochs
        epoch = loop.state.epoch + 1
        where = f"step {loop.state.step}, epoch {epoch if epochs is None else min(epoch, epochs)}"
        rows.append(("resumed", f"{Path(loop.resume_from).name} ({where})"))
    return rows


def device_line(accelerator: Accelerator) -> str:
    """Return e.g. "cuda (NVIDIA H100) · 8 processes · bf16"."""
    device, precision = accelerator.device, accelerator.mixed_precision
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    processes = counted(accelerator.num_processes, "process")
    precision = "fp32" if precision == "no" else str(precision)
    return f"{device.type}{name} · {processes} · {precision}"


def engine_line(accelerator: Accelerator) -> str:
    """Return e.g. "fsdp · mesh dp_shard 4 · sharded: parameters, gradients, optimizer state"."""
    strategy, dims = accelerator.strategy, accelerator.parallel_dims
    parts = [accelerator.plan.strategy]
    axes = [f"{axis} {dims.size(axis)}" for axis in dims.order if dims.size(axis) > 1]
    if axes:
        parts.append(f"mesh {' × '.join(axes)}")
    if strategy.state.sharded:
        parts.append("sharded: " + ", ".join(strategy.state.sharded))
    elif accelerator.num_processes > 1:
        parts.append("the model replicated on each rank")
    if is_compiling(accelerator.plan.dynamo):
        parts.append(f"compiled by {accelerator.plan.dynamo.backend}")
    return " · ".join(parts)


def model_line(loop: Run) -> str:
    """Return e.g. "Cnn · 123,456 parameters, all trainable"."""
    total, trainable = loop.num_parameters
    unwrap = loop.accelerator.unwrap_model
    names = ", ".join(type(unwrap(model)).__name__ for model in loop.step.models.values())
    share = "all trainable" if trainable == total else f"{trainable:,} trainable"
    return f"{names} · {total:,} parameters, {share}"


def length_line(loop: Run) -> str:
    """Return how long the run is, e.g. "20 epochs × 20 steps, 400 steps"."""
    epochs, plan, parts = loop.recipe.trainer.epochs, loop.plan, []
    if epochs is not None:
        steps = plan.steps_per_epoch
        each = "" if steps is None else f" × {counted(steps, 'step')}"
        parts.append(f"{counted(epochs, 'epoch')}{each}")
    if plan.total_steps is not None:
        parts.append(counted(plan.total_steps, "step"))
    return ", ".join(parts)


def summary_of(loop: Run) -> dict[str, object]:
    """Return the content of `summary.json`."""
    state, stopped, speed = loop.state, loop.stopped, speed_of(loop)
    best = None
    if state.best is not None:
        checkpoint = loop.saver.best.name if loop.saver.best else None
        best = {
            "metric": loop.monitor,
            "mode": loop.mode,
            "value": state.best,
            "step": state.best_step,
            "checkpoint": checkpoint,
        }
    return {
        "name": loop.recipe.name,
        "stopped": None if stopped is None else stopped.kind,
        "reason": None if stopped is None else stopped.reason,
        # A run that reached max_time has not finished its schedule: it can be resumed.
        "complete": stopped is not None and stopped.complete and stopped.kind != TIME_IS_UP,
        "step": state.step,
        "epoch": state.epoch_number,
        "epochs_completed": state.epoch,
        "samples": state.samples,
        "tokens": state.tokens,
        "seconds": round(loop.seconds, 3),
        "samples_per_second": speed["samples_per_second"],
        "speed": speed,
        "num_processes": loop.accelerator.num_processes,
        "num_parameters": loop.num_parameters[0],
        "monitor": loop.monitor,
        "mode": loop.mode,
        "best": best,
        "metrics": loop.metrics,
        WEIGHTS_STEP: loop.weights_step,
        "checkpoint": None if loop.saver.last is None else str(loop.saver.last),
        "data": loop.data.sizes(),
        "ended": time.time(),
        **loop.results,
    }


def metadata_of(loop: Run) -> dict[str, object]:
    """Return what a checkpoint says of the run and of its position."""
    state = loop.state
    return {
        "step": state.step,
        "epoch": state.epoch,
        "samples": state.samples,
        "samples_in_epoch": state.samples_in_epoch,
        "num_processes": loop.accelerator.num_processes,
        "global_batch_size": loop.plan.global_batch,
        "monitor": loop.monitor,
        "mode": loop.mode,
        "metrics": loop.metrics.get("validation", {}),
        base_weights.KEY: loop.base,
    }


def speed_of(loop: Run) -> dict[str, object]:
    """Return the rates of this invocation, the seconds of each phase, and the slowest rank.

    Where it has trained nothing, the rates are those of the run.
    """
    samples, seconds = loop.samples_here, loop.watch.training
    if samples == 0:
        samples, seconds = loop.state.samples, loop.state.seconds
    tokens = samples * loop.state.tokens / max(loop.state.samples, 1)
    rank, ratio = slowest_rank(loop.speed.own)
    slowest = {"rank": rank, "ratio": ratio} if ratio > SLOW else None
    rates = loop.speed.rates(samples, tokens, seconds)
    return {**rates, "seconds": loop.watch.spent, "slowest_rank": slowest}


def final_rows(loop: Run, summary: Mapping[str, Any]) -> list[Row]:
    """Return the final table: metrics, throughput, paths."""
    rows: list[Row] = []
    epochs = f"epoch {loop.state.epoch_number}"
    if summary["best"] is not None:
        best = summary["best"]
        rows.append(
            ("best", f"validation {best['metric']} {number(best['value'])} at step {best['step']}")
        )
    for split, metrics in summary["metrics"].items():
        rows.append((split, "  ".join(f"{name} {number(v)}" for name, v in metrics.items())))
    rows += loop.rows
    rows += [
        ("stopped", f"{summary['reason']} (step {summary['step']}, {epochs})"),
        ("time", f"{clock(summary['seconds'])} · {shown_rates(summary['speed'])}"),
        ("spent", shown_shares(summary["speed"]["seconds"])),
        ("directory", str(loop.run_dir)),
    ]
    if loop.saver.last is not None:
        place = os.path.relpath(loop.saver.last, loop.run_dir)
        rows.append(("checkpoint", f"{place} (step {loop.saver.saved_step})"))
    if loop.saver.best is not None:
        place = os.path.relpath(loop.saver.best, loop.run_dir)
        rows.append(("best state", f"{place} (step {loop.state.best_step})"))
    if not summary["complete"]:
        rows.append(("resume", directory.resume_command(str(loop.run_dir))))
    return rows
