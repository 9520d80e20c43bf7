"""Training through torch_xla, on as many devices as CPU_NUM_DEVICES says (E1, E3, E5, R5).

``make test-xla`` runs these on one device and on two, in an environment with torch_xla.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel import Accelerator, infer_auto_device_map, notebook_launcher
from accel.config.xla import XlaPlugin
from accel.machine.enums import DistributedType
from accel.machine.errors import ConfigError
from accel.utils import set_seed
from tests.helpers import python, ran, reset_accel, write_file

torch_xla = pytest.importorskip("torch_xla", reason="torch_xla is not installed: make test-xla")
metrics = pytest.importorskip("torch_xla.debug.metrics")
runtime = pytest.importorskip("torch_xla.runtime")

pytestmark = pytest.mark.xla
CLOSE = 1e-6
TRANSFERS = "TransferFromDeviceTime"  # each is a wait of the host for the device
COMPILED = "CompileTime"


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch of no prepared loader."""

    inputs: torch.Tensor

    def to(self, device: torch.device, **kwargs: Any) -> Sample:
        return Sample(self.inputs.to(device))


def data(samples: int = 44) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 4, (samples,), generator=generator))


def parts(dropout: float = 0.0, samples: int = 44) -> tuple[Any, Any, Any, Any]:
    """Return a model, its optimizer, a loader whose last batch is short, and a schedule."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.LayerNorm(16),
        torch.nn.GELU(),
        torch.nn.Dropout(dropout),
        torch.nn.Linear(16, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    return model, optimizer, DataLoader(data(samples), 8), schedule


def train(accelerator: Accelerator, prepared: Any, epochs: int) -> list[torch.Tensor]:
    """Return the losses [] of the micro-batches, which stay on the device."""
    model, optimizer, loader, schedule = prepared
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


def plain(epochs: int, steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return losses and weights of a loop without `accel`, on the CPU."""
    model, optimizer, loader, schedule = parts()
    losses = []
    for _ in range(epochs):
        for number, (inputs, targets) in enumerate(loader, start=1):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            (loss / steps).backward()
            losses.append(loss.detach())
            if number % steps == 0 or number == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return torch.stack(losses), model.state_dict()


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= CLOSE * max(1, tensor.abs().max()), name


@pytest.mark.parametrize(("steps", "sharded"), [(1, False), (2, False), (4, False), (2, True)])
def test_losses_and_weights_are_those_of_a_plain_loop(steps: int, sharded: bool) -> None:
    plugins = [XlaPlugin(shard_weights=sharded)]
    accelerator = Accelerator(gradient_accumulation_steps=steps, strategy_plugins=plugins)
    prepared = accelerator.prepare(*parts())
    losses = torch.stack(train(accelerator, prepared, 3)).cpu()
    wanted, weights = plain(3, steps)
    assert ((losses - wanted).abs() / wanted).max() <= CLOSE
    assert_close(accelerator.get_state_dict(prepared[0]), weights)


def test_model_and_batches_are_on_the_device_of_torch_xla() -> None:
    accelerator = Accelerator()
    model, optimizer, loader, _ = accelerator.prepare(*parts())
    number = runtime.global_runtime_device_count()
    assert accelerator.device == torch_xla.device()
    assert accelerator.distributed_type == DistributedType.XLA == DistributedType.TPU
    assert (accelerator.num_processes, accelerator.strategy.spec.name) == (1, "xla")
    for parameter, held in zip(
        model.parameters(), optimizer.param_groups[0]["params"], strict=True
    ):
        assert parameter is held
        assert parameter.device.type == "xla"
    inputs, targets = next(iter(loader))
    shardings = [sharding(one) for one in (inputs, targets)]
    assert shardings == (["{devices=[2,1]0,1}", "{devices=[2]0,1}"] if number == 2 else ["", ""])
    seen = []

    def loss_fn(model: torch.nn.Module, batch: Sample) -> torch.Tensor:
        seen.append(sharding(batch.inputs))
        return model(batch.inputs).sum()

    accelerator.forward_backward(model, [Sample(torch.ones(4, 8))], loss_fn)
    assert seen == shardings[:1]


