"""What `prepare` returns under Megatron: the model of a rank, and the optimizer that it steps."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from accel.config.handlers import GradScalerKwargs
from accel.config.megatron import MegatronLMPlugin
from accel.machine.errors import ConfigError
from accel.optimizer import AcceleratedOptimizer
from accel.precision.wrapping import register_wrapper
from accel.strategies.base import Gradients
from accel.strategies.context_parallel import IGNORED
from accel.strategies.megatron.build import Weights
from accel.strategies.megatron.placeholders import MegatronLMDummyScheduler
from accel.strategies.megatron.steps import (
    attends,
    avg_losses_across_data_parallel_group,
    check_names,
)

# What a group of torch's optimizers has, and Megatron's optimizer reads at each step.
SETTINGS = ("lr", "weight_decay", "betas", "eps")


class StageOutput(BaseException):
    """Ends a loss function on a pipeline stage that computes no loss, with the stage's output."""


@final
@register_wrapper
class MegatronModel(torch.nn.Module):
    """The part of a model that this rank computes, called as the model that `prepare` was given.

    With labels, the train step of a model of transformers computes its output: `loss` [], whose
    value is the mean over the data-parallel ranks, as documented, and whose gradient is this
    rank's. Without, GPT returns logits. A module of megatron-core takes its own arguments, unless
    it has a train step.

    Args:
        chunk: in Megatron's DistributedDataParallel where it trains.
        plain: the full model on the meta device, by whose names its state is saved.
        weights: how weights of megatron-core consist of the plain ones.
        is_rebuilt: whether it has the weights of a model of transformers, and returns its logits.

    Attributes:
        forward_step: of the train step; None: there is none.
        has_own_step: whether it, its batches or its loss are those of the plugin.
        run: runs a forward pass through a pipeline; None: there is one stage, or a schedule runs.
        draws: the context of a forward pass with dropout.
        optimizer: steps it; None: it is not trained.
        num_steps: steps made, those before a checkpoint included.
        num_forwards: forward passes with dropout since.
        given: plain names of each parameter of the model that `prepare` was given, while it lives.
        initial: its weights, as long as the optimizer's copies of them in fp32 are not built.
    """

    plain: torch.nn.Module
    keeps_cache = False  # of keys and values: `generate` computes them anew for each token

    def __init__(
        self, chunk: torch.nn.Module, plain: torch.nn.Module, weights: Weights, is_rebuilt: bool
    ) -> None:
        super().__init__()
        self.chunk, self.weights, self.is_rebuilt = chunk, weights, is_rebuilt
        self.__dict__["plain"] = plain  # no child: its parameters are not this rank's
        self.forward_step: Callable[..., Any] | None = None
        self.has_own_step = False
        self.run: Callable[..., Any] | None = None
        self.draws: Callable[[], AbstractContextManager[None]] | None = None
        self.optimizer: MegatronLMOptimizerWrapper | None = None
        self.num_steps = self.num_forwards = 0
        self.given = WeakTensorKeyDictionary()
        self.initial: dict[str, torch.Tensor] = {}

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return a submodule; ``module`` is the plain model.

        Args:
            target: its name.
        """
        return self.plain if target == "module" else super().get_submodule(target)

    @property
    def core(self) -> Any:
        """The module of megatron-core, without wrappers."""
        core: Any = self.chunk
        while hasattr(core, "module"):
            core = core.module
        return core

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the given model returns; on earlier stages of a pipeline raise StageOutput.

        Args:
            args: of the given model.
            kwargs: likewise.
        """
        if self.run is not None:
            return self.run(*args, **kwargs)
        if self.is_rebuilt and kwargs.get("labels") is None:
            return self._as_transformers(*args, **kwargs)
        if self.forward_step is None:
            return self._call(*args, **kwargs)
        from transformers.modeling_outputs import CausalLMOutput

        output, loss_func = self.forward_step(iter([kwargs]), self._call)
        loss, *_, logged = loss_func(output)
        is_whole = logged.keys() == {"lm loss"}
        mean = logged["lm loss"] if is_whole else avg_losses_across_data_parallel_group([loss])[0]
        return CausalLMOutput(loss=loss + (mean - loss).detach())

    def _call(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        length, config = None, self.core.config
        if self.is_rebuilt and config.sequence_parallel:  # which divides sequences evenly
            named = inspect.signature(self.core.forward).bind(*args, **kwargs).arguments
            length = named["input_ids"].shape[1]
            args, kwargs = (), _padded(named, -length % config.tensor_model_parallel_size)
        if self.draws is None or not self.training:
            output: torch.Tensor = self.chunk(*args, **kwargs)
        else:
            with self.draws():
                output = self.chunk(*args, **kwargs)
        if not parallel_state.is_pipeline_last_stage():
            raise StageOutput(output)
        return output if length is None else output[:, :length].contiguous()

    def _as_transformers(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        logits_to_keep: Any = 0,
        **further: Any,
    ) -> Any:
        """Return logits [B, T, V], or `token_losses` by targets; further inputs as `attends`.

        `logits_to_keep`: the last ones, of which `generate` reads one, or their places.
        """
        from transformers.modeling_outputs import CausalLMOutput

        if targets is not None and self.has_own_step:
            rule = "the train step of the plugin computes losses of labels alone"
            raise ConfigError.of("model(…, targets=…) under Megatron", rule, "Give labels.")
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **further}
        check_names(batch, "input_ids", "input_ids", "attention_mask", "position_ids")
        mask, positions = attends(batch, getattr(self.plain.config, "sliding_window", None))
        gathers = targets is None
        logits = self._call(input_ids, positions, mask, runtime_gather_output=gathers)
        if targets is None:
            is_count = isinstance(logits_to_keep, int)
            kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
            return CausalLMOutput(logits=logits[:, kept])
        return token_losses(logits, targets)


