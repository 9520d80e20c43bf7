"""Variables ``ACCELERATE_*`` that nothing reads, because of their spelling (E5)."""

from __future__ import annotations

import re

import pytest

from accel import Accelerator
from accel.plan.arguments import known_variables, misspelt_notes
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("ACCELERATE_MIXED_PRECISON", "ACCELERATE_MIXED_PRECISION"),
        ("ACCELERATE_mixed_precision", "ACCELERATE_MIXED_PRECISION"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEP", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ("ACCELERATE_USE_FSPD", "ACCELERATE_USE_FSDP"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAG", "ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        ("ACCELERATE_FP8_BACKND", "ACCELERATE_FP8_BACKEND"),
    ],
)
def test_the_near_name_is_given(name: str, near: str) -> None:
    (note,) = misspelt_notes({name: "bf16", "PATH": "/bin"})
    assert note == f"{name}='bf16' (environment): nothing reads it. Did you mean {near!r}?"


def test_every_name_in_the_source_is_known() -> None:
    found: set[str] = set()
    for path in (ROOT / "accel").rglob("*.py"):
        if path.name != "arguments.py":
            found |= set(re.findall(r"ACCELERATE_[A-Z0-9_]*[A-Z0-9]\b", path.read_text()))
    assert found - known_variables() == set()


def test_a_script_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISSION", "bf16")
    for _ in range(2):
        assert Accelerator(cpu=True).mixed_precision == "no"
    told = [one.getMessage() for one in caplog.records if "PRECISSION" in one.getMessage()]
    assert len(told) == 1
    assert "Did you mean 'ACCELERATE_MIXED_PRECISION'?" in told[0]
