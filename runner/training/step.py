"""How one optimizer step is made and measured: `Step`, `Objective` and the supervised step.

What the methods of a user return is checked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from accel.machine.errors import ConfigError, Problem
from accel.run.loss_normalization import global_weight, normalize_loss
from runner.runs.json_files import OF_RUN, PLACE, TIME_SHARE

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.data.batches import MicroBatch, Window
    from runner.recipe.schema import Trainer

# The loss of each sample [B], or `loss` and other values by name, each [B].
Losses = torch.Tensor | Mapping[str, torch.Tensor]
# Names of what the run itself logs.
RESERVED = (*PLACE, *OF_RUN)
TOKENS = "tokens"  # a value of a step that the run sums up


class Step(ABC):
    """Owns models and optimizers, and makes one optimizer step from a window of micro-batches.

    A class registered with ``@register.step(name)`` is called with the arguments of the recipe's
    `step` node. Parameters of its constructor called `model`, `objective`, `optimizer` or
    `scheduler` receive what the recipe's node of that name builds, and so does ``**kwargs`` where
    the node is not null; other nodes that the constructor does not name must be null. `optimizer`
    is a function ``optimizer(model) -> torch.optim.Optimizer`` and `scheduler`
    ``scheduler(optimizer, num_steps) -> LRScheduler``.

    The contract of `train`: the update is that of the gradient of the loss over *all* samples of
    the window, on all processes: summed loss over summed weight (samples or tokens), however they
    are divided into micro-batches and ranks. `runner.optimizer_step` does all of that for one
    optimizer. A step that calls `accelerator.backward` by hand has to undo two divisions:
    `backward` divides by the micro-batches of the window, and gradients are averaged over
    `accelerator.parallel_dims.grad_size` ranks. So it gives `backward` what `runner.normalize_loss`
    returns for the summed loss of a micro-batch (of real samples: `runner.keep_valid`) and the
    weight of the whole window (`Window.num_samples`, or `runner.global_weight`), and clips with
    `runner.clip_gradients`. A mean over each micro-batch is right only where all are of one size
    and nothing is padded or masked. ``runner debug=fdr`` compares one micro-batch with two.

    Attributes:
        models: by name; the runner replaces them by the prepared ones before the first step.
        optimizers: likewise.
        monitor: the evaluation metric by which states are compared.
        mode: whether its best is the "max" or the "min".
    """

    monitor: str = "loss"
    mode: str = "min"
    models: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]

    def make_schedulers(self, num_steps: int) -> Mapping[str, LRScheduler]:
        """Return a learning-rate scheduler per optimizer name, for a run of `num_steps` steps."""
        return {}

    @abstractmethod
    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, torch.Tensor]:
        """Make one optimizer step.

        Returns:
            0-d tensors on the device: this process's share of each value to log, so that the sum
            over processes is the value (for a loss: the local sum over the global weight and
            over `accelerator.parallel_dims.tp`, the ranks that compute the same loss).
            `loss` is the one that the progress bar shows; `tokens`, if any, is what tokens per
            second are measured by. Nothing here may wait for the device.
        """

    @abstractmethod
    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return values to measure, each [B, ...], under no_grad and eval mode."""

    @abstractmethod
    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a data set from the values of all its samples: each [N, ...]."""

    def metric_inputs(self, output: Any, batch: Any) -> tuple[Any, Any]:
        """Return predictions and targets for the recipe's `metrics`, as `Objective` does."""
        return output, _target_of(batch)

    def predict(self, batch: Any) -> object:
        """Return predictions as nested tensors, each [B, ...]."""
        name = type(self).__name__
        remedy = f"Define {name}.predict(batch), which returns tensors [B, ...]."
        raise ConfigError.of(f"step {name}", "it defines no predict", remedy)