def _padded(named: Mapping[str, Any], extra: int) -> dict[str, Any]:
    """Return arguments of a GPT with further tokens, which see all, and are seen by none before."""
    found = dict(named)
    for name in ("input_ids", "position_ids", "labels"):
        if found.get(name) is not None:
            found[name] = F.pad(found[name], (0, extra))
    if (mask := found["attention_mask"]) is not None:
        found["attention_mask"] = F.pad(F.pad(mask, (0, extra), value=True), (0, 0, 0, extra))
    return found


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the cross-entropy of each target, and whether it is the likeliest token: [B, T].

    Args:
        logits: [B, T, V / tp] of this rank's part of the vocabulary.
        targets: [B, T], -100 for none.
    """
    size, group = logits.shape[-1], parallel_state.get_tensor_model_parallel_group()
    logits, counts = logits.float(), targets != IGNORED
    with torch.no_grad():
        index = targets - parallel_state.get_tensor_model_parallel_rank() * size
        is_here = (index >= 0) & (index < size)
        own = logits.gather(-1, torch.where(is_here, index, 0)[..., None])[..., 0]
        both = torch.stack([torch.where(is_here, own, -math.inf), logits.amax(-1)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    nats = vocab_parallel_cross_entropy(logits, targets.clamp(min=0))  # changes the logits
    return {"nats": nats * counts, "hits": (both[0] >= both[1]) & counts}


@final
class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """Megatron's optimizer, stepped with the learning rates of the one that `prepare` was given.

    Args:
        given: the optimizer that `prepare` was given; schedulers set its rates.
        model: whose gradients are reduced and stepped.
        groups: index of the group of each parameter of `model` that trains, by identity.
        plugin: of the run.
        scale: of losses under fp16.

    Attributes:
        engine: Megatron's optimizer.
        model: as above.

    Raises:
        ConfigError: if Megatron's optimizer does not compute what `given` does.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer,
        model: MegatronModel,
        groups: dict[int, int],
        plugin: MegatronLMPlugin,
        scale: GradScalerKwargs,
    ) -> None:
        super().__init__(given, device_placement=False)
        first, kind, config = given.param_groups[0], type(given), model.core.config
        others = any(one.get("amsgrad") or one["maximize"] for one in given.param_groups)
        if kind not in (torch.optim.AdamW, torch.optim.Adam) or others:
            rule = "Megatron's optimizer computes AdamW or Adam of torch, no amsgrad, no maximize"
            raise ConfigError.of(f"prepare: {kind.__name__} under Megatron", rule, "Use AdamW.")
        settings = OptimizerConfig(
            lr=float(first["lr"]),
            weight_decay=float(first["weight_decay"]),
            decoupled_weight_decay=first["decoupled_weight_decay"],
            bf16=config.bf16,
            fp16=config.fp16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=plugin.use_distributed_optimizer,
            initial_loss_scale=scale.init_scale,
            loss_scale_window=scale.growth_interval,
            hysteresis=1,
        )
        overrides: dict[Any, Any] = {}
        for index in range(len(given.param_groups)):
            belongs = lambda p, index=index: groups[id(p)] == index  # noqa: E731
            inside = ParamPredicate(name=f"group {index}", fn=belongs)
            overrides[ParamKey(predicate=inside)] = {"given_group": index}
        self.engine: Any = get_megatron_optimizer(
            settings, [model.chunk], overrides, use_gloo_process_groups=False
        )
        if config.fp16:
            config.grad_scale_func = self.engine.scale_loss
        self.model, model.optimizer = model, self
        self._clipping, self._is_clipped = plugin.gradient_clipping, False
        self._overflowed: bool | None = None  # None: gradients are not reduced yet

    def reduce_gradients(self) -> bool:
        """Reduce the gradients of a window over the ranks, once; return whether any overflowed."""
        if self._overflowed is None:
            finalize_model_grads([self.model.chunk])
            self._overflowed = bool(self.engine.prepare_grads())
        return self._overflowed

    def clip(self, max_norm: float) -> float:
        """Clip the gradients of the next step, and return their norm before; 0: it is not known."""
        if not self.gradient_state.sync_gradients:  # neither complete nor averaged
            return 0.0
        if self.reduce_gradients():
            return math.inf
        if max_norm == math.inf:  # only the norm is requested
            return float(self.engine.get_grad_norm())
        self._is_clipped = True
        return float(self.engine.clip_grad_norm(max_norm))

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters if a window of micro-batches is complete.

        Args:
            closure: not called: Megatron reads gradients of passes that were made.
        """
        if not self.gradient_state.sync_gradients:
            return
        self.step_was_skipped = self.reduce_gradients()
        if not self.step_was_skipped:
            if self._clipping and not self._is_clipped:
                self.clip(self._clipping)
            for live in self.engine.param_groups:
                group = self.optimizer.param_groups[live["given_group"]]
                live.update({name: group[name] for name in SETTINGS})
            self.engine.step_with_ready_grads()
            self.model.num_steps, self.model.num_forwards = self.model.num_steps + 1, 0
        self._overflowed, self._is_clipped = None, False

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set the gradients to zero if a window of micro-batches is complete.

        Args:
            set_to_none: not used: gradients are in Megatron's buffers.
        """
        if self.gradient_state.sync_gradients:
            chunk: Any = self.model.chunk
            chunk.zero_grad_buffer()
            self.engine.zero_grad()
            self._overflowed, self._is_clipped = None, False

    def state_dict(self) -> NoReturn:
        """Refuse: each rank has a part of the state, in Megatron's optimizer."""
        raise _in_engine("optimizer.state_dict()", "accelerator.save_state(…)")

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Refuse, as `state_dict`.

        Args:
            state_dict: not used.
        """
        raise _in_engine("optimizer.load_state_dict(…)", "accelerator.load_state(…)")

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Refuse: Megatron's optimizer steps the parameters that it was built with.

        Args:
            param_group: not used.

        Raises:
            ConfigError: always.
        """
        rule = "its optimizer steps the parameters that require gradients at prepare"
        remedy = "Give the optimizer all groups before; a rate of 0 leaves one as it is."
        raise ConfigError.of("add_param_group under Megatron", rule, remedy)


