"""The Megatron strategy: megatron-core shards the model, reduces gradients and makes the step.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/index.html
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module, MegatronModule

from accel.config.megatron import OF_STEPS, MegatronLMPlugin
from accel.logging import get_logger
from accel.machine.errors import ConfigError
from accel.optimizer import unwrap_optimizer
from accel.state import AcceleratorState, GradientState
from accel.strategies.base import Accumulation, Objects, Strategy
from accel.strategies.megatron import placeholders
from accel.strategies.megatron.build import BERT, GPT, T5, Weight, build_model, step_of, weights_of
from accel.strategies.megatron.spec import NAME, set_micro_batches
from accel.strategies.megatron.state import MegatronState, described, shards_of
from accel.strategies.megatron.steps import called
from accel.strategies.megatron.wrappers import (
    MegatronGradients,
    MegatronLMOptimizerWrapper,
    MegatronModel,
    MegatronScheduler,
    StageOutput,
)

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.precision.base import Precision

logger = get_logger(__name__)
Batch = TypeVar("Batch")
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
class MegatronStrategy(Strategy):
    """Matrices are divided over tensor-parallel ranks, layers over pipeline stages."""

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        super().__init__(plan, comm, device, precision)
        self.plugin: MegatronLMPlugin = plan.plugin(NAME)
        steps = plan.accumulation.num_steps or 1
        set_micro_batches(self.plugin, steps, "gradient_accumulation_steps")
        factors = plan.scaler.growth_factor, plan.scaler.backoff_factor
        if factors != (2.0, 0.5):
            rule = "Megatron's loss scale doubles and halves"
            raise ConfigError.of(
                f"GradScalerKwargs with factors {factors}", rule, "Leave them out."
            )
        self._dtype = DTYPES[plan.mixed_precision]
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            self.plugin.tp_degree, self.plugin.pp_degree, create_gloo_process_groups=False
        )
        comm.before_exit(parallel_state.destroy_model_parallel)
        self._seed = 0
        with self._draws_of(0, 0):
            pass  # modules of megatron-core draw initial weights
        self._models: weakref.WeakSet[MegatronModel] = weakref.WeakSet()
        self.gradients = MegatronGradients(self._models)
        self.state: MegatronState = MegatronState(self.plugin)

    # -- preparing -------------------------------------------------------------------------

    def prepare(
        self, objects: Objects, placement: Objects, prepared: Objects, evaluation: bool = False
    ) -> Objects:
        """Return `objects`, with models of megatron-core and its optimizer."""
        own = self.plugin.custom_megatron_datasets_provider_function
        loaders, kinds = objects.dataloaders, {type(model).__name__ for model in objects.models}
        dummies = (
            d
            for one in loaders
            if isinstance(d := one.dataset, placeholders.MegatronLMDummyDataLoader)
        )
        if dummy := next(dummies, None):
            if own is None and kinds & {*BERT, *T5}:
                value, rule = "MegatronLMDummyDataLoader", "it has the data sets of GPT here"
                raise ConfigError.of(value, rule, "Prepare a DataLoader of torch.")
            built = iter(dummy.build(self.plan, self.plugin, len(prepared.dataloaders)))
            objects.dataloaders = [next(built) if o.dataset is dummy else o for o in loaders]
        if sizes := [size for one in objects.dataloaders if (size := one.batch_size)]:
            size = min(sizes) if self.plugin.is_train_batch_min else max(sizes)
            self.plugin.set_training_args(size, self.plan.parallel_dims.dp_size)
        done = super().prepare(objects, placement, prepared, evaluation)
        for one in done.schedulers:
            if isinstance(one.scheduler, placeholders.MegatronLMDummyScheduler):
                one.scheduler = MegatronScheduler(one.scheduler, self.plugin)
                one._repeats = 1  # it counts optimizer steps
        return done

    def wrap_model(
        self, model: torch.nn.Module, place: bool = True, evaluation: bool = False
    ) -> torch.nn.Module:
        """Return `model` as megatron-core computes it, with its weights."""
        if isinstance(model, MegatronModel):
            return model  # as after free_memory()
        given, seeds = list(model.parameters()), [torch.initial_seed()]
        dist.broadcast_object_list(seeds, src=0)
        self._seed = seeds[0]
        if self.plugin.custom_model_provider_function is not None:
            model = self.plugin.custom_model_provider_function(
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
        core: Any = model
        if not isinstance(model, MegatronModule):
            core = build_model(model, self.plugin, self._dtype, self._seed)
        core.to(self.device)
        has_weights = type(model).__name__ in GPT
        wrapped = self._rebuilt(model, core) if has_weights else self._own(core, given)
        if core is not model and not has_weights:
            name = type(model).__name__
            logger.warning("prepare: megatron-core draws the weights of %s anew.", name)
            model.to("meta")
        if core is not model or self.plugin.custom_train_step_class is not None:
            wrapped.forward_step = self._forward_step(model, core)
            wrapped.has_own_step = any(getattr(self.plugin, name) for name in OF_STEPS)
        self._models.add(wrapped)
        if evaluation or self._dtype == torch.float32:
            wrapped.initial = {}  # else once more, into the optimizer's copies in fp32
        if self._dtype != torch.float32:
            wrapped.chunk = Float16Module(core.config, wrapped.chunk)
        if not evaluation:
            config = DistributedDataParallelConfig(
                use_distributed_optimizer=self.plugin.use_distributed_optimizer,
                grad_reduce_in_fp32=self._dtype != torch.float32,
            )
            ddp: Any = DistributedDataParallel(core.config, config, wrapped.chunk)
            ddp.broadcast_params()
            wrapped.chunk = ddp
        if self.plugin.sizes[1] > 1:
            wrapped.run = functools.partial(self._run, wrapped)
        if core.config.attention_dropout or core.config.hidden_dropout:
            wrapped.draws = functools.partial(self._draws, wrapped)
        return wrapped

    def _forward_step(self, model: torch.nn.Module, core: Any) -> Callable[..., Any]:
        kind, arguments = step_of(model, core)
        kind = self.plugin.custom_train_step_class or kind
        named = self.plugin.custom_train_step_kwargs or {}
        step = called(kind, AcceleratorState(), arguments, **named)
        flags = arguments.pretraining_flag, arguments.bert_binary_head
        found: Callable[..., Any] = called(step.get_forward_step_func, *flags)
        return found

    def _rebuilt(self, model: Any, core: Any) -> MegatronModel:
        """Return a rebuilt model with the weights of the given one, whose memory is freed."""
        weights: Any = weights_of(model.config)
        wrapped = MegatronModel(core, model, weights, is_rebuilt=True)
        given = dict(model.named_parameters())
        for name, shard in shards_of(core).items():
            trains = {given[one].requires_grad for one in weights[name].names}
            if len(trains) > 1:
                value, rule = ", ".join(weights[name].names), "they are one weight of megatron-core"
                raise ConfigError.of(f"prepare: {value}", rule, "Freeze all of them, or none.")
            shard.tensor.requires_grad_(trains.pop())
        wrapped.initial = dict(model.state_dict())
        self.state.load_model_state(wrapped, wrapped.initial)
        model.to("meta")
        model.tie_weights()
        model.forward = functools.wraps(model.forward)(_refuse_call)  # which `generate` calls
        wrapped.given.update((p, (name,)) for name, p in given.items())
        return wrapped

    def _own(self, core: Any, given: Sequence[torch.Tensor]) -> MegatronModel:
        """Return a module of megatron-core, whose plain names are its own in one process."""
        config = core.config
        wanted: dict[str, bool | None] = {"num_moe_experts": None}
        wanted |= {"bf16": self._dtype == torch.bfloat16, "fp16": self._dtype == torch.float16}
        if self.plugin.sizes[1] > 1:  # shapes are exchanged by the stages
            wanted["variable_seq_lengths"] = True
        for name, value in wanted.items():
            if getattr(config, name) != value:
                rule, remedy = f"it is {value} in this run", "Set it there."
                value_ = f"TransformerConfig.{name}={getattr(config, name)} of a given model"
                raise ConfigError.of(value_, rule, remedy)
        plain, shards = torch.nn.Module(), shards_of(core)
        for name, (shape, trains) in described(shards).items():
            owner, leaf = plain, name.rpartition(".")[2]
            for part in name.split(".")[:-1]:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            tensor = torch.empty(shape, device="meta")
            owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=trains))
        weights = {name: Weight((name,)) for name, _ in plain.named_parameters()}
        wrapped = MegatronModel(core, plain, weights, is_rebuilt=False)
        # Other tensors: vectors (norms, biases) are in the group of those that were given.
        alike = len({parameter.dim() == 1 for parameter in given}) == 1
        for parameter in given:
            wrapped.given[parameter] = tuple(
                name
                for name, weight in plain.named_parameters()
                if alike or (weight.dim() == 1) == (parameter.dim() == 1)
            )
        return wrapped

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, place: bool = True
    ) -> torch.optim.Optimizer:
        """Return Megatron's optimizer of the model whose parameters `optimizer` has.

        `optimizer` then has those of the plain model, which schedulers and states name.
        """
        own = unwrap_optimizer(optimizer)
        for model in self._models:
            shards, plain = shards_of(model.core), dict(model.plain.named_parameters())
            names = {id(parameter): known for parameter, known in model.given.items()}
            names |= {id(s.tensor): model.weights[n].names for n, s in shards.items()}
            names |= {id(parameter): (name,) for name, parameter in plain.items()}
            index_of: dict[str, int] = {}
            for index, group in enumerate(own.param_groups):
                found = [name for p in group["params"] for name in names.get(id(p), ())]
                group["params"] = [plain[name] for name in dict.fromkeys(found)] or group["params"]
                if any(index_of.get(name, index) != index for name in found):
                    raise ConfigError.of(
                        f"prepare: {len(own.param_groups)} groups of {type(own).__name__}",
                        "megatron-core builds other weights, whose vectors can have their group",
                        "Give one group, or two: of matrices, and of norms and biases.",
                    )
                index_of |= dict.fromkeys(found, index)
            if index_of:
                break
        else:
            raise ConfigError.of(
                f"prepare: {type(own).__name__} of no model that Megatron trains",
                "its optimizer reads gradients from the model's buffers",
                "Prepare the model in the same call, or before.",
            )
        groups = {}
        for name, shard in shards.items():
            indices = {index_of.get(one) for one in model.weights[name].names}
            if shard.tensor.requires_grad and (None in indices or len(indices) > 1):
                raise ConfigError.of(
                    f"prepare: {', '.join(model.weights[name].names)} under Megatron",
                    "what trains is in one group of the optimizer, as one weight of megatron-core",
                    "Put it into one group, or freeze it with requires_grad_(False) before.",
                )
            groups[id(shard.tensor)] = indices.pop() or 0
        if own.state:
            rule = "Megatron's optimizer begins without a state"
            remedy = "Prepare a new one, and load a checkpoint with accelerator.load_state(…)."
            raise ConfigError.of("prepare: an optimizer that has made steps", rule, remedy)
        wrapped = MegatronLMOptimizerWrapper(own, model, groups, self.plugin, self.plan.scaler)
        if model.initial:
            self.state.load_model_state(model, model.initial)
            model.initial = {}
        return wrapped

    # -- the step --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _draws_of(self, step: int, forward: int) -> Iterator[None]:
        """Seed dropout: a function of seed, step, forward pass, stage and data-parallel rank.

        So a resumed run draws what an undisturbed one does. Tensor-parallel ranks draw alike where
        they hold the same activations; Megatron's tracker has other draws for the others.
        """
        dims, state = self.plan.parallel_dims, torch.cuda.get_rng_state()
        place = (self._seed, step, forward, dims.coordinates["pp"], dims.dp_rank)
        digest = hashlib.sha256(repr(place).encode()).digest()
        model_parallel_cuda_manual_seed(int.from_bytes(digest[:4]) % 2**31)
        yield
        torch.cuda.set_rng_state(state)

    @contextlib.contextmanager
    def _draws(self, model: MegatronModel) -> Iterator[None]:
        model.num_forwards += 1
        with self._draws_of(model.num_steps, model.num_forwards):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Compute gradients into Megatron's buffers, scaled under fp16."""
        trained = (model.optimizer for model in self._models if model.optimizer is not None)
        if self._dtype == torch.float16:
            loss = next(trained).engine.scale_loss(loss)
        loss.backward(**kwargs)

    def forward_backward(
        self,
        model: torch.nn.Module,
        micro_batches: Sequence[Batch],
        loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor],
        accumulation: Accumulation,
    ) -> list[torch.Tensor]:
        """Run a window through Megatron's schedule: 1F1B where there are pipeline stages.

        `loss_fn` ends early on stages that compute no loss. Every rank returns the losses.
        """
        count, scale = len(micro_batches), len(micro_batches) / GradientState().num_steps

        def step(batches: Iterator[Batch], chunk: object) -> tuple[torch.Tensor, object]:
            batch = self._place(next(batches), accumulation.device_placement)
            try:
                loss = loss_fn(model, batch)
            except StageOutput as early:
                return early.args[0], None
            # The schedule divides by the count.
            return loss, lambda loss: (loss * scale, loss.detach().float())

        losses = self._schedule(model, step, micro_batches)
        if self.plugin.pp_degree == 1:
            return losses
        stacked = torch.stack(losses) if losses else torch.empty(count, device=self.device)
        dist.broadcast(stacked, **_from_last_stage())
        return list(stacked.unbind())

    def _schedule(
        self, model: Any, step: object, batches: Sequence[object], forward_only: bool = False
    ) -> list[torch.Tensor]:
        run, model.run = model.run, None
        try:
            found: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[model.chunk],
                num_microbatches=len(batches),
                seq_length=1,  # shapes are exchanged by the stages
                micro_batch_size=1,
                forward_only=forward_only,
            )
        finally:
            model.run = run
        return found

    def _run(self, model: MegatronModel, *args: object, **kwargs: object) -> Any:
        """Return the output of a forward pass through all stages, on each of them."""
        if torch.is_grad_enabled():
            raise ConfigError.of(
                f"model(…) with gradients and pp_degree={self.plugin.pp_degree} under Megatron",
                "a pipeline's schedule runs forward and backward passes of a window together",
                "Call accelerator.forward_backward(model, micro_batches, loss_fn).",
            )
        outputs: list[Any] = [None]

        def step(_: object, chunk: object) -> tuple[torch.Tensor, object]:
            try:
                outputs[0] = model(*args, **kwargs)
            except StageOutput as early:
                return early.args[0], None
            return torch.zeros((), device=self.device), lambda nothing: (nothing, None)

        self._schedule(model, step, [None], forward_only=True)
        dist.broadcast_object_list(outputs, **_from_last_stage())
        return outputs[0]

    def close(self) -> None:
        """Destroy Megatron's process groups."""
        super().close()
        parallel_state.destroy_model_parallel()


def _refuse_call(*_: object, **__: object) -> NoReturn:
    rule = "its weights are in Megatron's shards"
    remedy = "Call the prepared model, or load a saved one."
    raise ConfigError.of("a call of a model that was given to prepare", rule, remedy)


def _from_last_stage() -> dict[str, Any]:
    """Return source and group of a broadcast to all stages of a pipeline."""
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    return {"src": source, "group": parallel_state.get_pipeline_model_parallel_group()}
