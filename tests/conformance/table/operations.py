"""Operations on nested data (documentation pages: utilities, accelerator, internals)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P

OPS = "tests/accel/test_ops.py::"
PADDING = OPS + "test_padding"

ENTRIES = [
    Entry(
        "accel.utils:pad_across_processes",
        PADDING,
        NoOp.FIRST,
        {
            "tensor": P(REQUIRED, PADDING),
            "dim": P(0, PADDING),
            "pad_index": P(0, PADDING),
            "pad_first": P(False, PADDING),
        },
    ),
]
