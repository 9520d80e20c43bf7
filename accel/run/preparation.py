"""Preparing objects for a run, and releasing them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accel.data.loaders import PreparedLoader
from accel.data.prepare import prepare_for, skip_first_batches
from accel.logging import get_logger
from accel.machine.errors import ConfigError, Problem
from accel.machine.memory import release_memory
from accel.optimizer import AcceleratedOptimizer
from accel.precision.amp import parameters_of
from accel.precision.wrapping import extract_model_from_parallel, hide_compiled, own_module
from accel.scheduler import AcceleratedScheduler
from accel.strategies.base import Objects

if TYPE_CHECKING:
    from accel.plan.plan import Plan
    from accel.strategies.base import Strategy

KINDS = ("models", "optimizers", "schedulers", "dataloaders")
STATEFUL = ("state_dict", "load_state_dict")
PREPARED = (AcceleratedOptimizer, AcceleratedScheduler, PreparedLoader)
logger = get_logger(__name__)
# Attributes that are true of what was prepared; other libraries ask for them.
MARKS = ("_is_accelerate_prepared", "_is_accelerator_prepared")


class Preparation:
    """Prepares objects for a run, and holds what it prepared: a part of the `Accelerator`.

    Attributes:
        plan: everything decided, frozen.
        strategy: how the model is distributed.
        device_placement: whether objects that are prepared from now on, and batches, are moved to
            the device.
    """

    plan: Plan
    strategy: Strategy
    device_placement: bool
    _objects: Objects
    _restart: Callable[[], None]
    _num_loaders = 0  # each draws permutations of its own

    def _reserve_loaders(self, count: int) -> None:
        """Leave the permutations of the next loaders to those that are prepared elsewhere."""
        self._num_loaders += count

    # -- preparing -----------------------------------------------------------------------------

    def prepare(self, *args: object, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers fit the run, whatever their order.

        Args:
            args: objects; None stays None. Prepared objects are returned unchanged, but a model
                whose layers were frozen, unfrozen, added or replaced is wrapped again where its
                strategy requires that (DDP).
                A scheduler of your own has `step`, `state_dict`, `load_state_dict`, and one of
                `get_last_lr`, `get_lr`, `optimizer`; other objects come back with a warning.
            device_placement: for each object, whether it is moved to the device; None: as the
                `Accelerator` does.

        Returns:
            The prepared objects in the order of `args`; for one argument, that object itself.

        Raises:
            ConfigError: if the objects do not fit together.

        Example:
            >>> model, optimizer, loader, scheduler = accelerator.prepare(
            ...     model, optimizer, loader, scheduler
            ... )
        """
        places = self._places(args, device_placement)
        kinds = [self._kind(item) for item in args]
        new, placement = Objects(), Objects()
        for item, kind, place in zip(args, kinds, places, strict=True):
            if kind is not None:
                getattr(new, kind).append(item)
                getattr(placement, kind).append(place)
        done = self._prepare(new, placement)
        ready = {kind: iter(getattr(done, kind)) for kind in KINDS}
        result = [
            self._again(item) if kind is None else next(ready[kind])
            for item, kind in zip(args, kinds, strict=True)
        ]
        return result[0] if len(result) == 1 else tuple(result)

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Make a model fit the run.

        Args:
            model: the model. A prepared one whose layers were frozen, unfrozen, added or replaced
                is wrapped again where its strategy requires that (DDP).
            device_placement: whether it is moved to the device; None: as the `Accelerator` does.
            evaluation_mode: whether it is only evaluated: then nothing prepares it for training.
        """
        return self._prepare_one("models", model, device_placement, evaluation=evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Make an optimizer fit the run.

        Args:
            optimizer: the optimizer.
            device_placement: whether state that it brings along is moved to the device.
        """
        return self._prepare_one("optimizers", optimizer, device_placement)

    def prepare_scheduler(self, scheduler: object) -> AcceleratedScheduler:
        """Make a learning-rate scheduler fit the run; prepare its optimizer before.

        Args:
            scheduler: of torch, or anything with `step`, `state_dict` and `load_state_dict`.

        Returns:
            One that steps when its optimizer does.
        """
        return self._prepare_one("schedulers", scheduler, None)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., object] | None = None,
    ) -> DataLoader[Any]:
        """Make a loader fit the run.

        Args:
            data_loader: the loader.
            device_placement: whether batches are moved to the device.
            slice_fn_for_dispatch: with `dispatch_batches`, takes a process's part of a batch; None:
                `slice_tensors`.
        """
        return self._prepare_one(
            "dataloaders", data_loader, device_placement, slice_fn=slice_fn_for_dispatch
        )

    def _prepare_one(self, kind: str, item: object, place: bool | None, **options: Any) -> Any:
        if self._is_prepared(item):
            return self._again(item)
        placed = self.device_placement if place is None else place
        new, placement = Objects(**{kind: [item]}), Objects(**{kind: [placed]})
        return getattr(self._prepare(new, placement, **options), kind)[0]

    def _again(self, item: Any) -> Any:
        """Return a prepared model wrapped again if need be, and other objects as they are."""
        models = self._objects.models
        for index, model in enumerate(models):
            if model is item:
                models[index] = self.strategy.wrap_again(model)
                self._mark(models[index])
                return models[index]
        return item

    def _mark(self, *items: object) -> None:
        for item in items:
            for mark in MARKS:
                setattr(item, mark, True)

    def _prepare(
        self,
        new: Objects,
        placement: Objects,
        evaluation: bool = False,
        slice_fn: Callable[..., object] | None = None,
    ) -> Objects:
        if new.models:
            self._refuse_device_maps(new.models)
        for optimizer in new.optimizers:
            _refuse_offloaded(optimizer)
        loaders = self._loaders(new.dataloaders, placement.dataloaders, slice_fn)
        before = {id(p): p for model in new.models for p in model.parameters()}
        given = replace(new, dataloaders=loaders)
        done = self.strategy.prepare(given, placement, self._objects, evaluation)
        for model in done.models:
            hide_compiled(own_module(model))
        self._num_loaders += len(loaders)
        self._objects.extend(done)
        self._mark(*done.models, *done.optimizers, *done.schedulers, *done.dataloaders)
        if new.models and new.optimizers and not self.strategy.spec.owns_parameters:
            self._check_parameters(new.optimizers, before)
        return done

    def _loaders(
        self,
        loaders: Iterable[DataLoader[object]],
        places: Iterable[bool],
        slice_fn: Callable[..., object] | None,
    ) -> list[Any]:
        prepared = (
            prepare_for(
                self.plan,
                loader,
                loader_index=self._num_loaders + position,
                put_on_device=place,
                slice_fn_for_dispatch=slice_fn,
            )
            for position, (loader, place) in enumerate(zip(loaders, places, strict=True))
        )
        return [self.strategy.wrap_loader(loader) for loader in prepared]

    def _places(
        self, args: Sequence[object], given: Sequence[bool | None] | None
    ) -> Sequence[bool]:
        if given is None:
            return [self.device_placement] * len(args)
        if len(given) != len(args):
            raise ConfigError.of(
                f"prepare: device_placement has {len(given)} entries for {len(args)} objects",
                "there is one for each object",
                "Give as many, or leave it out.",
            )
        return [self.device_placement if place is None else place for place in given]

    def _kind(self, item: object) -> str | None:
        """Return what `item` is, a field of `Objects`; None for what is left as it is."""
        if item is None or self._is_prepared(item):
            return None
        if isinstance(item, torch.nn.Module):
            return "models"
        if isinstance(item, torch.optim.Optimizer):
            return "optimizers"
        if isinstance(item, DataLoader):
            return "dataloaders"
        if _is_scheduler(item):
            return "schedulers"
        hint = ""
        if all(hasattr(item, name) for name in STATEFUL):
            hint = (
                " If it has a state to be saved, call register_for_checkpointing(…) with it; if it "
                "is a learning-rate scheduler, prepare_scheduler(…)."
            )
        warnings.warn(
            f"prepare: {type(item).__name__} is no model, optimizer, DataLoader or scheduler, and "
            f"is returned as it is.{hint}",
            stacklevel=3,
        )
        return None

    def _is_prepared(self, item: object) -> bool:
        known = (self._objects.models, self._objects.optimizers, self._objects.dataloaders)
        return isinstance(item, PREPARED) or any(item is entry for kind in known for entry in kind)

    def _refuse_device_maps(self, models: Iterable[torch.nn.Module]) -> None:
        dp_size = self.plan.parallel_dims.dp_size
        if dp_size > 1 and any(self.verify_device_map(model) for model in models):
            raise ConfigError.of(
                "prepare: a model with a device map over several devices",
                f"each of the {dp_size} processes computes on one device",
                "Load the model without device_map='auto', or start one process.",
            )

    def _check_parameters(
        self, optimizers: Iterable[torch.optim.Optimizer], before: dict[int, torch.Tensor]
    ) -> None:
        """Refuse optimizers that would update tensors which no model computes with (any more).

        `before`: the parameters of the call's models, as they were given, by id.
        """
        known = {id(p) for model in self._objects.models for p in model.parameters()}
        problems = []
        for index, optimizer in enumerate(optimizers):
            strange = [p for p in parameters_of(optimizer) if id(p) not in known]
            replaced = sum(id(p) in before for p in strange)
            several, here = self.plan.world_size > 1, self.plan.device.type
            apart = sum(several or p.device.type != here for p in strange)
            if replaced or apart:
                problems.append(_parameter_problem(index, len(strange), replaced > 0))
        ConfigError.raise_if(problems)

    # -- around it -----------------------------------------------------------------------------

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """Return the module inside what `prepare` put around it.

        What is removed from the module itself is gone from the prepared model, too: to train on,
        keep both.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: whether its forward pass stays in mixed precision.
            keep_torch_compile: whether a compiled module stays compiled, and so do layers that are
                compiled in place.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader that leaves out the first batches of another, for this pass.

        Args:
            dataloader: prepared or not.
            num_batches: how many batches of this process are left out; 0: `dataloader` itself.
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a model was spread over several devices by a map such as ``"auto"``.

        Args:
            model: prepared or not.
        """
        maps = (getattr(module, "hf_device_map", None) for module in model.modules())
        return any(device_map is not None and len(device_map) > 1 for device_map in maps)

    def free_memory(self, *objects: object) -> list[None]:
        """Let go of everything that was prepared, set `step` to 0 and collect garbage.

        Call it between trainings of different models: the loaders prepared next draw the orders
        that the first ones drew. Objects registered for checkpointing, hooks
        and trackers stay: they belong to the script, and are saved and restored as before.

        Args:
            objects: more to let go of.

        Returns:
            As many None as there are `objects`: ``a, b = accelerator.free_memory(a, b)``.
        """
        self._objects.clear_prepared()
        self._num_loaders = 0
        self._restart()
        return release_memory(*objects)

    def clear(self, *objects: object) -> list[None]:
        """Do what `free_memory` does.

        Args:
            objects: more to let go of.

        Returns:
            As many None as there are `objects`.
        """
        return self.free_memory(*objects)


