"""``accel config``: the file of settings that `accel launch` starts scripts with.

Keys and place are those of the public package's command line, so that either reads the other's.

Source: https://huggingface.co/docs/accelerate/package_reference/cli
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from accel.commands import CommandParser
from accel.machine import device, env
from accel.machine.enums import ComputeEnvironment, DistributedType, PrecisionType
from accel.machine.errors import ConfigError, Problems, nearest, unknown_choice
from accel.plan.fp8 import LAUNCHED
from accel.strategies.spec import PluginSpec
from accel.strategies.table import plugins

NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")
# Settings that reach the script by a variable of the environment, those of strategies apart.
VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "use_cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "dynamo_mode": "ACCELERATE_DYNAMO_MODE",
    "dynamo_use_fullgraph": "ACCELERATE_DYNAMO_USE_FULLGRAPH",
    "dynamo_use_dynamic": "ACCELERATE_DYNAMO_USE_DYNAMIC",
    "dynamo_use_regional_compilation": "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
    **LAUNCHED,
}
# Settings of the launcher itself.
WHERE = (
    *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("gpu_ids", "same_network", "rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval"),
    "use_tpu",
)
FILE_HELP = "the settings of `accel launch` (default: in HF_HOME, else ~/.cache/huggingface)"
DYNAMO, FP8 = "dynamo_config", "fp8_config"
# Keys of the section of fp8, which its name is the prefix of; two spellings of one are documented.
FP8_KEYS = {
    **{name.removeprefix("fp8_"): name for name in LAUNCHED},
    "fp8_format": "fp8_format",
    "amax_history_length": "fp8_amax_history_len",
}
# Settings that say nothing where they have these values, and are not offered with others.
EMPTY = (None, "", False, "no", "false", "none", 0)
_POD = "A script starts on this machine, on all of its TPU cores: leave it out."
NOT_OFFERED = {
    "parallelism_config": "Give the plugins to the Accelerator of the script.",
    "ipex_config": "Recent torch has Intel's optimizations built in: leave it out.",
    "ipex": "Recent torch has Intel's optimizations built in: leave it out.",
    "mpirun_config": "Start with mpirun: mpirun -hostfile FILE python script.py.",
    "downcast_bf16": "torch_xla has no such option: use mixed_precision: bf16.",
    **dict.fromkeys(("tpu_env", "tpu_name", "tpu_zone", "tpu_vm", "tpu_use_cluster"), _POD),
    **dict.fromkeys(("tpu_use_sudo", "commands", "command_file"), _POD),
}
TPUS = ("XLA", "TPU")  # the same type, by its older name, too
# Settings of other machines, which change nothing on this one.
WITHOUT_EFFECT = ("main_training_function", "use_xpu")


def strategies() -> dict[str, PluginSpec]:
    """Return the plugins that a setting ``use_<name>`` switches on, by name."""
    switched = [plugin for plugin in plugins() if plugin.switch]
    return {one.switch.removeprefix("ACCELERATE_USE_").lower(): one for one in switched}


def default_config_file() -> Path:
    """Return where the settings are kept: in HF_HOME, else in the user's cache."""
    home = env.read("HF_HOME")
    cache = Path(env.read("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    folder = (Path(home).expanduser() if home else cache) / "accelerate"
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    return found[0] if found else folder / NAMES[0]


def basic_config(mixed_precision: str = "no") -> dict[str, object]:
    """Return the settings of this machine: all of its GPUs, or one process on the CPU."""
    precision = str(mixed_precision).lower()
    if precision not in PrecisionType.list():
        raise ConfigError(unknown_choice("mixed_precision", precision, PrecisionType.list()))
    kind = device.default_device_type()
    number = 1 if kind in ("cpu", "mps") else device.device_count(kind)
    return {
        "compute_environment": str(ComputeEnvironment.LOCAL_MACHINE),
        "debug": False,
        "distributed_type": _distributed_type(kind, number),
        "downcast_bf16": False,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": number,
        "rdzv_backend": "static",
        "same_network": False,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": kind == "cpu",
    }


def _distributed_type(kind: str, number: int) -> str:
    if kind.upper() in TPUS:
        return kind.upper()
    return "NO" if number == 1 else f"MULTI_{'GPU' if kind == 'cuda' else kind.upper()}"


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write the settings of this machine for `accel launch`, unless there are some.

    Args:
        mixed_precision: no, fp16, bf16 or fp8.
        save_location: the file; None: ``accelerate/default_config.yaml`` in HF_HOME, or in
            ``~/.cache/huggingface``.

    Returns:
        The file, or False where it was there before.

    Raises:
        ConfigError: for an unknown precision.
    """
    path = default_config_file() if save_location is None else Path(save_location)
    settings = basic_config(mixed_precision)
    if path.exists():
        print(f"{path} is there already: it stays as it is. Remove it, or name another file.")
        return False
    write(settings, path)
    return path


def write(settings: Mapping[str, object], path: Path) -> None:
    """Write settings as JSON, which is YAML as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(settings.items())), indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, object]:
    """Return the settings of a file, those of its sections among them.

    Raises:
        ConfigError: if it cannot be read, or asks for what is not offered.
    """
    settings = load(path)
    found = Problems()
    _check_keys(path, settings, found)
    kind = str(settings.get("distributed_type") or "NO").upper()
    _check_place(path, settings, kind, found)
    found.raise_if()
    flat = {name: value for name, value in settings.items() if name not in _sections()}
    flat |= _section(settings, DYNAMO)
    flat |= {FP8_KEYS.get(name, name): v for name, v in _section(settings, FP8).items()}
    chosen = strategies().get(kind.lower())
    if chosen is not None:
        flat |= _section(settings, f"{kind.lower()}_config") | {f"use_{kind.lower()}": True}
    if kind == "MULTI_CPU":
        flat["use_cpu"] = True
    if kind in TPUS:
        flat["use_tpu"] = True
    if flat.get("mixed_precision") is False:  # what YAML makes of no
        flat["mixed_precision"] = str(PrecisionType.NO)
    known = {*VARIABLES, *WHERE, *(f"use_{name}" for name in strategies())}
    known.update(*(plugin.launch_variables for plugin in strategies().values()))
    return {name: value for name, value in flat.items() if name in known and value is not None}


