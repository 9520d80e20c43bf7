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
