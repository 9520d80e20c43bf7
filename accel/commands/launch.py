"""``accel launch``: a user's script on all GPUs, or on processes of the CPU, under torchelastic.

Flags override the file of settings (`accel.commands.launch_config`). Together they become one
command and its variables; this process becomes that command, so that signals and the exit code are
the script's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import accel
from accel.commands import CommandParser, launch_config
from accel.commands.launch_config import EMPTY, VARIABLES, strategies
from accel.machine import device, env, launcher_variables
from accel.machine.enums import PrecisionType
from accel.machine.errors import ConfigError, Problems, unknown_choice
from accel.plan.fp8 import LAUNCHED, check_launched

PORT = 29500

# Documented flags without a value, by the setting that each gives, those of strategies apart.
SWITCHES = {
    "cpu": "use_cpu",
    "tpu": "use_tpu",
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
_POD = "the script starts on this machine, on all of its TPU cores"
_PLUGINS = "give the plugins to the Accelerator of the script"
# Documented flags that are refused, or beginnings of their names, and why.
REFUSED = {
    **dict.fromkeys(("vm", "env", "tpu_", "no_tpu_cluster"), _POD),
    "main_training_function": "the script runs from its first line",
    "downcast_bf16": "torch_xla has no such option; use --mixed_precision=bf16",
    "ipex": "recent torch has Intel's optimizations built in",
    "use_parallelism_config": _PLUGINS,
    "parallelism_config_": _PLUGINS,
    "aws_": "jobs start on this machine, not on SageMaker",
    "mpirun_hostfile": "start with mpirun -hostfile FILE python script.py",
}
DESCRIPTION = (
    "Start a script on all GPUs or TPU cores of this machine, or on processes of the CPU. A flag "
    "goes before the file of settings; names are written with dashes or underscores."
)
USAGE = "accel launch [flags] SCRIPT [the script's own arguments]"


def main(arguments: Sequence[str]) -> int:
    """Start a script; the process becomes the script's launcher.

    Raises:
        ConfigError: if the flags or the file of settings are refused.
    """
    launch = parse(arguments)
    launch.execute()
    return 0


def parse(arguments: Sequence[str]) -> Launch:
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
    devices = {"cpu": found.use_cpu, "tpu": found.use_tpu, "multi_gpu": found.multi_gpu}
    if chosen := [f"--{name}" for name, is_given in devices.items() if is_given]:
        if len(chosen) > 1:
            raise ConfigError.of(" with ".join(chosen), "each chooses the device", "Give one.")
        settings |= {"use_cpu": bool(found.use_cpu), "use_tpu": bool(found.use_tpu)}
    launched = Script(
        found.training_script, found.training_script_args, found.module, found.no_python
    )
    logs = {"tee": found.tee, "log-dir": found.log_dir, "role": found.role}
    return plan(settings, launched, [f"--{k}={v}" for k, v in logs.items() if v], given)


def _from_file(name: str | None) -> dict[str, object]:
    if name is not None:
        return launch_config.read(Path(name))
    default = launch_config.default_config_file()
    return launch_config.read(default) if default.is_file() else {}


def _switches() -> dict[str, str]:
    """Return the flags without a value, with the setting of each."""
    on = {f"use_{name}": None for name in strategies()}
    return {name: setting or name for name, setting in {**SWITCHES, **on}.items()}


def _values() -> list[str]:
    """Return the flags with a value."""
    of_strategies = [name for one in strategies().values() for name in one.launch_variables]
    return [*VALUES, *of_strategies]


def _refused() -> dict[str, str]:
    """Return why a flag, or each that begins so, is refused."""
    refused = dict(REFUSED)
    for plugin in strategies().values():
        refused |= plugin.refused_launched
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
        prog="accel launch", usage=USAGE, description=DESCRIPTION, allow_abbrev=False
    )

    def add(name: str, **options: object) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, **options)  # type: ignore[arg-type]

    add("config_file", help="settings (default: the file that `accel config` writes)")
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


# -- the command that a command line becomes ---------------------------------------------------


@dataclass(frozen=True)
class Script:
    """What each process runs.

    Args:
        name: path of the script, name of the module, or program.
        arguments: its own arguments.
        is_module: whether it is run as ``python -m name``.
        no_python: whether it is a program of its own.
    """

    name: str
    arguments: Sequence[str] = ()
    is_module: bool = False
    no_python: bool = False

    def problems(self) -> Problems:
        """Return what is wrong with the file of a Python script; modules and programs are found."""
        found, path = Problems(), Path(self.name)
        if not (self.is_module or self.no_python):
            remedy = "Correct its name; a flag goes before it."
            if not path.exists():
                found.add(f"SCRIPT {self.name!r}", "there is no such file", remedy)
            elif path.is_dir() and not (path / "__main__.py").exists():
                found.add(f"SCRIPT {self.name!r}", "it is a folder without __main__.py", remedy)
        return found

    @property
    def flags(self) -> list[str]:
        """The flags of torchrun that say so."""
        return [*["-m"] * self.is_module, *["--no-python"] * self.no_python]

    @property
    def command(self) -> list[str]:
        """The command line of one process."""
        python = [] if self.no_python else [sys.executable, *["-m"] * self.is_module]
        return [*python, self.name, *self.arguments]


@dataclass(frozen=True)
class Launch:
    """A command and the variables that it gets.

    Args:
        command: program and arguments.
        variables: those that are set; None removes one.
    """

    command: list[str]
    variables: Mapping[str, str | None] = field(default_factory=dict)

    def execute(self) -> None:
        """Become the command; never return.

        Raises:
            ConfigError: if there is no such program.
        """
        env.set_values(self.variables)
        sys.stdout.flush()
        try:
            os.execvp(self.command[0], self.command)
        except OSError as error:
            value = " ".join(self.command)
            raise ConfigError.of(value, str(error), "Correct the program's name.") from error


def plan(
    settings: Mapping[str, object],
    script: Script,
    torchrun: Sequence[str] = (),
    flags: Collection[str] = (),
) -> Launch:
    """Return how a script is started.

    Args:
        settings: as `accel.commands.launch_config.read` gives them.
        script: what each process runs.
        torchrun: further flags of torchrun.
        flags: names of the settings that were given on the command line.

    Raises:
        ConfigError: if the settings contradict each other or this machine.
    """
    found = script.problems()
    machines = _number(settings, "num_machines", 1, found)
    rank = _number(settings, "machine_rank", 0, found)
    restarts = _number(settings, "max_restarts", 0, found)
    local = _local_processes(settings, machines, found)
    if not 0 <= rank < machines:
        rule = f"it is from 0 to {machines - 1}"
        found.add(f"machine_rank={rank}", rule, "Give each machine one of its own.")
    if machines > 1 and not settings.get("main_process_ip"):
        rule = "the machines meet at the address of the first"
        found.add(f"num_machines={machines}", rule, "Give --main_process_ip.")
    precision = settings.get("mixed_precision")
    if precision not in EMPTY and str(precision).lower() not in PrecisionType.list():
        choices = PrecisionType.list()
        found.append(unknown_choice("mixed_precision", str(precision), choices))
    found += check_launched(settings, flags)
    switched_on = [f"use_{name}" for name in strategies() if settings.get(f"use_{name}")]
    if len(switched_on) > 1:
        found.add(" with ".join(switched_on), "they cannot be combined", "Give one of them.")
    found.raise_if()
    variables = _variables(settings, local)
    _check_strategies(settings, variables)
    if machines == 1 and local == 1 and not (restarts or torchrun):
        return Launch(script.command, variables)
    _check_launcher(machines)
    options = [f"--nproc-per-node={local}", f"--max-restarts={restarts}"]
    if settings.get("monitor_interval") is not None:
        options.append(f"--monitor-interval={settings['monitor_interval']}")
    options += _rendezvous(settings, machines, rank)
    head = [sys.executable, "-m", "accel.commands.agent", *options, *torchrun, *script.flags]
    return Launch([*head, script.name, *script.arguments], variables | launcher_variables.OWN_STORE)


def _check_launcher(machines: int) -> None:
    """Raise `ConfigError` unless another launcher has started this command once per machine."""
    found = launcher_variables.read(env.copy())
    if found is not None and found.world_size != machines:
        raise ConfigError.of(
            f"{found.source}, num_machines={machines}",
            f"each of the launcher's {found.world_size} processes would start a run of its own",
            "Start the script by that launcher (mpirun -n 2 python train.py), or this command "
            "once per machine, with --num_machines and each machine's --machine_rank.",
        )


def _rendezvous(settings: Mapping[str, object], machines: int, rank: int) -> list[str]:
    """Return the flags that say where the machines meet; one machine takes a free port."""
    port, backend = settings.get("main_process_port"), settings.get("rdzv_backend") or "static"
    if machines == 1 and not port:
        return ["--standalone"]
    host = settings.get("main_process_ip") or "127.0.0.1"
    flags = [f"--nnodes={machines}", f"--node-rank={rank}"]
    if backend == "static":
        flags += [f"--master-addr={host}", f"--master-port={port or PORT}"]
    else:
        endpoint = f"{host}:{port or PORT}"
        flags += [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=none"]
        is_host = "true" if rank == 0 else "false"
        flags += [f"--rdzv-conf=is_host={is_host}"] if not settings.get("rdzv_conf") else []
    conf = settings.get("rdzv_conf")
    return [*flags, f"--rdzv-conf={conf}"] if conf else flags


def _local_processes(settings: Mapping[str, object], machines: int, found: Problems) -> int:
    """Return the number of processes on this machine."""
    total = settings.get("num_processes")
    if settings.get("use_tpu"):
        if machines > 1 or total not in (None, 0, 1):
            rule = "one process drives all TPU cores of one machine, and batches are sharded"
            value = f"num_processes={total}, num_machines={machines} with a TPU"
            found.add(value, rule, "Give 1 of each, and the batch size of all cores together.")
        return 1
    on_cpu = settings.get("use_cpu") in (True, "true", "True")
    ids = _gpu_ids(settings)
    if total is None or total == 0:
        present = len(ids) if ids else 0 if on_cpu else num_gpus()
        return max(1, present)
    number = _number(settings, "num_processes", 1, found)
    if number < 1 or machines < 1 or number % machines:
        rule = f"each of {machines} machines starts as many processes"
        found.add(f"num_processes={number}", rule, f"Give {max(machines, 1)}, or a multiple of it.")
        return 1
    local = number // machines
    if on_cpu or local == 1:
        return local
    present = len(ids) if ids else num_gpus()
    if 0 < present < local:
        rule = f"each process has a GPU of its own, and this machine offers {present}"
        found.add(f"num_processes={number}", rule, f"Give --num_processes={present * machines}.")
    elif present == 0:
        rule = "torch finds no GPU on this machine"
        found.add(f"num_processes={number}", rule, "Give --cpu for processes on the CPU.")
    return local


def num_gpus() -> int:
    """Return how many GPUs (or alike) torch finds on this machine."""
    kind = device.default_device_type()
    return 0 if kind == "cpu" else device.device_count(kind)


def _gpu_ids(settings: Mapping[str, object]) -> list[str]:
    text = str(settings.get("gpu_ids") or "all").strip()
    return [] if text == "all" else [part.strip() for part in text.split(",") if part.strip()]


def _number(settings: Mapping[str, object], name: str, default: int, found: Problems) -> int:
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    found.add(f"{name}={value!r}", "expected an integer", "Correct it.")
    return default


def _variables(settings: Mapping[str, object], local: int) -> dict[str, str | None]:
    """Return the variables that hand the settings to the script."""
    names = dict(VARIABLES)
    for name, plugin in strategies().items():
        if settings.get(f"use_{name}"):
            names |= {**plugin.launch_variables, f"use_{name}": plugin.switch}
    variables: dict[str, str | None] = {
        variable: _text(settings[name])
        for name, variable in names.items()
        if settings.get(name) is not None
    }
    if settings.get("use_tpu"):
        runtime = env.read("PJRT_DEVICE") or "TPU"
        variables |= {"ACCELERATE_TORCH_DEVICE": "xla", "PJRT_DEVICE": runtime}
    if _gpu_ids(settings):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(_gpu_ids(settings))
    if local > 1 and not env.read("OMP_NUM_THREADS"):
        variables.setdefault("OMP_NUM_THREADS", "1")
    here = str(Path(accel.__file__).resolve().parents[1])
    if "site-packages" not in here:  # a checkout, which the script imports, too
        paths = [*(env.read("PYTHONPATH") or "").split(os.pathsep), here]
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    return variables


def _check_strategies(settings: Mapping[str, object], variables: Mapping[str, str | None]) -> None:
    """Raise what the plugin of the strategy that is on would refuse in each process."""
    given = {name: text for name, text in {**env.copy(), **variables}.items() if text is not None}
    for name, plugin in strategies().items():
        if settings.get(f"use_{name}") and plugin.read is not None:
            own = {key: text for key, text in given.items() if key.startswith(plugin.prefixes)}
            plugin.read(None, own)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)
