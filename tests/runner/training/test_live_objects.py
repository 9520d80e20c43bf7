"""C2: every field of handlers and plugins reaches the object that uses it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accel.config import handlers, training
from tests.helpers import run_distributed

# Key of the recipe, value on the command line, what to look at among the live objects (a dotted
# name, or a function of them), and what must be seen there.
Row = tuple[str, str, str | Callable[[dict[str, Any]], Any], Any]

DDP: list[Row] = [
    ("distributed.ddp.dim", "0", "ddp.dim", 0),
    ("distributed.ddp.broadcast_buffers", "false", "ddp.broadcast_buffers", False),
    ("distributed.ddp.bucket_cap_mb", "3", "ddp.bucket_bytes_cap", 3 * 2**20),
    ("distributed.ddp.find_unused_parameters", "true", "ddp.find_unused_parameters", True),
    ("distributed.ddp.check_reduction", "true", "plan.ddp.check_reduction", True),
    ("distributed.ddp.gradient_as_bucket_view", "true", "ddp.gradient_as_bucket_view", True),
    ("distributed.ddp.static_graph", "true", "ddp.static_graph", True),
    (
        "distributed.ddp.comm_hook",
        "power_sgd",
        lambda live: (
            inspect.getclosurevars(live["ddp"]._comm_hooks[0][0]).nonlocals["hook"].__name__
        ),
        "powerSGD_hook",
    ),
    (
        "distributed.ddp.comm_wrapper",
        "fp16",
        lambda live: live["ddp"]._comm_hooks[0][0].__name__,
        "fp16_compress_wrapper_hook",
    ),
    (
        "distributed.ddp.comm_state_option",
        "{matrix_approximation_rank: 2}",
        lambda live: live["ddp"]._comm_hooks[0][1].matrix_approximation_rank,
        2,
    ),
]
INIT: list[Row] = [
    ("distributed.init.backend", "gloo", "group.backend", "gloo"),
    ("distributed.init.init_method", "FILE", "group.store", "FileStore"),
    ("distributed.init.timeout", "77", "group.timeout", timedelta(seconds=77)),
]
AUTOCAST: list[Row] = [
    ("precision.autocast.enabled", "false", "autocast._enabled", False),
    ("precision.autocast.cache_enabled", "false", "autocast._cache_enabled", False),
]
SCALER: list[Row] = [
    ("precision.scaler.init_scale", "1024.0", "scaler.get_scale", 1024.0),
    ("precision.scaler.growth_factor", "3.0", "scaler.get_growth_factor", 3.0),
    ("precision.scaler.backoff_factor", "0.25", "scaler.get_backoff_factor", 0.25),
    ("precision.scaler.growth_interval", "7", "scaler.get_growth_interval", 7),
]
SCALER_OFF: list[Row] = [("precision.scaler.enabled", "false", "scaler.is_enabled", False)]
LOADER: list[Row] = [
    ("dataloader.even_batches", "false", "batch_shard.even_batches", False),
    ("dataloader.split_batches", "true", "batch_shard.split_batches", True),
    ("dataloader.data_seed", "5", lambda live: live["first_ids"] != live["first_ids_seed_0"], True),
    ("dataloader.num_workers", "1", "loader.num_workers", 1),
    ("dataloader.pin_memory", "false", "loader.pin_memory", False),
    ("dataloader.prefetch_factor", "3", "loader.prefetch_factor", 3),
    ("dataloader.persistent_workers", "true", "loader.persistent_workers", True),
    ("dataloader.seed_samples", "false", "loader.dataset.seed_samples", False),
    ("dataloader.non_blocking", "true", "loader._non_blocking", True),
]
DISPATCH: list[Row] = [
    ("dataloader.dispatch_batches", "true", "loader.kind", "DataLoaderDispatcher"),
    ("dataloader.use_seedable_sampler", "false", "order.kind", "ReplayedRandomSampler"),
]
ACCUMULATION: list[Row] = [
    ("trainer.accumulation.num_steps", "2", "gradient.num_steps", 2),
    ("trainer.accumulation.adjust_scheduler", "false", "gradient.adjust_scheduler", False),
    ("trainer.accumulation.sync_with_dataloader", "true", "gradient.sync_with_dataloader", True),
    ("trainer.accumulation.sync_each_batch", "true", "gradient.sync_each_batch", True),
]
PROJECT: list[Row] = [
    ("checkpoint.project.project_dir", "elsewhere", "project.project_dir", "elsewhere"),
    ("checkpoint.project.logging_dir", "logs", "project.logging_dir", "logs"),
    (
        "checkpoint.project.automatic_checkpoint_naming",
        "false",
        "project.automatic_checkpoint_naming",
        False,
    ),
    ("checkpoint.project.total_limit", "9", "project.total_limit", 9),
    ("checkpoint.project.iteration", "4", "project.iteration", 4),
    ("checkpoint.project.save_on_each_node", "true", "project.save_on_each_node", True),
]
PROFILE: list[Row] = [
    (
        "profile.activities",
        "[cpu]",
        lambda live: [a.name for a in live["profiler"].activities],
        ["CPU"],
    ),
    ("profile.record_shapes", "true", "profiler.record_shapes", True),
    ("profile.profile_memory", "true", "profiler.profile_memory", True),
    ("profile.with_stack", "true", "profiler.with_stack", True),
    ("profile.with_flops", "true", "profiler.with_flops", True),
    ("profile.with_modules", "true", "profiler.with_modules", True),
    (
        "profile.schedule_option",
        "{wait: 1, warmup: 1, active: 1}",
        lambda live: [live["profiler"].schedule(step).name for step in range(3)],
        ["NONE", "WARMUP", "RECORD_AND_SAVE"],
    ),
    (
        "profile.on_trace_ready",
        "torch.nn.utils.parameters_to_vector",
        "profiler.on_trace_ready.__name__",
        "parameters_to_vector",
    ),
]
TRACES: list[Row] = [
    ("profile.output_trace_dir", "traces", "profiler.on_trace_ready.folder.name", "traces")
]

# Rows that hold together in one run, and what else that run needs.
RUNS: dict[str, tuple[int, list[Row], list[str]]] = {
    "ddp": (2, DDP, []),
    "init": (2, INIT, []),
    "autocast": (1, AUTOCAST, ["precision=bf16"]),
    "scaler": (1, SCALER, ["precision=fp16"]),
    "scaler off": (1, SCALER_OFF, ["precision=fp16"]),
    "loader": (2, LOADER, ["trainer.drop_last=true"]),
    "dispatch": (2, DISPATCH, []),
    "accumulation": (1, ACCUMULATION, []),
    "project": (1, PROJECT, []),
    "profile": (1, PROFILE, ["profile=trace", "profile.output_trace_dir=null"]),
    "traces": (1, TRACES, ["profile=trace"]),
}
NODES = {
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
ELSEWHERE = {"dataloader.use_stateful_dataloader"}


def live_objects(overrides: list[str], folder: str) -> dict[str, Any]:
    """Build a run from overrides, as a worker does, and return what torch was given."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from accel.comm.rng import set_seed
    from accel.machine.env import Environment
    from runner.data.batches import TrainBatches
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
    live: dict[str, Any] = {
        "plan": accelerator.plan,
        "scaler": accelerator.scaler,
        "autocast": accelerator.autocast(),
        "gradient": accelerator.gradient_state,
        "project": accelerator.project_configuration,
        "loader": batches.loader,
        "batch_shard": batches.loader.batch_sampler,
        "order": batches._sampler.sampler,
        "first_ids": list(batches._sampler.sampler)[:8],
        "first_ids_seed_0": _first_ids_of_seed_0(data.train, recipe),
    }
    if isinstance(model, DistributedDataParallel):
        live["ddp"] = model
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
            live["profiler"] = profiler
    return live


