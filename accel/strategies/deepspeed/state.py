"""State dicts of an engine: full tensors by parameter name, out and in; loss scale; memory."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch

from accel.checkpoint.optimizer_state import FORMAT_VERSION, ParameterNames, misfit
from accel.machine.errors import StateError
from accel.strategies.base import StateIO
from accel.strategies.deepspeed.fragments import (
    Fragments,
    Groups,
    ParameterFragment,
    SwappedState,
    fragments,
)
from accel.strategies.deepspeed.wrappers import DeepSpeedOptimizerWrapper, TrainedEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from accel.comm.base import Communicator


LOSS_SCALE = "loss_scale"  # key in the `extra` of an optimizer's state
State: TypeAlias = dict[str, Any]  # of an optimizer, or of one parameter in it
_SCALE_COUNTS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@final
class ZeroState(StateIO):
    """Full state dicts, gathered from the fragments of an engine and written to them."""

    def __init__(self, trained: TrainedEngine, comm: Communicator, package: ModuleType) -> None:
        self._trained = trained
        self._comm = comm
        self._package = package

    @property
    def sharded(self) -> tuple[str, ...]:
        kinds = ("optimizer state", "gradients", "parameters")
        return kinds[: self._trained.plugin.stage] if self._comm.world_size > 1 else ()

    def num_elements(self, parameter: torch.nn.Parameter) -> int:
        """Return the elements of a parameter; a partitioned one has none of its own."""
        return int(getattr(parameter, "ds_numel", parameter.numel()))

    def model_state(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the full tensors of a model by parameter name, trained ones in fp32."""
        found, full = self._fragments(model), dict[int, torch.Tensor]()  # tied weights stay tied
        state = {}
        with SwappedState(model) as swapped:
            for name, value in self.unwrap(model).state_dict(keep_vars=True).items():
                if not isinstance(value, torch.Tensor):
                    state[name] = value
                    continue
                if id(value) not in full:
                    full[id(value)] = self._gather(value, found.get(id(value)), swapped)
                state[name] = full[id(value)]
        return state

    def load_model_state(
        self, model: torch.nn.Module, state: dict[str, torch.Tensor], strict: bool = True
    ) -> None:
        live = self.unwrap(model).state_dict(keep_vars=True)
        both = {n: v for n, v in live.items() if n in state and isinstance(v, torch.Tensor)}
        wrong = [f"missing {n}" for n in live if n not in state] if strict else []
        wrong += [f"unexpected {n}" for n in state if n not in live] if strict else []
        for name, value in both.items():
            shape = tuple(getattr(value, "ds_shape", value.shape))
            if shape != tuple(state[name].shape):
                wrong.append(f"{name} has shape {tuple(state[name].shape)}, not {shape}")
        if wrong:
            raise RuntimeError(", ".join(wrong))
        found = self._fragments(model)
        if found:  # an evaluation may have ended with parameters on their way to be gathered
            cast("DeepSpeedEngine", model).empty_partition_cache()
        with SwappedState(model) as swapped:
            for name, value in both.items():
                self._write(value, state[name])
                fragment = found.get(id(value))
                if fragment is not None:
                    swapped.fetch(fragment.sub_group, change=True)
                    fragment.write(state[name], fragment.flat)

    def optimizer_state(self, optimizer: torch.optim.Optimizer, names: ParameterNames) -> State:
        prepared = _prepared(optimizer)
        basic, groups, engine = prepared.optimizer, prepared.groups, prepared.engine
        keys, found, state = _keys(groups, names), fragments(engine), {}
        with SwappedState(engine) as swapped:
            for parameter in (p for group in groups for p in group):
                fragment = found.get(id(parameter))
                stepped = None if fragment is None else basic.state.get(fragment.flat)
                if fragment is not None and stepped:
                    swapped.fetch(fragment.sub_group)
                    state[keys[id(parameter)]] = {
                        name: fragment.gather(value, self._comm)
                        if _is_flat(value, fragment.flat)
                        else _copy(value)
                        for name, value in stepped.items()
                    }
        return {
            "format": FORMAT_VERSION,
            "param_groups": [
                _settings(live) | {"params": [keys[id(p)] for p in group]}
                for group, live in zip(groups, basic.param_groups, strict=True)
            ],
            "state": state,
            "other_state": {},
            "unnamed": [key for key in keys.values() if key.startswith("#")],
            "extra": scale_state(engine),
        }

    def load_optimizer_state(
        self, optimizer: torch.optim.Optimizer, state: State, names: ParameterNames
    ) -> None:
        prepared = _prepared(optimizer)
        basic, groups, engine = prepared.optimizer, prepared.groups, prepared.engine
        if not isinstance(state, dict) or state.get("format") != FORMAT_VERSION:
            raise misfit("another format", f"this version reads {FORMAT_VERSION}")
        keys = _keys(groups, names)
        ours = [{keys[id(p)] for p in group} for group in groups]
        saved = [{names.canonical(key) for key in g["params"]} for g in state["param_groups"]]
        if ours != saved:
            raise misfit("its parameter groups", "they hold other parameters than the saved ones")
        for live, group in zip(basic.param_groups, state["param_groups"], strict=True):
            live.update(_settings(group))
        by_key = {names.canonical(key): value for key, value in state["state"].items()}
        found = fragments(engine)
        with SwappedState(engine) as swapped:
            swapped.clear()
            basic.state.clear()
            for parameter in (p for group in groups for p in group):
                fragment, values = found.get(id(parameter)), by_key.get(keys[id(parameter)])
                if fragment is not None and values:
                    swapped.fetch(fragment.sub_group, change=True)
                    _write_state(basic, fragment, values, keys[id(parameter)])
        load_scale_state(engine, state["extra"])
        engine.optimizer._hp_optimizer_states_linked = False

    def _fragments(self, model: torch.nn.Module) -> Fragments:
        optimizer = self._trained.optimizer()
        return fragments(model) if optimizer is not None and optimizer.engine is model else {}

    def _gather(
        self, value: torch.Tensor, fragment: ParameterFragment | None, swapped: SwappedState
    ) -> torch.Tensor:
        if fragment is not None:
            swapped.fetch(fragment.sub_group)
            return fragment.gather(fragment.flat, self._comm)
        if hasattr(value, "ds_id") and isinstance(value, torch.nn.Parameter):
            with self._package.zero.GatheredParameters([value]):
                return value.detach().cpu().clone()
        return value.detach().clone()

    def _write(self, value: torch.Tensor, full: torch.Tensor) -> None:
        if not hasattr(value, "ds_id"):
            with torch.no_grad():
                value.copy_(full)
            return
        with self._package.zero.GatheredParameters([value], modifier_rank=0), torch.no_grad():
            if self._comm.rank == 0:
                value.copy_(full)


