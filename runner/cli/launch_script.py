"""The command line of ``runner launch``: flags go before the file of settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from accel.commands import launch_config
from accel.commands.launch_config import strategies
from accel.machine.errors import ConfigError
from accel.plan.fp8 import LAUNCHED
from runner.cli.arguments import CommandParser
from runner.launch import script

# Documented flags without a value, by the setting that each gives, those of strategies apart.
SWITCHES = {
    "cpu": "use_cpu",
    **dict.fromkeys(("multi_gpu", "debug", "enable_cpu_affinity", "same_network")),
    **dict.fromkeys(("dynamo_use_fullgraph", "dynamo_use_dynamic")),
    **dict.fromkeys(("dynamo_use_regional_compilation", "fp8_use_autocast_during_eval")),
}
VALUES = (
    *("mixed_precision", "num_processes", "num_machines", "num_cpu_threads_per_process"),
    *("dynamo_backend", "dynamo_mode", "gpu_ids", "machine_rank", "main_process_ip"),
    *("main_process_port", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval"),
    "gradient_accumulation_steps",
    *(name for name in LAUNCHED if name != "fp8_use_autocast_during_eval"),
)
_TPU = "TPUs are not built yet"
_PLUGINS = "give the plugins to the Accelerator of the script"
# Documented flags that are refused, or beginnings of their names, and why.
REFUSED = {
    **dict.fromkeys(("tpu", "vm", "env", "main_training_function", "downcast_bf16"), _TPU),
    **dict.fromkeys(("tpu_", "no_tpu_cluster"), _TPU),
    "ipex": "recent torch has Intel's optimizations built in",
    "use_parallelism_config": _PLUGINS,
    "parallelism_config_": _PLUGINS,
    "aws_": "jobs start on this machine, not on SageMaker",
    "mpirun_hostfile": "start with mpirun -hostfile FILE python script.py",
}
DESCRIPTION = (
    "Start a script on all GPUs of this machine, or on processes of the CPU. A flag goes before "
    "the file of settings; names are written with dashes or underscores."
)
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
    given = {name: getattr(found, name) for name in (*_switches().values(), *_values())}
    given = {name: value for name, value in given.items() if value is not None}
    settings |= given
    if found.multi_gpu:
        if found.use_cpu:
            raise ConfigError.of("--multi_gpu with --cpu", "both choose the device", "Give one.")
        settings["use_cpu"] = False
    launched = script.Script(
        found.training_script, found.training_script_args, found.module, found.no_python
    )
    logs = {"tee": found.tee, "log-dir": found.log_dir, "role": found.role}
    return script.plan(settings, launched, [f"--{k}={v}" for k, v in logs.items() if v], given)


def _from_file(name: str | None) -> dict[str, object]:
    if name is not None:
        return launch_config.read(Path(name))
    default = launch_config.default_config_file()
    return launch_config.read(default) if default.is_file() else {}


def _switches() -> dict[str, str]:
    """Return the flags without a value, with the setting of each."""
    on = {f"use_{name}": None for name, plugin in strategies().items() if plugin.kind}
    return {name: setting or name for name, setting in {**SWITCHES, **on}.items()}


def _values() -> list[str]:
    """Return the flags with a value."""
    of_strategies = [name for one in strategies().values() for name in one.launch_variables]
    return [*VALUES, *of_strategies]


def _refused() -> dict[str, str]:
    """Return why a flag, or each that begins so, is refused."""
    refused = dict(REFUSED)
    for name, plugin in strategies().items():
        refused |= plugin.refused_launched
        if plugin.kind is None:
            refused |= dict.fromkeys((f"use_{name}", f"{name}_"), f"{name} is not built yet")
    return refused


def _refuse(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, or raise the reason of a documented flag that is refused."""
    takes_value = ("config_file", "log_dir", "role", "tee", "t", *_values())
    waiting = list(arguments)
    while waiting and waiting[0].startswith("-"):
        argument = waiting.pop(0)
        name, given, _ = argument.lstrip("-").replace("-", "_").partition("=")
        refused = _refused()
        beginning = next((one for one in refused if one[-1] == "_" and name.startswith(one)), name)
        if beginning in refused:
            raise ConfigError.of(argument, refused[beginning], "Leave it out.")
        if name in takes_value and not given:
            del waiting[:1]
    return list(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="runner launch", usage=USAGE, description=DESCRIPTION, allow_abbrev=False
    )

    def add(name: str, **options: object) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, **options)  # type: ignore[arg-type]

    add("config_file", help="settings (default: the file that `runner config` writes)")
    for name, setting in _switches().items():
        add(name, dest=setting, action="store_true", default=None)
    ignored = [flag for one in strategies().values() for flag in one.not_launched]
    for name in [*_values(), *ignored]:
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
