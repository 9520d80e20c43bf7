"""The cells of the matrix: backend × precision × processes × accumulation, and why some do not run.

An engine's own arguments are built here, so that a worker needs to know none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.megatron import MegatronLMPlugin
from accel.config.parallelism import ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import TorchDynamoPlugin
from accel.machine.imports import is_megatron_lm_available, is_torchao_available
from tests.parity.task import Task

PRECISIONS = ("no", "bf16", "fp16")
FLOAT8 = ("single", "ddp", "fsdp_full_shard")  # in fp8, too
WORLD_SIZES = (1, 2, 4)
ACCUMULATIONS = (1, 2)
# Of what a replica holds, on 4 processes, where parameters, gradients and optimizer state are all
# spread over them: 0.25 would be a fourth of everything.
SHARE = 0.3
# Where the optimizer is in the host's memory, ZeRO-3 keeps its shard of gradients twice there:
# `grad_partitions_flat_buffer`, which micro-batches add to, and the optimizer's own `grad`, which
# that is copied to. Weights, two moments and gradients twice are 5/4 of a fourth.
# Source: deepspeed/runtime/zero/stage3.py, `_offload_grad_partition_at_boundary`
SHARE_OFFLOADED = SHARE * 5 / 4


@dataclass(frozen=True)
class Cell:
    """One training run of the matrix.

    Args:
        backend: key in `BACKENDS`.
        precision: no, bf16, fp16 or fp8.
        world_size: processes.
        accumulation: micro-batches of an optimizer step.
        task: what is trained.
        variant: what else is special, in a word.
        sabotage: what a control does wrong; None: nothing.
        device: "cpu", "cuda" or "xla" (as many devices as CPU_NUM_DEVICES says).
    """

    backend: str
    precision: str = "no"
    world_size: int = 1
    accumulation: int = 1
    task: Task = field(default_factory=Task)
    variant: str = ""
    sabotage: str | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        llama = self.backend.startswith("megatron")  # rebuilds models of transformers alone
        object.__setattr__(self, "task", replace(self.task, llama=llama))

    @property
    def reference_device(self) -> str:
        """Where the plain loop computes."""
        return "cpu" if self.device == "xla" else self.device


@dataclass(frozen=True)
class Backend:
    """One way to spread a model.

    Args:
        arguments: returns what `Accelerator` is given beside precision and accumulation.
        owns_bf16: whether the engine keeps a bf16 copy of the weights itself; else autocast.
        own_kernels: whether a compiler of its own computes each operation, so that losses differ
            from the plain loop's by rounding, and weights by what AdamW makes of that.
        max_share: of what a replica holds, on 4 processes; None: as much as it wants.
        reason: returns why a cell does not run; None if it does.
    """

    arguments: Callable[[Cell], dict[str, Any]]
    owns_bf16: bool = False
    own_kernels: bool = False
    max_share: float | None = None
    reason: Callable[[Cell], str | None] = lambda cell: None


TP_PLAN = {
    "blocks.*.attention.q_proj": "colwise",
    "blocks.*.attention.k_proj": "colwise",
    "blocks.*.attention.v_proj": "colwise",
    "blocks.*.attention.o_proj": "rowwise",
    "blocks.*.mlp.up_proj": "colwise",
    "blocks.*.mlp.down_proj": "rowwise",
}


def _fsdp(**fields: Any) -> Callable[[Cell], dict[str, Any]]:
    return lambda cell: {"fsdp_plugin": FullyShardedDataParallelPlugin(**fields)}


def _tensor_parallel(size: int | None = None) -> Callable[[Cell], dict[str, Any]]:
    def arguments(cell: Cell) -> dict[str, Any]:
        plugin = TorchTensorParallelPlugin(tp_size=size or cell.world_size, tp_plan=TP_PLAN)
        return {"torch_tp_plugin": plugin}

    return arguments


def _sequences(size: int = 2, **plugins: Any) -> Callable[[Cell], dict[str, Any]]:
    def arguments(cell: Cell) -> dict[str, Any]:
        tp = plugins["torch_tp_plugin"].tp_size if plugins else 1
        shards = cell.world_size // (size * tp)
        config = ParallelismConfig(cp_size=size, tp_size=tp, dp_shard_size=shards)
        return {"parallelism_config": config, **plugins}

    return arguments


# Two stages on each process, of a model of two blocks.
FOUR_STAGES = ["blocks.0", "blocks.1", "norm"]


def _stages(**sizes: Any) -> Callable[[Cell], dict[str, Any]]:
    def arguments(cell: Cell) -> dict[str, Any]:
        replicas = 1 if sizes else cell.world_size // 2
        split = FOUR_STAGES if "pp_schedule" in sizes else None
        given = {"pp_size": 2, "dp_replicate_size": replicas, "pp_split": split, **sizes}
        return {"parallelism_config": ParallelismConfig(**given)}

    return arguments


def _deepspeed(stage: int, **fields: Any) -> Callable[[Cell], dict[str, Any]]:
    return lambda cell: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage, **fields)}


# As files for stage 3 have it: sizes that suit the model, not buckets as large as the whole of it.
ZERO3_SIZES = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    "auto",
)


def _zero3(**sections: Any) -> Callable[[Cell], dict[str, Any]]:
    config = {"zero_optimization": {"stage": 3, **ZERO3_SIZES, **sections}}
    return lambda cell: {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}


def _compiled(inner: Callable[[Cell], dict[str, Any]]) -> Callable[[Cell], dict[str, Any]]:
    return lambda cell: {**inner(cell), "dynamo_plugin": TorchDynamoPlugin(backend="inductor")}


def _none(cell: Cell) -> dict[str, Any]:
    return {}


def _together(*parts: Callable[[Cell], dict[str, Any]]) -> Callable[[Cell], dict[str, Any]]:
    return lambda cell: {name: value for part in parts for name, value in part(cell).items()}


def _two(cell: Cell) -> str | None:
    return None if cell.world_size == 2 else "two processes hold two stages each"


def _alone(cell: Cell) -> str | None:
    return None if cell.world_size == 1 else "one process alone; several are DDP"


def _several(cell: Cell) -> str | None:
    return "DDP on one process is one process alone" if cell.world_size == 1 else None


def _pairs(cell: Cell) -> str | None:
    return "sequences, or stages, are divided over two processes" if cell.world_size == 1 else None


def _four(cell: Cell) -> str | None:
    return None if cell.world_size == 4 else "two times two processes are four"


def _fp16_on_gpu(cell: Cell) -> str | None:
    if cell.precision == "fp16" and cell.device == "cpu":
        return "DeepSpeed computes in fp16 on accelerators only; accel refuses it on a CPU"
    return None


def _one_in_fp32_or_bf16(cell: Cell) -> str | None:
    return "torch_xla computes in fp32 or bf16" if cell.precision == "fp16" else _alone(cell)


def _sharded_backends() -> dict[str, Backend]:
    engine = partial(Backend, owns_bf16=True)
    both = _together(_fsdp(reshard_after_forward=True), _tensor_parallel(2))
    return {
        "fsdp_full_shard": engine(_fsdp(reshard_after_forward=True), max_share=SHARE),
        "fsdp_shard_grad_op": engine(_fsdp(reshard_after_forward=False)),
        "fsdp_hybrid_shard": engine(_fsdp(dp_replicate_size=2), reason=_four),
        "fsdp_no_shard": engine(_fsdp(dp_replicate_size="all")),
        "fsdp_cpu_offload": engine(_fsdp(cpu_offload=True), max_share=SHARE),
        "fsdp_tp": engine(both, reason=_four),
        "cp": engine(_sequences(), reason=_pairs),
        "cp_tp": engine(
            _sequences(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2, tp_plan=TP_PLAN)),
            reason=_four,
        ),
        "pp": Backend(_stages(), reason=_pairs),
        "pp_interleaved": Backend(_stages(pp_schedule="Interleaved1F1B"), reason=_two),
        "pp_zero_bubble": Backend(_stages(pp_schedule="ZBVZeroBubble"), reason=_two),
        "pp_fsdp": engine(_stages(dp_shard_size=2), reason=_four),
        "pp_cp": engine(_stages(cp_size=2), reason=_four),
        "pp_tp": Backend(_together(_stages(tp_size=2), _tensor_parallel(2)), reason=_four),
        "tp": Backend(_tensor_parallel()),
        "tp_ddp": Backend(_tensor_parallel(2), reason=_four),
    }


def _deepspeed_backends() -> dict[str, Backend]:
    engine = partial(Backend, owns_bf16=True, reason=_fp16_on_gpu)
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {
        "zero0": engine(_deepspeed(0)),
        "zero1": engine(_deepspeed(1)),
        "zero2": engine(_deepspeed(2)),
        "zero3": engine(_zero3(), max_share=SHARE),
        "zero2_offload": engine(_deepspeed(2, offload_optimizer_device="cpu")),
        "zero3_offload": engine(
            _zero3(**both),
            max_share=SHARE_OFFLOADED,
        ),
    }


def _megatron(**fields: Any) -> Callable[[Cell], dict[str, Any]]:
    def arguments(cell: Cell) -> dict[str, Any]:
        sizes = {name: cell.world_size if one == "all" else one for name, one in fields.items()}
        return {"megatron_lm_plugin": MegatronLMPlugin(**sizes)}

    return arguments


def _megatron_backends() -> dict[str, Backend]:
    def on(*sizes: int) -> Callable[[Cell], str | None]:
        def reason(cell: Cell) -> str | None:
            if cell.precision == "fp16":
                return "Megatron's scale begins at 2**32: the first steps are skipped"
            if cell.variant == "own loss":
                return "what is trained gives its loss function logits"
            return None if cell.world_size in sizes else f"it is tried on {sizes} processes"

        return reason

    engine = partial(Backend, owns_bf16=True)
    whole = {"tp_degree": "all", "sequence_parallelism": True}
    return {
        "megatron_tp": engine(_megatron(tp_degree="all"), reason=on(1, 2)),
        "megatron_sp": engine(_megatron(**whole), reason=on(2)),
        "megatron_pp": engine(_megatron(pp_degree=2), reason=on(2)),
        "megatron_dp": engine(_megatron(), reason=on(2)),
        "megatron_sharded": engine(_megatron(use_distributed_optimizer=True), reason=on(2)),
        "megatron_tp_dp": engine(_megatron(tp_degree=2), reason=on(4)),
    }


BACKENDS: dict[str, Backend] = {
    "single": Backend(_none, reason=_alone),
    "ddp": Backend(_none, reason=_several),
    **_sharded_backends(),
    **_deepspeed_backends(),
    **(_megatron_backends() if is_megatron_lm_available() else {}),
    "xla": Backend(_none, own_kernels=True, reason=_one_in_fp32_or_bf16),
    "compile_single": Backend(_compiled(_none), reason=_alone),
    "compile_ddp": Backend(_compiled(_none), reason=_several),
    "compile_fsdp": Backend(_compiled(_fsdp()), owns_bf16=True),
    "compile_zero2": Backend(_compiled(_deepspeed(2)), owns_bf16=True, reason=_fp16_on_gpu),
}


def reason_not_to_run(cell: Cell, num_gpus: int) -> str | None:
    """Return why this machine does not run `cell`; None if it does."""
    if cell.device == "cuda" and cell.world_size > num_gpus:
        return f"{cell.world_size} processes want as many GPUs; there are {num_gpus}"
    if cell.precision == "fp8" and not is_torchao_available():
        return "torchao is not installed (extra `fp8`)"
    return BACKENDS[cell.backend].reason(cell)


def matrix(task: Task, device: str) -> Iterator[Cell]:
    """Yield every cell, run or not, in the order of the table."""
    for backend, precision, world_size, accumulation in itertools.product(
        [name for name in BACKENDS if (name == "xla") == (device == "xla")],
        PRECISIONS,
        WORLD_SIZES,
        ACCUMULATIONS,
    ):
        yield Cell(backend, precision, world_size, accumulation, task, device=device)
        if precision == "bf16" and accumulation == 1:
            special = replace(task, own_loss=True)
            yield Cell(
                backend, precision, world_size, accumulation, special, "own loss", device=device
            )
        if precision == "no" and accumulation == 2:
            for variant in ("ragged", "short"):
                special = replace(task, **{variant: True})
                yield Cell(
                    backend, precision, world_size, accumulation, special, variant, device=device
                )
    for backend, world_size in itertools.product(() if device == "xla" else FLOAT8, WORLD_SIZES):
        yield Cell(backend, "fp8", world_size, task=task, device=device)
