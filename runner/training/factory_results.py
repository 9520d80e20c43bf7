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
from runner.recipe.factory import is_plain
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
    "metrics": (torch.nn.Module, "torchmetrics.Metric"),
}


def check(key: str, place: str, value: object) -> None:
    """Raise if the factory `place` returned the wrong kind of object for the node `key`.

    Raises:
        ConfigError: naming everything that is wrong with it.
    """
    kind, name = KINDS[key.partition(".")[0]]
    if not isinstance(value, kind):
        remedy = f"Return a {name}."
        if isinstance(value, type) and issubclass(value, kind):
            remedy = f"Return {value.__name__}(…), an instance."
        raise ConfigError.of(f"{place} returned {shown(value)}", f"a {name} is required", remedy)
    found: list[Problem] = []
    if isinstance(value, Data):
        found += _data(place, value)
    if isinstance(value, Step):
        found += _held(place, value)
    if isinstance(value, (Objective, Step, Callback)):
        found += _methods(place, value, kind)
    if isinstance(value, (Objective, Step)):
        where = f"{place}: {type(value).__name__}"
        if not isinstance(value.monitor, str):
            rule, remedy = "it is the name of a metric", 'Set monitor = "loss".'
            found.append(Problem(f"{where}.monitor={value.monitor!r}", rule, remedy))
        if value.mode not in ("min", "max"):
            rule, remedy = "it is one of min, max", 'Set mode = "min" or "max".'
            found.append(Problem(f"{where}.mode={value.mode!r}", rule, remedy))
    ConfigError.raise_if(found)


def check_trainable(place: str, model: torch.nn.Module) -> None:
    """Raise a ConfigError if a model that is to be trained has no trainable parameters."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError.of(
            f"{place} returned {shown(model)}",
            "it has no trainable parameters",
            "Return a model with parameters whose requires_grad is true.",
        )


def _data(place: str, value: Data) -> Iterator[Problem]:
    sets = {split: value.sets(split) for split in SPLITS} | {"train": {"": value.train}}
    for split, named in sets.items():
        for name, dataset in named.items():
            where = f"{split}[{name!r}]" if name else split
            yield from _dataset(f"{place} returned Data with {where} {shown(dataset)}", dataset)
    for fact, told in value.facts.items():
        if not is_plain(told):
            rule, remedy = "YAML holds it: numbers, texts, lists", "Convert it."
            yield Problem(f"{place} returned Data with facts[{fact!r}] {shown(told)}", rule, remedy)
    for name, path in value.artifacts.items():
        if not path.exists():
            where = f"{place} returned Data with artifacts[{name!r}]={path}"
            yield Problem(where, "there is no such file or folder", "Write it first.")
    if value.collate_fn is not None and not callable(value.collate_fn):
        where = f"{place} returned Data with collate_fn {shown(value.collate_fn)}"
        yield Problem(where, "it is a function of a list of samples", "Leave it out.")


def _dataset(value: str, dataset: object) -> Iterator[Problem]:
    own = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)
    if isinstance(dataset, DataLoader):
        rule = "a data set is required: the runner makes the loaders"
        yield Problem(value, rule, "Give loader.dataset, and trainer.global_batch_size=…")
    elif isinstance(dataset, IterableDataset):
        return
    elif isinstance(dataset, Mapping) or not own:
        rule = "a data set with __getitem__ and __len__, or an IterableDataset, is required"
        yield Problem(value, rule, "Give one torch.utils.data.Dataset.")
    else:
        try:
            empty = len(dataset) == 0  # type: ignore[arg-type]
        except Exception as error:
            rule = f"a map-style data set has __len__, and it cannot be read ({error})"
            yield Problem(value, rule, "Return the number of samples from __len__.")
            return
        if empty:
            yield Problem(value, "it is empty", "Give samples, or None for a missing split.")


def _held(place: str, step: Step) -> Iterator[Problem]:
    for name, kind in (("models", torch.nn.Module), ("optimizers", torch.optim.Optimizer)):
        held = getattr(step, name, None)
        if not isinstance(held, Mapping) or not all(isinstance(v, kind) for v in held.values()):
            rule = f"self.{name} maps names to {kind.__name__}s"
            remedy = f"Set self.{name} = {{…}} in {type(step).__name__}.__init__."
            yield Problem(f"{place}: {name} is {shown(held)}", rule, remedy)


def _methods(place: str, value: object, base: type) -> Iterator[Problem]:
    """Yield methods that would never be called, and those that take other arguments."""
    kind, where = type(value), f"{place}: {type(value).__name__}"
    public = [name for name, found in vars(base).items() if name[0] != "_" and callable(found)]
    if base is Objective and getattr(kind, "losses", None) is Objective.losses:
        remedy = "Define losses: it returns the loss of each sample, [B]."
        yield Problem(f"{place} returned {shown(value)}", "it defines no losses", remedy)
    for name in dir(kind):
        own = getattr(kind, name, None)
        if name.startswith("_") or not callable(own):
            continue
        if name in public:
            given = list(inspect.signature(getattr(base, name)).parameters)
            try:
                inspect.signature(getattr(value, name)).bind(*given[1:])
            except TypeError as error:
                remedy = f"Define {name}({', '.join(given)})."
                yield Problem(f"{where}.{name}", f"it is called otherwise ({error})", remedy)
        elif not hasattr(base, name):
            close = closest(name, public, SIMILAR)
            unused = close is not None and getattr(kind, close) is getattr(base, close)
            if unused or (base is Callback and name.startswith("on_")):
                remedy = f"Did you mean {close!r}?" if close else f"They are {', '.join(public)}."
                yield Problem(f"{where}.{name}", f"{base.__name__} has no such method", remedy)
