"""The command line of ``runner launch``: flags go before the file of settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from accel import launch_config
from accel.config import deepspeed
from accel.errors import ConfigError
from runner.cli.arguments import CommandParser
from runner.launch import script

# Documented flags without a value, by the setting that each gives.
SWITCHES = {
    "cpu": "use_cpu",
    "multi_gpu": "multi_gpu",
    "debug": "debug",
    "use_fsdp": "use_fsdp",
    "use_deepspeed": "use_deepspeed",
    "enable_cpu_affinity": "enable_cpu_affinity",
    "dynamo_use_fullgraph": "dynamo_use_fullgraph",
    "dynamo_use_dynamic": "dynamo_use_dynamic",
    "dynamo_use_regional_compilation": "dynamo_use_regional_compilation",
    "same_network": "same_network",
}
VALUES = (
    *("mixed_precision", "num_processes", "num_machines", "num_cpu_threads_per_process"),
    *("dynamo_backend", "dynamo_mode", "gpu_ids", "machine_rank", "main_process_ip"),
    *("main_process_port", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval"),
    *launch_config.FSDP_VARIABLES,
    *(name for name in deepspeed.VARIABLES.values() if name not in ("hf_ds_config",)),
    *("deepspeed_config_file", "deepspeed_moe_layer_cls_names", "gradient_accumulation_steps"),
    "deepspeed_multinode_launcher",
)
# Documented flags that this version refuses, and why.
REFUSED_SWITCHES = {
    "tpu": "TPUs are not built yet",
    "tpu_cluster": "TPUs are not built yet",
    "tpu_use_sudo": "TPUs are not built yet",
    "downcast_bf16": "it concerns TPUs, which are not built yet",
    "ipex": "recent torch has Intel's optimizations built in",
    "use_megatron_lm": "Megatron-LM is not built yet; use --use_fsdp or --use_deepspeed",
    "use_parallelism_config": "give Accelerator(torch_tp_plugin=…, fsdp_plugin=…) in the script",
    "fp8_use_autocast_during_eval": "fp8 is not built yet; use --mixed_precision=bf16",
}
REFUSED_VALUES = {
    **dict.fromkeys(("vm", "env", "main_training_function"), "TPUs are not built yet"),
    "aws_access_key_id": "jobs start on this machine, not on SageMaker",
    "aws_secret_access_key": "jobs start on this machine, not on SageMaker",
    **dict.fromkeys(
        ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
        "start `runner launch` on each machine with its --machine_rank",
    ),
    "mpirun_hostfile": "start with mpirun -hostfile FILE python script.py",
}
REFUSED_PREFIXES = {
    "megatron_lm_": REFUSED_SWITCHES["use_megatron_lm"],
    "fp8_": REFUSED_SWITCHES["fp8_use_autocast_during_eval"],
    "parallelism_config_": REFUSED_SWITCHES["use_parallelism_config"],
}
USAGE = "runner launch [flags] SCRIPT [the script's own arguments]"


def main(arguments: Sequence[str]) -> int:
    """Start a script; the process becomes the script's launcher.

    Raises:
        ConfigError: if the flags or the file of settings are refused.
    """
    launch = parse(arguments)
    launch.execute()
    return 0


def parse(arguments: Sequence[str]) -> script.Launch:
    """Return what a command line starts.

    Raises:
        ConfigError: if the flags or the file of settings are refused.
    """
    flags = _refuse(arguments)
    found = _parser().parse_args(flags)
    settings = _from_file(found.config_file)
    given = {name: getattr(found, name) for name in (*SWITCHES.values(), *VALUES)}
    settings |= {name: value for name, value in given.items() if value is not None}
    if found.multi_gpu:
        if found.use_cpu:
            raise ConfigError.of("--multi_gpu with --cpu", "both choose the device", "Give one.")
        settings["use_cpu"] = False
    launched = script.Script(
        found.training_script, found.training_script_args, found.module, found.no_python
    )
    logs = {"tee": found.tee, "log-dir": found.log_dir, "role": found.role}
    return script.plan(settings, launched, [f"--{k}={v}" for k, v in logs.items() if v])


def _from_file(name: str | None) -> dict[str, object]:
    if name is not None:
        return launch_config.read(Path(name))
    default = launch_config.default_config_file()
    return launch_config.read(default) if default.is_file() else {}


def _refuse(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, or raise the reasons of documented flags that are refused."""
    takes_value = ("config_file", "log_dir", "role", "tee", "t", *VALUES)
    waiting = list(arguments)
    while waiting and waiting[0].startswith("-"):
        argument = waiting.pop(0)
        name, given, _ = argument.lstrip("-").replace("-", "_").partition("=")
        prefix = next((p for p in REFUSED_PREFIXES if name.startswith(p)), "")
        reason = {**REFUSED_SWITCHES, **REFUSED_VALUES, **REFUSED_PREFIXES}.get(prefix or name)
        if reason is not None:
            raise ConfigError.of(argument, reason, "Leave it out.")
        if name in takes_value and not given:
            del waiting[:1]
    return list(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="runner launch", usage=USAGE, description=str(__doc__), allow_abbrev=False
    )

    def add(name: str, **options: object) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, **options)  # type: ignore[arg-type]

    add("config_file", help="settings (default: the file that `runner config` writes)")
    for name, setting in SWITCHES.items():
        add(name, dest=setting, action="store_true", default=None)
    for name in VALUES:
        add(name, metavar=name.rpartition("_")[2].upper())
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    add("no_python", action="store_true", help="SCRIPT is a program of its own")
    parser.add_argument("-q", "--quiet", action="store_true", help="of no effect")
    parser.add_argument("-t", "--tee", help="streams that go to log files, too (torchrun's)")
    add("log_dir", help="folder of those log files")
    add("role", help="name of the processes in logs")
    parser.add_argument("training_script", metavar="SCRIPT")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, metavar="…")
    return parser
