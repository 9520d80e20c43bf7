"""The configuration of quantized models (E1, E5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel.machine.errors import ConfigError
from accel.utils import BnbQuantizationConfig
from accel.utils.dataclasses import BnbQuantizationConfig as SameConfig


def test_the_other_weights_have_a_dtype() -> None:
    assert BnbQuantizationConfig(load_in_8bit=True).torch_dtype == torch.float16
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert four.torch_dtype == four.bnb_4bit_compute_dtype == torch.bfloat16
    given = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    assert given.torch_dtype == torch.float32
    assert SameConfig is BnbQuantizationConfig


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp32", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("torch.float16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes_have_several_names(given: Any, expected: torch.dtype) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype=given)
    assert config.bnb_4bit_compute_dtype == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "can't be both False"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "can't be both True"),
        ({"llm_int8_threshold": -1.0}, "llm_int8_threshold=-1.0: it is at least 0"),
        ({"bnb_4bit_quant_type": "nf5"}, "bnb_4bit_quant_type='nf5': it is one of fp4, nf4"),
        ({"bnb_4bit_compute_dtype": "fp31"}, "bnb_4bit_compute_dtype='fp31': it is one of fp32"),
        ({"torch_dtype": torch.int8}, "BnbQuantizationConfig.torch_dtype=torch.int8"),
        ({"skip_modules": "head"}, "skip_modules='head': it is a list of names"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str) -> None:
    bits = {} if "load_in_8bit" in given else {"load_in_4bit": True}
    with pytest.raises(ConfigError, match=message):
        BnbQuantizationConfig(**({**bits, **given} if given else {}))
