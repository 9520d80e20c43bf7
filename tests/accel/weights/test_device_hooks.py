"""Hooks that move or convert a whole module (E4)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel.big_modeling import attach_layerwise_casting_hooks
from accel.hooks import LayerwiseCastingHook, add_hook_to_module, remove_hook_from_module
from tests.accel.weights.models import inputs, net


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def test_weights_are_stored_in_few_bits() -> None:
    module, plain = layer(), layer()
    hook = LayerwiseCastingHook(torch.float8_e4m3fn, torch.float64, non_blocking=False)
    add_hook_to_module(module, hook)
    assert module.weight.dtype == torch.float8_e4m3fn
    out = module(inputs())
    assert out.dtype == torch.float64
    assert module.weight.dtype == torch.float8_e4m3fn
    assert torch.allclose(out.float(), plain(inputs()), atol=0.2)
    remove_hook_from_module(module)
    assert module.weight.dtype == torch.float64


def test_conversions_may_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    to = nn.Module.to

    def spy(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
        given.append(kwargs["non_blocking"])
        return to(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", spy)
    add_hook_to_module(layer(), LayerwiseCastingHook(torch.float16, torch.float32, True))
    attach_layerwise_casting_hooks(layer(), torch.float16, torch.float32, non_blocking=True)
    assert given == [True, True]


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    parameters = (*model.named_parameters(), *model.named_buffers())
    return {name: one.dtype for name, one in parameters if one.is_floating_point()}


def test_layers_that_stand_it_are_cast() -> None:
    model = net()
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32)
    cast = {name for name, dtype in dtypes(model).items() if dtype == torch.float16}
    assert cast == {f"{n}.linear.{part}" for n in "01" for part in ("weight", "bias")}
    assert torch.allclose(model(inputs()), net()(inputs()), atol=1e-2)


def test_embeddings_and_what_is_tied_to_them_are_not_cast() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3))
    model[2].weight = model[0].weight
    tokens = torch.tensor([1])
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    expected = [torch.float32, torch.float8_e4m3fn, torch.float32]
    assert [layer.weight.dtype for layer in model] == expected
    assert torch.equal(model[0](tokens), model[0].weight[tokens])
    assert model(tokens).dtype == torch.float32


@pytest.mark.parametrize("pattern", [r"^0\.", (r"^0\.", "none")])
def test_modules_are_spared_by_name(pattern: str | tuple[str, ...]) -> None:
    model = net()
    attach_layerwise_casting_hooks(
        model, torch.float16, torch.float32, skip_modules_pattern=pattern
    )
    assert dtypes(model)["0.linear.weight"] == torch.float32
    assert dtypes(model)["1.linear.weight"] == torch.float16


def test_modules_are_spared_by_class() -> None:
    model = net()
    options = {"skip_modules_classes": (nn.Linear,)}
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32, **options)
    assert set(dtypes(model).values()) == {torch.float32}
