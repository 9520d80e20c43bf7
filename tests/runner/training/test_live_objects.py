"""C2: every field of handlers and plugins reaches the object that uses it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel.config import handlers, training
from tests.helpers import run_distributed

# Key below a node, value on the command line, what to look at among the live objects (a dotted
# name), and what must be seen there.
Row = tuple[str, str, str, Any]

PHASES = ["NONE", "WARMUP", "RECORD_AND_SAVE"]
DDP: list[Row] = [
    ("dim", "0", "ddp.dim", 0),
    ("broadcast_buffers", "false", "ddp.broadcast_buffers", False),
    ("bucket_cap_mb", "3", "ddp.bucket_bytes_cap", 3 * 2**20),
    ("find_unused_parameters", "true", "ddp.find_unused_parameters", True),
    ("check_reduction", "true", "plan.ddp.check_reduction", True),
    ("gradient_as_bucket_view", "true", "ddp.gradient_as_bucket_view", True),
    ("static_graph", "true", "ddp.static_graph", True),
    ("comm_hook", "power_sgd", "hook.__name__", "powerSGD_hook"),
    ("comm_wrapper", "fp16", "wrapper.__name__", "fp16_compress_wrapper_hook"),
    ("comm_state_option", "{matrix_approximation_rank: 2}", "state.matrix_approximation_rank", 2),
]
INIT: list[Row] = [
    ("backend", "gloo", "group.backend", "gloo"),
    ("init_method", "FILE", "group.store", "FileStore"),
    ("timeout", "77", "group.timeout", timedelta(seconds=77)),
]
AUTOCAST: list[Row] = [
    ("enabled", "false", "autocast._enabled", False),
    ("cache_enabled", "false", "autocast._cache_enabled", False),
]
SCALER: list[Row] = [
    ("init_scale", "1024.0", "scaler.get_scale", 1024.0),
    ("growth_factor", "3.0", "scaler.get_growth_factor", 3.0),
    ("backoff_factor", "0.25", "scaler.get_backoff_factor", 0.25),
    ("growth_interval", "7", "scaler.get_growth_interval", 7),
]
SCALER_OFF: list[Row] = [("enabled", "false", "scaler.is_enabled", False)]
LOADER: list[Row] = [
    ("even_batches", "false", "batch_shard.even_batches", False),
    ("split_batches", "true", "batch_shard.split_batches", True),
    ("data_seed", "5", "is_other_order", True),
    ("num_workers", "1", "loader.num_workers", 1),
    ("pin_memory", "false", "loader.pin_memory", False),
    ("prefetch_factor", "3", "loader.prefetch_factor", 3),
    ("persistent_workers", "true", "loader.persistent_workers", True),
    ("seed_samples", "false", "loader.dataset.seed_samples", False),
    ("non_blocking", "true", "loader._non_blocking", True),
]
DISPATCH: list[Row] = [
    ("dispatch_batches", "true", "loader.kind", "DataLoaderDispatcher"),
    ("use_seedable_sampler", "false", "order.kind", "ReplayedRandomSampler"),
]
ACCUMULATION: list[Row] = [
    ("num_steps", "2", "gradient.num_steps", 2),
    ("adjust_scheduler", "false", "gradient.adjust_scheduler", False),
    ("sync_with_dataloader", "true", "gradient.sync_with_dataloader", True),
    ("sync_each_batch", "true", "gradient.sync_each_batch", True),
]
PROJECT: list[Row] = [
    ("project_dir", "elsewhere", "project.project_dir", "elsewhere"),
    ("logging_dir", "logs", "project.logging_dir", "logs"),
    ("automatic_checkpoint_naming", "false", "project.automatic_checkpoint_naming", False),
    ("total_limit", "9", "project.total_limit", 9),
    ("iteration", "4", "project.iteration", 4),
    ("save_on_each_node", "true", "project.save_on_each_node", True),
]
PROFILE: list[Row] = [
    ("activities", "[cpu]", "activities", ["CPU"]),
    ("record_shapes", "true", "profiler.record_shapes", True),
    ("profile_memory", "true", "profiler.profile_memory", True),
    ("with_stack", "true", "profiler.with_stack", True),
    ("with_flops", "true", "profiler.with_flops", True),
    ("with_modules", "true", "profiler.with_modules", True),
    ("schedule_option", "{wait: 1, warmup: 1, active: 1}", "phases", PHASES),
    ("on_trace_ready", "torch.nn.init.zeros_", "profiler.on_trace_ready.__name__", "zeros_"),
]
TRACES: list[Row] = [("output_trace_dir", "t", "profiler.on_trace_ready.folder.name", "t")]
# A node, rows that hold together in one run, the run's processes, and what else it needs.
RUNS: dict[str, tuple[str, list[Row], int, list[str]]] = {
    "ddp": ("distributed.ddp", DDP, 2, []),
    "init": ("distributed.init", INIT, 2, []),
    "autocast": ("precision.autocast", AUTOCAST, 1, ["precision=bf16"]),
    "scaler": ("precision.scaler", SCALER, 1, ["precision=fp16"]),
    "scaler off": ("precision.scaler", SCALER_OFF, 1, ["precision=fp16"]),
    "loader": ("dataloader", LOADER, 2, ["trainer.drop_last=true"]),
    "dispatch": ("dataloader", DISPATCH, 2, []),
    "accumulation": ("trainer.accumulation", ACCUMULATION, 1, []),
    "project": ("checkpoint.project", PROJECT, 1, []),
    "profile": ("profile", PROFILE, 1, ["profile=trace", "profile.output_trace_dir=null"]),
    "traces": ("profile", TRACES, 1, ["profile=trace"]),
}
KINDS = {
    "distributed.ddp": handlers.DistributedDataParallelKwargs,
    "distributed.init": handlers.InitProcessGroupKwargs,
    "precision.autocast": handlers.AutocastKwargs,
    "precision.scaler": handlers.GradScalerKwargs,
    "dataloader": training.DataLoaderConfiguration,
    "trainer.accumulation": training.GradientAccumulationPlugin,
    "checkpoint.project": training.ProjectConfiguration,
    "profile": handlers.ProfileKwargs,
}
# Needs torchdata, and is tested with the loaders.
ELSEWHERE = {("dataloader", "use_stateful_dataloader")}


def live_objects(overrides: list[str], folder: str) -> dict[str, Any]:
    """Build a run from overrides, as a worker does, and return what torch was given."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from accel.comm.rng import set_seed
    from accel.machine.env import Environment
    from runner.data.batches import TrainBatches
    from runner.data.datasets import make_order
    from runner.recipe import composition, hydra_setup
    from runner.recipe.batch_plan import plan_batches
    from runner.training.build import build_data, build_step, make_accelerator

    with hydra_setup.session():
        recipe = composition.require(composition.new_run(overrides, "config"))
    set_seed(0)
    step, data = build_step(recipe), build_data(recipe)
    plan = plan_batches(recipe.trainer, Environment.read().world_size, len(data.train))  # type: ignore[arg-type]
    accelerator = make_accelerator(recipe, Path(folder), plan)
    model = accelerator.prepare(step.models["model"])
    batches = TrainBatches(accelerator, data, recipe, plan)
    profile = recipe.profile
    order = list(batches._sampler.sampler)
    unseeded = dataclasses.replace(recipe.dataloader, data_seed=None)
    live: dict[str, Any] = {
        "plan": accelerator.plan,
        "scaler": accelerator.scaler,
        "autocast": accelerator.autocast(),
        "gradient": accelerator.gradient_state,
        "project": accelerator.project_configuration,
        "loader": batches.loader,
        "batch_shard": batches.loader.batch_sampler,
        "order": batches._sampler.sampler,
        "is_other_order": order != list(make_order(data.train, 0, unseeded)),
    }
    if isinstance(model, DistributedDataParallel):
        live["ddp"] = model
        for wrapper, state in model._comm_hooks:
            hook = inspect.getclosurevars(wrapper).nonlocals["hook"]
            live |= {"wrapper": wrapper, "hook": hook, "state": state}
    if dist.is_initialized():
        group = dist.distributed_c10d._get_default_group()
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        live["group"] = SimpleNamespace(
            backend=dist.get_backend(),
            store=type(store).__name__,
            timeout=group._get_backend(accelerator.device).options._timeout,
        )
    if profile is not None:
        with accelerator.profile(profile) as profiler:
            phases = [profiler.schedule(step).name for step in range(3)]
            activities = [one.name for one in profiler.activities]
            live |= {"profiler": profiler, "phases": phases, "activities": activities}
    return live


