"""Train steps of Megatron-LM, and placeholders of its data sets and schedule."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, P, documented

UTILS = "accel.utils:"
NAMED = "test_a_step_has_a_name_and_three_functions"
AVERAGED = "test_losses_are_averaged_over_data_parallel_ranks"
MASKS = "test_masks_of_t5_hide_padding_and_what_comes_after"
BERT = "test_functions_of_a_step[bert]"
STEPS = {
    f"{UTILS}{name}TrainStep": f"test_functions_of_a_step[{kind}]"
    for name, kind in (("GPT", "gpt2"), ("Bert", "bert"), ("T5", "t5"))
}
T5 = f"{UTILS}T5TrainStep."
SCHEDULE = "test_the_schedule_is_that_of_megatron"
LOADERS = "test_loaders_of_megatrons_data_sets_are_built"
LOADER = f"{UTILS}MegatronLMDummyDataLoader"

ENTRIES = [
    documented(
        f"{UTILS}MegatronLMDummyScheduler",
        SCHEDULE,
        optimizer=REQUIRED,
        total_num_steps=None,
        warmup_num_steps=0,
        kwargs=P({}, SCHEDULE, keyword=True),
    ),
    documented(LOADER, LOADERS, dataset_kwargs=P({}, LOADERS, keyword=True)),
    Entry(f"{LOADER}.set_megatron_data_args", LOADERS),
    Entry(f"{LOADER}.get_train_valid_test_datasets_provider", LOADERS),
    documented(f"{LOADER}.build_train_valid_test_data_iterators", LOADERS, accelerator=REQUIRED),
    documented(f"{UTILS}AbstractTrainStep", NAMED, name=REQUIRED),
    *(documented(name, test, accelerator=REQUIRED, args=None) for name, test in STEPS.items()),
    *(
        documented(
            f"{name}.get_batch_func", test, accelerator=REQUIRED, megatron_dataset_flag=REQUIRED
        )
        for name, test in STEPS.items()
    ),
    *(Entry(f"{name}.get_loss_func", test) for name, test in STEPS.items()),
    *(
        Entry(
            f"{name}.get_forward_step_func",
            test,
            parameters=dict.fromkeys(
                ("pretraining_flag", "bert_binary_head") if test == BERT else (),
                P(REQUIRED, test),
            ),
        )
        for name, test in STEPS.items()
    ),
    documented(f"{T5}attn_mask_postprocess", MASKS, attention_mask=REQUIRED),
    documented(f"{T5}get_decoder_mask", MASKS, seq_length=REQUIRED, device=REQUIRED),
    documented(
        f"{T5}get_enc_dec_mask",
        MASKS,
        attention_mask=REQUIRED,
        dec_seq_length=REQUIRED,
        device=REQUIRED,
    ),
    documented(f"{UTILS}avg_losses_across_data_parallel_group", AVERAGED, losses=REQUIRED),
]
