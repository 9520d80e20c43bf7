"""Mistakes drawn from the live schema: whatever key, file or factory is added is drawn, too."""

from __future__ import annotations

import dataclasses
import inspect
import random
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from runner.recipe import keys, paths
from runner.recipe.factory import Registry, register
from runner.recipe.schema import Recipe
from tests.mistakes.cases import Mistake

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WRONG_VALUES = {int: ("many", "1.5", "[1]", "true"), float: ("much", "[1]"), bool: ("perhaps", "7")}
BELOW = ("-1", "-3")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A key of the schema that holds a plain value.

    Attributes:
        key: dotted.
        kinds: types that it takes, None for a null; empty: unknown to YAML.
        on: overrides that switch on the nodes above it.
    """

    key: str
    kinds: tuple[Any, ...]
    on: tuple[str, ...]


def leaves(kind: type = Recipe, prefix: str = "", on: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield every leaf of the schema."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner, hint = keys.nodes(kind)[field.name], hints[field.name]
        key = f"{prefix}{field.name}"
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if inner is None:
            yield Leaf(key, kinds, on)
        else:
            off = type(None) in kinds
            yield from leaves(inner, f"{key}.", (*on, *_switch(key)) if off else on)


def _switch(key: str) -> tuple[str, ...]:
    options = groups().get(key)
    return (f"{key}={options[0]}",) if options else (f"{key.rpartition('.')[0]}={key[-3:]}",)


def groups() -> dict[str, list[str]]:
    """Return the files of each group of the shipped `conf/`."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths.conf_folder().glob("*/*.yaml")):
        found.setdefault(path.parent.name, []).append(path.stem)
    return found


def defaults() -> dict[str, str]:
    """Return the file that is chosen in each group where nothing is said."""
    return paths.default_files()


def misspelt(word: str, rng: random.Random) -> str:
    """Return `word` with one letter dropped, doubled, replaced or two exchanged."""
    while True:
        at = rng.randrange(len(word))
        other = rng.choice(LETTERS)
        mended = rng.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[:at] + other + word[at + 1 :],
                word[:at] + word[at : at + 2][::-1] + word[at + 2 :],
            )
        )
        if mended != word and mended and mended[0].isalpha():
            return mended


def _all_names() -> set[str]:
    return {part for key in keys.typed_keys() for part in key.split(".")}


def key_typo(rng: random.Random) -> Mistake:
    """A key with one misspelt part, set, added or deleted."""
    leaf = rng.choice([leaf for leaf in leaves() if not leaf.on and len(leaf.key) > 4])
    parts = leaf.key.split(".")
    level = rng.choice([n for n, part in enumerate(parts) if len(part) > 4] or [len(parts) - 1])
    wrong = misspelt(parts[level], rng)
    key = ".".join([*parts[:level], wrong, *parts[level + 1 :]])
    if wrong in _all_names() or key == leaf.key:
        return key_typo(rng)
    prefix = rng.choice(("", "", "+", "++", "~"))
    line = f"{prefix}{key}" if prefix == "~" else f"{prefix}{key}=1"
    # A part of at least six letters is always found again; of shorter ones the valid ones are told.
    long = len(parts[level]) >= 6
    names = (wrong, f"'{leaf.key}'") if long else (wrong, ("Did you mean", "The keys"))
    return Mistake("misspelt key", (line,), names)


def wrong_type(rng: random.Random) -> Mistake:
    """A value of a type that a key does not take."""
    known = [
        leaf
        for leaf in leaves()
        if any(kind in WRONG_VALUES for kind in leaf.kinds)
        and not any(kind in (str, Any) for kind in leaf.kinds)
        and not leaf.on
    ]
    leaf = rng.choice(known)
    kind = next(kind for kind in leaf.kinds if kind in WRONG_VALUES)
    if bool in leaf.kinds and kind is not bool:
        return wrong_type(rng)
    value = rng.choice(WRONG_VALUES[kind])
    if value == "true" and float in leaf.kinds:
        return wrong_type(rng)
    return Mistake("wrong type", (f"{leaf.key}={value}",), (f"{leaf.key}={value}",))


def out_of_range(rng: random.Random) -> Mistake:
    """A number that a key of the trainer, the checkpoints or the loaders does not take."""
    least = {
        **dict.fromkeys(
            (
                *("trainer.epochs", "trainer.max_steps", "trainer.stop_after"),
                *("trainer.global_batch_size", "trainer.micro_batch_size", "trainer.log_every"),
                *("trainer.eval_batch_size", "trainer.eval_every", "trainer.overfit_batches"),
                *("checkpoint.every_steps", "checkpoint.every_epochs", "distributed.num_threads"),
                *("distributed.num_processes", "dataloader.prefetch_factor"),
                *("trainer.limit_train_batches", "trainer.limit_eval_batches"),
                *("trainer.clip_grad_norm", "trainer.clip_grad_value"),
                "trainer.accumulation.num_steps",
            ),
            ("0", *BELOW),
        ),
        **dict.fromkeys(
            (
                *("dataloader.num_workers", "seed", "optimizer.lr", "optimizer.weight_decay"),
                *("optimizer.eps", "model.width", "model.dropout", "trainer.max_time"),
                *("scheduler.warmup", "scheduler.final", "objective.label_smoothing"),
                *("data.num_variants", "checkpoint.project.total_limit"),
            ),
            BELOW,
        ),
        "model.dropout": ("1.5", "-0.1"),
        "objective.label_smoothing": ("1.5", "-1"),
        "seed": ("-1", str(2**32)),
    }
    key = rng.choice(sorted(least))
    value = rng.choice(least[key])
    return Mistake("out of range", (f"{key}={value}",), (key, value.lstrip("-")))


def group_option(rng: random.Random) -> Mistake:
    """A file that a group does not have."""
    known = groups()
    group = rng.choice(sorted(known))
    option = rng.choice(known[group])
    wrong = misspelt(option, rng) if rng.random() < 0.7 else rng.choice(("x1", "nothing_like_it"))
    if wrong in known[group] or wrong in ("null", "n", "y", "yes", "of", "on", "o"):
        return group_option(rng)
    prefix = rng.choice(("", "", "+"))
    expected = (wrong, ("Did you mean", option)) if len(option) < 6 else (wrong, option)
    return Mistake("group's file", (f"{prefix}{group}={wrong}",), expected)


def registries() -> dict[str, Registry]:
    """Return the registry of each node for which any factory is registered."""
    found = {node: getattr(register, node) for node in keys.FACTORY_NODES}
    return {node: registry for node, registry in found.items() if registry.names()}


def factory_name(rng: random.Random) -> Mistake:
    """A name that no factory has."""
    found = registries()
    node = rng.choice(sorted(found))
    name = rng.choice(found[node].names())
    wrong = misspelt(name, rng) if rng.random() < 0.8 else "nothing_like_it"
    if wrong in found[node].names() or wrong in ("n", "y", "on", "no"):
        return factory_name(rng)
    key = rng.choice((node, node, "callbacks.mine"))
    if key != node:
        return Mistake("factory's name", (f"{key}.name={wrong}",), (key, wrong))
    return Mistake("factory's name", (f"{node}.name={wrong}",), (f"{node}.name", wrong, name))


def _chosen() -> Iterator[tuple[str, Callable[..., Any], int]]:
    """Yield (node, factory, how many arguments are given) of the default recipe."""
    from runner.recipe.factory import NUM_GIVEN

    chosen = {**defaults(), "step": "supervised"}
    for node, registry in registries().items():
        name = chosen.get(node)
        if name in registry.names() and node != "step":
            yield node, registry.get(name), NUM_GIVEN.get(node, (0, 0))[0]


def factory_argument(rng: random.Random) -> Mistake:
    """An argument that a factory does not have, or of a type that it does not take."""
    node, factory, given = rng.choice(list(_chosen()))
    own = list(inspect.signature(factory).parameters.values())[given:]
    if not own:
        return Mistake("factory's argument", (f"{node}.width=1",), (f"{node}.width",))
    parameter = rng.choice(own)
    hints = typing.get_type_hints(getattr(factory, "__init__", factory))
    if isinstance(factory, types.FunctionType):
        hints = typing.get_type_hints(factory)
    if hints.get(parameter.name) in WRONG_VALUES and rng.random() < 0.4:
        kind = hints[parameter.name]
        value = "much" if kind is not bool else "perhaps"
        line = f"{node}.{parameter.name}={value}"
        return Mistake("factory's argument", (line,), (f"{node}.{parameter.name}", value))
    wrong = misspelt(parameter.name, rng)
    if wrong in {p.name for p in own}:
        return factory_argument(rng)
    named = (f"'{parameter.name}'",) if len(parameter.name) >= 6 else ()
    prefix = rng.choice(("", "", "+", "++"))
    return Mistake("factory's argument", (f"{prefix}{node}.{wrong}=1",), (wrong, *named))


def flag(rng: random.Random) -> Mistake:
    """A flag that does not exist."""
    known = ("--multirun", "--package", "--config-name", "--config-dir", "--version", "--import")
    right = rng.choice(known)
    wrong = f"--{misspelt(right[2:], rng)}"
    if right.startswith(wrong) or wrong in known:
        return flag(rng)
    value = rng.choice(("", "=x"))
    return Mistake("flag", (f"{wrong}{value}",), (wrong, f"'{right}'"))


def command(rng: random.Random) -> Mistake:
    """A command that does not exist."""
    right = rng.choice(("eval", "predict", "train", "evaluate", "test", "fit", "resume"))
    wrong = misspelt(right, rng) if right in ("eval", "predict") else right
    if wrong in ("eval", "predict"):
        return command(rng)
    names = (wrong, right) if right in ("eval", "predict") else (wrong,)
    return Mistake("command", (wrong,), names)


def switched_off(rng: random.Random) -> Mistake:
    """A key of a node that is off."""
    leaf = rng.choice([leaf for leaf in leaves() if leaf.on])
    node = leaf.on[-1].partition("=")[0]
    return Mistake("node that is off", (f"{leaf.key}=1",), (leaf.key, "off", node))


def conflict(rng: random.Random) -> Mistake:
    """Groups that do not go together."""
    known = groups()
    engines = ["fsdp", "deepspeed", "tensor_parallel"]
    first, second = rng.sample(engines, 2)
    if {first, second} == {"fsdp", "tensor_parallel"}:
        return conflict(rng)
    chosen = tuple(
        f"{name}={rng.choice([o for o in known[name] if o != 'config_file'])}"
        for name in (first, second)
    )
    return Mistake("conflict", ("distributed=multi_cpu", *chosen), (first, second))


DRAWS: tuple[Callable[[random.Random], Mistake], ...] = (
    *(key_typo, key_typo, wrong_type, out_of_range, group_option, factory_name),
    *(factory_argument, flag, command, switched_off, conflict),
)


def draw(rng: random.Random) -> Mistake:
    """Return one mistake."""
    return rng.choice(DRAWS)(rng)
