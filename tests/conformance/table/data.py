"""Samplers, loaders and random states (documentation pages: internals, accelerator, utilities)."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented, given

SHARES = "test_the_documented_examples"
STREAM = "test_the_documented_example"
SKIPS = "test_a_shard_skips_and_takes_the_arguments_of_a_torch_loader"
DEALS = "test_a_dispatcher_deals_out_batches_or_splits_them"
STATEFUL = "test_a_stateful_one_wants_torchdata"
ENDS = "test_a_shard_says_when_it_ends_and_what_remains"
LENGTHS = "test_lengths_of_a_shard"
DISPATCHER_LENGTHS = "test_lengths_of_a_dispatcher"
DISPATCHER_PLACES = "test_a_dispatcher_places_slices"
ORDER = "test_shards_synchronise_the_named_generators[generator-2]"
MESH = "test_ranks_of_one_tensor_parallel_group_read_alike[2]"
SHARING = "test_the_documented_parameters_of_sharing_out"
PLACEMENT = "test_the_documented_parameters_of_placement"
SEEDED = "test_the_documented_parameters_of_order"
SPLIT = "test_split_and_even_batches[2]"
WHO = "test_who_reads"
EACH_ORDER = "test_the_order_is_seeded"
SKIPPED = "test_skipping_leaves_out_batches_and_fetches_none_of_them"
SKIPPED_BY_ACCELERATOR = "test_the_first_batches_are_skipped"
CUT = "test_the_callers_slice_function_cuts[2]"
PREPARED = "test_one_loader_is_prepared"
SEED = "test_one_seed_seeds_all"
STATES = "test_ranks_get_the_states_of_the_main_process[2]"

SAMPLER_ENTRIES = [
    Entry(
        "accel.data_loader:BatchSamplerShard",
        SHARES,
        parameters={
            **given(
                SHARES,
                batch_sampler=REQUIRED,
                num_processes=1,
                process_index=0,
                split_batches=False,
            ),
            "even_batches": P(True, "test_uneven_batches_are_left_as_they_are"),
        },
        attributes={"total_length": "test_uneven_batches_are_left_as_they_are"},
    ),
    documented(
        "accel.data_loader:IterableDatasetShard",
        STREAM,
        dataset=REQUIRED,
        batch_size=1,
        drop_last=P(False, "test_a_short_last_round_is_left_out_or_completed"),
        num_processes=1,
        process_index=0,
        split_batches=False,
    ),
    documented(
        "accel.data_loader:IterableDatasetShard.set_epoch",
        "test_the_epoch_reaches_the_stream",
        epoch=REQUIRED,
    ),
    documented(
        "accel.data_loader:SeedableRandomSampler",
        "test_the_order_is_a_function_of_seed_and_epoch",
        data_seed=P(None, "test_the_order_is_a_function_of_seed_and_epoch", keyword=True),
    ),
    documented(
        "accel.data_loader:SeedableRandomSampler.set_epoch",
        "test_the_order_is_a_function_of_seed_and_epoch",
        epoch=REQUIRED,
    ),
]

LOADER_ENTRIES = [
    Entry(
        "accel.data_loader:DataLoaderShard",
        SKIPS,
        parameters={
            "dataset": P(REQUIRED, SKIPS),
            "device": P(None, "test_a_shard_puts_batches_on_the_device"),
            **given(ORDER, rng_types=None, synchronized_generator=None),
            "skip_batches": P(0, SKIPS),
            "use_stateful_dataloader": P(False, STATEFUL),
            "_drop_last": P(False, "test_a_shard_that_dropped_the_rest_has_no_remainder"),
            "_non_blocking": P(False, "test_a_shard_copies_without_blocking"),
            "torch_device_mesh": P(None, "test_a_shard_keeps_its_mesh"),
            "iteration": P(0, "test_a_loader_begins_at_an_iteration[DataLoaderShard]"),
            "kwargs": P(dict, SKIPS),
        },
        attributes={
            "end_of_dataloader": ENDS,
            "remainder": ENDS,
            "total_batch_size": LENGTHS,
            "total_dataset_length": LENGTHS,
        },
    ),
    documented(
        "accel.data_loader:DataLoaderShard.set_epoch",
        "test_a_shard_hands_on_the_epoch",
        epoch=REQUIRED,
    ),
    Entry(
        "accel.data_loader:DataLoaderDispatcher",
        DEALS,
        parameters={
            **given(DEALS, dataset=REQUIRED, split_batches=False),
            "skip_batches": P(0, "test_a_dispatcher_skips_rounds"),
            "use_stateful_dataloader": P(False, STATEFUL),
            "_drop_last": P(False, "test_a_dispatcher_drops_the_last_round"),
            "_non_blocking": P(False, DISPATCHER_PLACES),
            "slice_fn": P(None, "test_a_dispatcher_cuts_as_it_is_told"),
            "torch_device_mesh": P(None, MESH),
            "iteration": P(0, "test_a_loader_begins_at_an_iteration[DataLoaderDispatcher]"),
            "device": P(None, DISPATCHER_PLACES, keyword=True),
            "kwargs": P(dict, DEALS, keyword=True),
        },
        attributes={
            "end_of_dataloader": DISPATCHER_LENGTHS,
            "remainder": DISPATCHER_LENGTHS,
            "total_batch_size": DISPATCHER_LENGTHS,
            "total_dataset_length": DISPATCHER_LENGTHS,
        },
    ),
    documented(
        "accel.data_loader:DataLoaderDispatcher.set_epoch",
        "test_a_dispatcher_hands_on_the_epoch",
        epoch=REQUIRED,
    ),
    documented(
        "accel.data_loader:prepare_data_loader",
        SHARING,
        NoOp.FIRST,
        dataloader=REQUIRED,
        device=P(None, PLACEMENT),
        num_processes=None,
        process_index=None,
        split_batches=False,
        put_on_device=P(False, PLACEMENT),
        rng_types=P(None, SEEDED),
        dispatch_batches=P(None, WHO),
        even_batches=True,
        slice_fn_for_dispatch=P(None, CUT),
        use_seedable_sampler=P(False, SEEDED),
        data_seed=P(None, SEEDED),
        non_blocking=P(False, PLACEMENT),
        use_stateful_dataloader=P(False, "test_loaders_of_torchdata"),
        torch_device_mesh=P(None, MESH),
    ),
    documented("accel:skip_first_batches", SKIPPED, NoOp.FIRST, dataloader=REQUIRED, num_batches=0),
]

ACCELERATOR_ENTRIES = [
    documented(
        "accel:Accelerator.prepare_data_loader",
        PREPARED,
        NoOp.FIRST,
        data_loader=REQUIRED,
        device_placement=P(
            None,
            "test_batches_stay_where_they_are_without_device_placement",
        ),
        slice_fn_for_dispatch=P(None, CUT),
    ),
    documented(
        "accel:Accelerator.skip_first_batches",
        SKIPPED_BY_ACCELERATOR,
        NoOp.FIRST,
        dataloader=REQUIRED,
        num_batches=0,
    ),
    documented(
        "accel.utils:DataLoaderConfiguration",
        WHO,
        split_batches=P(False, SPLIT),
        dispatch_batches=None,
        even_batches=P(True, SPLIT),
        use_seedable_sampler=P(False, EACH_ORDER),
        data_seed=P(None, "test_the_seed_of_the_order"),
        non_blocking=P(False, "test_copies_do_not_block"),
        use_stateful_dataloader=P(False, "test_loaders_of_torchdata"),
    ),
]

RANDOM_ENTRIES = [
    documented(
        "accel.utils:set_seed",
        SEED,
        seed=REQUIRED,
        device_specific=P(False, "test_device_specific_seeds_differ"),
        deterministic=P(False, "test_deterministic"),
    ),
    documented("accel.utils:synchronize_rng_state", STATES, rng_type=None, generator=None),
    documented("accel.utils:synchronize_rng_states", STATES, rng_types=REQUIRED, generator=None),
]


ENTRIES = [*SAMPLER_ENTRIES, *LOADER_ENTRIES, *ACCELERATOR_ENTRIES, *RANDOM_ENTRIES]
