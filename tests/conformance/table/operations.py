"""Operations on nested data (documentation pages: utilities, accelerator, internals)."""

from __future__ import annotations

from accel.machine.tree import is_tensor
from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented, given

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
    return documented(name, test, NoOp.FIRST, tensor=REQUIRED, dim=0, pad_index=0, pad_first=False)


ENTRIES = [
    documented("accel.utils:gather", COLLECTIVES, NoOp.FIRST, tensor=REQUIRED),
    documented("accel.utils:gather_object", COLLECTIVES, NoOp.FIRST, object=REQUIRED),
    documented("accel.utils:broadcast", COLLECTIVES, NoOp.FIRST, tensor=REQUIRED, from_process=0),
    documented(
        "accel.utils:broadcast_object_list",
        COLLECTIVES,
        NoOp.FIRST,
        object_list=REQUIRED,
        from_process=0,
    ),
    Entry(
        "accel.utils:reduce",
        LAYOUTS,
        NoOp.FIRST,
        {**given(LAYOUTS, tensor=REQUIRED, reduction="mean"), "scale": P(1.0, COLLECTIVES)},
        choices={"reduction": {"sum": LAYOUTS, "mean": COLLECTIVES, "none": COLLECTIVES}},
    ),
    padding("accel.utils:pad_across_processes", PADDING),
    documented("accel.utils:concatenate", JOINED, NoOp.FIRST, data=REQUIRED, dim=0),
    documented(
        "accel.utils:send_to_device",
        SENT,
        NoOp.FIRST,
        tensor=REQUIRED,
        device=REQUIRED,
        non_blocking=P(False, "test_copies_may_overlap_with_computation"),
        skip_keys=None,
    ),
    documented(
        "accel.utils:slice_tensors", SLICED, NoOp.FIRST, data=REQUIRED, tensor_slice=REQUIRED
    ),
    documented("accel.utils:find_batch_size", SLICED, data=REQUIRED),
    documented("accel.utils:convert_to_fp32", FP32, NoOp.FIRST, tensor=REQUIRED),
    documented("accel.utils:convert_outputs_to_fp32", OUTPUTS, NoOp.FIRST, model_forward=REQUIRED),
    documented(
        "accel.utils:recursively_apply",
        TYPES,
        func=REQUIRED,
        data=REQUIRED,
        args=P(REQUIRED, HANDED_ON),
        test_type=P(is_tensor, "test_other_leaves_by_test"),
        error_on_other_type=P(False, "test_other_types_may_be_an_error"),
        kwargs=P(REQUIRED, HANDED_ON),
    ),
    documented("accel.utils:honor_type", TYPES, NoOp.FIRST, original=REQUIRED, values=REQUIRED),
    documented("accel.utils:is_namedtuple", TYPES, value=REQUIRED),
    documented(
        "accel.utils:merge_dicts", MERGED, NoOp.FIRST, source=REQUIRED, destination=REQUIRED
    ),
    documented("accel:Accelerator.gather", EXCHANGES, NoOp.FIRST, tensor=REQUIRED),
    documented(
        "accel:Accelerator.gather_for_metrics",
        METRICS,
        NoOp.FIRST,
        input_data=REQUIRED,
        use_gather_object=False,
    ),
    Entry(
        "accel:Accelerator.reduce",
        EXCHANGES,
        NoOp.FIRST,
        given(EXCHANGES, tensor=REQUIRED, reduction="sum", scale=1.0),
        choices={"reduction": {"sum": EXCHANGES, "mean": EXCHANGES}},
    ),
    padding("accel:Accelerator.pad_across_processes", EXCHANGES),
]
