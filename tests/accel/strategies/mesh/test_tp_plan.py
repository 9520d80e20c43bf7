"""Plans: which modules they name, and those that models bring along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from accel.config.tensor_parallel import SUMMED
from accel.errors import ConfigError
from accel.strategies.mesh.tp_plan import resolve_plan
from tests.accel.strategies.training import Model, build, largest, plain, train
from tests.helpers import run_distributed

CLOSE = 1e-5


def test_patterns_name_modules_and_whole_parameters() -> None:
    split = resolve_plan(Model(), {"blocks.*.up": "colwise", "blocks.1": SUMMED, "shift": SUMMED})
    assert list(split.styles) == ["blocks.0.up", "blocks.1.up"]
    assert all(isinstance(style, ColwiseParallel) for style in split.styles.values())
    own = {name for name, _ in Model().blocks[1].named_parameters(prefix="blocks.1")}
    assert set(split.summed) == {*own, "shift"}
    with pytest.raises(ConfigError, match=r"'shift'\]: no module of the model"):
        resolve_plan(Model(), {"shift": "colwise"})


def check_compiled() -> None:
    accelerator = build(tp={"tp_size": 2})
    inner = Model()
    inner.blocks[0] = torch.compile(inner.blocks[0], backend="eager")
    model: Any = torch.compile(inner, backend="eager")
    with pytest.raises(ConfigError, match=r"Did you mean 'blocks.0.up'"):
        resolve_plan(model, {"blocks.0.upp": "colwise"})
    losses, _, _ = train(accelerator, model)
    assert largest(losses, plain(Model())[0]) < CLOSE
    split = {name for name, value in model.named_parameters() if isinstance(value, DTensor)}
    assert "_orig_mod.blocks.0._orig_mod.up.weight" in split
    assert "_orig_mod.blocks.1.down.weight" in split


def test_a_model_compiled_before_is_split() -> None:
    run_distributed(check_compiled, 2)


def llama(tied: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def losses_of(model: Any, optimizer: Any, backward: Any) -> list[float]:
    tokens = torch.arange(12).reshape(2, 6)
    losses = []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_llama() -> None:
    for tied in (False, True):
        own = llama(tied)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        expected = losses_of(own, optimizer, torch.Tensor.backward)
        accelerator = build(tp={"tp_size": 2})
        model = llama(tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert largest(losses_of(model, optimizer, accelerator.backward), expected) < CLOSE
        assert isinstance(model.get_parameter("lm_head.weight"), DTensor)
        assert isinstance(model.get_parameter("model.embed_tokens.weight"), DTensor)


@pytest.mark.slow  # each process imports transformers; plans with its names run in `test_tp.py`
def test_a_model_of_transformers_is_split_by_its_own_plan() -> None:
    pytest.importorskip("transformers")
    run_distributed(check_llama, 2)
