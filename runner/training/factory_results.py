"""Checks of the objects that the user's factories return, before they are used.

Each problem names the factory, the returned object and the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel.machine.errors import ConfigError, Problem, closest
from runner.data.datasets import Data
from runner.recipe.schema import SPLITS
from runner.training.run import Callback
from runner.training.step import Objective, Step, shown

SIMILAR = 0.85  # from which a method's name is taken for a misspelt one
# What the factory of each node returns.
KINDS: dict[str, tuple[type, str]] = {
    "model": (torch.nn.Module, "torch.nn.Module"),
    "data": (Data, "runner.Data"),
    "objective": (Objective, "runner.Objective"),
    "optimizer": (torch.optim.Optimizer, "torch.optim.Optimizer"),
    "scheduler": (torch.optim.lr_scheduler.LRScheduler, "torch.optim.lr_scheduler.LRScheduler"),
    "step": (Step, "runner.Step"),
    "callbacks": (Callback, "runner.Callback"),
}
# Methods that stand for a class of the user's own: no subclass is required.
ENOUGH = {
    "objective": ("losses", "weights", "evaluate", "summarize", "predict"),
    "scheduler": ("step", "state_dict", "load_state_dict"),
}


def check(key: str, place: str, value: object) -> None:
    """Raise if the factory `place` returned the wrong kind of object for the node `key`.

    Raises:
        ConfigError: naming everything that is wrong with it.
    """
    node = key.partition(".")[0]
    kind, name = KINDS[node]
    enough = not isinstance(value, type) and node in ENOUGH
    if not isinstance(value, kind) and not (enough and _has(value, ENOUGH[node])):
        remedy = f"Return a {name}."
        if isinstance(value, type) and issubclass(value, kind):
            remedy = f"Return {value.__name__}(…), an instance."
        raise ConfigError.of(f"{place} returned {shown(value)}", f"a {name} is required", remedy)
    found: list[Problem] = []
    if isinstance(value, Data):
        found += _data(place, value)
    if isinstance(value, Step):
        found += _held(place, value)
    if node in ("objective", "step"):
        found += _monitored(place, value)
    if node in ("objective", "step", "callbacks"):
        found += _methods(place, value, kind)
    ConfigError.raise_if(found)


def _has(value: object, methods: tuple[str, ...]) -> bool:
    return all(callable(getattr(value, name, None)) for name in methods)


def check_trainable(place: str, model: torch.nn.Module) -> None:
    """Raise a ConfigError if a model that is to be trained has no trainable parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError.of(
            f"{place} returned {shown(model)}",
            "it has no trainable parameters",
            "Return a model with parameters whose requires_grad is true.",
        )


def _data(place: str, value: Data) -> Iterator[Problem]:
    for split in SPLITS:
        where, found = f"{place} returned Data with {split}", getattr(value, split)
        if isinstance(found, Mapping):
            yield from _named_sets(where, split, found)
        elif found is not None or split == "train":
            yield from _dataset(where, found)
    if value.collate_fn is not None and not callable(value.collate_fn):
        where = f"{place} returned Data with collate_fn {shown(value.collate_fn)}"
        yield Problem(where, "it is a function of a list of samples", "Leave it out.")


def _named_sets(where: str, split: str, sets: Mapping[object, object]) -> Iterator[Problem]:
    if split == "train" or not sets:
        rule = "a run trains on one data set" if split == "train" else "it names no data set"
        remedy = "Join them: torch.utils.data.ConcatDataset." if split == "train" else "Give None."
        yield Problem(f"{where} {shown(sets)} of {len(sets)} entries", rule, remedy)
        return
    for name, dataset in sets.items():
        if not isinstance(name, str) or not name or "/" in name:
            rule = "its metrics are called <name>/<metric>: a name is a text without a slash"
            yield Problem(f"{where} named {name!r}", rule, 'Give {"clean": …, "noisy": …}.')
        yield from _dataset(f"{where}[{name!r}]", dataset)


