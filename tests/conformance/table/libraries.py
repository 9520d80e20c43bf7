"""Functions and classes that scripts and libraries of the current release import."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P, documented

AVERAGED = "test_two_processes_train_as_by_hand[2]"
PLAIN = "test_without_it_gradients_are_averaged_at_every_step"
SHOWN = "test_the_main_process_shows_it"
FIRST, SECOND = (
    "test_a_sharded_model_and_its_optimizer_are_saved_and_loaded[0]",
    "test_a_sharded_model_and_its_optimizer_are_saved_and_loaded[1]",
)
ADAPTER = "test_only_the_adapter_of_a_model_of_peft_is_saved_and_loaded"
FULL = "test_the_state_of_rank_0_is_loaded_into_the_shards"
RESTS = "test_weights_rest_on_the_host_or_the_device[True]"
FOLLOWS = "test_an_optimizer_follows_the_shards"
IGNORED = "test_the_parameters_of_ignored_modules"
SWITCHED = "test_loading_on_rank_0_is_switched_by_the_environment"
NUMBERS = "test_tensors_become_lists_of_numbers"
LOADED = "test_a_file_of_torch_is_loaded_without_running_code"
ORDER = "test_modules_come_after_those_inside_them"
PEFT = "test_a_model_of_peft_is_recognized"
CONTEXT = "test_a_context_computes_in_the_precision_of_the_run[bf16-dtype0]"
OWN_SCALER = "test_a_gradient_scaler_on_its_own"
ENGINE = "test_a_wrapped_engine_steps_where_a_window_ends"
RATES = "test_rates_are_printed"
SAMPLER = "test_the_sampler_is_read_and_replaced"
BY_HAND = "test_a_pass_by_hand_makes_the_loader_active"
NAMED = "test_a_class_is_found_by_its_name"
DEVICES = ("xpu", "npu", "mlu", "musa", "sdaa", "neuron")
PACKAGES = (
    *("aim", "amdsmi", "boto3", "ccl", "clearml", "comet_ml", "datasets", "deepspeed", "dvclive"),
    *("fp8", "import_timer", "ipex", "lomo", "matplotlib", "megatron_lm", "mlflow", "msamp"),
    *("pandas", "peft", "pippy", "pynvml", "pytest", "rich", "sagemaker", "schedulefree"),
    *("swanlab", "tensorboard", "timm", "torchao", "torchdata", "torchdata_stateful_dataloader"),
    *("torchvision", "tqdm", "trackio", "transformer_engine", "transformers", "triton", "wandb"),
)
APPLE = "test_apples_gpu_needs_a_version_of_torch"
GAUDI = "test_gaudi_with_its_collectives"
BITS = "test_bits_of_bitsandbytes_by_its_version[0.37.2-True-False]"
MORE_BITS = "test_bits_of_bitsandbytes_by_its_version[0.39.0-True-True]"
# Checks of their own, without parameters.
CHECKS = {
    "4bit_bnb": MORE_BITS,
    "8bit_bnb": BITS,
    "cuda": "test_cuda_is_torchs",
    "bitsandbytes_multi_backend": "test_bitsandbytes_for_several_devices",
    "fp16": "test_fp16_is_missing_on_the_first_gaudi_alone",
    "rocm": "test_rocm_is_a_build_of_torch_with_a_gpu",
    "transformer_engine_mxfp8": "test_mxfp8_is_a_matter_of_the_gpu",
    "weights_only": "test_weights_are_read_alone_from_a_version_of_torch_on",
    "xccl": "test_xccl_is_of_torchs_build",
}
UTILS = "accel.utils:"


def device_check(kind: str) -> Entry:
    test = f"test_devices_that_a_package_plugs_into_torch[{kind}]"
    name = f"{UTILS}is_{kind}_available"
    return documented(name, test, check_device=False)


def of_sharded_model(name: str, last: str, adapter: bool, optimizer: bool = False) -> Entry:
    """Return the rows of a function that saves or loads a sharded model or its optimizer."""
    objects = ("fsdp_plugin", "accelerator", *(("optimizer",) if optimizer else ()), "model")
    parameters = {each: P(REQUIRED, FIRST) for each in (*objects, last)}
    parameters["optimizer_index" if optimizer else "model_index"] = P(0, SECOND)
    if adapter:
        parameters["adapter_only"] = P(False, ADAPTER)
    return Entry(UTILS + name, FIRST, parameters=parameters)


ENTRIES = [
    *(device_check(kind) for kind in DEVICES),
    *(
        Entry(
            f"{UTILS}is_{name}_available",
            f"test_a_check_asks_for_its_package[{name}]",
        )
        for name in PACKAGES
    ),
    *(Entry(f"{UTILS}is_{name}_available", test) for name, test in CHECKS.items()),
    documented(UTILS + "is_bnb_available", BITS, min_version=None),
    documented(UTILS + "is_mps_available", APPLE, min_version="1.12"),
    documented(UTILS + "is_hpu_available", GAUDI, init_hccl=False),
    Entry(UTILS + "install_xla", "test_a_running_program_installs_nothing"),
    documented(
        "accel.local_sgd:LocalSGD",
        AVERAGED,
        accelerator=REQUIRED,
        model=REQUIRED,
        local_sgd_steps=REQUIRED,
        enabled=P(True, PLAIN),
    ),
    Entry("accel.local_sgd:LocalSGD.step", AVERAGED),
    documented(
        UTILS + "tqdm",
        SHOWN,
        main_process_only=P(True, SHOWN, keyword=True),
        kwargs=P(REQUIRED, "test_one_process_shows_it", keyword=True),
    ),
    of_sharded_model("save_fsdp_model", "output_dir", adapter=True),
    of_sharded_model("load_fsdp_model", "input_dir", adapter=True),
    of_sharded_model("save_fsdp_optimizer", "output_dir", adapter=False, optimizer=True),
    # Its adapter_only makes no difference, as FIRST shows: no mutant would.
    of_sharded_model("load_fsdp_optimizer", "input_dir", adapter=False, optimizer=True),
    Entry(UTILS + "enable_fsdp_ram_efficient_loading", SWITCHED),
    Entry(UTILS + "disable_fsdp_ram_efficient_loading", SWITCHED),
    documented(
        UTILS + "fsdp2_load_full_state_dict",
        FULL,
        accelerator=REQUIRED,
        model=REQUIRED,
        full_sd=REQUIRED,
        cpu_offload=P(False, RESTS),
    ),
    documented(UTILS + "fsdp2_prepare_model", FULL, accelerator=REQUIRED, model=REQUIRED),
    documented(
        UTILS + "fsdp2_switch_optimizer_parameters", FOLLOWS, optimizer=REQUIRED, mapping=REQUIRED
    ),
    documented(
        "accel.utils.fsdp_utils:get_parameters_from_modules",
        IGNORED,
        modules=REQUIRED,
        model=REQUIRED,
        device=None,
    ),
    documented(UTILS + "listify", NUMBERS, NoOp.FIRST, data=REQUIRED),
    documented(
        UTILS + "load",
        LOADED,
        f=REQUIRED,
        map_location=None,
        kwargs=P(REQUIRED, LOADED, keyword=True),
    ),
    documented(UTILS + "get_module_children_bottom_up", ORDER, model=REQUIRED, return_fqns=False),
    documented(UTILS + "is_peft_model", PEFT, model=REQUIRED),
    documented(
        "accel.utils.dataclasses:get_module_class_from_name", NAMED, module=REQUIRED, name=REQUIRED
    ),
    documented(
        UTILS + "get_mixed_precision_context_manager",
        CONTEXT,
        NoOp.CONTEXT,
        native_amp=False,
        autocast_kwargs=None,
    ),
    documented(
        UTILS + "get_grad_scaler",
        OWN_SCALER,
        distributed_type=P(None, "test_the_scaler_of_sharded_gradients_is_that_of_the_run"),
        kwargs=P(REQUIRED, OWN_SCALER, keyword=True),
    ),
    documented("accel.utils.deepspeed:DeepSpeedEngineWrapper", ENGINE, engine=REQUIRED),
    documented(
        "accel.utils.deepspeed:DeepSpeedEngineWrapper.backward",
        ENGINE,
        loss=REQUIRED,
        sync_gradients=True,
        kwargs=P(REQUIRED, ENGINE, keyword=True),
    ),
    Entry("accel.utils.deepspeed:DeepSpeedEngineWrapper.get_global_grad_norm", ENGINE),
    documented(
        "accel:AcceleratedScheduler.print_lr",
        RATES,
        args=P(REQUIRED, RATES, keyword=True),
        kwargs=P(REQUIRED, RATES, keyword=True),
    ),
    Entry(
        "accel.data_loader:DataLoaderShard",
        attributes={"iteration": "test_the_iteration_is_the_epoch"},
        call=False,
    ),
    Entry("accel.data_loader:DataLoaderShard.get_sampler", SAMPLER),
    documented("accel.data_loader:DataLoaderShard.set_sampler", SAMPLER, sampler=REQUIRED),
    Entry("accel.data_loader:DataLoaderShard.begin", BY_HAND),
    Entry("accel.data_loader:DataLoaderShard.end", BY_HAND),
    Entry("accel.data_loader:DataLoaderShard.reset", BY_HAND),
]
