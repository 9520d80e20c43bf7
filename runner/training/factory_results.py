"""Checks of the objects that the user's factories return, before they are used.

Each problem names the factory, the returned object and the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel.machine.errors import ConfigError, Problem, closest
from runner.data.datasets import Data
from runner.recipe.schema import SPLITS
from runner.training.callback import Callback
from runner.training.objective import Objective
from runner.training.return_checks import shown
from runner.training.step import Step

MODES = ("min", "max")
SIMILAR = 0.85  # from which a method's name is taken for a misspelt one


def check(key: str, place: str, value: object) -> None:
    """Raise if the factory `place` returned the wrong kind of object for the node `key`.

    Raises:
        ConfigError: naming everything that is wrong with it.
    """
    kind = key.partition(".")[0]
    ConfigError.raise_if(list(CHECKS[kind](place, value)))


def _instance(place: str, value: object, kind: type, name: str) -> Iterator[Problem]:
    if not isinstance(value, kind):
        remedy = f"Return a {name}."
        if isinstance(value, type) and issubclass(value, kind):
            remedy = f"Return {value.__name__}(…), an instance."
        yield Problem(f"{place} returned {shown(value)}", f"a {name} is required", remedy)


def _model(place: str, value: object) -> Iterator[Problem]:
    yield from _instance(place, value, torch.nn.Module, "torch.nn.Module")


def check_trainable(place: str, model: torch.nn.Module) -> None:
    """Raise a ConfigError if a model that is to be trained has no trainable parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError.of(
            f"{place} returned {shown(model)}",
            "it has no trainable parameters",
            "Return a model with parameters whose requires_grad is true.",
        )


def _data(place: str, value: object) -> Iterator[Problem]:
    if not isinstance(value, Data):
        rule = "a runner.Data is required: the data sets by split"
        remedy = "Return Data(train=…, validation=…, test=…), with data sets, not loaders."
        yield Problem(f"{place} returned {shown(value)}", rule, remedy)
        return
    for split in SPLITS:
        dataset = getattr(value, split)
        if dataset is not None or split == "train":
            yield from _dataset(f"{place} returned Data with {split}", dataset)
    if value.collate_fn is not None and not callable(value.collate_fn):
        yield Problem(
            f"{place} returned Data with collate_fn {shown(value.collate_fn)}",
            "it is a function of a list of samples",
            "Give a function, or leave it out.",
        )


def _dataset(where: str, dataset: object) -> Iterator[Problem]:
    value = f"{where} {shown(dataset)}"
    if isinstance(dataset, DataLoader):
        rule = "a data set is required: the runner makes the loaders"
        yield Problem(value, rule, "Give loader.dataset, and trainer.global_batch_size=…")
        return
    stream = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    if isinstance(dataset, type) or not (hasattr(dataset, "__getitem__") or stream):
        rule = "a map-style data set (__getitem__ and __len__) or an iterable one is required"
        yield Problem(value, rule, "Give a torch.utils.data.Dataset.")
        return
    if stream and not isinstance(dataset, IterableDataset):
        rule = "a torch.utils.data.IterableDataset is required: each pass must start over"
        yield Problem(value, rule, "Yield its samples in __iter__ of a subclass of that.")
        return
    if isinstance(dataset, IterableDataset):
        if type(dataset).__iter__ is getattr(IterableDataset, "__iter__", None):
            yield Problem(value, "an iterable data set has __iter__", "Define __iter__.")
        return
    if not hasattr(dataset, "__len__"):
        remedy = "Define __len__, or make it an IterableDataset."
        yield Problem(value, "a map-style data set has __len__", remedy)
    elif isinstance(dataset, Dataset) and type(dataset).__getitem__ is Dataset.__getitem__:
        yield Problem(value, "a map-style data set has __getitem__", "Define __getitem__(index).")
    else:
        yield from _length(value, dataset)


def _length(value: str, dataset: Any) -> Iterator[Problem]:
    try:
        empty = len(dataset) == 0
    except (TypeError, ValueError, OverflowError) as error:
        remedy = "Return the number of samples from __len__."
        yield Problem(value, f"its length cannot be read ({error})", remedy)
        return
    if empty:
        remedy = "Give samples, or None for a split that there is not."
        yield Problem(value, "it is empty", remedy)


