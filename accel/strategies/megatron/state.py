"""Full state of a model that Megatron shards, by the plain model's names: out and in.

Megatron's `sharded_state_dict` says which slice of which full tensor a local one is. The
distributed optimizer keeps a range of each flattened local parameter on each data-parallel rank.

Source: https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_checkpointing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from accel.checkpoint.optimizer_state import ParameterNames, load_by_name, misfit, state_by_name
from accel.config.megatron import MegatronLMPlugin
from accel.strategies.base import StateIO
from accel.strategies.megatron.wrappers import (
    SETTINGS,
    MegatronLMOptimizerWrapper,
    MegatronModel,
)

Tensors: TypeAlias = dict[str, torch.Tensor]
LOSS_SCALE = "megatron_loss_scale"  # key in the `extra` of an optimizer's state
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam


@final
@dataclass(frozen=True)
class Shard:
    """The slices of a full tensor that this rank holds.

    Attributes:
        tensor: of this rank.
        entry: Megatron's description of it.
    """

    tensor: torch.Tensor
    entry: Any

    def parts(self, local: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield views of a tensor like `self.tensor`, each with Megatron's description."""
        entry = self.entry
        if isinstance(entry, ShardedTensor):
            yield entry, local
            return
        for part in entry.build_fn(entry.key, local, entry.replica_id, None):  # gate and up
            yield part, part.data

    def described(self) -> tuple[tuple[int, ...], bool]:
        """Return the shape of the full tensor, and whether it is trained."""
        entry, _ = next(self.parts(self.tensor))
        return tuple(entry.global_shape), self.tensor.requires_grad

    def write(self, local: torch.Tensor, full: torch.Tensor) -> None:
        """Copy a local tensor to its place in a full one, if no other rank does so before."""
        if not any(self.entry.replica_id[:-1]):  # the last one counts data-parallel ranks
            for entry, view in self.parts(local):
                full[entry.global_slice()] = view

    def read(self, full: torch.Tensor) -> torch.Tensor:
        """Return the local part of a full tensor, in fp32."""
        local = torch.empty_like(self.tensor, dtype=torch.float32, requires_grad=False)
        for entry, view in self.parts(local):
            view.copy_(full[entry.global_slice()])
        return local


Shards: TypeAlias = dict[str, Shard]  # by Megatron's name of the full tensor


def shards_of(core: Any) -> Shards:
    """Return the shards of a module of megatron-core that this rank holds."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # A name for each layer, instead of one tensor of all layers.
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": True}
    live, kinds = core.state_dict(keep_vars=True), (ShardedTensor, ShardedTensorFactory)
    entries = core.sharded_state_dict(metadata=metadata).items()
    return {entry.key: Shard(live[n], entry) for n, entry in entries if isinstance(entry, kinds)}


def described(shards: Shards) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return what `Shard.described` does for those of all stages. Every rank calls this."""
    group = parallel_state.get_model_parallel_group()
    every: list[Any] = [None] * dist.get_world_size(group)
    own = {name: shard.described() for name, shard in shards.items()}
    dist.all_gather_object(every, own, group=group)
    return {name: value for one in every for name, value in one.items()}


class Stepped:
    """The tensor that Megatron's optimizer steps for a parameter: it, a copy, or a range of one.

    Attributes:
        tensor: as above, in fp32; None: other data-parallel ranks step this parameter.
    """

    def __init__(
        self, optimizer: MegatronLMOptimizerWrapper | None, parameter: torch.Tensor
    ) -> None:
        self.parameter, self.start, self.is_range = parameter, 0, False
        self.tensor: torch.Tensor | None = getattr(parameter, "main_param", parameter)
        if optimizer is None or not parameter.requires_grad:
            self.tensor = parameter
            return
        (engine,) = optimizer.engine.chained_optimizers
        if isinstance(engine, DistributedOptimizer):
            self.tensor, self.is_range = None, True
            if parameter in engine.model_param_group_index_map:
                group, index = engine.model_param_group_index_map[parameter]
                self.tensor = engine.optimizer.param_groups[group]["params"][index]
                self.start = engine._get_model_param_range_map(parameter)["param"].start

    def whole(self, value: torch.Tensor | None) -> torch.Tensor:
        """Return a value like `tensor` for all of the parameter. Data-parallel ranks call this."""
        flat = torch.zeros(self.parameter.numel(), device=self.parameter.device)
        if value is not None:
            flat[self.start : self.start + value.numel()] = value.detach().flatten()
        if self.is_range:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(flat, group=group)
        return flat.view_as(self.parameter)

    def part(self, whole: torch.Tensor) -> torch.Tensor | None:
        """Return the part of a value for all of the parameter that is like `tensor`."""
        if self.tensor is None:
            return None
        return whole.flatten()[self.start :][: self.tensor.numel()].view_as(self.tensor)


def gather(model: MegatronModel, shards: Shards, read: Callable[[Shard], torch.Tensor]) -> Tensors:
    """Return full tensors by plain name, on the host, from what `read` returns for each shard.

    Every rank calls this.
    """
    plain: Tensors = {}
    for name, (shape, _) in described(shards).items():
        full = torch.zeros(shape, device=torch.cuda.current_device())
        if name in shards:
            shards[name].write(read(shards[name]), full)
        dist.all_reduce(full, group=parallel_state.get_model_parallel_group())
        weight = model.weights[name]
        plain |= dict(zip(weight.names, weight.split(full.cpu()), strict=True))
    return plain