def _check_place(path: Path, settings: Mapping[str, object], kind: str, found: Problems) -> None:
    place = settings.get("compute_environment", "LOCAL_MACHINE")
    if place != ComputeEnvironment.LOCAL_MACHINE:
        remedy = "Run the script on the machine itself: compute_environment: LOCAL_MACHINE."
        found.add(f"{path}: compute_environment={place}", "jobs start on this machine", remedy)
    kinds = [str(known) for known in DistributedType]
    if kind not in (*kinds, *TPUS):
        found.append(unknown_choice(f"{path}: distributed_type", kind, kinds))


def load(path: Path) -> dict[str, object]:
    """Return the content of a file of settings.

    Raises:
        ConfigError: if it is none.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        remedy = "Name another file, or write one: accel config default --config_file FILE."
        raise ConfigError.of(f"{path}", f"it cannot be read ({error})", remedy) from error
    if not isinstance(settings, dict):
        raise ConfigError.of(f"{path}", "it holds key: value lines", "Correct it.")
    return {str(name): value for name, value in settings.items()}


def _sections() -> dict[str, tuple[str, ...]]:
    """Return the keys of each section."""
    common = "gradient_accumulation_steps"
    found = {
        f"{name}_config": (*plugin.launch_variables, *plugin.not_launched, common)
        for name, plugin in strategies().items()
    }
    dynamo = tuple(name for name in VARIABLES if name.startswith("dynamo_"))
    return {**found, DYNAMO: dynamo, FP8: tuple(FP8_KEYS)}


def _section(settings: Mapping[str, object], name: str) -> dict[str, object]:
    section = settings.get(name) or {}
    return {str(k): v for k, v in section.items()} if isinstance(section, dict) else {}


def _check_keys(path: Path, settings: Mapping[str, object], found: Problems) -> None:
    refused = dict(NOT_OFFERED)
    for plugin in strategies().values():
        refused |= plugin.refused_launched
    sections = _sections()
    switches = (f"use_{name}" for name in strategies())
    top = (*VARIABLES, *WHERE, *switches, *sections, *NOT_OFFERED, *WITHOUT_EFFECT)
    keys = {"": (*top, "compute_environment", "distributed_type"), **sections}
    for place, name, value in _entries(settings, sections):
        where = f"{path}: {place + '.' if place else ''}{name}"
        if name in refused and not _is_empty(value):
            found.add(f"{where}={value!r}", "`accel launch` does not offer it", refused[name])
        elif name not in keys[place] and place not in refused:
            found.add(where, "unknown key", nearest(name, keys[place]))


def _entries(
    settings: Mapping[str, object], sections: Iterable[str]
) -> Iterator[tuple[str, str, object]]:
    for name, value in settings.items():
        yield "", name, value
    for place in sections:
        for name, value in _section(settings, place).items():
            yield place, name, value


def _is_empty(value: object) -> bool:
    """Return whether a value asks for nothing: no, null, an empty list, a section of such."""
    if isinstance(value, (dict, list)):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return (value.strip().lower() if isinstance(value, str) else value) in EMPTY


# -- the command ------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Write the settings of `accel launch`: by questions, for this machine, or brought up to date.

    Raises:
        ConfigError: if nobody answers, or the file to update cannot be read.
    """
    parser = CommandParser(prog="accel config", description="Write settings of accel launch.")
    what = "default: those of this machine; update: add keys that a file lacks"
    parser.add_argument("action", nargs="?", choices=("default", "update"), help=what)
    add_file(parser)
    names = ("--mixed_precision", "--mixed-precision")
    parser.add_argument(*names, choices=PrecisionType.list(), default="no")
    found = parser.parse_args(list(arguments))
    path = file_of(found)
    settings = basic_config(found.mixed_precision)
    if found.action == "default" and path.exists():
        remedy = "Remove it first, or name another with --config_file; update adds keys to it."
        raise ConfigError.of(f"{path}", "it is there already", remedy)
    if found.action == "update":
        settings |= load(path)
    elif found.action is None:
        settings |= _answers(settings)
    write(settings, path)
    print(f"Settings written to {path}")
    return 0


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names a file of settings."""
    parser.add_argument("--config_file", "--config-file", type=Path, help=FILE_HELP)


def file_of(found: argparse.Namespace) -> Path:
    """Return the file of settings that a command line names, or the default one."""
    path: Path | None = found.config_file
    return default_config_file() if path is None else path


def _answers(default: dict[str, object]) -> dict[str, object]:
    """Ask for the settings that people change; an empty answer takes the default."""
    answers: dict[str, object] = {}
    on_cpu = _ask("Compute on the CPU (yes, no)", default["use_cpu"], _boolean)
    answers["use_cpu"] = on_cpu
    answers["num_machines"] = _ask("Number of machines", 1, _positive)
    if answers["num_machines"] != 1:
        answers["machine_rank"] = _ask("Rank of this machine", 0, int)
        answers["main_process_ip"] = _ask("Address of the machine of rank 0", "127.0.0.1", str)
        answers["main_process_port"] = _ask("Port there", 29500, _positive)
    number = _ask("Number of processes on all machines", default["num_processes"], _positive)
    answers["num_processes"] = number
    known = list(strategies())
    question = f"Strategy (none, {', '.join(known)})"
    strategy = str(_ask(question, "none", _one_of(("none", *known))))
    if strategy in known:
        kind, answers[f"{strategy}_config"] = strategy.upper(), {}
    else:
        kind = "NO" if number == 1 else "MULTI_CPU" if on_cpu else "MULTI_GPU"
    precision = _one_of(PrecisionType.list())
    answers["mixed_precision"] = _ask("Precision (no, fp16, bf16, fp8)", "no", precision)
    return {**answers, "distributed_type": kind}


def _ask(question: str, default: object, parse: Callable[[str], object]) -> object:
    while True:
        try:
            text = input(f"{question} [{default}]: ").strip()
        except EOFError:
            remedy = "Use accel config default, which asks nothing."
            raise ConfigError.of(f"{question}", "nobody answers", remedy) from None
        try:
            return parse(text) if text else default
        except ValueError as error:
            print(error)


def _boolean(text: str) -> bool:
    value = env.parse_bool(text)
    if value is None:
        raise ValueError(f"{text!r} is neither yes nor no")
    return value


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(f"{text} is less than 1")
    return int(text)


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in known:
            raise ValueError(f"{text!r} is none of {', '.join(known)}")
        return text.lower()

    return parse
