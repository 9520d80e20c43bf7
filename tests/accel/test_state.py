"""One state per process, process control, and a reset that is a reset (E1)."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import pytest
import torch

import accel
from accel import Accelerator
from accel.config.parallelism import ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import GradientAccumulationPlugin, TorchDynamoPlugin
from accel.machine import env
from accel.machine.enums import DistributedType
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, StateError
from accel.plan.arguments import Arguments
from accel.plan.plan import resolve
from accel.state import (
    AcceleratorState,
    GradientState,
    PartialState,
    current_environment,
    is_initialized,
)
from tests.helpers import run_distributed

WORLD_SIZES = [1, 2, 3]


# -- one process -------------------------------------------------------------------------------


def test_instances_share_one_state() -> None:
    first, second = PartialState(cpu=True), PartialState()
    assert first.__dict__ is second.__dict__
    assert first.comm is second.comm
    assert first.device == torch.device("cpu")
    assert first.distributed_type is DistributedType.NO
    assert (first.num_processes, first.process_index, first.local_process_index) == (1, 0, 0)
    assert first.is_main_process
    assert first.is_local_main_process
    assert first.is_last_process
    assert not first.use_distributed
    assert not first.debug
    assert first.mixed_precision == "no"
    assert first.backend is None
    assert first.default_device.type in ("cpu", "cuda", "xpu", "mps")


def test_accelerator_state_is_built_on_the_partial_one() -> None:
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    assert state.comm is PartialState().comm
    assert state.mixed_precision == "bf16"
    assert state.dynamo_plugin.backend == "no"
    assert "Mixed precision: bf16" in repr(state)
    assert "Device: cpu" in repr(state)


def test_debug_comes_from_the_environment() -> None:
    with env.patched(ACCELERATE_DEBUG_MODE="1"):
        assert PartialState(cpu=True).debug is True
        assert AcceleratorState(cpu=True).debug is True


def test_debug_mode_is_set_for_all_instances() -> None:
    """E1: a setting, unlike the rest of the state."""
    accelerator = Accelerator(cpu=True)
    PartialState().debug = True
    assert PartialState().debug is AcceleratorState().debug is accelerator.state.debug is True


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
def test_a_state_is_immutable(kind: type[PartialState | AcceleratorState]) -> None:
    """E1: "these classes are immutable"."""
    state = kind(cpu=True)
    with pytest.raises(AttributeError, match=r"device='cuda'.*immutable"):
        state.device = "cuda"  # type: ignore[assignment]
    assert kind().device == Accelerator(cpu=True).device == torch.device("cpu")


def test_both_states_report_the_precision_of_the_run() -> None:
    """E1: also a `PartialState` that was made before."""
    partial = PartialState(cpu=True)
    assert partial.mixed_precision == "no"
    Accelerator(cpu=True, mixed_precision="bf16")
    assert partial.mixed_precision == PartialState().mixed_precision == "bf16"


def test_a_state_is_initialized_from_an_accelerator() -> None:
    """E1: `initialized` says "whether it has been initialized from Accelerator"."""
    state = AcceleratorState(cpu=True)
    assert not state.initialized
    assert not is_initialized()
    Accelerator(cpu=True)
    assert state.initialized
    assert is_initialized()


def test_the_environment_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """E1: ACCELERATE_TORCH_DEVICE, which an argument overrides."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    with pytest.raises(ConfigError, match="device='meta'"):
        PartialState()
    assert PartialState(cpu=True).device.type == "cpu"
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    monkeypatch.setattr("accel.machine.device.default_device_type", lambda: "cuda")
    assert PartialState().device.type == "cpu"


def test_use_after_reset_is_an_error() -> None:
    partial, full, gradients = PartialState(cpu=True), AcceleratorState(cpu=True), GradientState()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not partial.initialized
    for use in (
        lambda: partial.device,
        lambda: partial.num_processes,
        lambda: full.mixed_precision,
        lambda: full.print("x"),
        lambda: gradients.sync_gradients,
        lambda: gradients.end_of_dataloader,
    ):
        with pytest.raises(StateError, match="was reset"):
            use()
    assert not hasattr(partial, "no_such_attribute")
    assert "reset" in repr(partial)
    assert PartialState(cpu=True).num_processes == 1
    assert partial.num_processes == 1  # shares the new state


def test_reset_of_the_accelerator_alone_keeps_the_partial_state() -> None:
    state = AcceleratorState(cpu=True)
    AcceleratorState._reset_state()
    assert PartialState().initialized
    assert not state.initialized


def test_what_was_set_up_cannot_change() -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState("bf16").mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"mixed_precision='fp16'.*set up with 'bf16'"):
        AcceleratorState("fp16")
    PartialState._shared_state["device"] = torch.device("meta")
    with pytest.raises(ConfigError, match="cpu=True"):
        PartialState(cpu=True)


