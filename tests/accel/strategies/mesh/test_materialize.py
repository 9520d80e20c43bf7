"""Models are materialized with the weights of rank 0, or their own (E3)."""

from __future__ import annotations

import pytest
import torch

from accel.machine.errors import ConfigError
from tests.accel.strategies.training import Model, assert_as_plain, build, difference
from tests.helpers import run_distributed


def check_loading() -> None:
    for plugin in ({"cpu_ram_efficient_loading": True}, {"dp_replicate_size": "all"}):
        accelerator = build(fsdp=plugin)
        if accelerator.is_main_process:
            model = Model()
        else:  # nothing is allocated here
            with torch.device("meta"):
                model = Model(seed=9)
        assert_as_plain(accelerator, model, Model())
        assert model.head.weight is model.embed.weight
        accelerator.end_training()
    # Without meta devices, all start from the weights of rank 0, too.
    accelerator = build(fsdp={})
    model = accelerator.prepare(Model(seed=accelerator.process_index))
    assert difference(accelerator.get_state_dict(model), Model().state_dict()) == 0.0
    accelerator.end_training()
    check_own_weights()
    check_nowhere()


def check_own_weights() -> None:
    accelerator = build(fsdp={"sync_module_states": False})
    rank, size = accelerator.process_index, accelerator.num_processes
    model = accelerator.prepare(Model(seed=rank))
    own = Model(seed=rank).embed.weight.chunk(size)[rank]
    assert torch.equal(model.embed.weight.to_local(), own)
    with torch.device("cpu" if rank == 0 else "meta"):
        other = Model()
    with pytest.raises(ConfigError, match=r"sync_module_states=False .* on ranks \[1\]"):
        accelerator.prepare(other)
    accelerator.end_training()


def check_nowhere() -> None:
    accelerator = build(fsdp={})
    with torch.device("meta"):
        model = Model()
    with pytest.raises(ConfigError, match="meta device on rank 0"):
        accelerator.prepare(model)
    accelerator.end_training()

    def init(module: torch.nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            torch.nn.init.constant_(tensor, 0.25)

    accelerator = build(fsdp={"param_init_fn": init})
    state = accelerator.get_state_dict(accelerator.prepare(model))
    assert all(bool((value == 0.25).all()) for value in state.values())
    accelerator.end_training()


def test_weights_come_from_rank_0() -> None:
    run_distributed(check_loading, 2)
