"""E3, E5: layers that are frozen, unfrozen or added after `prepare` train as in a plain loop.

Under DDP the model is prepared again after each change; without that, the next forward raises.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.tensor import DTensor

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.machine.errors import ConfigError
from tests.accel.strategies.training import build
from tests.helpers import reset_accel, run_distributed

WIDTH, BATCH, MICRO_BATCHES = 4, 6, 16
CLOSE = 1e-4  # of weights near 1, in fp32


class Net(torch.nn.Module):
    """An encoder that is frozen at first, and two layers that are trained."""

    _tp_plan: ClassVar = {"encoder": "colwise_rep", "body": "colwise_rep"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.body = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.body(torch.tanh(self.encoder(inputs)))))


class Grown(torch.nn.Module):
    """A layer that ranks draw differently, over another that is not trained."""

    def __init__(self, inner: torch.nn.Module, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.inner = inner
        self.fixed = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.extra = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.extra(self.fixed(self.inner(inputs)))


def changes(grows: bool, rank: int = 0) -> dict[int, Any]:
    """Return the changes of a model, by micro-batch: between windows of two."""

    def unfreeze(model: Any, optimizer: Any) -> None:
        model.encoder.requires_grad_(True)
        optimizer.add_param_group({"params": model.encoder.parameters(), "lr": 0.05})

    def freeze(model: Any, optimizer: Any) -> None:
        model.body.requires_grad_(False)

    def grow(model: Any, optimizer: Any) -> None:
        model.norm = Grown(model.norm, rank)
        optimizer.add_param_group({"params": model.norm.extra.parameters()})

    def thaw(model: Any, optimizer: Any) -> None:
        model.requires_grad_(True)

    found = {4: unfreeze, 8: freeze, 12: thaw}
    return found | {10: grow} if grows else found


def inputs_of(index: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(index))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs * torch.arange(1.0, WIDTH + 1)).square().mean()


def plain(grows: bool, accumulation: int) -> dict[str, torch.Tensor]:
    model = Net()
    optimizer = sgd(model)
    for index in range(MICRO_BATCHES):
        changes(grows).get(index, lambda *_: None)(model, optimizer)
        (loss_of(model(inputs_of(index))) / accumulation).backward()
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(engines: dict[str, Any], grows: bool, accumulation: int) -> dict[str, torch.Tensor]:
    """Train on this rank's part of each micro-batch; return the weights, equal on all ranks."""
    accelerator = build(**engines, gradient_accumulation_steps=accumulation)
    model = Net()
    optimizer = sgd(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, size = accelerator.parallel_dims.dp_rank, accelerator.parallel_dims.dp_size
    own = accelerator.unwrap_model(model)
    schedule = changes(grows, accelerator.process_index)
    for index in range(MICRO_BATCHES):
        if index in schedule:
            schedule[index](own, optimizer)
            assert accelerator.prepare(model) is model
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(inputs_of(index)[rank::size])))
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    flat = torch.cat([value.flatten() for value in weights.values()])
    accelerator = Accelerator(cpu=True)
    every = accelerator.gather(flat.unsqueeze(0))
    assert torch.equal(every, flat.expand_as(every)), "ranks drifted apart"
    accelerator.end_training()
    reset_accel()
    return weights


def check(engines: dict[str, Any], grows: bool) -> None:
    for accumulation in (1, 2):
        expected = plain(grows, accumulation)
        found = trained(engines, grows, accumulation)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            apart = (found[name] - value).abs().max()
            assert apart < CLOSE, (accumulation, name, apart)


def test_one_process_trains_what_is_unfrozen() -> None:
    check({}, True)


@pytest.mark.parametrize("engines", [{"fsdp": {}}, {"tp": {"tp_size": 2}}])
def test_sharded_models_train_what_is_unfrozen(engines: dict[str, Any]) -> None:
    run_distributed(check, 2, engines, False)


def ones_and_threes(accelerator: Accelerator) -> torch.Tensor:
    """Inputs whose average over two ranks is 2."""
    return torch.full((1, WIDTH), 1.0 + 2 * accelerator.process_index)


