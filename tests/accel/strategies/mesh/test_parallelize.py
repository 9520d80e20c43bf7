"""Collectives, recomputed activations and compiled graphs of FSDP2, counted (E3)."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

from accel.config.training import GradientAccumulationPlugin
from tests.accel.strategies.training import Model, build, data, loss_of
from tests.helpers import run_distributed


def calls(accelerator: Any, model: Any, sync: bool) -> tuple[int, int]:
    """Return how often one pass gathers parameters and reduces gradients."""
    tokens = torch.zeros(2, 4, dtype=torch.long)
    with CommDebugMode() as mode, accelerator.accumulate(model, sync_gradients=sync):
        accelerator.backward(loss_of(model, tokens, tokens))
    counts = {str(name): count for name, count in mode.get_comm_counts().items()}
    gathers = sum(count for name, count in counts.items() if "allgather" in name)
    reduces = sum(count for name, count in counts.items() if "reduce_scatter" in name)
    return gathers, reduces


def check_collectives() -> None:
    # Three units: two blocks and what is around them, which stays gathered after its forward.
    for reshard, gathers in ((None, 5), (True, 6), (False, 3)):
        accelerator = build(fsdp={"reshard_after_forward": reshard}, gradient_accumulation_steps=3)
        model = accelerator.prepare(Model())
        assert calls(accelerator, model, True) == (gathers, 3), reshard
        # Gathered once, and kept through the passes without synchronization.
        assert calls(accelerator, model, False) == (3, 0), reshard
        assert calls(accelerator, model, False) == (0, 0), reshard
        # The last one's forward finds everything there, and frees what is to be freed.
        assert calls(accelerator, model, True) == (gathers - 3, 3), reshard
        assert calls(accelerator, model, True) == (gathers, 3), reshard
        accelerator.end_training()
    # The first forward of all may be one without synchronization.
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    for arguments, expected in (
        ({"gradient_accumulation_steps": 3}, [(3, 0), (0, 0), (2, 3), (5, 3)]),
        ({"gradient_accumulation_plugin": plugin}, [(5, 3)] * 4),  # memory over traffic
    ):
        accelerator = build(fsdp={}, **arguments)
        model = accelerator.prepare(Model())
        found = [calls(accelerator, model, sync) for sync in (False, False, True, True)]
        assert found == expected
        accelerator.end_training()


def test_collectives_of_a_step_are_those_of_its_units() -> None:
    run_distributed(check_collectives, 2)


def recomputed(plugin: dict[str, Any]) -> int:
    """Return how many activations a backward pass recomputes."""
    accelerator = build(fsdp=plugin)
    model = accelerator.prepare(Model())
    computed = []
    own = torch.nn.functional.gelu
    loss = loss_of(model, *data(1).tensors)
    torch.nn.functional.gelu = lambda hidden: (computed.append(hidden), own(hidden))[1]
    try:
        accelerator.backward(loss)
    finally:
        torch.nn.functional.gelu = own
    accelerator.end_training()
    return len(computed)


def gathers_ahead(plugin: dict[str, Any]) -> list[list[Any]]:
    """Return what each block lets be gathered while it computes."""
    accelerator = build(fsdp=plugin)
    model = accelerator.prepare(Model())
    states = [block._get_fsdp_state() for block in model.blocks]
    ahead = [[states.index(s) for s in state._states_to_forward_prefetch] for state in states]
    accelerator.end_training()
    return ahead


def check_switches() -> None:
    assert recomputed({"activation_checkpointing": True}) == 2  # one a block
    assert recomputed({}) == 0
    assert gathers_ahead({"forward_prefetch": True}) == [[1], []]
    assert gathers_ahead({}) == [[], []]


def test_activations_are_recomputed_and_units_gathered_ahead() -> None:
    run_distributed(check_switches, 2)
