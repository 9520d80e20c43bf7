"""Devices, filled one after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel.weights.device_map import Filler, lies_in
from accel.weights.sizes import compute_module_sizes, own_parts
from accel.weights.tensors import find_tied_parameters
from tests.accel.weights.models import Tied


def test_what_lies_in_a_module() -> None:
    assert lies_in("a.b", "a")
    assert lies_in("a", "a")
    assert lies_in("a", "")
    assert not lies_in("ab", "a")


@given(st.lists(st.integers(0, 800), max_size=3), st.integers(0, 800), st.booleans())
def test_every_tensor_has_a_device_that_has_room(
    accelerators: list[int], memory: int, fallback: bool
) -> None:
    model = nn.Sequential(Tied(), Tied())
    sizes = compute_module_sizes(model)
    limits = {**dict(enumerate(accelerators)), "cpu": memory}
    filler = Filler(limits, sizes, find_tied_parameters(model), frozenset(["Block"]), fallback)
    placed = filler.fill(own_parts(model))
    for name in (*model.state_dict(), "0.block.shift"):
        assert [lies_in(name, part) for part in placed].count(True) == 1
    for device, limit in limits.items():
        held = [sizes.get(name, 0) for name, where in placed.items() if where == device]
        assert sum(held) == filler.used.get(device, 0) <= limit
