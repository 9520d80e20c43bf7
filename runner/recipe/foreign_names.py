"""What people type from habit, and what it is called here: one table. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from accel.strategies.table import plugins

_STRATEGIES = " or ".join(f"{found.name}=…" for found in plugins() if found.kind is not None)
_CHECKPOINTED = " or ".join(
    f"{found.name}.activation_checkpointing=true"
    for found in plugins()
    if hasattr(found.kind, "activation_checkpointing")
)
_EVALUATIONS = "trainer.eval_every=… counts optimizer steps; null evaluates after each epoch."
_CALLED = "Leave it out: the runner calls the factory itself."

# The last part of a key as other tools name it, with the key here, or the sentence that helps.
HABITS: dict[str, str] = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup": "scheduler.warmup",
    "warmup_steps": "scheduler.warmup",
    "warmup_ratio": "scheduler.warmup",
    "batch_size": "trainer.global_batch_size",
    "train_batch_size": "trainer.global_batch_size",
    "per_device_train_batch_size": "trainer.micro_batch_size",
    "per_device_eval_batch_size": "trainer.eval_batch_size",
    "max_epochs": "trainer.epochs",
    "num_epochs": "trainer.epochs",
    "num_train_epochs": "trainer.epochs",
    "devices": "distributed.num_processes",
    "gpus": "distributed.num_processes",
    "num_gpus": "distributed.num_processes",
    "nproc_per_node": "distributed.num_processes",
    "gradient_clip_val": "trainer.clip_grad_norm",
    "max_grad_norm": "trainer.clip_grad_norm",
    "accumulate_grad_batches": "trainer.accumulation.num_steps",
    "gradient_accumulation_steps": "trainer.accumulation.num_steps",
    "eval_steps": "trainer.eval_every",
    "val_check_interval": _EVALUATIONS,
    "check_val_every_n_epoch": _EVALUATIONS,
    "log_every_n_steps": "trainer.log_every",
    "logging_steps": "trainer.log_every",
    "save_steps": "checkpoint.every_steps",
    "save_last": "checkpoint.at_end",
    "save_total_limit": "checkpoint.project.total_limit",
    "save_top_k": "checkpoint.project.total_limit",
    "workers": "dataloader.num_workers",
    "num_workers": "dataloader.num_workers",
    "default_root_dir": "output_dir",
    "logdir": "output_dir",
    "checkpoint_dir": "checkpoint.project.project_dir",
    "resume_from_checkpoint": "resume",
    "ckpt_path": "resume",
    "report_to": "tracker.log_with",
    "logger": "Choose tracker=wandb, or another file of that group.",
    "accelerator": "Choose distributed=multi_gpu, or distributed.device=cuda.",
    "strategy": f"Choose distributed=multi_gpu, and {_STRATEGIES}.",
    "mixed_precision": "Choose precision=bf16.",
    "precision": "Choose precision=bf16.",
    "fast_dev_run": "Choose debug=fdr.",
    "init_from": "Load weights in the factory of the model; resume=… continues a run.",
    "gradient_checkpointing": f"Call torch.utils.checkpoint in the model, or set {_CHECKPOINTED}.",
    "hparams_search": "Start with -m hydra/sweeper=optuna.",
    "device_map": "It is a flag of runner eval and runner predict: --device-map auto.",
    **dict.fromkeys(("_partial_", "_args_", "_recursive_", "_convert_"), _CALLED),
}
_OPTIONS: dict[str, dict[str, str]] = {
    "precision": {
        **dict.fromkeys(("fp32", "float32", "32", "32-true", "full", "single"), "no"),
        **dict.fromkeys(("float16", "half", "16", "16-mixed", "16-true", "amp"), "fp16"),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    },
}


def remedy(key: str, known: Sequence[str] = ()) -> str | None:
    """Return the remedy for a key under the name of another tool, or None.

    `known` are the keys of the recipe; those of the optimizer and the schedule may lack there.
    """
    leaf = key.rpartition(".")[2]
    found = HABITS.get(leaf, "")
    if " " in found:
        return found if leaf != key or leaf not in known else None
    free = found.startswith(("optimizer.", "scheduler."))
    return (
        f"Did you mean {found!r}?" if found not in ("", key) and (free or found in known) else None
    )


def option(group: str, value: object) -> str | None:
    """Return the file of a group that another name stands for, or None."""
    return _OPTIONS.get(group, {}).get(str(value).lower())


def renamed(name: str) -> str | None:
    """Return the key that another tool calls `name`, or None."""
    found = HABITS.get(name, " ")
    return None if " " in found else found
