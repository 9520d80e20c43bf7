"""Memory: batches that fit, sizes as text and bytes (documentation pages: memory, utilities)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, NoOp, P, documented

SHRINK = "test_batches_shrink_until_they_fit"
RELEASED = "test_release_memory"
COLLECTED = "test_clear_device_cache_collects_garbage_where_asked"
SPEAKS = "test_which_errors_speak_of_memory"
FROM_TEXT = "test_sizes_as_text"
AS_TEXT = "test_bytes_as_text"
DTYPE = "test_bytes_of_a_dtype"
IN_ORDER = "test_given_memory_is_put_in_order"
UTILS = "accel.utils:"

ENTRIES = [
    documented(
        "accel:find_executable_batch_size",
        SHRINK,
        NoOp.DECORATOR,
        function=P(None, "test_other_errors_pass"),
        starting_batch_size=128,
        reduce_batch_size_fn=P(None, "test_a_rule_of_ones_own"),
    ),
    documented(UTILS + "release_memory", RELEASED, objects=REQUIRED),
    documented(UTILS + "clear_device_cache", COLLECTED, garbage_collection=False),
    documented(UTILS + "should_reduce_batch_size", SPEAKS, exception=REQUIRED),
    documented(UTILS + "convert_file_size_to_int", FROM_TEXT, NoOp.FIRST, size=REQUIRED),
    documented(UTILS + "convert_bytes", AS_TEXT, NoOp.FIRST, size=REQUIRED),
    documented(UTILS + "dtype_byte_size", DTYPE, dtype=REQUIRED),
    documented(UTILS + "get_max_memory", IN_ORDER, NoOp.FIRST, max_memory=None),
]