def _refuse_offloaded(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of nothing but offloaded weights that train: they get no gradients.

    When their hooks are removed, the model has other tensors than the optimizer.
    """
    given = [one for one in parameters_of(optimizer) if one.requires_grad]
    if not any(parameter.is_meta for parameter in given):
        return
    from accel.weights.offloaded_tensors import OffloadedWeight

    count = sum(isinstance(one, OffloadedWeight) for one in given)
    if 0 < count < len(given):
        logger.warning(
            "prepare: %d offloaded weights of an optimizer do not train, but for those that are "
            "tied to one that does.",
            count,
        )
    elif count:
        raise ConfigError.of(
            f"prepare: an optimizer of {count} offloaded weights that are to train",
            "a gradient of an offloaded weight has no memory to be kept in",
            "Freeze them with requires_grad_(False) and train an adapter (LoRA), or make the "
            "optimizer after accel.hooks.remove_hook_from_submodules(model).",
        )


def _is_scheduler(item: object) -> bool:
    """Return whether `item` is a learning-rate scheduler: torch's, or one that tells of rates.

    Averages of weights, gradient scalers and the like have `step` and a state, too; taken for a
    scheduler, they would step once for each process.
    """
    if isinstance(item, LRScheduler):
        return True
    rates = any(hasattr(item, name) for name in ("get_last_lr", "get_lr", "optimizer"))
    stateful = all(hasattr(item, name) for name in ("step", *STATEFUL))
    return rates and stateful and not hasattr(item, "param_groups")


def _parameter_problem(index: int, count: int, replaced: bool) -> Problem:
    tensors = f"{count} parameter{'s' if count > 1 else ''}"
    if replaced:
        return Problem(
            f"prepare: {tensors} of optimizer {index}",
            "moving the model to the device replaced them, so they would never be trained",
            "Build the optimizer from model.parameters() after prepare(model).",
        )
    return Problem(
        f"prepare: {tensors} of optimizer {index} in no prepared model",
        "what no model holds is neither moved to the device nor kept equal on all processes",
        "Prepare the model that holds them in the same call or before (a lone parameter: put it "
        "into a module).",
    )
