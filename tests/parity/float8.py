"""The matrix's model with layers in fp8, by torchao alone; nothing of the project is imported."""

from __future__ import annotations

import torch

# The layers that stay: the first, and the head, which is the last and tied to the embedding.
LEFT = ("blocks.0.attention.q_proj", "head")


def convert(model: torch.nn.Module) -> torch.nn.Module:
    """Return `model` with the linear layers of its blocks in fp8, emulated on a CPU."""
    import torchao.float8 as float8

    emulated = next(model.parameters()).device.type == "cpu"
    config = float8.Float8LinearConfig(emulate=emulated, pad_inner_dim=True)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda layer, name: name not in LEFT
    )
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name not in LEFT:
            layer.register_forward_pre_hook(_cast)
    return model


def _cast(layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Cast inputs to bf16, which torchao's layer does under the autocast of CUDA alone."""
    return args[0].bfloat16()
