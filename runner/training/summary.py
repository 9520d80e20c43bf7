"""Reports of a run: the rows of its header and of its final table, and summary.json."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runner.recipe.units import counted
from runner.runs.json_files import WEIGHTS_STEP
from runner.training.console import clock, number, short

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.data.datasets import Data
    from runner.recipe.batch_plan import BatchPlan
    from runner.training.run import Run

Row = tuple[str, str]


def header_rows(loop: Run) -> list[Row]:
    """Return the rows of the header, shown before a run starts."""
    rows = [
        ("directory", str(loop.run_dir)),
        ("device", device_line(loop.accelerator)),
        ("engine", engine_line(loop.accelerator)),
        ("model", model_line(loop)),
        ("data", data_line(loop.data)),
        ("batch", batch_line(loop.plan, loop.accelerator.parallel_dims.model_size)),
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


def limits_of(loop: Run) -> tuple[int | None, int | None, float | None]:
    """Return the steps and the epochs of a run, and the seconds that are left of `max_time`."""
    left = None if loop.deadline is None else loop.deadline - time.monotonic()
    return loop.plan.total_steps, loop.recipe.trainer.epochs, left


def device_line(accelerator: Accelerator) -> str:
    """Return e.g. "cuda (NVIDIA H100) · 8 processes · bf16"."""
    device, count = accelerator.device, accelerator.num_processes
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    precision = accelerator.mixed_precision
    return " · ".join(
        (
            f"{device.type}{name}",
            counted(count, "process", "processes"),
            "fp32" if precision == "no" else str(precision),
        )
    )


def engine_line(accelerator: Accelerator) -> str:
    """Return e.g. "fsdp · mesh dp_shard 4 · sharded: parameters, gradients, optimizer state"."""
    strategy = accelerator.strategy
    parts = [accelerator.plan.strategy]
    axes = _axes(accelerator)
    if axes:
        parts.append("mesh " + " × ".join(f"{name} {size}" for name, size in axes.items()))
    if strategy.state.sharded:
        parts.append("sharded: " + ", ".join(strategy.state.sharded))
    elif accelerator.num_processes > 1:
        parts.append("the model replicated on each rank")
    if accelerator.plan.dynamo.backend != "no":
        parts.append(f"compiled by {accelerator.plan.dynamo.backend}")
    return " · ".join(parts)


def _axes(accelerator: Accelerator) -> dict[str, int]:
    """Return the axes of processes by name; strategies without a mesh have a data axis only."""
    mesh = accelerator.strategy.device_mesh
    if mesh is not None:
        return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return {"data": accelerator.num_processes} if accelerator.num_processes > 1 else {}


def model_line(loop: Run) -> str:
    """Return e.g. "Cnn · 123,456 parameters, all trainable"."""
    total, trainable = loop.num_parameters
    unwrap = loop.accelerator.unwrap_model
    names = ", ".join(type(unwrap(model)).__name__ for model in loop.step.models.values())
    share = "all trainable" if trainable == total else f"{trainable:,} trainable"
    return f"{names} · {total:,} parameters, {share}"


def data_line(data: Data) -> str:
    """Return e.g. "train 1,257 · validation 180 · test 360"; a stream's length is unknown."""
    parts = []
    for name, length in data.sizes().items():
        parts.append(f"{name} {'stream' if length is None else f'{length:,}'}")
    return " · ".join(parts)


def batch_line(plan: BatchPlan, copies: int = 1) -> str:
    """Return the batch arithmetic, e.g. "global batch 64 = 2 processes × 32 × 1 accumulated".

    Each sample is computed by `copies` processes together.
    """
    processes = counted(plan.dp_size, "process", "processes")
    if copies > 1:
        processes = counted(plan.dp_size, "replica")
    return (
        f"global batch {plan.global_batch} = {processes} × {plan.micro_batch}"
        f" × {plan.accumulation} accumulated"
    )


def length_line(loop: Run) -> str:
    """Return how long the run is, e.g. "20 epochs × 20 steps, 400 steps"."""
    epochs, plan, parts = loop.recipe.trainer.epochs, loop.plan, []
    if epochs is not None and plan.steps_per_epoch is not None:
        parts.append(f"{counted(epochs, 'epoch')} × {counted(plan.steps_per_epoch, 'step')}")
    elif epochs is not None:
        parts.append(counted(epochs, "epoch"))
    if plan.total_steps is not None:
        parts.append(counted(plan.total_steps, "step"))
    return ", ".join(parts)


def summary_of(loop: Run) -> dict[str, object]:
    """Return the content of `summary.json`."""
    state, stopped = loop.state, loop.stopped
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
        "run_dir": str(loop.run_dir),
        "stopped": None if stopped is None else stopped.kind,
        "reason": None if stopped is None else stopped.reason,
        # A run that reached max_time has not finished its schedule: it can be resumed.
        "complete": stopped is not None and stopped.complete and stopped.kind != "max_time",
        "step": state.step,
        "epoch": state.epoch_number,
        "epochs_completed": state.epoch,
        "samples": state.samples,
        "seconds": round(loop.seconds, 3),
        "samples_per_second": throughput(loop),
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
        "metrics": loop.metrics.get("validation", {}),
    }


def throughput(loop: Run) -> float:
    """Return samples per second of this invocation; of the run where it has trained none."""
    here, seconds = loop.samples_here, loop.watch.training
    if here == 0:
        here, seconds = loop.state.samples, loop.state.seconds
    return here / seconds if seconds > 0 else 0.0


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
        ("time", f"{clock(summary['seconds'])} · {short(summary['samples_per_second'])} samples/s"),
        ("directory", str(loop.run_dir)),
    ]
    if loop.saver.last is not None:
        step = f"step {loop.saver.saved_step}"
        rows.append(("checkpoint", f"{_below(loop.saver.last, loop.run_dir)} ({step})"))
    if loop.saver.best is not None:
        step = f"step {loop.state.best_step}"
        rows.append(("best state", f"{_below(loop.saver.best, loop.run_dir)} ({step})"))
    if not summary["complete"]:
        rows.append(("resume", f"runner resume={shlex.quote(str(loop.run_dir))}"))
    return rows


def _below(path: str | Path, folder: Path) -> str:
    inner, root = Path(path).resolve(), folder.resolve()
    return str(inner.relative_to(root)) if inner.is_relative_to(root) else str(path)