def scatter(model: MegatronModel, shards: Shards, plain: Mapping[str, torch.Tensor]) -> Tensors:
    """Return this rank's part of each full tensor whose plain tensors are all given."""
    found: Tensors = {}
    for name, shard in shards.items():
        parts = [plain[one] for one in model.weights[name].names if one in plain]
        if len(parts) == len(model.weights[name].names):
            found[name] = shard.read(model.weights[name].join(parts))
    return found


@final
class MegatronState(StateIO):
    """Full state dicts, gathered from the shards of all ranks and written to them."""

    def __init__(self, plugin: MegatronLMPlugin) -> None:
        self._plugin = plugin

    @property
    def sharded(self) -> tuple[str, ...]:
        kinds = ("parameters", "gradients", "optimizer state")
        shards_optimizer = self._plugin.use_distributed_optimizer
        return kinds if self._plugin.model_size > 1 else kinds[2:] if shards_optimizer else ()

    def model_state(self, model: torch.nn.Module) -> Tensors:
        """Return the full tensors of a model by parameter name, in fp32."""
        assert isinstance(model, MegatronModel)
        optimizer = model.optimizer

        def read(shard: Shard) -> torch.Tensor:
            stepped = Stepped(optimizer, shard.tensor)
            return stepped.whole(stepped.tensor)

        full = gather(model, shards_of(model.core), read)
        names = {id(p): name for name, p in model.plain.named_parameters() if name in full}
        live = model.plain.state_dict(keep_vars=True).items()  # tied ones under all their names
        return {name: full[names[id(p)]] for name, p in live if id(p) in names}

    def load_model_state(self, model: torch.nn.Module, state: Tensors, strict: bool = True) -> None:
        assert isinstance(model, MegatronModel)
        if strict and (wrong := set(model.plain.state_dict()) ^ set(state)):
            raise RuntimeError(f"missing or unexpected: {', '.join(sorted(wrong))}")
        optimizer, shards = model.optimizer, shards_of(model.core)
        with torch.no_grad():
            for name, local in scatter(model, shards, state).items():
                stepped = Stepped(optimizer, shards[name].tensor)
                stepped.parameter.copy_(local)
                if stepped.tensor is not None and (part := stepped.part(local)) is not None:
                    stepped.tensor.copy_(part)

    def optimizer_state(
        self, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> dict[str, Any]:
        prepared = optimizer
        assert isinstance(prepared, MegatronLMOptimizerWrapper)
        saved = state_by_name(prepared.optimizer, names)
        model, base = prepared.model, prepared.engine.optimizer
        keys = {name: names.key(p, 0) for name, p in model.plain.named_parameters()}
        for moment in MOMENTS if model.num_steps else ():

            def read(shard: Shard, moment: str = moment) -> torch.Tensor:
                stepped = Stepped(prepared, shard.tensor)
                held = stepped.tensor is not None
                return stepped.whole(base.state[stepped.tensor][moment] if held else None)

            for name, full in gather(model, _trained(model), read).items():
                entry = saved["state"].setdefault(keys[name], {})
                entry |= {"step": torch.tensor(float(model.num_steps)), moment: full}
        (engine,) = prepared.engine.chained_optimizers
        if (scaler := getattr(engine, "grad_scaler", None)) is not None:
            saved["extra"] = {LOSS_SCALE: scaler.state_dict()}
        return saved

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], names: ParameterNames
    ) -> None:
        prepared = optimizer
        assert isinstance(prepared, MegatronLMOptimizerWrapper)
        model, base = prepared.model, prepared.engine.optimizer
        load_by_name(prepared.optimizer, {**state, "state": {}}, names)
        values = {names.canonical(key): value for key, value in state["state"].items()}
        other = {n for value in values.values() for n in value.keys() ^ {"step", *MOMENTS}}
        other |= {n for group in state["param_groups"] for n in SETTINGS if n not in group}
        if other:  # such as those of SGD
            rule = "Megatron's optimizer has the settings of Adam, and step, "
            rule += f"{' and '.join(MOMENTS)} of each parameter"
            raise misfit(f"missing or unexpected: {', '.join(sorted(other))}", rule)
        steps = {int(value["step"]) for value in values.values()}
        if len(steps) > 1:
            raise misfit(f"steps {sorted(steps)}", "Megatron counts one for all parameters")
        (engine,) = prepared.engine.chained_optimizers
        if (scale := state["extra"].get(LOSS_SCALE)) and getattr(engine, "grad_scaler", None):
            engine.grad_scaler.load_state_dict(scale)
        base.state.clear()
        model.num_steps, model.num_forwards = max(steps, default=0), 0
        keys = {name: names.key(p, 0) for name, p in model.plain.named_parameters()}
        for moment in MOMENTS:
            plain = {n: values[key][moment] for n, key in keys.items() if key in values}
            shards = _trained(model)
            for name, local in scatter(model, shards, plain).items():
                stepped = Stepped(prepared, shards[name].tensor)
                if (part := stepped.part(local)) is not None:
                    base.state[stepped.tensor][moment] = part.clone()
        for entry in base.state.values():  # torch's Adam counts by parameter, others by group
            if type(base).__module__.startswith("torch.optim"):
                entry["step"] = torch.tensor(float(model.num_steps))
        for group in base.param_groups:
            if "step" in group:
                group["step"] = model.num_steps


def _trained(model: MegatronModel) -> Shards:
    return {n: one for n, one in shards_of(model.core).items() if one.tensor.requires_grad}