def _first_ids_of_seed_0(dataset: Any, recipe: Any) -> list[int]:
    from runner.data.datasets import make_order

    config = dataclasses.replace(recipe.dataloader, data_seed=None)
    return list(make_order(dataset, 0, config))[:8]


def seen_at(live: dict[str, Any], look: str | Callable[[dict[str, Any]], Any]) -> Any:
    """Return what `look` names, or the result of the method that it names."""
    if not isinstance(look, str):
        return look(live)
    name, *attributes = look.split(".")
    if attributes == ["kind"]:
        return type(live[name]).__name__
    value = functools.reduce(getattr, attributes, live[name])
    return value() if inspect.ismethod(value) else value


def observe(name: str, folder: str) -> dict[str, Any]:
    """Return what each row of a run sees."""
    _, rows, more = RUNS[name]
    values = {key: value for key, value, _, _ in rows}
    if "distributed.init.init_method" in values:
        values["distributed.init.init_method"] = f"'file://{folder}/meeting'"
    overrides = [f"{key}={value}" for key, value in values.items()]
    live = live_objects([*more, *overrides], folder)
    seen = {key: seen_at(live, look) for key, _, look, _ in rows}
    live.clear()
    return seen


@pytest.mark.parametrize("name", RUNS)
def test_every_field_reaches_the_live_object(name: str, tmp_path: Path) -> None:
    world_size, rows, _ = RUNS[name]
    for seen in run_distributed(observe, world_size, name, str(tmp_path)):
        assert seen == {key: expected for key, _, _, expected in rows}


def test_no_field_is_left_out() -> None:
    shown = {key for _, rows, _ in RUNS.values() for key, *_ in rows} | ELSEWHERE
    for node, kind in NODES.items():
        for field in dataclasses.fields(kind):
            assert f"{node}.{field.name}" in shown
