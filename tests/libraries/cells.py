"""The matrix: which library trains with which setting on how many processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ZERO_2 = {
    "zero_optimization": {"stage": 2},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
ZERO_3 = {
    **ZERO_2,
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
# DeepSpeed's own optimizer and schedule; the trainer gives their values.
SCHEDULED = {
    **ZERO_2,
    "optimizer": {
        "type": "AdamW",
        "params": {
            **dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
            "torch_adam": True,  # the other ones want a compiler
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
}
BLOCKS = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}
# By program: the packages without which it is not run, the one that trains first.
PACKAGES = {
    "transformers_trainer": ("transformers",),
    "peft_lora": ("peft", "transformers"),
    "trl_sft": ("trl", "transformers", "peft", "datasets"),
    "sentence_transformers_trainer": ("sentence_transformers", "transformers", "datasets"),
    "diffusers_unet": ("diffusers", "transformers"),
}


@dataclass(frozen=True)
class Cell:
    """One training, run under both packages.

    Attributes:
        program: module of `tests.libraries.programs`.
        setting: what is special about it, in words.
        num_processes: 1: a plain process; more: under torchrun.
        options: what the program is given.
        tolerance: largest absolute difference of numbers; 0.0: bit-equal, as are weights and the
            names of files.
    """

    program: str
    setting: str
    num_processes: int
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tolerance: float = 0.0

    @property
    def name(self) -> str:
        """The cell's name in reports, and of its folder."""
        return f"{self.program}-{self.setting.replace(' ', '_')}-{self.num_processes}"

    @property
    def library(self) -> str:
        """The library that trains."""
        return PACKAGES[self.program][0]

    def reason_not_to_run(self) -> str | None:
        """Return what is not installed, or None."""
        wanted = (*PACKAGES[self.program], "accelerate")
        wanted += ("deepspeed",) if "deepspeed" in self.options else ()
        lacking = [name for name in wanted if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(lacking)}" if lacking else None


def matrix() -> list[Cell]:
    """Return every cell."""
    both = [
        Cell(program, setting, num_processes, options)
        for num_processes in (1, 2)
        for program, setting, options in _ON_ANY_NUMBER
    ]
    trainer = "transformers_trainer"
    return [
        *both,
        *(Cell(trainer, name, 2, given, tolerance=bound) for name, given, bound in _ZERO + _FSDP),
    ]


_ACCUMULATED = {"gradient_accumulation_steps": 3}
_STREAMED = {"stream": True, "max_steps": 10, "accelerator_config": {"dispatch_batches": False}}
_GROUPED = {"train_sampling_strategy": "group_by_length", "num_train_epochs": 1, "resume": True}
_ON_ANY_NUMBER: list[tuple[str, str, dict[str, Any]]] = [
    ("transformers_trainer", "resumed", {"resume": True}),
    ("transformers_trainer", "accumulated", {**_ACCUMULATED, "save_steps": 3}),
    # In later epochs each rank of the public package draws an order of its own.
    ("transformers_trainer", "grouped resumed", _GROUPED),
    ("transformers_trainer", "bf16 resumed", {"bf16": True, "resume": True}),
    ("transformers_trainer", "streamed", _STREAMED),
    # Its batch sampler deals the batches to the ranks itself.
    ("transformers_trainer", "batches rebalanced", {"train_sampling_strategy": "batch_rebalance"}),
    ("peft_lora", "plain", {}),
    ("peft_lora", "accumulated bf16", {**_ACCUMULATED, "mixed_precision": "bf16"}),
    ("trl_sft", "plain", {}),
    ("trl_sft", "LoRA accumulated", {"lora": True, **_ACCUMULATED}),
    ("sentence_transformers_trainer", "plain", {}),
    ("sentence_transformers_trainer", "bf16 accumulated", {"bf16": True, **_ACCUMULATED}),
    ("diffusers_unet", "resumed", {}),
    ("diffusers_unet", "accumulated bf16", {**_ACCUMULATED, "mixed_precision": "bf16"}),
]
_ZERO: list[tuple[str, dict[str, Any], float]] = [
    ("ZeRO-2 resumed", {"deepspeed": ZERO_2, "resume": True}, 0.0),
    ("ZeRO-2 accumulated", {"deepspeed": ZERO_2, "gradient_accumulation_steps": 2}, 0.0),
    ("ZeRO-2 auto schedule", {"deepspeed": SCHEDULED, "warmup_steps": 3, "resume": True}, 0.0),
    # Of a norm over partitions, sums are taken in another order.
    ("ZeRO-3 accumulated", {"deepspeed": ZERO_3, "gradient_accumulation_steps": 2}, 1e-6),
]
# On a CPU the public package does not shard and trains DDP: sums are taken in another order, and
# the checkpoints have other files.
_FSDP: list[tuple[str, dict[str, Any], float]] = [
    ("FSDP resumed", {"fsdp": True, "fsdp_config": BLOCKS, "resume": True}, 1e-5),
]
