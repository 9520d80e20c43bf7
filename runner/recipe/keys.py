"""The keys of a recipe: which exist, which one a person meant, and the keys of the engine's errors.

Free of torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accel.machine.errors import CheckpointError, ConfigError, Problem, closest, did_you_mean
from accel.strategies.table import plugins
from runner.recipe.schema import Recipe

_NODES: dict[type, dict[str, type | None]] = {}  # cache of `nodes`
UNKNOWN = "a recipe has no such key"
# Nodes that name a factory: their other keys are its arguments, checked against its signature.
FACTORY_NODES = ("step", "model", "peft", "data", "objective", "optimizer", "scheduler")
# Nodes that map names to such nodes, and the attribute of `register` that has their factories.
NAMED_NODES = {"callbacks": "callback", "metrics": "metric"}

OF_RECIPES = ("submit", "lr-find", "batch-size-find")  # commands that take a recipe
COMMANDS = (
    *("eval", "predict", "generate", "export", "list", "show", "compare", "report", "again"),
    *("factories", "new", "data"),
    *OF_RECIPES,
)
# -- what people type from habit ------------------------------------------------------------

_STRATEGIES = " or ".join(f"{found.name}=…" for found in plugins() if found.kind is not None)
_CHECKPOINTED = " or ".join(
    f"{found.name}.activation_checkpointing=true"
    for found in plugins()
    if hasattr(found.kind, "activation_checkpointing")
)
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
    "val_check_interval": "trainer.eval_every",
    "check_val_every_n_epoch": "'trainer.eval_every=2 epochs' evaluates after every second epoch.",
    "log_every_n_steps": "trainer.log_every",
    "logging_steps": "trainer.log_every",
    "save_steps": "checkpoint.every_steps",
    "save_last": "checkpoint.at_end",
    "save_total_limit": "checkpoint.project.total_limit",
    "save_top_k": "checkpoint.keep_best",
    "save_best": "checkpoint.keep_best",
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
    "pretrained": "init_from",
    "gradient_checkpointing": f"Call torch.utils.checkpoint in the model, or set {_CHECKPOINTED}.",
    "hparams_search": "Start with -m hydra/sweeper=optuna.",
    "device_map": "It is a flag of runner eval and runner predict: --device-map auto.",
    **dict.fromkeys(("_partial_", "_args_", "_recursive_", "_convert_"), _CALLED),
}


def nodes(kind: type[Any]) -> Mapping[str, type | None]:
    """Return by field name the dataclass of each nested node of `kind`; None for a plain value."""
    if kind not in _NODES:
        hints = typing.get_type_hints(kind)
        _NODES[kind] = {f.name: _dataclass_in(hints[f.name]) for f in dataclasses.fields(kind)}
    return _NODES[kind]


def _dataclass_in(hint: object) -> type | None:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if isinstance(hint, types.UnionType):
        return next((found for part in hint.__args__ if (found := _dataclass_in(part))), None)
    return None


def names_factory(key: str) -> bool:
    """Return whether the node at a dotted key names a factory: model, …, callbacks.<x>, …"""
    head, _, name = key.partition(".")
    return key in FACTORY_NODES or (head in NAMED_NODES and bool(name) and "." not in name)


def node_of(key: str) -> type | None:
    """Return the dataclass of the node at a dotted key; None for a plain value or no key at all."""
    kind: type | None = Recipe
    for part in key.split("."):
        kind = nodes(kind).get(part) if kind is not None else None
    return kind


def hint_of(key: str) -> object:
    """Return the type of the field at a dotted key of the schema; None if there is none."""
    parent, _, leaf = key.rpartition(".")
    kind = node_of(parent) if parent else Recipe
    return typing.get_type_hints(kind).get(leaf) if kind is not None else None


def is_switch(key: str) -> bool:
    """Return whether a dotted key of the schema is true or false."""
    return hint_of(key) in (bool, bool | None)


def typed_keys(kind: type = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema, nodes included."""
    for name, inner in nodes(kind).items():
        yield prefix + name
        if inner is not None:
            yield from typed_keys(inner, f"{prefix}{name}.")


def known_keys(recipe: Mapping[str, object]) -> list[str]:
    """Return the keys of the schema and those of a composed recipe, dotted."""
    return sorted({*typed_keys(), *keys_of(recipe)})


def keys_of(node: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings, nodes included."""
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{name}.")


def unknown_key(key: str, known: Sequence[str], value: str = "") -> Problem:
    """Return the problem that no recipe has `key`, with the key that was probably meant."""
    return Problem(f"{key}{value}", UNKNOWN, suggestion(key, known))


def suggestion(key: str, known: Sequence[str]) -> str:
    """Return the sentence that names the likeliest of the dotted keys `known`."""
    habit = remedy(key, known)
    if habit is not None:
        return habit
    parent, _, leaf = key.rpartition(".")
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf][:3]
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    if parent and not siblings:
        found = difflib.get_close_matches(key, known, 1) or same_leaf
    else:
        close = closest(leaf, siblings)
        found = same_leaf or ([siblings[close]] if close else [])
    if found:
        return did_you_mean(*found)
    place = f"The keys of {parent}" if siblings and parent else "The keys"
    names = siblings or [k for k in known if "." not in k]
    return f"{place}: {', '.join(names)}."


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


def switched_off(key: str, recipe: Mapping[str, object]) -> str | None:
    """Return the node above `key` that is null in `recipe`, or None if there is none."""
    parts = key.split(".")
    node: object = recipe
    for depth, part in enumerate(parts[:-1], start=1):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
        if node is None:
            return ".".join(parts[:depth])
    return None


# -- words in another grammar --------------------------------------------------------------


def key_for(name: str) -> str | None:
    """Return the key that a flag or a bare word stands for, or None."""
    name = name.lstrip("-").replace("-", "_").rstrip(":=")
    typed = list(typed_keys())
    head = name.partition(".")[0]
    if name in typed or ("." in name and head in (*FACTORY_NODES, *NAMED_NODES)):
        return name
    habit = HABITS.get(name, " ")
    if " " not in habit:
        return habit
    same_leaf = [key for key in typed if key.rpartition(".")[2] == name]
    return same_leaf[0] if len(same_leaf) == 1 else None


# -- errors of the engine ------------------------------------------------------------------


@contextmanager
def of_the_recipe() -> Iterator[None]:
    """Write errors of the engine that leave the context with keys of the recipe."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        error.args = tuple(in_keys(str(text)) for text in error.args)
        if isinstance(error, ConfigError):
            texts = ((one.value, one.rule, one.remedy) for one in error.problems)
            error.problems = tuple(Problem(*map(in_keys, three)) for three in texts)
        raise


def in_keys(text: str) -> str:
    """Return a text with ``fsdp.x=1`` for ``FullyShardedDataParallelPlugin(x=1)``, and the like."""
    for key in typed_keys():
        if (kind := node_of(key)) is not None:
            text = re.sub(rf"\b{kind.__name__}\.(?=[a-z])", f"{key}.", text)
            text = re.sub(rf"\b{kind.__name__}\((\w+=[^(),]*)\)", rf"{key}.\1", text)
    return re.sub(r"\bmixed_precision='(\w+)'", r"precision=\1", text)
