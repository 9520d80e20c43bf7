"""Functions and classes that scripts and libraries of the current release import."""

from __future__ import annotations

from tests.conformance.rows import REQUIRED, Entry, NoOp, P

AVERAGED = "test_two_processes_train_as_by_hand[2]"
PLAIN = "test_without_it_gradients_are_averaged_at_every_step"
SHOWN = "test_the_main_process_shows_it"
FIRST, SECOND = (
    "test_a_sharded_model_and_its_optimizer_are_saved_and_loaded[0]",
    "test_a_sharded_model_and_its_optimizer_are_saved_and_loaded[1]",
)
ADAPTER = "test_only_the_adapter_of_a_model_of_peft_is_saved_and_loaded"
FULL = "test_the_state_of_rank_0_is_loaded_into_the_shards"
RESTS = "test_weights_rest_on_the_host_or_the_device[True-cpu]"
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
    return Entry(name, test, parameters={"check_device": P(False, test)})


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
    Entry(UTILS + "is_bnb_available", BITS, parameters={"min_version": P(None, BITS)}),
    Entry(UTILS + "is_mps_available", APPLE, parameters={"min_version": P("1.12", APPLE)}),
    Entry(UTILS + "is_hpu_available", GAUDI, parameters={"init_hccl": P(False, GAUDI)}),
    Entry(UTILS + "install_xla", "test_a_running_program_installs_nothing"),
    Entry(
        "accel.local_sgd:LocalSGD",
        AVERAGED,
        parameters={
            "accelerator": P(REQUIRED, AVERAGED),
            "model": P(REQUIRED, AVERAGED),
            "local_sgd_steps": P(REQUIRED, AVERAGED),
            "enabled": P(True, PLAIN),
        },
    ),
    Entry("accel.local_sgd:LocalSGD.step", AVERAGED),
    Entry(
        UTILS + "tqdm",
        SHOWN,
        parameters={
            "main_process_only": P(True, SHOWN, keyword=True),
            "kwargs": P(REQUIRED, "test_one_process_shows_it", keyword=True),
        },
    ),
    of_sharded_model("save_fsdp_model", "output_dir", adapter=True),
    of_sharded_model("load_fsdp_model", "input_dir", adapter=True),
    of_sharded_model("save_fsdp_optimizer", "output_dir", adapter=False, optimizer=True),
    # Its adapter_only makes no difference, as FIRST shows: no mutant would.
    of_sharded_model("load_fsdp_optimizer", "input_dir", adapter=False, optimizer=True),
    Entry(UTILS + "enable_fsdp_ram_efficient_loading", SWITCHED),
    Entry(UTILS + "disable_fsdp_ram_efficient_loading", SWITCHED),
    Entry(
        UTILS + "fsdp2_load_full_state_dict",
        FULL,
        parameters={
            "accelerator": P(REQUIRED, FULL),
            "model": P(REQUIRED, FULL),
            "full_sd": P(REQUIRED, FULL),
            "cpu_offload": P(False, RESTS),
        },
    ),
    Entry(
        UTILS + "fsdp2_prepare_model",
        FULL,
        parameters={"accelerator": P(REQUIRED, FULL), "model": P(REQUIRED, FULL)},
    ),
    Entry(
        UTILS + "fsdp2_switch_optimizer_parameters",
        FOLLOWS,
        parameters={"optimizer": P(REQUIRED, FOLLOWS), "mapping": P(REQUIRED, FOLLOWS)},
    ),
    Entry(
        "accel.utils.fsdp_utils:get_parameters_from_modules",
        IGNORED,
        parameters={
            "modules": P(REQUIRED, IGNORED),
            "model": P(REQUIRED, IGNORED),
            "device": P(None, IGNORED),
        },
    ),
    Entry(UTILS + "listify", NUMBERS, NoOp.FIRST, {"data": P(REQUIRED, NUMBERS)}),
    Entry(
        UTILS + "load",
        LOADED,
        parameters={
            "f": P(REQUIRED, LOADED),
            "map_location": P(None, LOADED),
            "kwargs": P(REQUIRED, LOADED, keyword=True),
        },
    ),
    Entry(
        UTILS + "get_module_children_bottom_up",
        ORDER,
        parameters={"model": P(REQUIRED, ORDER), "return_fqns": P(False, ORDER)},
    ),
    Entry(UTILS + "is_peft_model", PEFT, parameters={"model": P(REQUIRED, PEFT)}),
    Entry(
        "accel.utils.dataclasses:get_module_class_from_name",
        NAMED,
        parameters={"module": P(REQUIRED, NAMED), "name": P(REQUIRED, NAMED)},
    ),
    Entry(
        UTILS + "get_mixed_precision_context_manager",
        CONTEXT,
        NoOp.CONTEXT,
        {"native_amp": P(False, CONTEXT), "autocast_kwargs": P(None, CONTEXT)},
    ),
    Entry(
        UTILS + "get_grad_scaler",
        OWN_SCALER,
        parameters={
            "distributed_type": P(None, "test_the_scaler_of_sharded_gradients_is_that_of_the_run"),
            "kwargs": P(REQUIRED, OWN_SCALER, keyword=True),
        },
    ),
    Entry(
        "accel.utils.deepspeed:DeepSpeedEngineWrapper",
        ENGINE,
        parameters={"engine": P(REQUIRED, ENGINE)},
    ),
    Entry(
        "accel.utils.deepspeed:DeepSpeedEngineWrapper.backward",
        ENGINE,
        parameters={
            "loss": P(REQUIRED, ENGINE),
            "sync_gradients": P(True, ENGINE),
            "kwargs": P(REQUIRED, ENGINE, keyword=True),
        },
    ),
    Entry("accel.utils.deepspeed:DeepSpeedEngineWrapper.get_global_grad_norm", ENGINE),
    Entry(
        "accel:AcceleratedScheduler.print_lr",
        RATES,
        parameters={
            "args": P(REQUIRED, RATES, keyword=True),
            "kwargs": P(REQUIRED, RATES, keyword=True),
        },
    ),
    Entry(
        "accel.data_loader:DataLoaderShard",
        attributes={"iteration": "test_the_iteration_is_the_epoch"},
        call=False,
    ),
    Entry("accel.data_loader:DataLoaderShard.get_sampler", SAMPLER),
    Entry(
        "accel.data_loader:DataLoaderShard.set_sampler",
        SAMPLER,
        parameters={"sampler": P(REQUIRED, SAMPLER)},
    ),
    Entry("accel.data_loader:DataLoaderShard.begin", BY_HAND),
    Entry("accel.data_loader:DataLoaderShard.end", BY_HAND),
    Entry("accel.data_loader:DataLoaderShard.reset", BY_HAND),
]