def _dataset(where: str, dataset: object) -> Iterator[Problem]:
    value = f"{where} {shown(dataset)}"
    if isinstance(dataset, DataLoader):
        rule = "a data set is required: the runner makes the loaders"
        yield Problem(value, rule, "Give loader.dataset, and trainer.global_batch_size=…")
        return
    if isinstance(dataset, IterableDataset):
        if type(dataset).__iter__ is getattr(IterableDataset, "__iter__", None):
            yield Problem(value, "an iterable data set has __iter__", "Define __iter__.")
        return
    own = not isinstance(dataset, Dataset) or type(dataset).__getitem__ is not Dataset.__getitem__
    if isinstance(dataset, type) or not hasattr(dataset, "__getitem__") or not own:
        rule = "a data set with __getitem__ and __len__, or an IterableDataset, is required"
        yield Problem(value, rule, "Give a torch.utils.data.Dataset.")
        return
    try:
        empty = len(dataset) == 0  # type: ignore[arg-type]
    except Exception as error:
        rule = f"a map-style data set has __len__, and it cannot be read ({error})"
        yield Problem(value, rule, "Return the number of samples from __len__.")
        return
    if empty:
        yield Problem(value, "it is empty", "Give samples, or None for a split that there is not.")


def _held(place: str, step: Step) -> Iterator[Problem]:
    for name, kind in (("models", torch.nn.Module), ("optimizers", torch.optim.Optimizer)):
        held = getattr(step, name, None)
        if not isinstance(held, Mapping) or not all(isinstance(v, kind) for v in held.values()):
            rule = f"self.{name} maps names to {kind.__name__}s"
            remedy = f"Set self.{name} = {{…}} in {type(step).__name__}.__init__."
            yield Problem(f"{place}: {name} is {shown(held)}", rule, remedy)


def _monitored(place: str, value: object) -> Iterator[Problem]:
    monitor, mode = getattr(value, "monitor", None), getattr(value, "mode", None)
    where = f"{place}: {type(value).__name__}"
    if not isinstance(monitor, str) or not monitor:
        rule = "it is the name of a metric"
        yield Problem(f"{where}.monitor={monitor!r}", rule, 'Set monitor = "loss".')
    if mode not in ("min", "max"):
        rule = "it is one of min, max"
        yield Problem(f"{where}.mode={mode!r}", rule, 'Set mode = "min" or "max".')


def _methods(place: str, value: object, base: type) -> Iterator[Problem]:
    """Yield methods whose name is nearly one of `base`, and those with other parameters."""
    public = [name for name, found in vars(base).items() if name[0] != "_" and callable(found)]
    where = f"{place}: {type(value).__name__}"
    if base is Objective and getattr(type(value), "losses", None) is Objective.losses:
        remedy = "Define losses: it returns the loss of each sample, [B]."
        value_shown = f"{place} returned {shown(value)}"
        yield Problem(value_shown, "it defines no losses(model, batch)", remedy)
    for name in dir(type(value)):
        own = getattr(type(value), name, None)
        if name.startswith("_") or not callable(own):
            continue
        if name in public and own is not getattr(base, name):
            yield from _parameters(where, value, base, name)
        if hasattr(base, name):
            continue
        close = closest(name, public, SIMILAR)
        unused = close is None or getattr(type(value), close, None) is getattr(base, close)
        if (close is not None and unused) or (base is Callback and name.startswith("on_")):
            remedy = f"Did you mean {close!r}?" if close else f"They are {', '.join(public)}."
            yield Problem(f"{where}.{name}", f"{base.__name__} has no such method", remedy)


def _parameters(where: str, value: object, base: type, name: str) -> Iterator[Problem]:
    given = list(inspect.signature(getattr(base, name)).parameters)[1:]
    try:
        inspect.signature(getattr(value, name)).bind(*given)
    except TypeError as error:
        rule = f"it is called with {', '.join(given)} ({error})"
        wanted = f"{name}({', '.join(['self', *given])})"
        yield Problem(f"{where}.{name}", rule, f"Define {wanted}.")
    except ValueError:  # it has no signature
        return
