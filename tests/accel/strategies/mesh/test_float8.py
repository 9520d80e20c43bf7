"""fp8 under FSDP2: gathered in bf16 or in fp8, scales that follow the weights, checkpoints (E3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.machine.errors import ConfigError
from accel.strategies.mesh.hooks import reshard
from accel.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, TorchTensorParallelPlugin
from tests.accel.precision.float8 import (
    Net,
    batches,
    needs_torchao,
    network,
    optimizer_of,
    resume,
    train,
)
from tests.helpers import run_distributed

pytestmark = needs_torchao
GATHERED = {"enable_fsdp_float8_all_gather": True}


def gathered(change: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the scales that the weights are gathered with, and those of the weights."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        kwargs_handlers=[AORecipeKwargs(**GATHERED)],
        fsdp_plugin=FullyShardedDataParallelPlugin(),
    )
    model = network()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    for batch in batches(accelerator.process_index, 2):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    layers = [model.inside[0], model.inside[2]]
    if change == "load":
        state = {name: 2 * tensor for name, tensor in network().state_dict().items()}
        accelerator.strategy.state.load_model_state(model, state)
        assert all(layer.weight._local_tensor._precomputed_scale is None for layer in layers)
    elif change == "data":  # of which no counter of versions tells
        for layer in layers:
            layer.weight.data.mul_(4)
    model(batches(0, 1)[0])
    reshard(model)
    scales = [layer.weight._local_tensor._precomputed_scale.clone() for layer in layers]
    full = accelerator.get_state_dict(model)
    wanted = [
        torch.finfo(torch.float8_e4m3fn).max / full[f"inside.{index}.weight"].abs().max()
        for index in (0, 2)
    ]
    accelerator.end_training()
    return scales, wanted


@pytest.mark.parametrize("change", ["step", "load", "data"])
def test_scales_are_those_of_the_weights(change: str) -> None:
    for scales, wanted in run_distributed(gathered, 2, change):
        torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0)


def from_rank0() -> dict[str, torch.Tensor]:
    """Return the weights of a model that rank 0 alone had weights of."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp8",
        kwargs_handlers=[AORecipeKwargs(**GATHERED)],
        fsdp_plugin=FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True),
    )
    with accelerator.strategy.init_context():
        model = Net() if accelerator.process_index else network()
    model = accelerator.prepare(model)
    model(batches(0, 1)[0])
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return weights


def test_weights_of_rank_0_on_the_meta_device() -> None:
    for weights in run_distributed(from_rank0, 2):
        for name, tensor in network().state_dict().items():
            assert torch.equal(weights[name], tensor)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_state_goes_from_fp8_to_fp32_and_back(tmp_path: Any, kind: str) -> None:
    plugin = {"state_dict_type": kind}
    (_, weights), _ = run_distributed(train, 2, GATHERED, plugin, str(tmp_path))
    exact, again = resume(str(tmp_path), None), resume(str(tmp_path), {})
    (sharded, _) = run_distributed(resume, 2, str(tmp_path), GATHERED, plugin)
    for name, tensor in weights.items():
        assert all(torch.equal(found[name], tensor) for found in (exact, again, sharded))
    # The scales of the gathered weights are those of the loaded ones: else the answer would be off.
    torch.testing.assert_close(sharded["answer"], again["answer"], rtol=0.1, atol=0.05)
    torch.testing.assert_close(exact["answer"], again["answer"], rtol=0.1, atol=0.1)


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match="mixed_precision='fp8' with tensor parallelism"):
        Accelerator(cpu=True, mixed_precision="fp8", torch_tp_plugin=TorchTensorParallelPlugin())
