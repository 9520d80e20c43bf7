"""Which layers compute in fp8 by default, and what is said of the others (E5)."""

from __future__ import annotations

import itertools

import pytest
import torch

from accel.machine.errors import ConfigError
from accel.precision.fp8 import choose_layers, heads


class Tied(torch.nn.Module):
    """[B, T] tokens to [B, T, 64] logits; the head is neither the last layer nor called so."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32)
        self.to_logits = torch.nn.Linear(32, 64, bias=False)
        self.to_logits.weight = self.embedding.weight
        self.blocks = stack(32, 32, 32, 32, 32)


def stack(*sizes: int) -> torch.nn.Sequential:
    """Return linear layers from each size to the next."""
    pairs = itertools.pairwise(sizes)
    return torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in pairs))


def test_first_last_and_tied_head_stay() -> None:
    model = Tied()
    assert list(heads(model)) == [model.to_logits]
    # The head is the first of all: no other layer is left out for being that.
    assert list(choose_layers(model)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_heads_by_name_and_by_the_models_word() -> None:
    model = stack(16, 16, 16, 16, 16)
    model.lm_head = torch.nn.Linear(16, 16)
    model.tail = torch.nn.Linear(16, 16)
    assert list(choose_layers(model)) == ["1", "2", "3"]
    model.get_output_embeddings = lambda: model[2]  # type: ignore[assignment]
    assert list(choose_layers(model)) == ["1", "3"]


def test_sizes_that_are_no_multiples_of_16_stay_and_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = choose_layers(stack(16, 32, 40, 32, 48, 16))
    assert list(found) == ["3"]
    assert "no multiples of 16: 1 (40 × 32), 2 (32 × 40)." in caplog.text


def test_a_model_without_a_layer_for_fp8_is_refused_unless_it_is_only_evaluated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remedy = r"precision\.fp8_torchao\.module_filter_func=my_module\.wanted"
    with pytest.raises(ConfigError, match=rf"no layer would compute in fp8.*{remedy}"):
        choose_layers(stack(16, 16, 16))
    choose_layers(stack(16, 16, 16), evaluation=True)
    assert "no layer of Sequential is converted" in caplog.text
    caplog.clear()
    assert not choose_layers(stack(16, 16, 16), done=torch.nn.Linear)  # it is already
    assert not caplog.text


def test_a_dispatched_model_is_refused() -> None:
    from accel.big_modeling import cpu_offload

    model = cpu_offload(stack(16, 16, 16, 16), execution_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="hooks at its layers"):
        choose_layers(model)
