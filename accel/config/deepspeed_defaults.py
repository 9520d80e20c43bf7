"""Values that DeepSpeed's plugin and its configuration show where nobody gave one."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from accel.config.deepspeed_json import AUTO, Config, set_at, value_at

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