class SupervisedStep(Step):
    """One model, one objective, one optimizer; the gradient of summed loss over summed weight.

    Shapes: B samples in the batch of one process.

    Args:
        model: what is trained.
        objective: what is minimised and measured.
        optimizer: makes the optimizer of a model.
        scheduler: makes the schedule of an optimizer for a number of steps; None: a constant rate.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        objective: Objective,
        optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None,
    ) -> None:
        self.objective = objective
        self.monitor, self.mode = objective.monitor, objective.mode
        self.models = {"model": model}
        self.optimizers = {"optimizer": optimizer(model)}
        self._make_scheduler = scheduler

    def make_schedulers(self, num_steps: int) -> Mapping[str, LRScheduler]:
        """Return the schedule of the one optimizer, if the recipe has any."""
        if self._make_scheduler is None:
            return {}
        return {"optimizer": self._make_scheduler(self.optimizers["optimizer"], num_steps)}

    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, torch.Tensor]:
        """Accumulate the window's gradients, clip them and step.

        Returns:
            `loss` and the objective's other values, and `grad_norm` (before clipping) where
            gradients are clipped by norm.
        """
        model, optimizer = self.models["model"], self.optimizers["optimizer"]
        objective = self.objective
        return optimizer_step(
            accelerator,
            window,
            trainer,
            model,
            optimizer,
            lambda model, batch: checked_losses(objective, objective.losses(model, batch)),
            lambda batch: checked_weights(objective, objective.weights(batch)),
        )

    def evaluate(self, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return the objective's values, each [B, ...]."""
        return self.objective.evaluate(self.models["model"], batch)

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the objective's metrics of a data set, from values [N, ...]."""
        return self.objective.summarize(values)

    def metric_inputs(self, output: Any, batch: Any) -> tuple[Any, Any]:
        """Return the objective's predictions and targets, each [B, ...]."""
        return self.objective.metric_inputs(output, batch)

    def predict(self, batch: Any) -> object:
        """Return the objective's predictions, each [B, ...]."""
        return self.objective.predict(self.models["model"], batch)


class Objective:
    """Base of objectives. All values are per sample, so that padded samples can be dropped exactly.

    Shapes: B samples in the batch of one process.

    Attributes:
        monitor: the evaluation metric by which states are compared.
        mode: whether its best is the "max" or the "min".
    """

    monitor: ClassVar[str] = "loss"
    mode: ClassVar[str] = "min"

    def losses(self, model: torch.nn.Module, batch: Any) -> Losses:
        """Return the loss of each sample, summed over its items (tokens, pixels): [B].

        Or values by name, each [B]: `loss` is trained, and the others are averaged and logged as it
        is, over the weights of all samples of a step.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no `losses(model, batch)`.")

    def weights(self, batch: Any) -> torch.Tensor | None:
        """Return how many items each sample's loss sums over: [B]. None: one each.

        The gradient of a step is that of the summed loss over the summed weight, over all processes
        and micro-batches. So training asks for the weights of a window before its micro-batches
        move to the device: the batch may lie on the host.
        """
        return None

    def evaluate(self, model: torch.nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        """Return values to measure, each [B, ...]. By default those of `losses`, and weights."""
        values = checked_losses(self, self.losses(model, batch))
        weights = checked_weights(self, self.weights(batch))
        ones = torch.ones_like(values["loss"])
        return {**values, "weight": ones if weights is None else weights}

    def summarize(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of a data set from the values of all its samples: [N, ...]."""
        own = type(self).evaluate is not Objective.evaluate
        names = ["loss", "weight"] if own else list(values)
        # On the CPU, because not every device has double precision.
        sums = {name: float(values[name].detach().cpu().double().sum()) for name in names}
        weight = sums.pop("weight")
        return {name: found / weight if weight else math.nan for name, found in sums.items()}

    def metric_inputs(self, output: Any, batch: Any) -> tuple[Any, Any]:
        """Return predictions and targets for the recipe's `metrics`: tensors [B, ...].

        By default the model's output, and the second part of a batch ``(input, target)``.

        Args:
            output: what the model returned in `evaluate`; a list where that calls it several times.
            batch: as evaluated.
        """
        return output, _target_of(batch)

    def predict(self, model: torch.nn.Module, batch: Any) -> object:
        """Return predictions as nested tensors, each [B, ...].

        By default the output of the model in the call that `losses` makes.

        Raises:
            ConfigError: if `losses` calls the model more than once: which output is meant?
        """
        if type(self).losses is Objective.losses:
            return model(batch)
        outputs: list[object] = []
        hook = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            self.losses(model, batch)
        finally:
            hook.remove()
        if len(outputs) != 1:
            raise ConfigError.of(
                f"{type(self).__name__}.losses called the model {len(outputs)} times",
                "by default its one output is the prediction",
                f"Define {type(self).__name__}.predict(model, batch).",
            )
        return _per_sample(outputs[0])


def _target_of(batch: Any) -> object:
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None


def _per_sample(output: object) -> object:
    """Return an output without its entries that have no batch dim, such as a loss."""
    if not isinstance(output, Mapping):
        return output
    return {
        name: value
        for name, value in output.items()
        if not (isinstance(value, torch.Tensor) and value.dim() == 0)
    }


