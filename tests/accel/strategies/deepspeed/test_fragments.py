"""Where ZeRO keeps weights and state: without a second copy, changed by hand, and on disk.

DeepSpeed's asynchronous I/O is compiled at the first use on a machine (minutes), into the folder
that torch has for such ops: a slow test does it, and others use it.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.strategies.deepspeed import initialize
from tests import commands
from tests.accel.strategies.deepspeed.helpers import (
    GLOBAL_BATCH,
    adamw,
    build,
    data,
    error_of,
    largest,
    own,
    started,
)
from tests.helpers import ROOT, run_distributed


def steps_the_weights_themselves(fields: dict[str, Any], precision: str, shared: bool) -> None:
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(**fields), mixed_precision=precision
    )
    model = build()
    model[3].bias.requires_grad_(False)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), data(4))
    held = {p.ds_tensor.untyped_storage().data_ptr() for p in model.parameters()}
    flats = model.optimizer.fp32_partitioned_groups_flat
    assert len(flats) >= 2
    assert {flat.untyped_storage().data_ptr() in held for flat in flats} == {shared}
    bytes_of = accelerator.strategy.state.footprint([model], [optimizer])
    inputs, targets = next(iter(loader))
    before = accelerator.get_state_dict(model)
    accelerator.backward(error_of(model(inputs), targets))
    optimizer.step()
    assert {flat.untyped_storage().data_ptr() in held for flat in flats} == {shared}
    moments = sum(2 * flat.nbytes + 4 for flat in flats)
    assert bytes_of.optimizer_state == moments + (0 if shared else sum(f.nbytes for f in flats))
    kept = [p for p in model.parameters() if p.ds_persist]  # whole after a pass
    assert sum(p.nbytes for p in kept) == sum(p.ds_numel * p.element_size() for p in kept)
    parts = sum(p.ds_tensor.nbytes for p in model.parameters())
    assert bytes_of.parameters == parts + sum(p.nbytes for p in kept)
    assert bool(kept) == ("zero_stage" in fields)
    after = accelerator.get_state_dict(model)
    assert largest(after, before) > 0
    accelerator.unwrap_model(model)
    with accelerator.strategy.package.zero.GatheredParameters(list(model.parameters())):
        gathered = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    assert largest(gathered, after) < (1e-9 if precision == "no" else 1e-2)
    accelerator.end_training()


def weights_and_copies() -> None:
    one = {"stage3_param_persistence_threshold": 0, "sub_group_size": 20, "stage": 3}
    for options in ({"zero_stage": 3}, {"hf_ds_config": {"zero_optimization": one}}):
        steps_the_weights_themselves(options, "no", shared=True)
    steps_the_weights_themselves({"zero_stage": 3}, "bf16", shared=False)


def test_stage_3_in_fp32_keeps_no_second_copy_of_the_weights() -> None:
    run_distributed(weights_and_copies, 2)


# -- manual changes --------------------------------------------------------------------------


def scales_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def scales_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def scales_gathered(model: torch.nn.Module) -> None:
    import deepspeed

    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        if torch.distributed.get_rank() == 0:
            for parameter in parameters:
                parameter.mul_(0.5)


def sets_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def loads(model: torch.nn.Module) -> None:
    state = {name: value * 0.5 for name, value in accelerator_state(model).items()}
    model.accel_test.strategy.state.load_model_state(model, state)


def accelerator_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.accel_test.get_state_dict(model))


def told_of_changes(stage: int, precision: str, change: Any, steps: int = 3) -> list[str]:
    accelerator, model, optimizer = started(precision, zero_stage=stage)
    model.accel_test = accelerator
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs, targets in data(GLOBAL_BATCH, steps=steps):
            inputs, targets = own(accelerator, inputs), own(accelerator, targets)
            accelerator.backward(error_of(model(inputs), targets))
            if change is not None:
                change(model)
            optimizer.step()
            optimizer.zero_grad()
    del model.accel_test
    accelerator.end_training()
    return [str(w.message) for w in caught if "under DeepSpeed's ZeRO" in str(w.message)]


def changes_by_hand() -> None:
    for stage, precision in ((1, "no"), (2, "bf16"), (0, "bf16")):
        for change in (scales_in_place, scales_data):
            told = told_of_changes(stage, precision, change)
            assert len(told) == 1, (stage, precision, change)
            assert "weights that were changed by hand since the last step" in told[0]
        for change in (None, loads):
            assert told_of_changes(stage, precision, change) == [], (stage, precision, change)
    (told_once,) = told_of_changes(2, "no", sets_gradients)
    assert "gradients that were set in parameter.grad" in told_once
    assert told_of_changes(0, "no", scales_in_place) == []  # which hold
    for precision in ("no", "bf16"):  # of stage 3, whose parameters are place holders
        for change in (None, loads):
            assert told_of_changes(3, precision, change) == [], (precision, change)
        assert len(told_of_changes(3, precision, scales_in_place)) == 1, precision
    assert told_of_changes(3, "no", scales_gathered) == []  # which holds
    assert len(told_of_changes(3, "bf16", scales_gathered)) == (int(os.environ["RANK"]) == 0)


@pytest.mark.slow
def test_changes_by_hand_that_a_step_overwrites_are_told_of() -> None:
    run_distributed(changes_by_hand, 2)


# -- on disk ---------------------------------------------------------------------------------


NUM_STEPS = 3


WIDTH = 1024  # DeepSpeed leaves what is smaller than 1 MiB per process in memory


OP = "AsyncIOBuilder"


UNABLE = "libaio's development files are not installed (Debian: libaio-dev)"


def asks(question: str) -> bool:
    """The answer of a process of its own, as deepspeed is imported for it."""
    code = (
        "import torch\nfrom accel.strategies.deepspeed import initialize\n"
        "known = initialize.import_deepspeed(torch.device('cpu'))\n"
        f"raise SystemExit(not ({question}))"
    )
    return commands.run("-c", code, cwd=ROOT, environment=os.environ).returncode == 0


@pytest.fixture(scope="module")
def compiled() -> None:
    """The op, where it was compiled on this machine before."""
    if not asks(f"initialize.can_build_op(known, {OP!r})"):
        pytest.skip(UNABLE)
    if not asks(f"initialize.is_op_built(known, {OP!r})"):
        pytest.skip("DeepSpeed's asynchronous I/O is not compiled yet: make test ARGS='-m slow'")


def build_op() -> None:
    initialize.build_op(initialize.import_deepspeed(torch.device("cpu")), OP)


@pytest.mark.long
@pytest.mark.timeout(1900)
def test_the_op_is_compiled_once_and_used(tmp_path: Path) -> None:
    if not asks(f"initialize.can_build_op(known, {OP!r})"):
        pytest.skip(UNABLE)
    run_distributed(build_op, 2, timeout=1800)
    assert asks(f"initialize.is_op_built(known, {OP!r})")
    run_distributed(trains_on_disk, 2, str(tmp_path))


def build_wide() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(512, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 512)
    )


def started_on(folder: Path | None) -> tuple[Any, ...]:
    """Accelerator, model and optimizer under ZeRO-3, in memory or on disk."""
    on_disk = {}
    for what in ("optimizer", "param") if folder is not None else ():
        on_disk |= {f"offload_{what}_device": "nvme", f"offload_{what}_nvme_path": str(folder)}
    plugin = DeepSpeedPlugin(zero_stage=3, **on_disk)  # type: ignore[arg-type]
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    model = build_wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (accelerator, *accelerator.prepare(model, optimizer))


def step(accelerator: Any, model: Any, optimizer: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(4 * accelerator.num_processes, 512, generator=generator)
    own = inputs[accelerator.process_index :: accelerator.num_processes]
    loss = (model(own) - own).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), "mean"))


def trains_on_disk(folder: str) -> None:
    """Losses, weights and states agree; files lie where they were asked for."""
    root = Path(folder)
    accelerator, model, optimizer = started_on(None)
    losses = [step(accelerator, model, optimizer, number) for number in range(NUM_STEPS)]
    weights = accelerator.get_state_dict(model)
    accelerator.save_state(root / "in_memory")
    after = step(accelerator, model, optimizer, NUM_STEPS)
    accelerator.end_training()

    accelerator, model, optimizer = started_on(root / "swap")
    found = [step(accelerator, model, optimizer, number) for number in range(NUM_STEPS)]
    assert found == pytest.approx(losses, rel=1e-5)
    state = accelerator.get_state_dict(model)
    assert max((state[n] - weights[n]).abs().max().item() for n in weights) < 1e-5
    held = [p.ds_tensor for p in model.parameters() if len(p.ds_shape) > 1]
    assert [tensor.final_location.value for tensor in held] == ["nvme", "nvme"]
    rank = accelerator.process_index
    files = {path.name: path.stat().st_size for path in (root / "swap").rglob(f"*rank{rank}/*.swp")}
    per_rank = 4 * 512 * WIDTH // accelerator.num_processes
    assert sum(name.endswith("_param.tensor.swp") for name in files) == 2
    assert [size >= 2 * per_rank for name, size in files.items() if "exp_avg" in name] == [True] * 2
    accelerator.save_state(root / "on_disk")
    assert step(accelerator, model, optimizer, NUM_STEPS) == pytest.approx(after, rel=1e-5)

    for source in ("in_memory", "on_disk"):
        accelerator.load_state(root / source)
        assert step(accelerator, model, optimizer, NUM_STEPS) == pytest.approx(after, rel=1e-5)
        again = step(accelerator, model, optimizer, NUM_STEPS + 1)
    accelerator.end_training()

    accelerator, model, optimizer = started_on(None)
    accelerator.load_state(root / "on_disk")
    assert step(accelerator, model, optimizer, NUM_STEPS) == pytest.approx(after, rel=1e-5)
    assert step(accelerator, model, optimizer, NUM_STEPS + 1) == pytest.approx(again, rel=1e-5)
    accelerator.end_training()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
def test_parameters_and_optimizer_state_rest_on_disk(tmp_path: Path) -> None:
    run_distributed(trains_on_disk, 2, str(tmp_path))