def _prepared(optimizer: torch.optim.Optimizer) -> DeepSpeedOptimizerWrapper:
    if not isinstance(optimizer, DeepSpeedOptimizerWrapper):
        raise StateError(f"{type(optimizer).__name__} was not prepared with DeepSpeed.")
    return optimizer


def _settings(group: State) -> State:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _write_state(
    basic: torch.optim.Optimizer, fragment: ParameterFragment, values: State, key: str
) -> None:
    """Write the saved state of one parameter to the state of the flat tensor that is stepped."""
    stepped = basic.state[fragment.flat]
    for name, value in values.items():
        is_full = isinstance(value, torch.Tensor) and tuple(value.shape) == fragment.shape
        if is_full and not (value.dim() == 0 and name == "step"):
            if name not in stepped:
                stepped[name] = torch.zeros_like(fragment.flat, dtype=value.dtype)
            fragment.write(value, stepped[name])
            continue
        if name in stepped and float(stepped[name]) != float(value):
            rule = "ZeRO keeps one for all parameters of a group, and the saved ones differ"
            raise misfit(f"{name}={float(value)} of {key}", rule)
        stepped[name] = _scalar(basic, value)


def _scalar(basic: torch.optim.Optimizer, value: float | torch.Tensor) -> int | torch.Tensor:
    """Return a count of steps as the optimizer keeps it: torch's in tensors, DeepSpeed's not."""
    if type(basic).__module__.startswith("deepspeed"):
        return int(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def _is_flat(value: object, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape and value.dim() > 0


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _keys(groups: Groups, names: ParameterNames) -> dict[int, str]:
    flat = {id(p): p for group in groups for p in group}
    return {key: names.key(p, position) for position, (key, p) in enumerate(flat.items())}


# -- loss scale of fp16 --------------------------------------------------------------------


def scale_state(engine: DeepSpeedEngine) -> State:
    """Return the loss scale and its counts, for `extra` of the optimizer's state; {} if constant.

    Source: https://www.deepspeed.ai/docs/config-json/#fp16-training-options
    """
    autocast, own = _autocast_scaler(engine), _dynamic_scaler(engine)
    if autocast is not None:
        return {LOSS_SCALE: dict(autocast.state_dict())}
    if own is not None:
        return {
            LOSS_SCALE: {name: getattr(own, name) for name in _SCALE_COUNTS if hasattr(own, name)}
        }
    return {}


def load_scale_state(engine: DeepSpeedEngine, extra: State) -> None:
    """Load what `scale_state` returned; a run in another precision ignores it."""
    saved = extra.get(LOSS_SCALE, {})
    autocast, own = _autocast_scaler(engine), _dynamic_scaler(engine)
    if autocast is not None and "_growth_tracker" in saved:
        autocast.load_state_dict(saved)
    elif own is not None and "cur_scale" in saved:
        for name in _SCALE_COUNTS:
            if name in saved and hasattr(own, name):
                setattr(own, name, saved[name])


def _autocast_scaler(engine: DeepSpeedEngine) -> torch.amp.GradScaler | None:
    """Return the scaler of an engine under `torch_autocast`, if it has one."""
    without_zero = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return without_zero or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def _dynamic_scaler(engine: DeepSpeedEngine) -> object | None:
    """Return the object that holds DeepSpeed's own loss scale, if that is dynamic."""
    optimizer = engine.optimizer
    if getattr(optimizer, "dynamic_loss_scale", False):  # stages 1 to 3
        return optimizer.loss_scaler
    config = getattr(optimizer, "loss_scale_config", None)
    return config if getattr(config, "dynamic_loss_scale", False) else None
