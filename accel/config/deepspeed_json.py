"""DeepSpeed's configuration as a nested dictionary, and what it cannot say.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from accel.errors import ConfigError, Problem, unknown_choice

AUTO = "auto"
GONE: Any = ...  # stands for the value of a key that was taken out; no configuration holds it
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
# Keys whose value is a section of its own: what to write there.
SECTIONS = {
    "optimizer": '{"type": "AdamW", "params": {"lr": "auto"}}',
    "optimizer.params": '{"lr": "auto"}',
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}',
    "scheduler.params": '{"warmup_num_steps": "auto"}',
    "zero_optimization": '{"stage": 2}',
    "zero_optimization.offload_optimizer": '{"device": "cpu"}',
    "zero_optimization.offload_param": '{"device": "cpu"}',
    "activation_checkpointing": '{"partition_activations": true}',
    "aio": '{"thread_count": 1}',
    "checkpoint": '{"tag_validation": "Warn"}',
    "compile": '{"deepcompile": true}',
    "data_types": '{"grad_accum_dtype": "fp32"}',
    **dict.fromkeys(
        (
            *("fp16", "bf16", "torch_autocast", "autotuning", "flops_profiler", "elasticity"),
            *("data_efficiency", "curriculum_learning", "csv_monitor", "tensorboard", "wandb"),
            *("comet", "comms_logger", "tensor_parallel", "expert_parallel"),
        ),
        '{"enabled": true}',
    ),
}
# Names that DeepSpeed still reads beside the present ones: two places would decide one value.
OLDER = {
    "bfloat16": 'bf16 in its place: {"enabled": true}',
    "zero_optimization.cpu_offload": 'offload_optimizer in its place: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'offload_param in its place: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "pin_memory in offload_optimizer or "
    "offload_param",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on"
    "_model_save in its place",
}
# What spreads a model in another way than ZeRO: the largest value that leaves it off.
OTHER_WAYS = {
    "sequence_parallel_size": 1,
    "tensor_parallel.autotp_size": 1,
    "expert_parallel.enabled": False,
}
SWITCHES = ("fp16.enabled", "bf16.enabled", "torch_autocast.enabled")
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class HfDeepSpeedConfig:
    """DeepSpeed's configuration, with queries by dotted key.

    Args:
        config_file_or_dict: path of a JSON file, or a dict, which is copied. A section that is null
            says nothing.

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
        _drop_empty(self.config)
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
    put_at(config, key.split("."), value)


def put_at(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set what lies at the end of `path`, or take it out for `GONE`; sections are created."""
    *sections, last = path
    for part in sections:
        config = config.setdefault(part, {})
    if value is GONE:
        config.pop(last, None)
    else:
        config[last] = value


def changes(
    now: Mapping[str, Any], before: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths in a nested dictionary that were written to, each with its value or `GONE`."""
    for key in {**before, **now}:
        value, was = now.get(key, GONE), before.get(key, GONE)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            yield from changes(value, was, (*path, key))
        elif value != was:
            yield (*path, key), value


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


def _drop_empty(config: dict[str, Any]) -> None:
    """Take out sections that are None, which DeepSpeed reads as if they were there."""
    for key in SECTIONS:
        parent, _, last = key.rpartition(".")
        owner = value_at(config, parent) if parent else config
        if isinstance(owner, dict) and last in owner and owner[last] is None:
            del owner[last]


def _config_problems(config: Mapping[str, Any], place: str) -> list[Problem]:
    """Return what DeepSpeed would take without a word, or refuse without naming the place."""
    problems = [
        *_key_problems(config, place),
        *_value_problems(config, place),
        *stage_problems(
            f"{place}: zero_optimization.stage", value_at(config, "zero_optimization.stage")
        ),
    ]
    for what in ("optimizer", "param"):
        key = f"zero_optimization.offload_{what}.device"
        device = value_at(config, key)
        if device not in (None, AUTO, *DEVICES):
            problems.append(unknown_choice(f"{place}: {key}", device, DEVICES))
    return problems


def _key_problems(config: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Yield keys that there are not, or not any more, and sections that are none."""
    for key in (key for key in config if key not in (*TOP_LEVEL, *SECTIONS)):
        for near in difflib.get_close_matches(key, TOP_LEVEL, n=1, cutoff=0.85):
            yield Problem(f"{place}: {key}", "unknown key", f"Did you mean {near}?")
    for key, example in SECTIONS.items():
        found = value_at(config, key)
        if found is not None and not isinstance(found, Mapping):
            yield Problem(f"{place}: {key}={found!r}", "it is a section", f"Write {example}.")
    for key, newer in OLDER.items():
        found = value_at(config, key)
        if found is not None:
            rule = "it is a name of older versions of DeepSpeed"
            yield Problem(f"{place}: {key}={found!r}", rule, f"Write {newer}.")


def _value_problems(config: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Yield values of another kind than their keys take, and strategies other than ZeRO."""
    for key in SWITCHES:
        found = value_at(config, key)
        if not isinstance(found, bool) and found not in (None, AUTO):
            rule = 'it is true, false or "auto"'
            yield Problem(f"{place}: {key}={found!r}", rule, "Write one of them.")
    for key in SIZES:
        found = value_at(config, key)
        whole = isinstance(found, int) and not isinstance(found, bool) and found >= 1
        if found not in (None, AUTO) and not whole:
            rule = "it is a whole number, at least 1"
            yield Problem(f"{place}: {key}={found!r}", rule, 'Write one, or "auto".')
    norm = config.get("gradient_clipping")
    number = isinstance(norm, (int, float)) and not isinstance(norm, bool) and norm >= 0
    if norm not in (None, AUTO) and not number:
        rule = "it is the largest norm of the gradients, or 0 for any"
        yield Problem(f"{place}: gradient_clipping={norm!r}", rule, 'Write a number, or "auto".')
    for key, off in OTHER_WAYS.items():
        found = value_at(config, key)
        if found not in (None, AUTO) and not (isinstance(found, int) and found <= off):
            rule = "this version spreads a model under DeepSpeed by ZeRO alone"
            yield Problem(f"{place}: {key}={found!r}", rule, "Leave it out.")


def stage_problems(where: str, stage: Any) -> list[Problem]:
    """Return what is wrong with a stage of ZeRO; None and "auto" leave it open.

    Args:
        where: what was set, as messages call it.
        stage: what it was set to.
    """
    if isinstance(stage, str) and stage.strip() in tuple("0123"):
        rule, remedy = "it is a number", f"Write {stage.strip()} without quotes."
        return [Problem(f"{where}={stage!r}", rule, remedy)]
    if stage in (None, AUTO) or (stage in range(4) and not isinstance(stage, bool)):
        return []
    return [unknown_choice(where, stage, "0123")]
