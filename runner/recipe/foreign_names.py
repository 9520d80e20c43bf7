"""Names from other tools and grammars, with their equivalents here. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from accel.machine.errors import Problem
from accel.strategies.table import plugins

_STRATEGIES = " or ".join(f"{found.name}=…" for found in plugins() if found.kind is not None)

# Names of other tools, and the sentence that helps.
_KEYS: dict[str, str] = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "batch_size": "trainer.global_batch_size",
    "train_batch_size": "trainer.global_batch_size",
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
    "val_check_interval": "trainer.eval_every",
    "eval_steps": "trainer.eval_every",
    "log_every_n_steps": "trainer.log_every",
    "logging_steps": "trainer.log_every",
    "save_steps": "checkpoint.every_steps",
    "workers": "dataloader.num_workers",
    "num_workers": "dataloader.num_workers",
    "default_root_dir": "output_dir",
    "logdir": "output_dir",
    "checkpoint_dir": "checkpoint.project.project_dir",
    "resume_from_checkpoint": "resume",
}
_SENTENCES: dict[str, str] = {
    "accelerator": "Choose distributed=multi_gpu, or distributed.device=cuda.",
    "strategy": f"Choose distributed=multi_gpu, and {_STRATEGIES}.",
    "mixed_precision": "Choose precision=bf16.",
    "precision": "Choose precision=bf16.",
    "fast_dev_run": "Choose debug=fdr.",
    "logger": "Set tracker.log_with=[tensorboard].",
    "device_map": "It is a flag of runner eval and runner predict: --device-map auto.",
}
_OPTIONS: dict[str, dict[str, str]] = {
    "precision": {
        **dict.fromkeys(("fp32", "float32", "32", "32-true", "full", "single"), "no"),
        **dict.fromkeys(("float16", "half", "16", "16-mixed", "16-true", "amp"), "fp16"),
        **dict.fromkeys(("bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    },
}
_PLUGINS = {
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
        "ray_aws": "hydra-ray-launcher",
        "rq": "hydra-rq-launcher",
    },
    "hydra/sweeper": {
        "ax": "hydra-ax-sweeper",
        "nevergrad": "hydra-nevergrad-sweeper",
    },
}


def remedy(key: str, known: Sequence[str]) -> str | None:
    """Return the remedy for a key under the name of another tool, or None."""
    leaf = key.rpartition(".")[2]
    target = _KEYS.get(leaf)
    if target is not None and target != key:
        factory = target.startswith("optimizer.")
        return f"Did you mean {target!r}?" if factory or target in known else None
    return _SENTENCES.get(leaf) if leaf != key or leaf not in known else None


def option(group: str, value: object) -> str | None:
    """Return the file of a group that another name stands for, or None."""
    return _OPTIONS.get(group, {}).get(str(value).lower())


def plugin(group: str, value: str) -> Problem | None:
    """Return the problem that a plugin of Hydra's is not installed, with the package to install."""
    package = _PLUGINS.get(group, {}).get(value)
    if package is None:
        return None
    rule = "it is a plugin of Hydra's that is not installed"
    return Problem(f"{group}={value}", rule, f"Install it with `pip install {package}`.")


def renamed(name: str) -> str | None:
    """Return the key that another tool calls `name`, or None."""
    return _KEYS.get(name)
