"""Operations on nested data (documentation pages: utilities, accelerator, internals)."""

from __future__ import annotations

from accel.machine.tree import is_tensor
from tests.conformance.rows import REQUIRED, Entry, NoOp, P

COLLECTIVES = "test_collectives[2]"
LAYOUTS = "test_tensors_of_any_layout_travel_in_one_collective[2]"
PADDING = "test_padding[2]"
SENT = "test_send_to_device"
SLICED = "test_slices_and_sizes"
JOINED = "test_concatenate"
TYPES = "test_structure_and_types_stay"
HANDED_ON = "test_arguments_are_handed_on"
MERGED = "test_dicts_are_merged_in_place"
OUTPUTS = "test_outputs_of_a_function_in_fp32"
FP32 = "test_conversion_to_fp32"
EXCHANGES = "test_exchanges[2]"
METRICS = "test_each_sample_counts_once[False-9-5-2]"


def padding(name: str, test: str) -> Entry:
    """Return the rows of the function or the method that pads."""
    return Entry(
        name,
        test,
        NoOp.FIRST,
        {
            "tensor": P(REQUIRED, test),
            "dim": P(0, test),
            "pad_index": P(0, test),
            "pad_first": P(False, test),
        },
    )


ENTRIES = [
    Entry("accel.utils:gather", COLLECTIVES, NoOp.FIRST, {"tensor": P(REQUIRED, COLLECTIVES)}),
    Entry(
        "accel.utils:gather_object", COLLECTIVES, NoOp.FIRST, {"object": P(REQUIRED, COLLECTIVES)}
    ),
    Entry(
        "accel.utils:broadcast",
        COLLECTIVES,
        NoOp.FIRST,
        {"tensor": P(REQUIRED, COLLECTIVES), "from_process": P(0, COLLECTIVES)},
    ),
    Entry(
        "accel.utils:broadcast_object_list",
        COLLECTIVES,
        NoOp.FIRST,
        {"object_list": P(REQUIRED, COLLECTIVES), "from_process": P(0, COLLECTIVES)},
    ),
    Entry(
        "accel.utils:reduce",
        LAYOUTS,
        NoOp.FIRST,
        {
            "tensor": P(REQUIRED, LAYOUTS),
            "reduction": P("mean", LAYOUTS),
            "scale": P(1.0, COLLECTIVES),
        },
        choices={"reduction": {"sum": LAYOUTS, "mean": COLLECTIVES, "none": COLLECTIVES}},
    ),
    padding("accel.utils:pad_across_processes", PADDING),
    Entry(
        "accel.utils:concatenate",
        JOINED,
        NoOp.FIRST,
        {"data": P(REQUIRED, JOINED), "dim": P(0, JOINED)},
    ),
    Entry(
        "accel.utils:send_to_device",
        SENT,
        NoOp.FIRST,
        {
            "tensor": P(REQUIRED, SENT),
            "device": P(REQUIRED, SENT),
            "non_blocking": P(False, "test_copies_may_overlap_with_computation"),
            "skip_keys": P(None, SENT),
        },
    ),
    Entry(
        "accel.utils:slice_tensors",
        SLICED,
        NoOp.FIRST,
        {"data": P(REQUIRED, SLICED), "tensor_slice": P(REQUIRED, SLICED)},
    ),
    Entry("accel.utils:find_batch_size", SLICED, NoOp.NONE, {"data": P(REQUIRED, SLICED)}),
    Entry("accel.utils:convert_to_fp32", FP32, NoOp.FIRST, {"tensor": P(REQUIRED, FP32)}),
    Entry(
        "accel.utils:convert_outputs_to_fp32",
        OUTPUTS,
        NoOp.FIRST,
        {"model_forward": P(REQUIRED, OUTPUTS)},
    ),
    Entry(
        "accel.utils:recursively_apply",
        TYPES,
        parameters={
            "func": P(REQUIRED, TYPES),
            "data": P(REQUIRED, TYPES),
            "args": P(REQUIRED, HANDED_ON),
            "test_type": P(is_tensor, "test_other_leaves_by_test"),
            "error_on_other_type": P(False, "test_other_types_may_be_an_error"),
            "kwargs": P(REQUIRED, HANDED_ON),
        },
    ),
    Entry(
        "accel.utils:honor_type",
        TYPES,
        NoOp.FIRST,
        {"original": P(REQUIRED, TYPES), "values": P(REQUIRED, TYPES)},
    ),
    Entry("accel.utils:is_namedtuple", TYPES, parameters={"value": P(REQUIRED, TYPES)}),
    Entry(
        "accel.utils:merge_dicts",
        MERGED,
        NoOp.FIRST,
        {"source": P(REQUIRED, MERGED), "destination": P(REQUIRED, MERGED)},
    ),
    Entry("accel:Accelerator.gather", EXCHANGES, NoOp.FIRST, {"tensor": P(REQUIRED, EXCHANGES)}),
    Entry(
        "accel:Accelerator.gather_for_metrics",
        METRICS,
        NoOp.FIRST,
        {"input_data": P(REQUIRED, METRICS), "use_gather_object": P(False, METRICS)},
    ),
    Entry(
        "accel:Accelerator.reduce",
        EXCHANGES,
        NoOp.FIRST,
        {
            "tensor": P(REQUIRED, EXCHANGES),
            "reduction": P("sum", EXCHANGES),
            "scale": P(1.0, EXCHANGES),
        },
        choices={"reduction": {"sum": EXCHANGES, "mean": EXCHANGES}},
    ),
    padding("accel:Accelerator.pad_across_processes", EXCHANGES),
]
