"""Accumulation and clipping of gradients, which an engine does itself."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import final

import torch

from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.deepspeed_json import AUTO, value_at
from accel.machine.errors import ConfigError, Problem, Problems
from accel.strategies.base import Gradients, Sync
from accel.strategies.deepspeed.wrappers import DeepSpeedOptimizerWrapper, TrainedEngine


@final
class DeepSpeedSync(Sync):
    """Whether a backward pass ends a window of micro-batches: not in contexts of `no_sync`."""

    def __init__(self) -> None:
        self.num_no_sync = 0

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Let backward passes in the context not end a window of micro-batches."""
        self.num_no_sync += 1
        try:
            yield
        finally:
            self.num_no_sync -= 1

    @contextlib.contextmanager
    def trigger(self, model: torch.nn.Module) -> Iterator[None]:
        """Let the next backward pass end a window of micro-batches, also under `no_sync`."""
        before, self.num_no_sync = self.num_no_sync, 0
        try:
            yield
        finally:
            self.num_no_sync = before

    def join(self, joinables: Sequence[object]) -> AbstractContextManager[None]:
        """Return a context without effect, with a warning: DeepSpeed needs even inputs."""
        warnings.warn(
            "join_uneven_inputs: DeepSpeed needs the same number of batches on every process.",
            stacklevel=4,
        )
        return contextlib.nullcontext()


@final
class DeepSpeedGradients(Gradients):
    """Clipping of gradients by the engine, which also scales the loss."""

    def __init__(self, trained: TrainedEngine) -> None:
        super().__init__()
        self._trained = trained

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Let the next step clip gradients to `max_norm`; return the norm [] before.

        Raise `ConfigError` if the configuration clips to another norm and `max_norm` is finite, for
        another kind of norm, and for a subset of the parameters.
        """
        optimizer = self._trained.require_optimizer("clip_grad_norm_")
        given = list(parameters)
        ConfigError.raise_if(
            _clip_problems(self._trained.plugin, optimizer, given, max_norm, norm_type)
        )
        if not optimizer.gradient_state.sync_gradients:  # neither complete nor averaged
            return torch.tensor(float(optimizer.engine.get_global_grad_norm() or 0.0))
        if max_norm != math.inf:  # else only the norm is requested
            optimizer.set_clipping(max_norm)
        return optimizer.gradient_norm()

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Refuse: DeepSpeed supports norm clipping only."""
        raise ConfigError.of(
            f"clip_grad_value_({clip_value}) under DeepSpeed",
            "DeepSpeed supports norm clipping only",
            "Call clip_grad_norm_, or give DeepSpeedPlugin(gradient_clipping=…).",
        )


def _clip_problems(
    plugin: DeepSpeedPlugin,
    optimizer: DeepSpeedOptimizerWrapper,
    parameters: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
) -> list[Problem]:
    call, problems = f"clip_grad_norm_(…, {max_norm})", Problems()
    is_open = value_at(plugin.stated_config(), "gradient_clipping") == AUTO
    if optimizer.clipping not in (0.0, float(max_norm)) and max_norm != math.inf and not is_open:
        source = f"{plugin.place}: gradient_clipping={optimizer.clipping}"
        if plugin.given("gradient_clipping") is not None:
            source = plugin.source("gradient_clipping")
        rule = "given in two places with different values"
        remedy = 'Make them equal, or write "auto" for gradient_clipping.'
        problems.add(f"{call} with {source}", rule, remedy)
    if norm_type != 2:
        rule = "DeepSpeed clips by the norm of order 2"
        problems.add(f"{call[:-1]}, norm_type={norm_type})", rule, "Remove it.")
    given = {id(parameter) for parameter in parameters}
    trained = (p for p in optimizer.engine.module.parameters() if p.requires_grad)
    num_missing = sum(id(parameter) not in given for parameter in trained)
    if num_missing:
        rule = f"DeepSpeed clips all parameters together, and {num_missing} of them are missing"
        problems.add(call, rule, "Give model.parameters().")
    return problems


# An option of the engine that is off in every backward pass: losses are divided before, unless the
# caller says with it that they are.
SCALES = "scale_wrt_gas"


def backward_problems(
    optimizer: DeepSpeedOptimizerWrapper, options: Mapping[str, object]
) -> list[Problem]:
    """Return the reasons why a backward pass would compute wrong gradients."""
    stage = optimizer.engine.zero_optimization_stage()
    problems = Problems(
        Problem(
            f"backward({name}=…) under DeepSpeed",
            "its engine supports retain_graph only",
            "Remove it.",
        )
        for name in options
        if name != "retain_graph" and (name != SCALES or options[name])
    )
    if optimizer.trainable.changed():
        problems.add(
            "backward after parameters were frozen, unfrozen or replaced under DeepSpeed",
            "its engine steps the parameters that required gradients at prepare",
            "Set requires_grad before prepare. To change it during training: save_state, "
            "rebuild model and Accelerator(), prepare, load_state.",
        )
    if options.get("retain_graph") and stage == 3:
        problems.add(
            "backward(retain_graph=True) under ZeRO 3",
            "stage 3 frees parameters in the backward pass, and a second one needs them",
            "Sum the losses, and call backward once.",
        )
    if optimizer.window_ended and stage in (1, 2):
        problems.add(
            f"a second backward before optimizer.step under ZeRO {stage}",
            "it would overwrite the gradients of the first one",
            "Sum the losses, put `with accelerator.no_sync(model):` around all but the last, "
            "or drop the first one's gradients with optimizer.zero_grad().",
        )
    return problems