def seen_at(live: dict[str, Any], look: str) -> Any:
    """Return what `look` names, or the result of the method that it names."""
    name, *attributes = look.split(".")
    if attributes == ["kind"]:
        return type(live[name]).__name__
    value = functools.reduce(getattr, attributes, live[name])
    return value() if inspect.ismethod(value) else value


def observe(name: str, folder: str) -> dict[str, Any]:
    """Return what each row of a run sees."""
    node, rows, _, more = RUNS[name]
    values = {key: value for key, value, _, _ in rows}
    if "init_method" in values:
        values["init_method"] = f"'file://{folder}/meeting'"
    overrides = [f"{node}.{key}={value}" for key, value in values.items()]
    live = live_objects([*more, *overrides], folder)
    seen = {key: seen_at(live, look) for key, _, look, _ in rows}
    live.clear()
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_every_field_reaches_the_live_object(name: str, tmp_path: Path) -> None:
    _, rows, world_size, _ = RUNS[name]
    for seen in run_distributed(observe, world_size, name, str(tmp_path)):
        assert seen == {key: expected for key, _, _, expected in rows}


def test_no_field_is_left_out() -> None:
    shown = {(node, key) for node, rows, *_ in RUNS.values() for key, *_ in rows} | ELSEWHERE
    for node, kind in KINDS.items():
        for field in dataclasses.fields(kind):
            assert (node, field.name) in shown