def test_unknown_arguments_are_refused_by_later_ones_too() -> None:
    Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="cpuu=True: known are backend"):
        PartialState(cpuu=True)
    with pytest.raises(ConfigError, match="foo=1: known are backend"):
        AcceleratorState(foo=1)
    PartialState(timeout=60)  # libraries give it again


def test_whether_there_is_a_state_is_asked_without_building_one() -> None:
    assert accel.state.is_initialized() is False
    PartialState(cpu=True)
    assert accel.state.is_initialized() is False
    assert not AcceleratorState._shared_state
    Accelerator(cpu=True)
    assert accel.state.is_initialized() is True
    AcceleratorState._reset_state()
    assert accel.state.is_initialized() is False


def test_a_plan_is_taken_over() -> None:
    partial = PartialState(cpu=True)
    plan = resolve(Arguments(mixed_precision="bf16"), current_environment())
    state = AcceleratorState(_from_accelerator=True, _plan=plan)
    assert state.mixed_precision == "bf16"
    assert state.plan.device == partial.device
    later = resolve(Arguments(gradient_accumulation_steps=4), current_environment())
    settled = AcceleratorState(_plan=later).settle(later)
    assert settled.mixed_precision == "bf16"
    assert settled.accumulation.num_steps == 4
    other = resolve(Arguments(mixed_precision="fp16"), current_environment())
    with pytest.raises(ConfigError, match="set up with 'bf16'"):
        AcceleratorState(_plan=other)


def test_the_environment_is_settled_with_the_first_state() -> None:
    PartialState(cpu=True)
    with env.patched(WORLD_SIZE="8", RANK="3", ACCELERATE_MIXED_PRECISION="bf16"):
        environment = current_environment()
    assert environment.world_size == 1
    assert environment.rank is None
    assert environment.mixed_precision == "bf16"


def test_a_state_made_for_the_cpu_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    monkeypatch.setattr("accel.state.default_device_type", lambda: "cuda")
    assert current_environment().use_cpu


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
def test_unknown_arguments(kind: type[PartialState | AcceleratorState]) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'backend'"):
        kind(bakend="gloo")
    assert not PartialState._shared_state


@pytest.mark.parametrize("name", ["deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"])
def test_plugins_of_another_kind_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}|deepspeed_plugins\['default'\]"):
        AcceleratorState(cpu=True, **{name: object()})


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
def test_cpu_ignores_the_accelerator_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, kind: type[PartialState | AcceleratorState]
) -> None:
    monkeypatch.setattr("accel.machine.device.default_device_type", lambda: "cuda")
    assert kind(cpu=True).device == torch.device("cpu")


def test_a_plugin_says_how_models_are_compiled() -> None:
    plugin = TorchDynamoPlugin(backend="no", fullgraph=True)
    assert AcceleratorState(cpu=True, dynamo_plugin=plugin).dynamo_plugin is plugin


def test_a_state_of_an_accelerator_begins_anew_where_the_last_run_has_ended() -> None:
    ended = AcceleratorState("bf16", cpu=True)
    ended.destroy_process_group()
    with pytest.raises(ConfigError, match="set up with 'bf16'"):
        AcceleratorState("no", cpu=True)
    assert AcceleratorState("no", cpu=True, _from_accelerator=True).mixed_precision == "no"


def seconds_of_the_group(kind: str) -> float:
    make = {"partial": PartialState, "full": AcceleratorState}[kind]
    state = make(cpu=True, timeout=timedelta(seconds=77))
    group = torch.distributed.group.WORLD
    assert group is not None
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    state.destroy_process_group()
    return seconds


@pytest.mark.parametrize("kind", ["partial", "full"])
def test_keyword_arguments_set_the_process_group_up(kind: str) -> None:
    assert run_distributed(seconds_of_the_group, 2, kind) == [77.0, 77.0]


def test_one_process_gets_everything() -> None:
    data = [1, 2, 3]
    with PartialState(cpu=True).split_between_processes(data, apply_padding=True) as part:
        assert part is data
    with pytest.raises(ValueError, match="inside"):
        raise_inside(PartialState())


def raise_inside(state: PartialState) -> None:
    with state.split_between_processes([1]):
        raise ValueError("inside")


# -- several processes -------------------------------------------------------------------------


def fail_first() -> str:
    state = PartialState(cpu=True)
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise ValueError("download failed")
    except ValueError as error:
        return str(error)
    finally:
        state.destroy_process_group()
    return "went on"


def test_a_failure_of_the_first_does_not_leave_the_others_waiting() -> None:
    assert run_distributed(fail_first, 2) == ["download failed", "went on"]


def reset_and_build_again() -> list[int]:
    first = PartialState(cpu=True)
    PartialState._reset_state()
    second = PartialState(cpu=True)  # takes the group over
    ranks = second.comm.all_gather_object(second.process_index)
    assert first.comm is second.comm
    second.destroy_process_group()
    return ranks


def test_the_group_outlives_a_reset() -> None:
    assert run_distributed(reset_and_build_again, 2) == [[0, 1]] * 2