def raises_until_prepared_again() -> None:
    accelerator = Accelerator(cpu=True)
    net = Net()
    model = accelerator.prepare(net)
    for layer, trains in ((net.encoder, True), (net.body, False)):
        layer.requires_grad_(trains)
        with pytest.raises(ConfigError, match=r"Net: .* model = accelerator\.prepare\(model\)"):
            model(ones_and_threes(accelerator))
        with torch.no_grad():
            model(ones_and_threes(accelerator))
        model = accelerator.prepare(model)
        model(ones_and_threes(accelerator)).sum().backward()
    accelerator.end_training()
    net.requires_grad_(True)
    model(ones_and_threes(Accelerator(cpu=True))).sum().backward()  # no group: nothing to average


def refused_within_a_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(Net())
    with accelerator.accumulate(model):
        model(ones_and_threes(accelerator)).sum().backward()
    model.module.encoder.requires_grad_(True)
    with pytest.raises(ConfigError, match="between two optimizer steps"):
        accelerator.prepare(model)
    accelerator.end_training()


def wrapped_by_the_user() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.parallel.DistributedDataParallel(Net()))
    model.module.encoder.requires_grad_(True)
    with pytest.raises(ConfigError, match="you wrapped it in DistributedDataParallel"):
        accelerator.prepare(model)
    accelerator.end_training()


def frozen_at_prepare() -> None:
    accelerator = Accelerator(cpu=True)
    net = Net().requires_grad_(False)
    model = accelerator.prepare(net)
    model(ones_and_threes(accelerator))
    net.body.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"Net: .* accelerator\.prepare\(model\)"):
        model(ones_and_threes(accelerator))
    model = accelerator.prepare(model)
    assert type(model).__name__ == "DistributedDataParallel"
    model(ones_and_threes(accelerator)).square().sum().backward()
    assert torch.equal(*accelerator.gather(net.body.weight.grad[None]))
    accelerator.end_training()


def toggled() -> None:
    """A discriminator that is frozen as a whole for its generator's step needs nothing."""
    accelerator = Accelerator(cpu=True)
    generator, discriminator = accelerator.prepare(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
    )
    found = []
    for _ in range(3):
        for trains in (True, False):
            discriminator.requires_grad_(trains)
            fake = generator(ones_and_threes(accelerator))
            discriminator(fake.detach() if trains else fake).sum().backward()
            trained = discriminator if trains else generator
            found.append(trained.module.weight.grad.clone())
            trained.zero_grad()
    every = accelerator.gather(torch.cat([gradient.flatten() for gradient in found])[None])
    assert torch.equal(every[0], every[1])
    accelerator.end_training()


def evaluated() -> None:
    accelerator = Accelerator(cpu=True)
    judge = accelerator.prepare_model(Net(), evaluation_mode=True)
    judge(ones_and_threes(accelerator)).sum().backward()
    with pytest.raises(ConfigError, match="prepare: 4 parameters of an optimizer, of a model prep"):
        accelerator.prepare_optimizer(torch.optim.SGD(judge.parameters(), lr=0.1))
    net = Net()
    _, optimizer = accelerator.prepare(net, sgd(net))
    with pytest.raises(ConfigError, match="add_param_group: 1 parameters of no model"):
        optimizer.add_param_group({"params": torch.nn.Parameter(torch.zeros(1))})
    accelerator.end_training()


CASES = [
    *(raises_until_prepared_again, refused_within_a_window, wrapped_by_the_user),
    *(frozen_at_prepare, toggled, evaluated),
]


@pytest.mark.parametrize("case", CASES)
def test_ddp_knows_what_trains(case: Any) -> None:
    run_distributed(case, 2)


def added_to_shards() -> None:
    accelerator = build(fsdp={"reshard_after_forward": False})
    net = Net()
    before = list(net.encoder.parameters())
    model, optimizer = accelerator.prepare(net, sgd(net))
    model.encoder.requires_grad_(True)
    model(inputs_of(0)).sum()  # leaves gathered copies behind
    optimizer.add_param_group({"params": model.encoder.parameters(), "weight_decay": 0.0})
    model.reshard()
    shards = list(model.encoder.parameters())
    assert all(a is b for a, b in zip(optimizer.param_groups[1]["params"], shards, strict=True))
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": before})  # as they were before prepare
    assert all(a is b for a, b in zip(optimizer.param_groups[1]["params"], shards, strict=True))
    model.norm = torch.nn.LayerNorm(WIDTH)
    with pytest.raises(ConfigError, match="add_param_group: 2 parameters that no model had"):
        optimizer.add_param_group({"params": model.norm.parameters()})
    accelerator.end_training()