def sharding(tensor: torch.Tensor) -> str:
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def test_weights_and_optimizer_state_are_sharded(tmp_path: Path) -> None:
    """Also after a checkpoint is loaded; the next step is that of the run that wrote it."""
    accelerator = Accelerator(strategy_plugins=[XlaPlugin(shard_weights=True)])
    prepared = accelerator.prepare(*parts())
    model, optimizer, *_ = prepared
    several = runtime.global_runtime_device_count() == 2
    train(accelerator, prepared, 1)
    accelerator.save_state(str(tmp_path))
    rest = torch.stack(train(accelerator, prepared, 1)).cpu()
    accelerator.load_state(str(tmp_path))
    for parameter in model.parameters():
        whole = "{devices=[2,1]0,1}" if parameter.dim() == 2 else "{devices=[2]0,1}"
        moments = optimizer.state[parameter]["exp_avg"]
        assert (sharding(parameter), sharding(moments)) == ((whole, whole) if several else ("", ""))
    assert torch.equal(torch.stack(train(accelerator, prepared, 1)).cpu(), rest)


def test_a_step_waits_for_no_value_and_is_compiled_once() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    prepared = accelerator.prepare(*parts(samples=48))
    train(accelerator, prepared, 2)  # the first steps make the optimizer's state
    torch_xla.sync(wait=True)
    metrics.clear_all()
    train(accelerator, prepared, 4)
    torch_xla.sync(wait=True)
    assert metrics.metric_data(COMPILED) is None
    assert metrics.metric_data(TRANSFERS) is None
    assert not [name for name in metrics.counter_names() if name.startswith("aten::")]


def test_two_models_train_on_each_others_outputs() -> None:
    """As adversarial training does: what one computes is no batch of the other."""

    def losses(accelerator: Accelerator) -> torch.Tensor:
        torch.manual_seed(0)
        first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        optimizers = [torch.optim.Adam(one.parameters()) for one in (first, second)]
        first, second, *optimizers, loader = accelerator.prepare(
            first, second, *optimizers, DataLoader(data(24), 8)
        )
        found = []
        for inputs, targets in loader:
            made = first(inputs)
            for hidden, optimizer in ((made.detach(), optimizers[1]), (made, optimizers[0])):
                loss = torch.nn.functional.cross_entropy(second(hidden.t().contiguous()), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        return torch.stack(found).cpu()

    found = losses(Accelerator())
    reset_accel()
    wanted = losses(Accelerator(cpu=True))
    assert ((found - wanted).abs() / wanted).max() <= CLOSE


def test_bf16_computes_forward_passes_in_bf16() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    prepared = accelerator.prepare(*parts())
    formats = []
    inner = accelerator.unwrap_model(prepared[0])[0]
    inner.register_forward_hook(lambda _, __, output: formats.append(output.dtype))
    losses = torch.stack(train(accelerator, prepared, 3)).cpu()
    wanted, _ = plain(3, 1)
    assert set(formats) == {torch.bfloat16}
    assert losses.dtype == torch.float32
    assert 1e-6 < ((losses - wanted).abs() / wanted).max() <= 2e-2


@pytest.mark.parametrize("first", ["xla", "cpu"])
def test_a_checkpoint_goes_on_on_another_device(tmp_path: Path, first: str) -> None:
    """Weights and optimizer state are exact; the steps that follow are those of the other run."""
    accelerator = Accelerator(cpu=first == "cpu")
    prepared = accelerator.prepare(*parts())
    train(accelerator, prepared, 1)
    accelerator.save_state(str(tmp_path))
    state = {k: v.clone() for k, v in accelerator.get_state_dict(prepared[0]).items()}
    moments = [one["exp_avg"].cpu().clone() for one in prepared[1].state.values()]
    rest = torch.stack(train(accelerator, prepared, 1)).cpu()
    reset_accel()

    accelerator = Accelerator(cpu=first != "cpu")
    prepared = accelerator.prepare(*parts())
    with pytest.warns(UserWarning, match="random state was saved on"):
        accelerator.load_state(str(tmp_path))
    loaded = accelerator.get_state_dict(prepared[0])
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    found = [one["exp_avg"].cpu() for one in prepared[1].state.values()]
    assert all(torch.equal(one, other) for one, other in zip(found, moments, strict=True))
    again = torch.stack(train(accelerator, prepared, 1)).cpu()
    assert ((again - rest).abs() / rest).max() <= CLOSE


def test_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    accelerator = Accelerator(rng_types=["xla"])
    set_seed(7)
    prepared = accelerator.prepare(*parts(dropout=0.5))
    train(accelerator, prepared, 1)
    accelerator.save_state(str(tmp_path))
    rest = torch.stack(train(accelerator, prepared, 1)).cpu()
    accelerator.load_state(str(tmp_path))
    assert torch.equal(torch.stack(train(accelerator, prepared, 1)).cpu(), rest)


def test_a_seed_decides_draws_on_the_device() -> None:
    device = Accelerator().device
    draws = []
    for seed in (3, 3, 4):
        set_seed(seed)
        draws.append(torch.rand(8, device=device).cpu())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    prepared = accelerator.prepare(model)
    assert prepared["b"].weight is prepared["a"].weight
    state = accelerator.get_state_dict(prepared)
    assert state["a.weight"].device.type == "cpu"
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    accelerator.save_model(prepared, str(tmp_path))
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


def test_an_evaluation_counts_each_sample_once() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=4))
    gathered = [accelerator.gather_for_metrics(batch).cpu() for batch in loader]
    assert torch.cat(gathered).tolist() == list(range(11))
    assert accelerator.reduce(torch.ones(2, device=accelerator.device)).tolist() == [1, 1]