def group_of_ones_own() -> list[int]:
    state = PartialState(cpu=True)
    group = torch.distributed.new_group([0, 1])
    state.destroy_process_group(group)
    ranks = state.comm.all_gather_object(state.process_index)
    state.destroy_process_group()
    return ranks


def test_a_group_of_ones_own_can_be_left() -> None:
    assert run_distributed(group_of_ones_own, 2) == [[0, 1]] * 2


def without_ranks() -> str:
    os.environ.pop("LOCAL_RANK")
    with pytest.raises(ConfigError) as caught:
        PartialState(cpu=True)
    return str(caught.value)


def test_an_incomplete_launch_is_refused_before_anything_hangs() -> None:
    assert "LOCAL_RANK is not set" in run_distributed(without_ranks, 2)[0]


# -- gradient state ----------------------------------------------------------------------------


class Loader:
    """What the state asks of a loader."""

    batches_given = 0
    end_of_dataloader = False
    remainder = -1


def test_gradient_state_starts_in_sync() -> None:
    state = GradientState()
    assert state.sync_gradients
    assert (state.num_steps, state.adjust_scheduler, state.sync_with_dataloader) == (1, True, True)
    assert not state.sync_each_batch
    assert not state.in_dataloader
    assert not state.end_of_dataloader
    assert state.remainder == -1
    assert state.dataloader_references == [None]


def test_a_plugin_configures_and_the_lack_of_one_does_not() -> None:
    plugin = GradientAccumulationPlugin(
        num_steps=4, adjust_scheduler=False, sync_with_dataloader=False, sync_each_batch=True
    )
    first = GradientState(plugin)
    second = GradientState()
    assert (second.num_steps, second.adjust_scheduler) == (4, False)
    assert (second.sync_with_dataloader, second.sync_each_batch) == (False, True)
    assert second.plugin_kwargs == plugin.to_kwargs()
    GradientState(GradientAccumulationPlugin(num_steps=2))
    assert (first.num_steps, first.adjust_scheduler) == (2, True)
    assert "num_steps" in repr(first)


def test_sync_gradients_is_shared() -> None:
    first, second = GradientState(), GradientState()
    first._set_sync_gradients(False)
    assert second.sync_gradients is False


def test_the_innermost_loader_is_active() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    inner.end_of_dataloader, inner.remainder = True, 3
    state._follow_dataloader()  # as a loader does
    assert state.active_dataloader is inner
    assert state.in_dataloader
    assert state.end_of_dataloader
    assert state.remainder == 3
    assert state.dataloader_references == [None, outer, inner]
    state._remove_dataloader(inner)
    assert state.active_dataloader is outer
    assert not state.end_of_dataloader
    state._remove_dataloader(inner)  # an iteration that ends twice
    state._remove_dataloader(outer)
    assert state.active_dataloader is None


def test_a_loader_may_be_iterated_in_itself() -> None:
    state, loader = GradientState(), Loader()
    state._add_dataloader(loader)
    state._add_dataloader(loader)
    state._remove_dataloader(loader)
    assert state.active_dataloader is loader


def test_a_loader_that_is_gone_is_forgotten() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    del inner
    gc.collect()
    assert state.active_dataloader is outer
    assert state.dataloader_references == [None, outer]


def test_what_lacks_after_a_reset_names_the_remedy() -> None:
    state, gradients = AcceleratorState(cpu=True), GradientState()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("device", "num_processes", "mixed_precision", "is_main_process", "nothing"):
        assert not hasattr(state, name)
        with pytest.raises(AttributeError, match=r"Build a new Accelerator\(\)"):
            getattr(state, name)
    for name in ("sync_gradients", "in_dataloader", "plugin_kwargs"):
        assert not hasattr(gradients, name)
        with pytest.raises(StateError, match=r"Build a new Accelerator\(\)"):
            getattr(gradients, name)


def test_plugins_and_sizes_of_a_state() -> None:
    config = ParallelismConfig()
    state = AcceleratorState(cpu=True, parallelism_config=config)
    assert state.parallelism_config is config
    assert state.fsdp_plugin is None
    assert state.torch_tp_plugin is None
    assert not state.is_fsdp2
    with pytest.raises(ConfigError, match="tp_size=2"):
        resolve(Arguments(plugins={"torch_tp_plugin": TorchTensorParallelPlugin(2)}), Environment())


def test_a_state_takes_the_plugin_of_tensor_parallelism() -> None:
    state = AcceleratorState(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin())
    assert state.torch_tp_plugin == TorchTensorParallelPlugin()


def test_a_forked_process_knows_it() -> None:
    assert AcceleratorState(cpu=True).fork_launched is False
    AcceleratorState._reset_state(reset_partial_state=True)
    with env.patched(FORK_LAUNCHED="1"):
        assert AcceleratorState(cpu=True).fork_launched is True


def test_gradients_of_a_tpu_are_never_in_sync() -> None:
    state = GradientState()
    assert state.is_xla_gradients_synced is False
    state.is_xla_gradients_synced = True
    assert GradientState().is_xla_gradients_synced is True
