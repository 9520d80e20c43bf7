"""The typed schema of a recipe, free of torch. The dataclasses of `accel.config` are its nodes.

YAML only chooses; defaults live here. A node of type `Any` (model, data, step, …) names a factory
(`name=` from the registry or `_target_=`) and gives its arguments, which are checked against the
factory's signature.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from accel.config.checks import check_choice, check_minimum
from accel.config.fp8 import AORecipeKwargs, TERecipeKwargs
from accel.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from accel.config.parallelism import STAGES_PER_RANK, ParallelismConfig
from accel.config.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.machine.enums import LoggerType, PrecisionType, RNGType
from accel.machine.errors import ConfigError, Problem, Problems, nearest
from accel.plan.arguments import conflicts
from accel.strategies.spec import PluginSpec
from accel.strategies.table import plugins
from runner.recipe import machines
from runner.recipe.machines import RayPlacement, Submit
from runner.recipe.units import parse_duration, parse_interval

DISTRIBUTED_KINDS = ("none", "auto", "multi_cpu", "multi_gpu", machines.KIND, machines.RAY)
SEEDS = 2**32  # NumPy takes no larger ones
SPLITS = ("train", "validation", "test")  # the data sets of a run: fields of `runner.Data`


def check_each(owner: object, name: str, known: list[str], problems: Problems) -> None:
    """Add a problem for each element of the list field `name` of `owner` that is not in `known`."""
    for value in getattr(owner, name) or ():
        if str(value) not in known:
            problems.add(
                f"{type(owner).__name__}.{name}: {value!r}",
                f"each is one of {', '.join(known)}",
                nearest(str(value), known),
            )


def check_given(owner: object, name: str, problems: Problems) -> None:
    """Add a problem if the field `name` is null."""
    if getattr(owner, name) is None:
        problems.add(f"{type(owner).__name__}.{name}=null", "it has a value", f"Give {name}=…")


@dataclass
class Distributed:
    """Where the processes of a run live.

    Args:
        kind: none (one process), multi_cpu, multi_gpu, multi_node, ray (a Ray cluster), or auto:
            GPUs if the machine has any.
        device: auto (the machine's accelerator, else cpu) or a type: cpu, cuda, mps, xpu.
        num_processes: worker processes of each machine; None: one per GPU, or 2 on the CPU.
        num_threads: intra-op threads of each process; None: the cores shared out evenly.
        max_restarts: how often, over the whole run, failed workers are started again from the
            newest complete checkpoint.
        nnodes: number of nodes; "1:4": from 1 to 4, as many as there are at each start.
        rdzv_endpoint: address and port of the first node, the same on each node.
        rdzv_id: name of the job; a node with another is refused.
        node_rank: place of this node; 0: the first one; None: in the order in which nodes join.
        is_host: whether this is the first node; None: whether it has the address of rdzv_endpoint.
        local_addr: address of this node for the others; None: the one that reaches rdzv_endpoint.
        node_timeout: time without a word from a node after which it counts as lost.
        join_timeout: how long the first node waits for the others, and they for it.
        ddp: arguments of `DistributedDataParallel`.
        init: arguments of `init_process_group`.
        ray: where in a Ray cluster, with kind ray.
    """

    kind: Any = "none"
    device: str = "auto"
    num_processes: int | None = None
    num_threads: int | None = None
    max_restarts: int = 0
    nnodes: Any = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str = ""
    node_rank: int | None = None
    is_host: bool | None = None
    local_addr: str | None = None
    node_timeout: Any = 30
    join_timeout: Any = 600
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    init: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    ray: RayPlacement = field(default_factory=RayPlacement)

    def __post_init__(self) -> None:
        problems = Problems()
        check_given(self, "kind", problems)
        check_choice(self, "kind", DISTRIBUTED_KINDS, problems)
        check_minimum(self, "num_processes", 1, problems)
        check_minimum(self, "num_threads", 1, problems)
        check_minimum(self, "max_restarts", 0, problems)
        check_minimum(self, "node_rank", 0, problems)
        problems += machines.problems_of(self)
        if self.kind != machines.RAY and self.ray != RayPlacement():
            rule = f"they concern processes in a Ray cluster, and distributed={self.kind} has none"
            problems.add("distributed.ray.*", rule, "Choose distributed=ray, or leave them out.")
        problems.raise_if()


FP8_RECIPES = ("fp8_torchao", "fp8_te")


@dataclass
class Parallelism:
    """Processes along each axis of the mesh, as of `ParallelismConfig`; their product is all.

    Args:
        dp_replicate_size: replicas of the model; None: what the other axes leave.
        dp_shard_size: processes that shard each replica; None: what the other axes leave.
        tp_size: processes that compute parts of the same matrices.
        cp_size: processes that compute parts of the same sequences.
        sp_size: the same under DeepSpeed.
        pp_size: processes that hold stages of the model.
        pp_schedule: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble or ZBVZeroBubble.
        pp_split: names of the modules that stages but the first begin with; None: at the model's
            repeated blocks.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int = 1
    cp_size: int = 1
    sp_size: int = 1
    pp_size: int = 1
    pp_schedule: str = "1F1B"
    pp_split: list[str] | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        for name in (f.name for f in fields(self) if f.name.endswith("_size")):
            check_minimum(self, name, 1, problems)
        check_choice(self, "pp_schedule", tuple(STAGES_PER_RANK), problems)
        problems.raise_if()

    def config(self, replicas: int, shards: int) -> ParallelismConfig | None:
        """Return the sizes of all axes; None where nothing is asked for.

        Args:
            replicas: of the model, if all processes read other samples.
            shards: of each replica, likewise.
        """
        if self == Parallelism():
            return None
        model = self.pp_size * self.cp_size * self.sp_size * self.tp_size
        data = max(1, replicas * shards // model)
        wanted = self.dp_replicate_size or (replicas if shards > 1 else data)
        sharded = self.dp_shard_size
        if sharded is not None and self.dp_replicate_size is None:
            wanted = max(1, data // sharded)
        sizes = {"dp_replicate_size": wanted, "dp_shard_size": sharded or max(1, data // wanted)}
        return ParallelismConfig(**{**vars(self), **sizes})


@dataclass
class Precision:
    """The number format of forward and backward passes.

    Args:
        mode: no (fp32), bf16, fp16 or fp8.
        autocast: arguments of `torch.autocast`.
        scaler: arguments of the gradient scaler (fp16).
        fp8_torchao: the recipe of fp8 by torchao.
        fp8_te: the recipe of fp8 by TransformerEngine.
        tf32: whether GPUs round the inputs of fp32 products and convolutions to 10 bits of
            mantissa; None: torch's default (convolutions only).
        weights: format of the weights themselves, with mode bf16: bf16 (no master weights in fp32;
            the optimizer rounds stochastically); None: as the model is built, fp32.
    """

    mode: Any = "no"
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    fp8_torchao: AORecipeKwargs | None = None
    fp8_te: TERecipeKwargs | None = None
    tf32: bool | None = None
    weights: Any = None

    def __post_init__(self) -> None:
        if self.mode is False:  # YAML reads a bare `no` so
            self.mode = "no"
        problems = Problems()
        check_given(self, "mode", problems)
        check_choice(self, "mode", PrecisionType.list(), problems)
        check_choice(self, "weights", ("bf16",), problems)
        if self.weights == "bf16" and self.mode != "bf16":
            problems.add(
                f"precision.weights=bf16 with precision.mode={self.mode}",
                "weights in bf16 are multiplied in bf16",
                "Choose precision=bf16_weights, or leave precision.weights out.",
            )
        given = [name for name in FP8_RECIPES if getattr(self, name) is not None]
        if len(given) > 1 or (given and self.mode != "fp8"):
            problems.add(
                f"precision.mode={self.mode} with {' and '.join(given)}",
                "fp8 has the recipe of one library, and other formats have none",
                f"Choose precision={given[0]}, or leave {given[-1]} out.",
            )
        problems.raise_if()


@dataclass
class DataLoader(DataLoaderConfiguration):
    """How batches are read, and (inherited) how they are divided over processes.

    Args:
        num_workers: reader processes per training process.
        pin_memory: whether batches are page-locked for faster copies; None: if the device is a GPU.
        prefetch_factor: batches each reader keeps ready; None: torch's default.
        persistent_workers: whether readers live across epochs.
        seed_samples: whether Python, NumPy and torch are reseeded per sample, so that each random
            draw in a data set is a function of (seed, epoch, index).
        group_by_length: whether a step's training samples are of like lengths (less padding); the
            data factory tells them.
    """

    use_seedable_sampler: bool = True
    num_workers: int = 0
    pin_memory: bool | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    seed_samples: bool = True
    group_by_length: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        check_minimum(self, "num_workers", 0, problems)
        check_minimum(self, "prefetch_factor", 1, problems)
        for name, unset in (("prefetch_factor", None), ("persistent_workers", False)):
            if self.num_workers == 0 and getattr(self, name) != unset:
                problems.add(
                    f"DataLoader.{name}={getattr(self, name)} with num_workers=0",
                    "it concerns reader processes, and there are none",
                    f"Set num_workers to 1 or more, or leave {name} out.",
                )
        problems.raise_if()


@dataclass
class Trainer:
    """How long and in what portions a run trains.

    Steps are optimizer steps. The global batch is what one step sees over all processes and
    accumulated micro-batches: global_batch_size = micro_batch_size × accumulation × processes.

    Args:
        epochs: passes over the training data; None: no limit.
        max_steps: optimizer steps in all; None: no limit. The schedule is planned for the nearer of
            the two limits.
        stop_after: end this invocation at that step (with a checkpoint); the schedule is unchanged.
        max_time: seconds, or "HH:MM:SS", after which the run stops with a checkpoint.
        hang_timeout: seconds, or "HH:MM:SS", without progress after which a hanging run ends; the
            rank that hangs is named. None: never.
        global_batch_size: samples per optimizer step.
        micro_batch_size: samples per process and forward pass; None: as large as possible.
        micro_batch_tokens: tokens per process and forward pass, padding included; None: no limit.
            Micro-batches are cut further to keep it; the data factory tells the lengths.
        eval_batch_size: samples per process in evaluation; None: twice the micro-batch.
        accumulation: the engine's plugin; num_steps=None is derived from the batch sizes.
        eval_every: how often the validation data are evaluated: optimizer steps, a fraction of an
            epoch (0.25), "2 epochs" or "HH:MM:SS"; None: at the end of each epoch.
        eval_first: whether they are also evaluated before the first step.
        evaluate: whether validation and test data are evaluated at all.
        sanity_steps: batches of a short evaluation before the first step of a new run, which finds
            mistakes in it and in what is monitored; 0: none.
        log_every: optimizer steps between log points (the only points that read from the device).
        limit_train_batches: global batches per epoch: a count, or a fraction below 1.0.
        limit_eval_batches: batches per evaluation, likewise.
        overfit_batches: train again and again on the first this many global batches.
        clip_grad_norm: largest total norm of the gradients; None: not clipped.
        clip_grad_value: largest absolute gradient element; None: not clipped.
        drop_last: whether a short last global batch of an epoch is left out.
        stop_on_nan: whether a loss that is not finite ends the run with an error.
        rng_types: generators that ranks synchronise at the start of an epoch.
        device_placement: whether the engine moves objects to the device.
        detect_anomaly: whether autograd names the operation that made a NaN (slow).
        check_gradients: whether the first samples are also computed as two micro-batches, whose
            gradients must be those of one (on one process).
    """

    epochs: int | None = 1
    max_steps: int | None = None
    stop_after: int | None = None
    max_time: Any = None
    hang_timeout: Any = "00:20:00"
    global_batch_size: int = 64
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    eval_batch_size: int | None = None
    accumulation: GradientAccumulationPlugin = field(default_factory=GradientAccumulationPlugin)
    eval_every: Any = None
    eval_first: bool = False
    evaluate: bool = True
    sanity_steps: int = 2
    log_every: int = 10
    limit_train_batches: Any = None
    limit_eval_batches: Any = None
    overfit_batches: int | None = None
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    drop_last: bool = False
    stop_on_nan: bool = True
    rng_types: list[str] | None = None
    device_placement: bool = True
    detect_anomaly: bool = False
    check_gradients: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        for name in (
            "epochs",
            "max_steps",
            "stop_after",
            "global_batch_size",
            "micro_batch_size",
            "micro_batch_tokens",
            "eval_batch_size",
            "log_every",
            "overfit_batches",
        ):
            check_minimum(self, name, 1, problems)
        check_minimum(self, "sanity_steps", 0, problems)
        for name in ("clip_grad_norm", "clip_grad_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                rule = "it is greater than 0: a limit of 0 would stop training"
                remedy = f"Set trainer.{name}=null for no clipping."
                problems.add(f"Trainer.{name}={value}", rule, remedy)
        for name in ("limit_train_batches", "limit_eval_batches"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            fraction = isinstance(value, float) and 0.0 < value <= 1.0
            if value is not None and not whole and not fraction:
                problems.add(
                    f"Trainer.{name}={value!r}",
                    "it is a count of at least 1 or a fraction in (0, 1]",
                    f"Give trainer.{name}=10 for ten batches or 0.1 for a tenth.",
                )
        check_each(self, "rng_types", RNGType.list(), problems)
        for name in ("max_time", "hang_timeout"):
            problems.collect(parse_duration, getattr(self, name), f"Trainer.{name}")
        problems.collect(parse_interval, self.eval_every, "Trainer.eval_every")
        if self.eval_first and not self.evaluate:
            rule, remedy = "nothing is evaluated", "Leave one of them out."
            problems.add("Trainer.eval_first=true with trainer.evaluate=false", rule, remedy)
        if self.epochs is None and self.max_steps is None:
            problems.add(
                "Trainer.epochs=null with trainer.max_steps=null",
                "a run needs an end",
                "Set one of them.",
            )
        problems.raise_if()


@dataclass
class Checkpoint:
    """When states are written and which are kept.

    Args:
        project: the engine's configuration: where (None: the run directory), how many
            (`total_limit`), on each node or once.
        every_steps: optimizer steps between checkpoints; None: none on this account.
        every_epochs: epochs between checkpoints; None: none on this account.
        every_time: seconds, or "HH:MM:SS", between checkpoints; None: none on this account.
        at_end: whether the last state is written.
        monitor: evaluation metric whose best value is kept as `best`; None: the objective's own.
        mode: whether the best is the max or the min; None: the objective's own.
        keep_best: how many of the best states are kept; 0: none.
        keep_every: optimizer steps; the checkpoint at each multiple is written and kept for good.
        weights_only: whether checkpoints that only `keep_best` or `keep_every` keeps are reduced to
            their weights; the newest (`project.total_limit`) stay whole, so the run can go on.
    """

    project: ProjectConfiguration = field(
        default_factory=lambda: ProjectConfiguration(
            automatic_checkpoint_naming=True, total_limit=3
        )
    )
    every_steps: int | None = None
    every_epochs: int | None = 1
    every_time: Any = None
    at_end: bool = True
    monitor: str | None = None
    mode: Any = None
    keep_best: int = 1
    keep_every: int | None = None
    weights_only: bool = False

    def __post_init__(self) -> None:
        problems = Problems()
        check_minimum(self, "every_steps", 1, problems)
        check_minimum(self, "every_epochs", 1, problems)
        check_minimum(self, "keep_best", 0, problems)
        check_minimum(self, "keep_every", 1, problems)
        problems.collect(parse_duration, self.every_time, "Checkpoint.every_time")
        check_choice(self, "mode", ("min", "max"), problems)
        problems.raise_if()


@dataclass
class Tracker:
    """Which experiment trackers are written.

    Args:
        log_with: names of trackers; an empty list writes none.
        project_name: name of the project; None: the run's name.
        init_kwargs: per tracker, arguments of its constructor.
    """

    log_with: list[str] = field(default_factory=lambda: ["tensorboard"])
    project_name: str | None = None
    init_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        check_each(self, "log_with", LoggerType.list(), problems)
        for name in self.init_kwargs:
            if name not in self.log_with and "all" not in self.log_with:
                problems.add(
                    f"Tracker.init_kwargs.{name}",
                    "these are arguments of a tracker that is on",
                    f"Add {name} to tracker.log_with, or leave them out.",
                )
        problems.raise_if()


@dataclass
class InitFrom:
    """Weights with which the models of a new run begin.

    Args:
        path: a run directory (its best state, else its last), a checkpoint, a file of weights
            (.safetensors, or what `torch.save` wrote), or a folder that holds one.
        include: patterns of the names that are loaded, as in a shell; empty: all.
        exclude: patterns of names that are not.
        strict: whether every chosen weight of model and file has one in the other.
    """

    path: str
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    strict: bool = False

    @classmethod
    def of(cls, given: object) -> InitFrom:
        """Return what a recipe gives: a path, or a mapping; raise a ConfigError for others."""
        try:
            found = cls(**given) if isinstance(given, dict) else cls(str(given))
        except TypeError as error:
            rule = f"it is a path, or path, include, exclude and strict ({error})"
            raise ConfigError.of(f"init_from={given}", rule, "Give init_from=DIR.") from error
        return found


# The plugins of strategies: each has a node in a recipe, null where it is off.
PLUGINS: dict[str, PluginSpec] = {p.name: p for p in plugins() if p.kind is not None}
Class = TypeVar("Class", bound=type)


def _with_plugins(recipe: Class) -> Class:
    """Declare a field for each plugin, behind the one that says how batches are divided."""
    own, fields = recipe.__annotations__, {}
    rule = "a recipe has another key of that name"
    ConfigError.raise_if(
        [Problem(f"plugin {name!r}", rule, "Rename it.") for name in PLUGINS if name in own]
    )
    for name, hint in own.items():
        fields[name] = hint
        if name == "dataloader":
            fields |= {name: plugin.kind | None for name, plugin in PLUGINS.items() if plugin.kind}
    recipe.__annotations__ = fields
    for name in PLUGINS:
        setattr(recipe, name, None)
    return recipe


@dataclass
@_with_plugins
class Recipe:
    """A whole run. Beside these fields it has a node for each of `PLUGINS`, null for off.

    Args:
        name: name of the run; run directories lie at ``<output_dir>/<name>/<time>-<id>``.
        output_dir: folder of all runs.
        seed: seed of every random draw.
        deterministic: whether results are bit-equal from run to run (pins threads and algorithms).
        resume: a run directory, or "auto" for the newest run of this name.
        run_dir: the directory of a new run itself; null: ``<output_dir>/<name>/<time>-<id>``.
        init_from: weights that a new run begins with: a run, checkpoint or file, or its `InitFrom`.
        tags: words to find the run by.
        distributed: where the processes live.
        precision: the number format.
        parallelism: processes along each axis of the mesh.
        dataloader: how batches are read and divided over processes.
        step: how one optimizer step is made; `supervised` uses the four nodes after `data`.
        model: factory of the model.
        peft: adapters that are trained in place of the model's weights; null: none.
        data: factory of the data sets.
        objective: what is minimised and measured.
        optimizer: ``_target_`` of an optimizer and its arguments.
        scheduler: factory of the learning-rate schedule, null for a constant rate.
        trainer: how long and in what portions.
        checkpoint: when states are written.
        tracker: experiment trackers.
        callbacks: by name, factories of callbacks.
        metrics: by name, torchmetrics objects that evaluations update with each sample once.
        compile: `torch.compile`, null for off.
        profile: the profiler, null for off.
        submit: what `runner submit` asks Slurm for.
    """

    name: str = "run"
    output_dir: str = "runs"
    seed: int = 0
    deterministic: bool = False
    resume: str | None = None
    run_dir: str | None = None
    init_from: Any = None
    tags: list[str] = field(default_factory=list)
    distributed: Distributed = field(default_factory=Distributed)
    precision: Precision = field(default_factory=Precision)
    parallelism: Parallelism = field(default_factory=Parallelism)
    dataloader: DataLoader = field(default_factory=DataLoader)
    step: Any = None
    model: Any = None
    peft: Any = None
    data: Any = None
    objective: Any = None
    optimizer: Any = None
    scheduler: Any = None
    trainer: Trainer = field(default_factory=Trainer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    tracker: Tracker = field(default_factory=Tracker)
    callbacks: Any = field(default_factory=dict)
    metrics: Any = field(default_factory=dict)
    compile: TorchDynamoPlugin | None = None
    profile: ProfileKwargs | None = None
    submit: Submit = field(default_factory=Submit)

    def __post_init__(self) -> None:
        problems = Problems()
        if not self.name or self.name.startswith(".") or "/" in self.name:
            problems.add(
                f"name={self.name!r}",
                "it names a folder, so it is not empty, has no slash and starts with no dot",
                "Give name=my_run.",
            )
        if not 0 <= self.seed < SEEDS:
            problems.add(
                f"seed={self.seed}", f"it is from 0 to {SEEDS - 1}", "Give seed=0 or more."
            )
        for key in ("run_dir", "output_dir", "resume"):
            value = getattr(self, key)
            if value is not None and not value.strip():
                rule = "it names a directory, and is empty (a shell variable without a value?)"
                problems.add(f"{key}={value!r}", rule, f"Give {key}=DIR, or leave it out.")
        problems += [
            Problem(
                f"{first}= and {second}= are both on",
                "they cannot be combined",
                f"Switch one off: {first}=null or {second}=null.",
            )
            for first, second in conflicts(self.plugins)
        ]
        problems.raise_if()

    @property
    def plugins(self) -> dict[str, Any]:
        """The plugins of strategies that are on, by name."""
        found = ((name, getattr(self, name)) for name in PLUGINS)
        return {name: plugin for name, plugin in found if plugin is not None}
