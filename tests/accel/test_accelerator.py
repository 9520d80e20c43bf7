"""The Accelerator in one process: preparing, accumulating, stepping, and what lies around it.

Holds E1.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accel import Accelerator
from accel.config.fp8 import AORecipeKwargs, MSAMPRecipeKwargs
from accel.config.handlers import DistributedDataParallelKwargs
from accel.config.training import ProjectConfiguration, TorchDynamoPlugin
from accel.machine import imports
from accel.machine.enums import PrecisionType
from accel.machine.errors import ConfigError
from accel.state import AcceleratorState, GradientState, PartialState


def loader(samples: int = 6, batch_size: int = 2) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples * 2.0).view(samples, 2)), batch_size)


def parts(lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, optimizer, loader(), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


# -- accumulation ------------------------------------------------------------------------------


def test_the_number_of_micro_batches_can_change() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.gradient_accumulation_steps == 2
    accelerator.gradient_accumulation_steps = 4
    assert GradientState().num_steps == 4
    assert accelerator.gradient_state.sync_with_dataloader is True
    accelerator.sync_gradients = False
    assert accelerator.sync_gradients is False


# -- gradients ---------------------------------------------------------------------------------


def test_gradients_are_clipped_by_norm_and_by_value() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1, bias=False))
    accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 5.0
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.8]]))
    assert accelerator.clip_grad_norm_(model.weight, 10.0, norm_type=1).item() == pytest.approx(1.4)
    accelerator.clip_grad_value_(model.parameters(), 0.7)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.7]]))
    accelerator.unscale_gradients()  # nothing to do without a scaler


def test_backward_takes_the_arguments_of_torch() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    loss = model(torch.ones(1, 2)).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert model.bias.grad.item() == 2.0


def test_lomo_optimizers_update_in_the_backward_pass() -> None:
    class Fused(torch.optim.SGD):
        def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
            self.seen = (loss.item(), lr)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="fused"):
        accelerator.lomo_backward(torch.zeros(()), 0.1)
    assert not accelerator.has_lomo_optimizer
    _, optimizer = accelerator.prepare(model, Fused(model.parameters(), lr=0.1))
    assert accelerator.has_lomo_optimizer
    accelerator.backward(torch.tensor(4.0), learning_rate=0.5)
    assert optimizer.optimizer.seen == (2.0, 0.5)


# -- exchanging --------------------------------------------------------------------------------


def test_a_stream_of_unknown_length_is_gathered_as_it_is() -> None:
    class Stream(IterableDataset):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from torch.arange(3.0)

    accelerator = Accelerator(cpu=True)
    batches = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    sizes = [len(accelerator.gather_for_metrics(batch)) for batch in batches]
    assert sizes == [2, 1]


def test_a_trigger_is_found_once() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.check_trigger() is False
    assert accelerator.flag_tensor.tolist() == [0]
    accelerator.set_trigger()
    assert accelerator.flag_tensor.tolist() == [1]
    assert accelerator.check_breakpoint() is True
    assert accelerator.flag_tensor.tolist() == [0]
    assert accelerator.check_trigger() is False


# -- processes ---------------------------------------------------------------------------------


def test_the_spelling_of_the_documentations_example_is_understood() -> None:
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3)
    accelerator = Accelerator(cpu=True, kwarg_handler=[handler])
    assert accelerator.plan.ddp.bucket_cap_mb == 3


# -- the constructor ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no", "fp16", "bf16"])
def test_each_precision_by_its_name(name: str) -> None:
    for spelling in (name, PrecisionType(name)):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision=spelling)
        assert accelerator.mixed_precision == name
        assert accelerator.state.mixed_precision == name


def test_fp8_takes_the_library_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_available", lambda name: name == "torchao")
    accelerator = Accelerator(cpu=True, mixed_precision="fp8")
    assert accelerator.mixed_precision == accelerator.state.mixed_precision == "fp8"
    assert accelerator.fp8_backend == "AO"
    assert accelerator.fp8_enabled is True
    assert accelerator.fp8_recipe_handler == AORecipeKwargs()
    AcceleratorState._reset_state()
    with pytest.raises(ConfigError, match="MSAMPRecipeKwargs with mixed_precision='no'"):
        Accelerator(cpu=True, kwargs_handlers=[MSAMPRecipeKwargs()])


@pytest.mark.parametrize(
    "name", ["deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"]
)
def test_a_plugin_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}|deepspeed_plugins\['default'\]"):
        Accelerator(cpu=True, **{name: object()})


def test_models_are_compiled_with_the_backend_of_the_run() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="no")
    assert accelerator.state.dynamo_plugin.backend == "no"
    inner = torch.nn.Linear(1, 1)
    assert accelerator.prepare(inner) is inner
    with pytest.raises(ConfigError, match="Did you mean 'inductor'"):
        Accelerator(cpu=True, dynamo_backend="indctor")
    for arguments in (
        {"dynamo_backend": "eager"},
        {"dynamo_plugin": TorchDynamoPlugin(backend="eager")},
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, **arguments)
        assert accelerator.state.dynamo_plugin.backend == "eager"
        assert isinstance(accelerator.prepare(inner), torch._dynamo.OptimizedModule)


def test_a_run_is_where_it_says_or_on_the_accelerator_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("accel.machine.device.default_device_type", lambda: "xpu")
    assert Accelerator(device="cpu").device == torch.device("cpu")
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ConfigError, match="'xpu': this machine has no such device"):
        Accelerator()


def test_generators_that_are_not_there_are_refused() -> None:
    for name in ("cuda", "xla"):
        with pytest.raises(ConfigError, match=f"rng_types: '{name}': this run computes on cpu"):
            Accelerator(cpu=True, rng_types=[name])
    for name in ("torch", "generator"):
        assert Accelerator(cpu=True, rng_types=[name]).rng_types == (name,)
    assert Accelerator(cpu=True).rng_types == ("generator",)


def test_states_and_logs_go_where_the_run_says() -> None:
    accelerator = Accelerator(cpu=True, project_dir="here", logging_dir="logs")
    assert (accelerator.project_dir, accelerator.logging_dir) == ("here", "logs")
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir="there"))
    assert (accelerator.project_dir, accelerator.logging_dir) == ("there", "there")


def test_a_refused_run_leaves_no_state_behind() -> None:
    with pytest.raises(ConfigError):
        Accelerator(cpu=True, log_with="tensorboard")
    assert PartialState._shared_state == {}


# -- around the run ----------------------------------------------------------------------------


def test_unwrapping_stops_at_the_users_own_module() -> None:
    accelerator = Accelerator(cpu=True)
    inner = torch.nn.Linear(1, 1)
    inside = torch.nn.Sequential(torch.nn.DataParallel(inner))
    assert accelerator.unwrap_model(torch.nn.DataParallel(inner)) is inner
    assert accelerator.unwrap_model(inside) is inside
    compiled = torch.compile(inner)
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is inner
    around = torch.compile(torch.nn.DataParallel(inner))
    assert accelerator.unwrap_model(around)._orig_mod is inner
    assert accelerator.strategy.state.unwrap(compiled) is inner


def test_a_run_after_the_end_starts_from_its_own_arguments() -> None:
    Accelerator(cpu=True, mixed_precision="bf16").end_training()
    assert Accelerator(cpu=True).mixed_precision == "no"


def test_end_training_can_be_called_twice() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    accelerator.end_training()
    assert accelerator.is_main_process
