"""DeepSpeed's configuration as a nested dictionary, and what it cannot say.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from accel.errors import ConfigError, Problem, unknown_choice

AUTO = "auto"
DEVICES = ("none", "cpu", "nvme")
# Keys of the configuration itself, as its documentation lists them; a typing error of one would
# switch off what it asks for, without a word.
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


class HfDeepSpeedConfig:
    """DeepSpeed's configuration, with queries by dotted key.

    Args:
        config_file_or_dict: path of a JSON file, or a dict, which is copied.

    Attributes:
        config: the nested dictionary.

    Raises:
        ConfigError: if the file does not exist or is no JSON, and for keys and values that there
            are none of.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        place = "hf_ds_config"
        if isinstance(config_file_or_dict, Mapping):
            self.config: dict[str, Any] = copy.deepcopy(dict(config_file_or_dict))
        elif isinstance(config_file_or_dict, (str, PathLike)):
            self.config = _read(Path(config_file_or_dict))
            place = fspath(config_file_or_dict)
        else:
            rule = "it is the path of a JSON file, or a dict"
            raise ConfigError(Problem(f"hf_ds_config={config_file_or_dict!r}", rule, "Give one."))
        ConfigError.raise_if(_config_problems(self.config, place))

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or `default` where it is not set.

        Args:
            ds_key_long: key with dots.
            default: what is returned where it is not set.
        """
        found = value_at(self.config, ds_key_long)
        return default if found is None else found

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a dotted key is set to something true.

        Args:
            ds_key_long: key with dots.
        """
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a dotted key is set, to something false.

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
        """Return whether parameters or optimizer state rest on the host or on disk."""
        devices = [
            self.get_value(f"zero_optimization.offload_{what}.device")
            for what in ("optimizer", "param")
        ]
        return any(device in ("cpu", "nvme") for device in devices)


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None."""
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def set_at(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; sections that lack are created."""
    *sections, last = key.split(".")
    for part in sections:
        config = config.setdefault(part, {})
    config[last] = value


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        rule = "it is the path of a JSON file that can be read"
        raise ConfigError(
            Problem(f"hf_ds_config={str(path)!r}", rule, f"Reading it failed: {error}.")
        ) from error
    except ValueError as error:
        raise ConfigError(
            Problem(f"hf_ds_config={str(path)!r}", "it is no JSON", f"Correct it: {error}.")
        ) from error
    if not isinstance(loaded, dict):
        rule = "DeepSpeed's configuration is a JSON object"
        raise ConfigError(Problem(f"hf_ds_config={str(path)!r}", rule, "Correct it."))
    return loaded


def _config_problems(config: Mapping[str, Any], place: str) -> list[Problem]:
    """Return what DeepSpeed would take without a word, or refuse without naming the place."""
    problems = []
    for key in (key for key in config if key not in TOP_LEVEL):
        for near in difflib.get_close_matches(key, TOP_LEVEL, n=1, cutoff=0.85):
            problems.append(Problem(f"{place}: {key}", "there is none", f"Did you mean {near}?"))
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        rule = "it is a section"
        return [
            *problems,
            Problem(f"{place}: zero_optimization={zero!r}", rule, 'Write {"stage": 2}.'),
        ]
    if zero.get("stage", AUTO) not in (AUTO, 0, 1, 2, 3):
        problems.append(unknown_choice(f"{place}: zero_optimization.stage", zero["stage"], "0123"))
    for what in ("optimizer", "param"):
        key = f"zero_optimization.offload_{what}"
        section = zero.get(f"offload_{what}")
        if section is not None and not isinstance(section, Mapping):
            remedy = 'Write {"device": "cpu"}.'
            problems.append(Problem(f"{place}: {key}={section!r}", "it is a section", remedy))
        elif section and section.get("device", AUTO) not in (AUTO, *DEVICES):
            problems.append(unknown_choice(f"{place}: {key}.device", section["device"], DEVICES))
    return problems