def _objective(place: str, value: object) -> Iterator[Problem]:
    lacking = [name for name in _public(Objective) if not callable(getattr(value, name, None))]
    if isinstance(value, type) or lacking:
        if isinstance(value, type) and issubclass(value, Objective):
            remedy = f"Return {value.__name__}(…), an instance."
        else:
            remedy = "Subclass runner.Objective and define losses(model, batch)."
        yield Problem(f"{place} returned {shown(value)}", "a runner.Objective is required", remedy)
        return
    if getattr(type(value), "losses", None) is Objective.losses:
        yield Problem(
            f"{place} returned {shown(value)}",
            "it defines no losses(model, batch)",
            "Define losses: it returns the loss of each sample, [B].",
        )
    yield from _monitored(place, value)
    yield from _misspelt(place, value, Objective)
    yield from _methods(place, value, Objective)


def _callback(place: str, value: object) -> Iterator[Problem]:
    yield from _instance(place, value, Callback, "runner.Callback")
    if not isinstance(value, Callback):
        return
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(type(value)):
        if name.startswith("on_") and name not in events:
            close = closest(name, events, SIMILAR)
            remedy = f"Did you mean {close!r}?" if close else f"The hooks are {', '.join(events)}."
            yield Problem(f"{place}: {_name(value)}.{name}", "no hook has that name", remedy)
    yield from _methods(place, value, Callback)


def _monitored(place: str, value: object) -> Iterator[Problem]:
    for name, known in (("monitor", None), ("mode", MODES)):
        found = getattr(value, name, None)
        if not isinstance(found, str) or not found or (known and found not in known):
            rule = "it is the name of a metric" if known is None else "it is one of min, max"
            remedy = 'Set monitor = "loss".' if known is None else 'Set mode = "min" or "max".'
            yield Problem(f"{place}: {_name(value)}.{name}={found!r}", rule, remedy)


def _methods(place: str, value: object, base: type) -> Iterator[Problem]:
    """Yield the problems of overridden methods whose signature differs from that of `base`."""
    for name in _public(base):
        own = getattr(type(value), name, None)
        if own is not getattr(base, name) and callable(own):
            yield from _method(place, value, base, name)


def _method(place: str, value: object, base: type, name: str) -> Iterator[Problem]:
    given = list(inspect.signature(getattr(base, name)).parameters)[1:]
    try:
        inspect.signature(getattr(value, name)).bind(*given)
    except TypeError as error:
        wanted = f"{name}({', '.join(['self', *given])})"
        rule = f"it is called with {', '.join(given)} ({error})"
        yield Problem(f"{place}: {_name(value)}.{name}", rule, f"Define {wanted}.")
    except ValueError:  # it has no signature
        return


def _optimizer(place: str, value: object) -> Iterator[Problem]:
    yield from _instance(place, value, torch.optim.Optimizer, "torch.optim.Optimizer")


def _scheduler(place: str, value: object) -> Iterator[Problem]:
    lacking = [n for n in ("step", "state_dict", "load_state_dict") if not hasattr(value, n)]
    if isinstance(value, type) or lacking:
        rule = "a torch.optim.lr_scheduler.LRScheduler is required"
        yield Problem(f"{place} returned {shown(value)}", rule, "Return a scheduler.")


def _step(place: str, value: object) -> Iterator[Problem]:
    yield from _instance(place, value, Step, "runner.Step")
    if not isinstance(value, Step):
        return
    for name, kind in (("models", torch.nn.Module), ("optimizers", torch.optim.Optimizer)):
        held = getattr(value, name, None)
        full = f"torch.{'nn.Module' if name == 'models' else 'optim.Optimizer'}"
        if not isinstance(held, Mapping) or not all(isinstance(v, kind) for v in held.values()):
            rule = f"self.{name} maps names to {full}"
            remedy = f"Set self.{name} = {{…}} in {_name(value)}.__init__."
            yield Problem(f"{place}: {name} is {shown(held)}", rule, remedy)
    yield from _monitored(place, value)
    yield from _misspelt(place, value, Step)
    yield from _methods(place, value, Step)


def _misspelt(place: str, value: object, base: type) -> Iterator[Problem]:
    """Yield methods whose name is nearly that of a method of `base`, which is left as it was."""
    for name in dir(type(value)):
        own = getattr(type(value), name, None)
        if name.startswith("_") or hasattr(base, name) or not callable(own):
            continue
        close = closest(name, _public(base), SIMILAR)
        if close is not None and getattr(type(value), close, None) is getattr(base, close):
            rule = f"{base.__name__} has no such method, and {close} is not overridden"
            yield Problem(f"{place}: {_name(value)}.{name}", rule, f"Did you mean {close!r}?")


def _public(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if name[0] != "_" and callable(value)]


def _name(value: object) -> str:
    return type(value).__name__


CHECKS: dict[str, Callable[[str, object], Iterator[Problem]]] = {
    "model": _model,
    "data": _data,
    "objective": _objective,
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "step": _step,
    "callbacks": _callback,
}
