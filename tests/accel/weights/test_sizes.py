"""Bytes of the modules of a model (E4)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from accel.utils import (
    CustomDtype,
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_bytes,
    convert_file_size_to_int,
    dtype_byte_size,
    get_max_layer_size,
)
from accel.weights.sizes import compute_module_total_buffer_size, own_parts
from tests.accel.weights.models import Block, net

OWN = 16 + 16  # scale and shift
NORM = 2 * 16 + 2 * 16 + 8
LINEAR = 64 + 16


def test_bytes_by_name() -> None:
    sizes = compute_module_sizes(Block())
    assert sizes[""] == OWN + NORM + LINEAR
    assert sizes["norm"] == NORM
    assert sizes["linear.weight"] == 64
    assert sizes == compute_module_sizes(Block().to("meta"))
    assert compute_module_sizes(net())["1.linear"] == LINEAR


def test_a_dtype_makes_tensors_smaller_only() -> None:
    for dtype in (torch.float16, "float16"):
        sizes = compute_module_sizes(Block(), dtype)
        assert sizes["linear"] == LINEAR // 2
        assert sizes["norm.num_batches_tracked"] == 8
    assert compute_module_sizes(Block(), torch.float64)["linear"] == LINEAR
    with pytest.raises(ConfigError, match="flaot"):
        compute_module_sizes(Block(), "flaot")


def test_dtypes_of_few_bits_share_bytes() -> None:
    """By whichever name: torch's own dtypes of few bits say that they take a byte."""
    model = nn.Linear(4, 4, bias=False)
    for dtypes, size in (
        (("int4", "torch.int4", torch.int4, torch.uint4, CustomDtype.INT4), 8),
        (("int2", torch.uint2, CustomDtype.INT2), 4),
        (("int8", torch.int8, CustomDtype.FP8), 16),
    ):
        for dtype in dtypes:
            assert compute_module_sizes(model, dtype)[""] == size
            assert compute_module_sizes(model, None, {"weight": dtype})[""] == size
    assert dtype_byte_size(torch.int4) == 0.5


def test_some_tensors_have_a_dtype_of_their_own() -> None:
    sizes = compute_module_sizes(Block(), "float16", {"linear.weight": torch.float32})
    assert sizes["linear"] == 64 + 8
    special = {"shift": torch.float64}
    assert compute_module_total_buffer_size(Block(), special_dtypes=special) == 40 + 32


def test_buffers_alone() -> None:
    sizes = compute_module_sizes(Block(), buffers_only=True)
    assert sizes == {"": 16 + 40, "shift": 16, "norm": 40} | {
        "norm.running_mean": 16,
        "norm.running_var": 16,
        "norm.num_batches_tracked": 8,
    }
    assert compute_module_total_buffer_size(Block()) == 16 + 40
    assert compute_module_total_buffer_size(Block(), torch.float16) == 8 + 24


def test_the_largest_layer() -> None:
    model = net()
    sizes = compute_module_sizes(model)
    linears = ["0.linear", "1.linear"]
    assert get_max_layer_size(own_parts(model), sizes, []) == (LINEAR, linears)
    assert get_max_layer_size(own_parts(model), sizes, ["Block"]) == (sizes["0"], ["0", "1"])
    assert get_max_layer_size([("0.norm", model[0].norm)], sizes, []) == (NORM, ["0.norm"])
    assert get_max_layer_size([("1.linear", model[1].linear)], {"1.linear": 7}, []) == (
        7,
        ["1.linear"],
    )


def test_a_model_and_its_largest_layer() -> None:
    model = net()
    total = compute_module_sizes(model)[""]
    assert calculate_maximum_sizes(model) == (total, (LINEAR, ["0.linear", "1.linear"]))
    model._no_split_modules = ["Block"]
    assert calculate_maximum_sizes(model)[1] == (total // 2, ["0", "1"])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1GB", 10**9), ("1GiB", 2**30), ("1.5 MB", 1_500_000), ("2kb", 250), ("8Gb", 10**9)),
        *((17, 17), (1.5, 1)),
    ],
)
def test_sizes_as_text(text: str | float, size: int) -> None:
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "5XB", ""])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="not in a valid format"):
        convert_file_size_to_int(text)


def test_bytes_of_a_dtype() -> None:
    assert dtype_byte_size(torch.bfloat16) == 2
    assert dtype_byte_size(torch.bool) == 1 / 8
    assert [dtype_byte_size(one) for one in CustomDtype] == [1, 0.5, 0.25]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (1_234_567, "1.18 MB"),
        (5 * 2**30, "5.0 GB"),
        (3 * 2**40, "3.0 TB"),
        (2**60, "1024.0 PB"),
    ],
)
def test_bytes_as_text(size: int, text: str) -> None:
    assert convert_bytes(size) == text