@final
class MegatronScheduler(OptimizerParamScheduler):
    """Megatron's schedule, of the rates and decays of each group.

    Args:
        given: whose place it takes.
        plugin: of the run.

    Raises:
        ConfigError: if the number of steps is not given.
    """

    def __init__(self, given: MegatronLMDummyScheduler, plugin: MegatronLMPlugin) -> None:
        steps = given.total_num_steps or plugin.lr_decay_iters or plugin.train_iters
        if steps is None:
            value, rule = "MegatronLMDummyScheduler", "a schedule has a number of steps"
            raise ConfigError.of(value, rule, "Give total_num_steps.")
        for group in given.optimizer.param_groups:
            decay = group["weight_decay"]
            group["max_lr"], group["start_wd"], group["end_wd"] = group["lr"], decay, decay
        arguments = {
            **{"init_lr": 0.0, "max_lr": 1.0, "min_lr": plugin.min_lr},
            **{"lr_warmup_steps": given.warmup_num_steps, "lr_decay_steps": steps},
            **{"lr_decay_style": plugin.lr_decay_style, "wd_incr_style": "constant"},
            **{"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": steps},
        }
        super().__init__(given.optimizer, **{**arguments, **given.kwargs})

    def step(self, increment: int = 1) -> None:
        """Set the rates of a later step.

        Args:
            increment: how much later.
        """
        super().step(increment)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Args:
            state_dict: of a schedule.
        """
        self.num_steps = 0  # Megatron adds the saved ones
        super().load_state_dict(state_dict)


def _in_engine(call: str, instead: str) -> ConfigError:
    rule = "each rank has a part of the state, in Megatron's optimizer"
    return ConfigError.of(f"{call} under Megatron", rule, f"Call {instead}.")


@final
class MegatronGradients(Gradients):
    """Clipping by Megatron's norm, over all ranks that hold parts of one of `models`."""

    def __init__(self, models: weakref.WeakSet[MegatronModel]) -> None:
        super().__init__()
        self._models = models

    def clip_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients of one prepared model; return their norm [] before.

        Raise `ConfigError` for another norm or a subset of the parameters.
        """
        given = {id(parameter) for parameter in parameters}
        for model in self._models:
            trained = {id(p) for p in model.parameters() if p.requires_grad}
            if model.optimizer is not None and trained <= given and norm_type == 2:
                return torch.tensor(model.optimizer.clip(float(max_norm)))
        raise ConfigError.of(
            f"clip_grad_norm_(…, {max_norm}, norm_type={norm_type})",
            "Megatron clips all parameters of a model together, by the norm of order 2",
            "Call clip_grad_norm_(model.parameters(), max_norm) of the prepared model.",
        )

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> NoReturn:
        """Refuse: Megatron supports norm clipping only."""
        rule = "Megatron supports norm clipping only"
        raise ConfigError.of(f"clip_grad_value_({clip_value})", rule, "Call clip_grad_norm_.")
