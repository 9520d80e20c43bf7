"""What people type out of habit, from other tools or in another grammar. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel.errors import Problem

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
    "strategy": "Choose distributed=multi_gpu, and fsdp=full_shard or deepspeed=zero2.",
    "mixed_precision": "Choose precision=bf16.",
    "precision": "Choose precision=bf16.",
    "fast_dev_run": "Choose debug=fdr.",
    "logger": "Set tracker.log_with=[tensorboard].",
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
        "ray": "hydra-ray-launcher",
        "ray_aws": "hydra-ray-launcher",
        "rq": "hydra-rq-launcher",
    },
    "hydra/sweeper": {
        "ax": "hydra-ax-sweeper",
        "nevergrad": "hydra-nevergrad-sweeper",
        "optuna": "hydra-optuna-sweeper",
    },
}


def remedy(key: str, known: Sequence[str]) -> str | None:
    """Return the sentence that helps a person who wrote another tool's name for a key, or None."""
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


def key_for(name: str) -> str | None:
    """Return the key that a flag or a bare word stands for, or None."""
    from runner.config import keys

    name = name.lstrip("-").replace("-", "_").rstrip(":=")
    typed = list(keys.typed_keys())
    head = name.partition(".")[0]
    if name in typed or ("." in name and head in (*keys.FACTORY_NODES, "callbacks")):
        return name
    if name in _KEYS:
        return _KEYS[name]
    same_leaf = [key for key in typed if key.rpartition(".")[2] == name]
    return same_leaf[0] if len(same_leaf) == 1 else None


def pairs(overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Return the overrides without words such as ``seed 3``, and what is wrong with those."""
    kept: list[str] = []
    problems: list[Problem] = []
    words = list(overrides)
    while words:
        word = words.pop(0)
        value = _value_of(word, words)
        if value is None:
            kept.append(word)
            continue
        written, num_words = value
        shown = " ".join([word, *words[:num_words]])
        del words[:num_words]
        rule = "a value is given as key=value, without spaces"
        problems.append(Problem(shown, rule, f"Write {key_for(word)}={written}"))
    return kept, problems


def _value_of(word: str, following: Sequence[str]) -> tuple[str, int] | None:
    """Return the value that stands behind a bare key, and how many words that are."""
    bare = word.rstrip(":=")
    if not following or "=" in bare or key_for(word) is None or word.startswith("-"):
        return None
    if following[0] == "=" and len(following) > 1 and bare == word:
        return following[1], 2
    if "=" not in following[0] and key_for(following[0]) is None:
        return following[0], 1
    return None


def no_switch(key: str, value: object) -> bool:
    """Return whether a number other than 0 and 1 was given for a key that is true or false."""
    import typing

    from runner.config import keys
    from runner.config.schema import Recipe

    parent, _, leaf = key.rpartition(".")
    kind: Any = keys.node_of(parent) if parent else Recipe
    hint = typing.get_type_hints(kind).get(leaf) if kind is not None else None
    is_switch = hint is bool or hint == (bool | None)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_switch and number and value not in (0, 1)


def switches(values: Mapping[str, object]) -> Iterator[Problem]:
    """Yield a problem for each number that was given for true or false."""
    for key, value in values.items():
        if no_switch(key, value):
            yield Problem(f"{key}={value}", "it is true or false", "Correct the value.")
