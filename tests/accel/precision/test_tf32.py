"""The switch of TF32: what torch is told, and that it is as before afterwards (E3)."""

from __future__ import annotations

import pytest
import torch

from accel.precision.amp import tf32


def told() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("enabled", "wanted"), [(True, "high"), (False, "highest")])
def test_torch_is_told_within_the_context(enabled: bool, wanted: str) -> None:
    before = told()
    with tf32(enabled):
        assert told() == (wanted, enabled)
    assert told() == before
    with tf32(None):
        assert told() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPUs have no TF32")
def test_products_are_rounded() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    torch.manual_seed(0)
    left, right = torch.randn(2, 512, 512, device="cuda", dtype=torch.float64).unbind()
    errors = []
    for enabled in (False, True):
        with tf32(enabled):
            found = (left.float() @ right.float()).double()
        errors.append(((found - left @ right).norm() / (left @ right).norm()).item())
    # Units of roundoff: 2^-24 of fp32, 2^-11 of TF32.
    assert errors[0] < 2**-20
    assert 2**-15 < errors[1] < 2**-10
