"""The plugin of DeepSpeed: fields, environment and a configuration of DeepSpeed's own.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from accel.config.checks import check_choice, check_minimum
from accel.config.deepspeed_json import (
    AUTO,
    DEVICES,
    HfDeepSpeedConfig,
    changes,
    put_at,
    set_at,
    stage_problems,
    value_at,
)
from accel.errors import ConfigError, Problem, nearest

# Told of each plugin that is selected, or that switches sharding while models are built.
_WATCHERS: list[weakref.WeakMethod[Callable[[DeepSpeedPlugin], None]]] = []

# Where each field of the plugin stands in DeepSpeed's configuration.
KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
# Documented environment variables: the field that each one fills.
VARIABLES = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "hf_ds_config",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "transformer_moe_cls_names",
}


@dataclass
class DeepSpeedPlugin:
    """How DeepSpeed trains a model.

    A value that the configuration does not tell, or that is ``"auto"`` there, is filled from the
    fields below, from the environment variables ``ACCELERATE_DEEPSPEED_…``, and from the run.

    Args:
        hf_ds_config: DeepSpeed's configuration: path of a JSON file, dict, or `HfDeepSpeedConfig`.
        gradient_accumulation_steps: micro-batches per optimizer step; None: as the run says.
        gradient_clipping: largest norm of the gradients; None: they are not clipped, unless
            `Accelerator.clip_grad_norm_` does.
        zero_stage: 0 (nothing is sharded), 1 (optimizer state), 2 (and gradients) or 3 (and
            parameters); None: as the configuration says, else 2, which it tells from the start of
            the run.
        is_train_batch_min: whether the smallest batch size of the prepared loaders counts, or the
            largest.
        offload_optimizer_device: where optimizer state rests: none, cpu or nvme; None: none.
        offload_param_device: where parameters rest under stage 3: none, cpu or nvme; None: none.
        offload_optimizer_nvme_path: folder for the optimizer state of nvme.
        offload_param_nvme_path: folder for the parameters of nvme.
        zero3_init_flag: whether models are sharded while they are built, under stage 3; None:
            those of transformers are, whose `from_pretrained` then loads them in parts.
        zero3_save_16bit_model: whether the engine's own export may gather weights under stage 3;
            None: no.
        transformer_moe_cls_names: names of mixture-of-experts classes, separated by commas, that
            stage 3 fetches as a whole.
        enable_msamp: whether MS-AMP computes in fp8; not built yet.
        msamp_opt_level: O1 or O2, of MS-AMP.

    Raises:
        ConfigError: naming every value that is out of its range.

    Example:
        >>> plugin = DeepSpeedPlugin(zero_stage=3, gradient_clipping=1.0)
        >>> accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")

    Source: https://www.deepspeed.ai/docs/config-json/
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: Any = None

    def __post_init__(self) -> None:
        for name in ("gradient_accumulation_steps", "gradient_clipping", "zero_stage"):
            if getattr(self, name) == AUTO:
                setattr(self, name, None)
        self._sources: dict[str, str] = {}
        self._decided: dict[str, tuple[Any, str]] = {}
        self._shown: dict[str, Any] = {}  # what `deepspeed_config` returned
        self._shown_first: dict[str, Any] = {}  # a copy of it, from before anybody wrote into it
        self._written: dict[tuple[str, ...], Any] = {}
        self._settled: int | None = None
        self._selected = False
        self._siblings: Sequence[DeepSpeedPlugin] = ()
        ConfigError.raise_if(_field_problems(self))

    @property
    def selected(self) -> bool:
        """Whether this is the active one of several plugins."""
        return self._selected

    def select(self) -> None:
        """Make this plugin the active one of its run, which the next `prepare` follows."""
        for plugin in self._siblings:
            plugin._selected = False
        self._selected = True
        _tell(self)

    def join(self, siblings: Sequence[DeepSpeedPlugin]) -> None:
        """Tell this plugin of the others of its run.

        Args:
            siblings: all plugins of the run, this one included.
        """
        self._siblings = siblings

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, with this plugin's fields where it says nothing.

        What is written into it holds for the next `prepare`; `hf_ds_config` is left as it is.

        Raises:
            ConfigError: if the file does not exist or is no JSON, or for what was written.

        Example:
            >>> plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
        """
        config = self.given_config()
        for name, key in KEYS.items():
            value = getattr(self, name)
            if value is not None and value_at(config, key) in (None, AUTO):
                set_at(config, key, value)
        if value_at(config, KEYS["zero_stage"]) in (None, AUTO):
            set_at(config, KEYS["zero_stage"], 2)
        if config != self._shown:  # else sections that somebody holds stay the live ones
            self._shown.clear()
            self._shown.update(config)
        self._shown_first = copy.deepcopy(self._shown)
        return self._shown

    def given_config(self) -> dict[str, Any]:
        """Return a copy of what `hf_ds_config` holds, and of what `deepspeed_config` was given."""
        self._take_writes()
        given = {} if self.hf_ds_config is None else self.hf_ds_config
        if isinstance(given, HfDeepSpeedConfig):
            config = copy.deepcopy(given.config)
        else:
            config = HfDeepSpeedConfig(given).config
        for path, value in self._written.items():
            put_at(config, path, copy.deepcopy(value))
        return HfDeepSpeedConfig(config).config if self._written else config

    def _take_writes(self) -> None:
        """Remember what was written into `deepspeed_config`."""
        found = dict(changes(self._shown, self._shown_first))
        for path, value in found.items():
            self._written.pop(path, None)  # the latest come last
            self._written[path] = value
        if found:
            self._shown_first = copy.deepcopy(self._shown)
        if found and self._settled is not None:
            self.settle()

    def settle(self) -> None:
        """Let `zero_stage` tell the stage that holds, where nobody gave it."""
        if self.zero_stage in (None, self._settled):
            self.zero_stage = None
            self.zero_stage = self._settled = self.stage

    @property
    def place(self) -> str:
        """What to call the configuration in messages: the name of the file, or hf_ds_config."""
        given = self.hf_ds_config
        return fspath(given) if isinstance(given, (str, PathLike)) else "hf_ds_config"

    def source(self, field: str) -> str:
        """Return what gave a field its value: the field itself, or an environment variable.

        Args:
            field: its name.
        """
        value = getattr(self, field)
        return self._sources.get(field, f"DeepSpeedPlugin({field}={value!r})")

    @property
    def decided(self) -> Mapping[str, tuple[Any, str]]:
        """What `decide` was told: value and source by dotted key."""
        return self._decided

    def decide(self, key: str, value: Any, source: str) -> None:
        """Tell what the run decides beside its loaders, which the configuration may not contradict.

        Args:
            key: dotted key of DeepSpeed's configuration.
            value: the value there.
            source: what decides it, as messages call it.
        """
        self._decided[key] = value, source

    def fill(self, variables: Mapping[str, str]) -> list[Problem]:
        """Fill fields that are None from environment variables; return what makes no sense.

        Args:
            variables: those that are set, by name; "", "none" and "auto" say nothing.
        """
        rule = "no field of DeepSpeedPlugin is filled by a variable of that name"
        problems = [
            Problem(f"{name}={text!r} (environment)", rule, nearest(name, VARIABLES))
            for name, text in variables.items()
            if name not in VARIABLES and text.strip()
        ]
        for name, field in VARIABLES.items():
            text = variables.get(name, "")
            if getattr(self, field) is not None or text.lower() in ("", "none", AUTO):
                continue
            try:
                value = _parsed(field, text)
            except ValueError:
                rule = f"it fills DeepSpeedPlugin.{field}, which has no such value"
                problems.append(Problem(f"{name}={text!r} (environment)", rule, "Correct it."))
                continue
            setattr(self, field, value)
            self._sources[field] = f"{name}={text} (environment)"
        return problems + _field_problems(self)

    @property
    def stage(self) -> int:
        """The stage of ZeRO that holds."""
        return int(value_at(self.deepspeed_config, KEYS["zero_stage"]))

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return a value of the configuration.

        Args:
            ds_key_long: key with dots, such as ``"zero_optimization.stage"``.
            default: what is returned where it is not set.
        """
        found = value_at(self.deepspeed_config, ds_key_long)
        return default if found is None else found

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the configuration is left to the run.

        Args:
            ds_key_long: key with dots.
        """
        return bool(self.get_value(ds_key_long) == AUTO)

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models are sharded while they are built."""
        return bool(self.zero3_init_flag) and self.stage == 3

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Switch sharding while models are built on or off inside the context.

        Args:
            enable: whether it is on.
        """
        before = self.zero3_init_flag
        self.zero3_init_flag = enable
        _tell(self)
        try:
            yield
        finally:
            self.zero3_init_flag = before
            _tell(self)


def watch(told: Callable[[DeepSpeedPlugin], None]) -> None:
    """Call a method when a plugin is selected, or switches sharding while models are built.

    Args:
        told: a bound method, called with the plugin for as long as its owner lives.
    """
    _WATCHERS[:] = [known for known in _WATCHERS if known() is not None]
    _WATCHERS.append(weakref.WeakMethod(told))


def _tell(plugin: DeepSpeedPlugin) -> None:
    for watcher in list(_WATCHERS):
        told = watcher()
        if told is not None:
            told(plugin)


def _parsed(field: str, text: str) -> Any:
    if field == "zero_stage":
        return int(text)
    if field == "gradient_clipping":
        return float(text)
    if field in ("zero3_init_flag", "zero3_save_16bit_model"):
        switch = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.strip().lower() not in switch:
            raise ValueError(text)
        return switch[text.strip().lower()]
    return text


def _field_problems(plugin: DeepSpeedPlugin) -> list[Problem]:
    problems = stage_problems("DeepSpeedPlugin.zero_stage", plugin.zero_stage)
    check_minimum(plugin, "gradient_accumulation_steps", 1, problems)
    check_minimum(plugin, "gradient_clipping", 0, problems)
    check_choice(plugin, "msamp_opt_level", ("O1", "O2"), problems)
    for what in ("optimizer", "param"):
        check_choice(plugin, f"offload_{what}_device", DEVICES, problems)
        device = getattr(plugin, f"offload_{what}_device")
        path = f"offload_{what}_nvme_path"
        if device == "nvme" and getattr(plugin, path) is None and plugin.hf_ds_config is None:
            rule = "nvme needs a folder on a disk of this machine"
            value = f"DeepSpeedPlugin.offload_{what}_device='nvme'"
            problems.append(Problem(value, rule, f"Give {path}=…"))
    return problems