# -- one optimizer step ------------------------------------------------------------------------


def optimizer_step(
    accelerator: Accelerator,
    window: Window,
    trainer: Trainer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Callable[[torch.nn.Module, Any], Losses],
    weights: Callable[[Any], torch.Tensor | None] | None = None,
) -> dict[str, torch.Tensor]:
    """Accumulate the gradients of a window, clip them and make one step of one optimizer.

    The gradient is that of the summed loss over the summed weight of the whole window, over all
    processes, however the samples are divided into micro-batches and ranks. Padding samples count
    nothing. Precision, loss scaling and gradient synchronisation are the engine's.

    Shapes: B samples in a batch of this process.

    Args:
        accelerator: the engine.
        window: the micro-batches of the step.
        trainer: of the recipe; says how gradients are clipped.
        model: prepared; the one that is trained.
        optimizer: prepared; its parameters are the model's.
        losses: from `model` and a batch to the loss of each sample, summed over what it consists
            of: [B]; or to values by name, each [B], of which `loss` is trained.
        weights: from a batch on the host to the weight of each sample, for instance its number of
            tokens: [B]; or to None: each sample weighs 1, as without `weights`.

    Returns:
        0-d tensors on the device: `loss` and the other values of `losses`, `tokens` (the weight of
        the step) where there are weights, and `grad_norm` (before clipping) where gradients are
        clipped by norm; this process's shares, so that the sums over processes are the values, as
        `Step.train` returns them.

    Example:
        >>> class Classify(Step):
        ...     def train(self, accelerator, window, trainer):
        ...         model, optimizer = self.models["model"], self.optimizers["optimizer"]
        ...         def losses(model, batch):
        ...             return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        ...         return optimizer_step(accelerator, window, trainer, model, optimizer, losses)
    """
    weight = _weight_of(window, weights, accelerator)
    dims = accelerator.parallel_dims
    scale = {"grad_size": dims.grad_size, "num_steps": accelerator.gradient_accumulation_steps}
    totals: dict[str, list[torch.Tensor]] = {"loss": []}

    def normalized(model: torch.nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        found = losses(model, micro_batch.batch)
        values = found if isinstance(found, Mapping) else {"loss": found}
        sums = {name: keep_valid(one, micro_batch.valid).sum() for name, one in values.items()}
        for name, total in sums.items():
            totals.setdefault(name, []).append(total.detach())
        return normalize_loss(sums["loss"], weight, **scale)

    accelerator.forward_backward(model, window.on_host, normalized)
    values = clip_gradients(accelerator, model, trainer)
    optimizer.step()
    optimizer.zero_grad()
    shares = {name: _sum(parts, accelerator) / weight / dims.tp for name, parts in totals.items()}
    if isinstance(weight, torch.Tensor):
        shares[TOKENS] = weight / accelerator.num_processes
    return {**shares, **values}


def _sum(totals: list[torch.Tensor], accelerator: Accelerator) -> torch.Tensor:
    """Return the sum of 0-d tensors; 0 for none, as on a pipeline stage that computes no loss."""
    if not totals:
        return torch.zeros((), device=accelerator.device)
    return totals[0] if len(totals) == 1 else torch.stack(totals).sum()


def _weight_of(
    window: Window, weights: Callable[[Any], torch.Tensor | None] | None, accelerator: Accelerator
) -> torch.Tensor | int:
    """Return the weight of the window over all processes, never zero."""
    sums: list[torch.Tensor | int] = []
    for micro_batch in window.on_host:
        of_samples = None if weights is None else weights(micro_batch.batch)
        if of_samples is None:
            return window.num_samples
        total = keep_valid(of_samples, micro_batch.valid).sum()
        sums.append(total.to(accelerator.device))
    weight = global_weight(sums, accelerator)
    if not isinstance(weight, torch.Tensor):
        return weight
    # A window in which every item is masked has a loss of 0 / 0; it is to change nothing.
    return torch.where(weight == 0, 1, weight)


def keep_valid(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return `values` [B] with zeros where `valid` [B] is False, be they finite or not."""
    return values if valid is None else torch.where(valid.to(values.device), values, 0)


def clip_gradients(
    accelerator: Accelerator, model: torch.nn.Module, trainer: Trainer
) -> dict[str, torch.Tensor]:
    """Clip the gradients of `model` as the recipe says.

    Returns:
        `grad_norm`: this process's share of the total norm before clipping, if that is bounded.
    """
    values: dict[str, torch.Tensor] = {}
    if trainer.clip_grad_norm is not None:
        norm = accelerator.clip_grad_norm_(model.parameters(), trainer.clip_grad_norm)
        values["grad_norm"] = norm.detach() / accelerator.num_processes
    if trainer.clip_grad_value is not None:
        accelerator.clip_grad_value_(model.parameters(), trainer.clip_grad_value)
    return values


# -- what the user's methods return ------------------------------------------------------------


def shown(value: object) -> str:
    """Return a short description of a value: "None", "a list", "the class Linear"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def refused(owner: object, method: str, value: str, rule: str, remedy: str) -> ConfigError:
    """Return the error that a method of the user's returned a value."""
    name = f"{type(owner).__name__}.{method}"
    return ConfigError(Problem(f"{name} returned {value}", rule, remedy))


def _each_sample(objective: object, method: str, value: object, remedy: str) -> torch.Tensor:
    """Return a value of each sample, [B]; else a ConfigError about the method."""
    if isinstance(value, torch.Tensor) and value.dim() == 1:
        return value
    found = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
    rule = "a tensor with one value per sample is required, [B], so that padding can be dropped"
    raise refused(objective, method, found, rule, remedy)


def checked_losses(objective: object, value: object) -> dict[str, torch.Tensor]:
    """Return the losses of an objective as `loss`, and its other values: each [B].

    Raises:
        ConfigError: if one is no tensor [B], or the loss carries no gradient where it is to.
    """
    remedy = 'Use reduction="none" and sum over everything but the first dim.'
    values = value if isinstance(value, Mapping) else {"loss": value}
    if "loss" not in values or "weight" in values:
        rule = "it returns `loss`, which is trained, and values of other names than `weight`"
        raise refused(objective, "losses", ", ".join(map(str, values)), rule, "Rename them.")
    found = {name: _each_sample(objective, "losses", one, remedy) for name, one in values.items()}
    if torch.is_grad_enabled() and not found["loss"].requires_grad:
        rule = "a loss must depend on trainable parameters"
        remedy = "Compute it from the model's output, without detach(), item() and no_grad()."
        raise refused(objective, "losses", "a tensor without gradient", rule, remedy)
    return found


def checked_weights(objective: object, value: object) -> torch.Tensor | None:
    """Return the weights of samples, [B], or None for one each; else a ConfigError."""
    remedy = "Count the items of each sample, or return None for one each."
    return None if value is None else _each_sample(objective, "weights", value, remedy)


def _require_free(owner: object, method: str, names: Iterable[str]) -> None:
    """Refuse names of what the run itself logs."""
    for name in names:
        if name in RESERVED or name.startswith(("lr_", TIME_SHARE)):
            rule = "the run logs a value of its own of that name"
            raise refused(owner, method, f"{name!r}", rule, f'Return it as "own_{name}".')


def checked_tensors(owner: object, method: str, value: object) -> dict[str, torch.Tensor]:
    """Return values by name, each a tensor; else a ConfigError about the method of `owner`."""
    rule = "it returns tensors by name"
    if not isinstance(value, Mapping):
        raise refused(owner, method, shown(value), rule, 'Return {"loss": …}.')
    for name, found in value.items():
        if not isinstance(found, torch.Tensor):
            shown_value = f"{shown(found)} for {name!r}"
            raise refused(owner, method, shown_value, rule, "Return a tensor for each name.")
    if method == "train":
        _require_free(owner, method, value.keys() - {TOKENS})
    return dict(value)


def checked_metrics(owner: object, value: object, method: str = "summarize") -> dict[str, float]:
    """Return the result of `summarize` as numbers by name; else raise a ConfigError."""
    rule = "it returns the metrics of the data set, numbers by name"
    remedy = 'Return {"loss": 0.5, …}.'
    if not isinstance(value, Mapping):
        raise refused(owner, method, shown(value), rule, remedy)
    found: dict[str, float] = {}
    for name, metric in value.items():
        if isinstance(metric, torch.Tensor) and metric.numel() != 1:
            shown_value = f"a tensor of shape {list(metric.shape)} for {name!r}"
            raise refused(owner, method, shown_value, rule, "Return its mean, or the like.")
        try:
            found[str(name)] = float(metric)
        except (TypeError, ValueError):
            shown_value = f"{shown(metric)} for {name!r}"
            raise refused(owner, method, shown_value, rule, remedy) from None
    _require_free(owner, method, found)
    return found
