"""DeepSpeed's configuration as a nested dictionary: queries by dotted key, and validation.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

from accel.machine.errors import ConfigError, Problem, closest, unknown_choice

Config: TypeAlias = dict[str, Any]  # a nested dictionary, as JSON holds it
AUTO = "auto"  # the value is resolved from the run
DEVICES = ("none", "cpu", "nvme")
# Top-level keys, as the documentation lists them. DeepSpeed ignores unknown keys: a mistyped one
# would have no effect.
TOP_LEVEL = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("optimizer", "scheduler", "fp16", "bf16", "zero_optimization"),
    *("torch_autocast", "communication_data_type", "prescale_gradients", "amp", "seed"),
    *("gradient_predivide_factor", "sparse_gradients", "gradient_clipping", "autotuning"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "steps_per_print"),
    *("wall_clock_breakdown", "dump_state", "flops_profiler", "activation_checkpointing"),
    *("sparse_attention", "data_efficiency", "curriculum_learning", "compression_training"),
    *("csv_monitor", "tensorboard", "wandb", "comet", "monitor_config", "elasticity", "checkpoint"),
    *("comms_logger", "data_types", "tensor_parallel", "sequence_parallel_size", "compile"),
)
# Further keys that DeepSpeed's code reads, whose names are near to documented ones.
UNDOCUMENTED = ("managed_gradient_accumulation", "seq_parallel_communication_data_type", "bfloat16")
# Keys whose value is a section.
SECTIONS = (
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params", "zero_optimization"),
    *("zero_optimization.offload_optimizer", "zero_optimization.offload_param", "aio", "fp16"),
    *("bf16", "activation_checkpointing", "checkpoint", "compile", "data_types", "elasticity"),
    *("torch_autocast", "autotuning", "flops_profiler", "data_efficiency", "csv_monitor", "wandb"),
    *("curriculum_learning", "tensorboard", "comet", "comms_logger", "tensor_parallel"),
    "expert_parallel",
)
# Deprecated names that DeepSpeed still reads beside the present ones.
DEPRECATED = {
    "bfloat16": 'bf16 in its place: {"enabled": true}',
    "zero_optimization.cpu_offload": 'offload_optimizer in its place: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'offload_param in its place: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory in offload_optimizer or "
    "offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on"
    "_model_save in its place",
}
# Parallelism other than ZeRO's data parallel: the largest value that switches it off.
OTHER_PARALLELISM = {
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 1,
    "expert_parallel.enabled": False,
}
SWITCHES = ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled")
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class HfDeepSpeedConfig:
    """DeepSpeed's configuration, with queries by dotted key.

    Args:
        config_file_or_dict: path of a JSON file, or a dict or another such object, which is copied.
            A section that is null is removed.

    Attributes:
        config: the nested dictionary.
        place: its name in messages: the path of its file, or hf_ds_config.

    Raises:
        ConfigError: if the file does not exist or is not JSON, and for unknown keys and invalid
            values.
    """

    def __init__(self, config_file_or_dict: object) -> None:
        self.place = "hf_ds_config"
        if isinstance(config_file_or_dict, HfDeepSpeedConfig):
            self.place = config_file_or_dict.place
            config_file_or_dict = config_file_or_dict.config
        if isinstance(config_file_or_dict, Mapping):
            self.config: Config = copy.deepcopy(dict(config_file_or_dict))
        elif isinstance(config_file_or_dict, (str, PathLike)):
            self.config = _read(Path(config_file_or_dict))
            self.place = fspath(config_file_or_dict)
        else:
            rule = "expected the path of a JSON file, or a dict"
            raise ConfigError.of(f"hf_ds_config={config_file_or_dict!r}", rule, "Give one.")
        validate(self.config, self.place)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HfDeepSpeedConfig) and self.config == other.config

    def find_config_node(self, ds_key_long: str) -> tuple[Config | None, str]:
        """Return the section that has, or could have, a dotted key, and the key's last part.

        Args:
            ds_key_long: key with dots.

        Returns:
            The section, which may be changed; None where there is no such section.
        """
        *sections, last = ds_key_long.split(".")
        found = value_at(self.config, ".".join(sections)) if sections else self.config
        return (found if isinstance(found, dict) else None), last

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Delete a dotted key, with all that is below it.

        Args:
            ds_key_long: key with dots.
            must_exist: whether it is an error that it is not set.

        Raises:
            ValueError: if it must be set and is not.
        """
        section, last = self.find_config_node(ds_key_long)
        if section is not None and last in section:
            del section[last]
        elif must_exist:
            raise ValueError(
                f"del_config_sub_tree({ds_key_long!r}): it is not set. Leave must_exist out."
            )

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return the value of a dotted key, or `default` where it is not set.

        Args:
            ds_key_long: key with dots.
            default: what is returned where it is not set.
        """
        return value_at(self.config, ds_key_long, default)

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a dotted key is set to a true value.

        Args:
            ds_key_long: key with dots.
        """
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a dotted key is set to a false value.

        Args:
            ds_key_long: key with dots.
        """
        found = self.get_value(ds_key_long)
        return found is not None and not found

    def is_zero2(self) -> bool:
        """Return whether this is stage 2 of ZeRO."""
        return bool(self.get_value("zero_optimization.stage") == 2)

    def is_zero3(self) -> bool:
        """Return whether this is stage 3 of ZeRO."""
        return bool(self.get_value("zero_optimization.stage") == 3)

    def is_offload(self) -> bool:
        """Return whether parameters or optimizer state are offloaded to the host or to disk."""
        devices = [
            self.get_value(f"zero_optimization.offload_{name}.device")
            for name in ("optimizer", "param")
        ]
        return any(device in ("cpu", "nvme") for device in devices)


def value_at(config: Config, key: str, default: object = None) -> Any:
    """Return the value of a dotted key, or `default` where it is not set."""
    found: object = config
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return default
        found = found[part]
    return default if found is None else found


def set_at(config: Config, key: str, value: object) -> None:
    """Set a dotted key; missing sections are created."""
    *sections, last = key.split(".")
    for name in sections:
        config = config.setdefault(name, {})
    config[last] = value


def leaves(config: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted keys of a configuration's values, with these."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, config


def autos(config: Config) -> list[str]:
    """Return the dotted keys whose value is "auto"."""
    return [key for key, value in leaves(config) if value == AUTO]


def validate(config: Config, place: str) -> None:
    """Remove sections of `config` that are None, in place, and check keys and values.

    Raise a `ConfigError` that names every unknown key and invalid value, and `place`, its origin.
    """
    _drop_empty(config)
    ConfigError.raise_if(_config_problems(config, place))


def _read(path: Path) -> Config:
    where = f"hf_ds_config={str(path)!r}"
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        rule = "expected the path of a readable JSON file"
        raise ConfigError.of(where, rule, f"Reading it failed: {error}.") from error
    except ValueError as error:
        raise ConfigError.of(where, "the file is not JSON", f"Correct it: {error}.") from error
    if not isinstance(loaded, dict):
        raise ConfigError.of(where, "expected a JSON object", "Correct it.")
    return loaded


def _drop_empty(config: Config) -> None:
    """Remove sections that are None, which DeepSpeed would read as sections."""
    for key in SECTIONS:
        parent, _, last = key.rpartition(".")
        owner = value_at(config, parent) if parent else config
        if isinstance(owner, dict) and last in owner and owner[last] is None:
            del owner[last]


def _config_problems(config: Config, place: str) -> list[Problem]:
    """Return values that DeepSpeed would ignore, or refuse without naming their place."""
    problems = [
        *_key_problems(config, place),
        *_value_problems(config, place),
        *stage_problems(
            f"{place}: zero_optimization.stage", value_at(config, "zero_optimization.stage")
        ),
    ]
    for name in ("optimizer", "param"):
        key = f"zero_optimization.offload_{name}.device"
        device = value_at(config, key)
        if device not in (None, AUTO, *DEVICES):
            problems.append(unknown_choice(f"{place}: {key}", device, DEVICES))
    return problems


def _key_problems(config: Config, place: str) -> Iterator[Problem]:
    """Yield mistyped and deprecated keys, and sections that are not mappings."""
    for key in (key for key in config if key not in (*TOP_LEVEL, *SECTIONS, *UNDOCUMENTED)):
        near = _mistyped(str(key))
        if near is not None:  # DeepSpeed has further keys, which its documentation does not list
            yield Problem(f"{place}: {key}", "unknown key", f"Did you mean {near!r}?")
    for key in SECTIONS:
        found = value_at(config, key)
        if found is not None and not isinstance(found, Mapping):
            remedy = 'Write its keys and values in braces, such as {"enabled": true}.'
            yield Problem(f"{place}: {key}={found!r}", "expected a section", remedy)
    for key, newer in DEPRECATED.items():
        found = value_at(config, key)
        if found is not None:
            rule = "deprecated key"
            yield Problem(f"{place}: {key}={found!r}", rule, f"Write {newer}.")


def _mistyped(key: str) -> str | None:
    """Return the documented key that an unknown one stands for; None: it may be someone's own.

    Of several words, the beginning of a documented key ("train_micro_batch_size") and one with more
    at its end count as mistyped, too.
    """
    longer = [known for known in TOP_LEVEL if "_" in key and known.startswith(key)]
    shorter = [known for known in TOP_LEVEL if "_" in known and key.startswith(f"{known}_")]
    return next(iter(longer + shorter), None) or closest(key, TOP_LEVEL, cutoff=0.75)


def _value_problems(config: Config, place: str) -> Iterator[Problem]:
    """Yield values of the wrong type, and parallelism other than ZeRO's."""
    for key in SWITCHES:
        found = value_at(config, key)
        if not isinstance(found, bool) and found not in (None, AUTO):
            rule = 'expected true, false or "auto"'
            yield Problem(f"{place}: {key}={found!r}", rule, "Write one of them.")
    for key in SIZES:
        found = value_at(config, key)
        is_size = isinstance(found, int) and not isinstance(found, bool) and found >= 1
        if found not in (None, AUTO) and not is_size:
            rule = "expected an integer, at least 1"
            yield Problem(f"{place}: {key}={found!r}", rule, 'Write one, or "auto".')
    norm = config.get("gradient_clipping")
    is_norm = isinstance(norm, (int, float)) and not isinstance(norm, bool) and norm >= 0
    if norm not in (None, AUTO) and not is_norm:
        rule = "expected the maximum norm of the gradients, or 0 to clip none"
        yield Problem(f"{place}: gradient_clipping={norm!r}", rule, 'Write a number, or "auto".')
    for key, off in OTHER_PARALLELISM.items():
        found = value_at(config, key)
        if found not in (None, AUTO) and not (isinstance(found, int) and found <= off):
            rule = "this version supports ZeRO only"
            yield Problem(f"{place}: {key}={found!r}", rule, "Leave it out.")


