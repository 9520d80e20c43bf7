"""A script of the user's on all GPUs, or on processes of the CPU, under torchelastic.

Settings come from `accel.commands.launch_config` and the command line. They become one command
and its variables; the process becomes that command: signals and the exit code are the script's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import accel
from accel.commands.launch_config import EMPTY, VARIABLES, strategies
from accel.machine import env, launcher_variables
from accel.machine.enums import PrecisionType
from accel.machine.errors import ConfigError, Problems, unknown_choice
from accel.plan.fp8 import check_launched
from runner.recipe import processes

PORT = 29500


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
    head = [sys.executable, "-m", "runner.launch.agent", *options, *torchrun, *script.flags]
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
    on_cpu = settings.get("use_cpu") in (True, "true", "True")
    ids = _gpu_ids(settings)
    if total is None or total == 0:
        present = len(ids) if ids else 0 if on_cpu else processes.num_accelerators()
        return max(1, present)
    number = _number(settings, "num_processes", 1, found)
    if number < 1 or machines < 1 or number % machines:
        rule = f"each of {machines} machines starts as many processes"
        found.add(f"num_processes={number}", rule, f"Give {max(machines, 1)}, or a multiple of it.")
        return 1
    local = number // machines
    if on_cpu or local == 1:
        return local
    present = len(ids) if ids else processes.num_accelerators()
    if 0 < present < local:
        rule = f"each process has a GPU of its own, and this machine offers {present}"
        found.add(f"num_processes={number}", rule, f"Give --num_processes={present * machines}.")
    elif present == 0:
        rule = "torch finds no GPU on this machine"
        found.add(f"num_processes={number}", rule, "Give --cpu for processes on the CPU.")
    return local


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