def test_parameters_are_added_as_shards_or_refused() -> None:
    run_distributed(added_to_shards, 2)


def steps_under_zero(stage: int, precision: str, folder: str) -> None:
    def start(unfrozen: bool) -> tuple[Any, ...]:
        reset_accel()
        plugin = DeepSpeedPlugin(zero_stage=stage)
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision=precision)
        net = Net()
        net.encoder.requires_grad_(unfrozen)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        return accelerator, *accelerator.prepare(net, optimizer)

    def step(accelerator: Any, model: Any, optimizer: Any) -> Any:
        accelerator.backward(model(inputs_of(accelerator.process_index)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        return accelerator.get_state_dict(model)

    run = accelerator, model, optimizer = start(unfrozen=False)
    first = step(*run)
    for layer, trains in ((model.module.encoder, True), (model.module.body, False)):
        layer.requires_grad_(trains)
        with pytest.raises(ConfigError, match="DeepSpeed: its engine steps the parameters"):
            step(*run)
        layer.requires_grad_(not trains)
    with pytest.raises(ConfigError, match="add_param_group under DeepSpeed"):
        optimizer.add_param_group({"params": model.module.encoder.parameters()})
    accelerator.save_state(folder)
    accelerator.end_training()
    run = accelerator, model, optimizer = start(unfrozen=True)  # what the message says
    accelerator.load_state(folder)
    second = step(*run)
    assert not any(torch.equal(second[name], first[name]) for name in first)
    accelerator.end_training()


@pytest.mark.parametrize(("stage", "precision"), [(1, "no"), (3, "bf16")])
def test_zero_refuses_to_leave_layers_behind(stage: int, precision: str, tmp_path: Any) -> None:
    run_distributed(steps_under_zero, 2, stage, precision, str(tmp_path))


UNITS: dict[str, Any] = {"transformer_cls_names_to_wrap": ["Linear"]}


def shards_change(precision: str, plugin: dict[str, Any], shift: int) -> None:
    """Compare with a plain loop; layers change `shift` micro-batches into a window of two."""
    accelerator = build(fsdp=plugin, mixed_precision=precision, gradient_accumulation_steps=2)
    plain, model = Net(), Net()
    reference = sgd(plain)
    model, optimizer = accelerator.prepare(model, sgd(model))
    rank, size = accelerator.process_index, accelerator.num_processes
    schedule = changes(grows=False)
    for index in range(MICRO_BATCHES):
        change = schedule.get(index - shift, lambda *_: None)
        change(plain, reference)
        change(model, optimizer)
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(inputs_of(index)[rank::size])))
            for parameter in model.parameters():
                grad = parameter.grad
                assert grad is None or not isinstance(grad, DTensor) or grad.dtype == torch.float32
            optimizer.step()
            optimizer.zero_grad()
        (loss_of(plain(inputs_of(index))) / 2).backward()
        if index % 2:
            reference.step()
            reference.zero_grad()
            for name, parameter in model.named_parameters():
                assert parameter.requires_grad is plain.get_parameter(name).requires_grad, name
    found = accelerator.get_state_dict(model)
    close = CLOSE if precision == "no" else 0.05
    for name, value in plain.state_dict().items():
        assert (found[name] - value).abs().max() < close, name
    accelerator.end_training()


@pytest.mark.parametrize(
    ("precision", "plugin", "shift"),
    [("bf16", UNITS, 0), ("no", {}, 1), ("no", UNITS, 1), ("bf16", UNITS, 1)],
)
def test_shards_train_what_is_unfrozen_between_steps_and_within_a_window(
    precision: str, plugin: dict[str, Any], shift: int
) -> None:
    """E3, E5: layers stay frozen or not when they are resharded; gradients are reduced in fp32."""
    run_distributed(shards_change, 2, precision, plugin, shift)