def stage_problems(where: str, stage: object) -> list[Problem]:
    """Return the problems of a ZeRO stage, called `where`; None and "auto" are valid."""
    if isinstance(stage, str) and stage.strip() in tuple("0123"):
        rule, remedy = "expected a number", f"Write {stage.strip()} without quotes."
        return [Problem(f"{where}={stage!r}", rule, remedy)]
    if stage in (None, AUTO) or (stage in range(4) and not isinstance(stage, bool)):
        return []
    return [unknown_choice(where, stage, "0123")]


STAGE = "zero_optimization.stage"
DEFAULT_STAGE = 2
NO_PATH = "none"  # of a folder for nvme
# The dotted key of DeepSpeed's configuration that each field of the plugin gives.
KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": STAGE,
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
FIELDS: dict[str, object] = {
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "zero_stage": DEFAULT_STAGE,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": NO_PATH,
    "offload_param_nvme_path": NO_PATH,
    "zero3_save_16bit_model": False,
    "enable_msamp": False,
    "msamp_opt_level": "O1",
}
# What the configuration of a plugin without `hf_ds_config` shows, by dotted key; the engine does
# not get these.
PLACEHOLDERS: dict[str, object] = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    KEYS["offload_optimizer_device"]: "none",
    KEYS["offload_optimizer_nvme_path"]: None,
    KEYS["offload_param_device"]: "none",
    KEYS["offload_param_nvme_path"]: None,
    KEYS["zero3_save_16bit_model"]: False,
}


def shown_fields(config: Config, stage: int | None) -> Mapping[str, object]:
    """Return what fields show that nobody gave: the configuration's value, else the default.

    `stage` is the one that was given, if any. Under stage 3, transformers partitions models while
    it builds them.
    """
    found = {field: value_at(config, key) for field, key in KEYS.items()}
    shown = FIELDS | {name: value for name, value in found.items() if value not in (None, AUTO)}
    return shown | {"zero3_init_flag": (shown["zero_stage"] if stage is None else stage) == 3}


def placeholders() -> Config:
    """Return the configuration of a plugin without `hf_ds_config`."""
    config: Config = {}
    for key, value in PLACEHOLDERS.items():
        set_at(config, key, value)
    return config


def without_placeholders(config: Config) -> Config:
    """Return a copy of a configuration without placeholders, and sections that only have such."""
    config = copy.deepcopy(config)
    for key, value in PLACEHOLDERS.items():
        parent, _, last = key.rpartition(".")
        section = value_at(config, parent) if parent else config
        if isinstance(section, dict) and last in section and section[last] == value:
            del section[last]
        if section == {} and parent.count("."):
            del value_at(config, "zero_optimization")[parent.rpartition(".")[2]]
    return config