def test_what_it_cannot_do_is_refused() -> None:
    for arguments, message in (
        ({"mixed_precision": "fp16"}, "mixed_precision='fp16' on xla.*bf16"),
        ({"dynamo_backend": "inductor"}, "torch.compile on xla"),
    ):
        with pytest.raises(ConfigError, match=message):
            Accelerator(**arguments)
    with pytest.raises(ConfigError, match="XlaPlugin on cpu"):
        Accelerator(cpu=True, strategy_plugins=[XlaPlugin(shard_weights=True)])
    with pytest.raises(ConfigError, match=r"num_processes=8.*this machine has 1"):
        notebook_launcher(print, num_processes=8)
    with pytest.raises(ConfigError, match="torch_xla places models by itself"):
        infer_auto_device_map(torch.nn.Linear(2, 2))


def test_a_notebook_trains_in_its_own_process() -> None:
    found: list[Accelerator] = []
    notebook_launcher(lambda: found.append(Accelerator()))
    assert found[0].device == torch_xla.device()


def test_a_launched_script_is_on_the_device(tmp_path: Path) -> None:
    script = write_file(tmp_path / "train.py", "import accel; print(accel.Accelerator().device)")
    answer = ran(python("-m", "accel.commands", "launch", "--tpu", str(script)), tmp_path)
    assert answer.stdout.splitlines()[-1] == "xla:0", answer.stderr


def test_processes_of_torch_xla_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would train alone."""
    monkeypatch.delenv("XLA_USE_SPMD", raising=False)
    text = """
        import torch_xla
        from accel import Accelerator
        def train(index):
            Accelerator()
        if __name__ == "__main__":
            torch_xla.launch(train)
    """
    script = write_file(tmp_path / "train.py", textwrap.dedent(text))
    answer = ran(python(str(script)), tmp_path)
    refused = "one process drives all devices of its machine"
    assert (refused in answer.stderr) == (runtime.global_runtime_device_count() > 1)
