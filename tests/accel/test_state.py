"""One state per process, process control, and a reset that is a reset (E1)."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import accel
from accel import Accelerator
from accel.config.parallelism import ParallelismConfig
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.config.training import TorchDynamoPlugin
from accel.machine import env
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.plan import resolve
from accel.state import AcceleratorState, GradientState, PartialState
from tests.helpers import run_distributed

# -- one process -------------------------------------------------------------------------------


def test_instances_share_one_state() -> None:
    first, second = PartialState(cpu=True), PartialState()
    assert first.__dict__ is second.__dict__
    assert first.comm is second.comm
    assert not first.debug
    assert first.backend is None
    assert first.default_device.type in ("cpu", "cuda", "xpu", "mps")


def test_accelerator_state_is_built_on_the_partial_one() -> None:
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    assert state.comm is PartialState().comm
    assert state.initialized is False  # by no `Accelerator`
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


def test_what_was_set_up_cannot_change() -> None:
    AcceleratorState(mixed_precision="bf16", cpu=True)
    assert AcceleratorState().mixed_precision == "bf16"
    assert AcceleratorState("bf16").mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"mixed_precision='fp16'.*set up with 'bf16'"):
        AcceleratorState("fp16")
    PartialState._shared_state["device"] = torch.device("meta")
    with pytest.raises(ConfigError, match="cpu=True"):
        PartialState(cpu=True)


def test_whether_there_is_a_state_is_asked_without_building_one() -> None:
    assert accel.state.is_initialized() is False
    PartialState(cpu=True)
    assert accel.state.is_initialized() is False
    assert not AcceleratorState._shared_state
    Accelerator(cpu=True)
    assert accel.state.is_initialized() is True
    AcceleratorState._reset_state()
    assert accel.state.is_initialized() is False


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState])
def test_unknown_arguments(kind: type[PartialState | AcceleratorState]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bakend'"):
        kind(bakend="gloo")
    assert not PartialState._shared_state


@pytest.mark.parametrize("name", ["deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"])
def test_plugins_of_another_kind_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}|deepspeed_plugins\['default'\]"):
        AcceleratorState(cpu=True, **{name: object()})


@pytest.mark.parametrize("kind", [PartialState, AcceleratorState, Accelerator])
def test_cpu_ignores_the_accelerator_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, kind: type[PartialState | AcceleratorState | Accelerator]
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


# -- gradient state ----------------------------------------------------------------------------


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
