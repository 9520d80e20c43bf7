"""Which layers of a prepared model compute in fp8, and whether they do so as by hand.

A gate on losses and weights cannot tell: rounding to fp8 costs so little that a run in bf16 holds
it, too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch

from tests.parity.float8 import LEFT

# Both factors of a product in e4m3 are off by up to 2**-4, about 3 % in the mean square; outputs in
# bf16, and sums in another order, by less than 2**-8. What differs by more than this was not
# multiplied in fp8 with these scales.
MOST = 2.0**-7
LARGEST = 448.0  # of e4m3


@dataclass
class Layers:
    """What the linear layers of a model did in their first forward passes on this process.

    Attributes:
        linear: names of all linear layers.
        errors: by name of a layer in fp8: the root mean square of the difference between its
            output and the product by hand, over that of the product.
    """

    linear: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)


def watch(model: torch.nn.Module) -> Layers:
    """Return what forward passes of `model`, without its containers, will fill in."""
    found = Layers()
    module = sys.modules.get("torchao.float8.float8_linear")
    for name, layer in model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        found.linear.append(name)
        if module is not None and isinstance(layer, module.Float8Linear):
            layer.register_forward_hook(_Note(name, found))
    return found


class _Note:
    def __init__(self, name: str, found: Layers) -> None:
        self.name, self.found = name, found

    def __call__(
        self, layer: torch.nn.Linear, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> None:
        if self.name in self.found.errors:
            return
        with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            wanted = rounded(args[0].bfloat16()) @ rounded(layer.weight).T
            error = (output.float() - wanted).square().mean().sqrt()
            self.found.errors[self.name] = (error / wanted.square().mean().sqrt()).item()


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [...] in fp32, rounded to e4m3 with one scale; by torch alone."""
    scale = LARGEST / tensor.detach().abs().max().double()
    scaled = (tensor.detach().float() * scale.float()).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).float() / scale.float()


def mistakes(found: Layers) -> list[str]:
    """Return what is wrong with the layers of one process; empty: all is as it should be."""
    told = []
    wanted = set(found.linear) - set(LEFT)
    if missing := sorted(wanted - set(found.errors)):
        told.append(f"{len(missing)} of {len(wanted)} layers do not compute in fp8")
    if more := sorted(set(found.errors) - wanted):
        told.append(f"computed in fp8, and must not be: {', '.join(more)}")
    wrong = [error for error in found.errors.values() if not error <= MOST]  # NaN is no product
    if wrong:
        worst = max(wrong)
        told.append(f"layers in fp8 are {worst:.1e} from the product by hand > {MOST:.1e}")
    return told
