"""DeepSpeed's plugin: its fields, and the configuration of DeepSpeed that they complete.

Source: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Protocol, final

from accel.config.checks import FieldDefaults, check_choice, check_minimum
from accel.config.deepspeed_json import (
    AUTO,
    DEFAULT_STAGE,
    DEVICES,
    KEYS,
    NO_PATH,
    PLACEHOLDERS,
    STAGE,
    Config,
    HfDeepSpeedConfig,
    autos,
    placeholders,
    set_at,
    shown_fields,
    stage_problems,
    validate,
    value_at,
    without_placeholders,
)
from accel.machine import env
from accel.machine.env import parse_bool
from accel.machine.errors import ConfigError, Problem, Problems, nearest, unknown_choice

if TYPE_CHECKING:
    import torch


PREFIXES = ("ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_CLIPPING")
# Documented environment variables, with the field that each fills.
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


@final
@dataclass(eq=False)
class Selection:
    """The plugin that the next `prepare` uses (None: none); the plugins of one run share it."""

    active: DeepSpeedPlugin | None = None


@dataclass
class DeepSpeedPlugin(FieldDefaults):
    """Configure training with DeepSpeed.

    A value that the configuration lacks, or that is ``"auto"`` there, is filled from the fields
    below, from the environment variables ``ACCELERATE_DEEPSPEED_…``, and from the run. A field that
    nobody gives shows the configuration's value, else its default; `given` tells the difference.

    Args:
        hf_ds_config: DeepSpeed's configuration: path of a JSON file, dict, or `HfDeepSpeedConfig`.
            It reads back as an `HfDeepSpeedConfig`, the given one or a new one, whose `config` is
            `deepspeed_config`.
        gradient_accumulation_steps: micro-batches per optimizer step; "auto": those of the run.
        gradient_clipping: maximum norm of the gradients. "auto": they are clipped by
            `Accelerator.clip_grad_norm_` alone, but an "auto" in `hf_ds_config` is 1.0 without it.
        zero_stage: 0 (nothing is sharded), 1 (optimizer state), 2 (and gradients) or 3 (and
            parameters); not given: that of the configuration, else 2.
        is_train_batch_min: whether the smallest batch size of the prepared loaders counts, or the
            largest.
        offload_optimizer_device: where optimizer state is kept: none, cpu or nvme.
        offload_param_device: where parameters are kept under stage 3: none, cpu or nvme.
        offload_optimizer_nvme_path: folder for the optimizer state on nvme.
        offload_param_nvme_path: folder for the parameters on nvme.
        zero3_init_flag: whether models are partitioned while they are built. Not given: under stage
            3 those of transformers are, whose `from_pretrained` then loads them shard by shard, so
            that it shows True. Under other stages it is False.
        zero3_save_16bit_model: whether the engine's own export may gather weights under stage 3.
        transformer_moe_cls_names: names of mixture-of-experts classes, separated by commas, whose
            parameters stage 3 gathers all at once.
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

    def __post_init__(self, _defaulted: Mapping[str, object] | None) -> None:
        self._hide_defaults(_defaulted)
        for name in KEYS:
            setattr(self, name, self.given(name))
        self._sources: dict[str, str] = {}
        self._decided: dict[str, tuple[object, str]] = {}
        self._outline = HfDeepSpeedConfig(placeholders())  # where no configuration is given
        self._filled: Config = {}  # values in the configuration that fields gave, by dotted key
        self._resolved: Config = {}  # values in it that `prepare` gave in place of "auto"
        self._seen_by_transformers: HfDeepSpeedConfig | None = None
        self._selection = Selection()
        ConfigError.raise_if(self.fill(env.prefixed(*PREFIXES)))
        if self.given("zero3_init_flag") and self.zero_stage != 3:
            warnings.warn(
                "DeepSpeedPlugin: zero3_init_flag=True has no effect under ZeRO "
                f"{self.zero_stage}, and is False.",
                stacklevel=3,
            )
            self.zero3_init_flag = False

    @property
    def selected(self) -> bool:
        """Whether this is the active one of several plugins."""
        return self._selection.active is self

    def select(self) -> None:
        """Make this plugin the active one of its run, which the next `prepare` uses."""
        self._selection.active = self

    @property
    def deepspeed_config(self) -> Config:
        """DeepSpeed's configuration, which may be changed until `prepare` reads it.

        It starts as a copy of the given file or dict, as the given `HfDeepSpeedConfig`'s own (none
        given: as an outline, whose values are "auto"), and has this plugin's fields where that has
        no value. `prepare` puts the values that it resolves in the place of "auto".

        Raises:
            ConfigError: if the file does not exist or is not JSON, and for unknown keys and
                invalid values.

        Example:
            >>> plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
        """
        config = self._loaded().config
        validate(config, self.place)
        for field, key in KEYS.items():
            found, filled = value_at(config, key), self._filled.pop(key, None)
            outlined = PLACEHOLDERS.get(key) if self._is_outline else None
            if found not in (None, AUTO, filled, outlined):
                continue
            value = self.given(field)
            if value is None and field == "zero_stage":
                value = DEFAULT_STAGE
            if value is not None:
                set_at(config, key, value)
                self._filled[key] = value
            elif filled is not None:
                set_at(config, key, AUTO if outlined is None else outlined)
        self._show(config)
        return config

    @deepspeed_config.setter
    def deepspeed_config(self, config: Config) -> None:
        """Replace the configuration; `hf_ds_config` follows."""
        if config is not self._loaded().config:
            replaced = HfDeepSpeedConfig(config)
            replaced.config = config
            self.hf_ds_config = replaced

    def stated_config(self) -> Config:
        """Return a copy of the configuration with the values alone that something stands for.

        Values that an earlier `prepare` resolved are "auto" again.
        """
        config = copy.deepcopy(self.deepspeed_config)
        for key, value in self._resolved.items():
            if value_at(config, key) == value:
                set_at(config, key, AUTO)
        return without_placeholders(config) if self._is_outline else config

    def given_config(self) -> Config:
        """Return a copy of the configuration without what fields and `prepare` filled in."""
        config = self.stated_config()
        for key, value in self._filled.items():
            parent, _, last = key.rpartition(".")
            section = value_at(config, parent) if parent else config
            if isinstance(section, dict) and section.get(last) == value:
                del section[last]
        return config

    def resolve(self, resolved: Config) -> None:
        """Put values of a complete configuration in the place of those that are "auto".

        Args:
            resolved: the configuration that an engine has.
        """
        config, stated = self.deepspeed_config, self.stated_config()
        outline = PLACEHOLDERS if self._is_outline else {}
        for key in (*autos(stated), *(k for k in outline if value_at(config, k) == AUTO)):
            value = value_at(resolved, key)
            if value is not None:
                set_at(config, key, value)
                self._resolved[key] = value

    @property
    def has_config(self) -> bool:
        """Whether a configuration was given, so that there is no outline in its place."""
        return not self._is_outline

    @property
    def _is_outline(self) -> bool:
        return self.hf_ds_config is None or self.hf_ds_config is self._outline

    def _loaded(self) -> HfDeepSpeedConfig:
        """Return the configuration; a file or dict that was assigned is read now."""
        if self.hf_ds_config is None:
            return self._outline
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        return self.hf_ds_config

    def check_config(self) -> None:
        """Raise `ConfigError` if the configuration cannot be read, or is invalid."""
        validate(self.deepspeed_config, self.place)

    def given(self, field: str) -> Any:
        """Return the value that an argument or an environment variable gave a field, or None.

        Args:
            field: its name.
        """
        value = super().given(field)
        is_open = field in KEYS and value == (NO_PATH if field.endswith("_path") else AUTO)
        return None if is_open else value

    def _show(self, config: Config) -> None:
        shown = shown_fields(config, self.given("zero_stage"))
        self._show_defaults({**shown, "hf_ds_config": self._outline})

    def _show_config(self) -> None:
        """Let fields show the configuration; none that cannot be read, as `check_config` tells."""
        config: Config = {}
        with contextlib.suppress(ConfigError):  # raised together with what else is wrong
            config = self._loaded().config
        self._show(config)

    def filled_by(self, key: str) -> str | None:
        """Return the source of a value that a field gave the configuration; None for other values.

        Args:
            key: dotted key.
        """
        fields = (field for field, own in KEYS.items() if own == key and key in self._filled)
        return next((self.source(field) for field in fields), None)

    @property
    def place(self) -> str:
        """Name of the configuration in messages: the path of its file, or hf_ds_config."""
        given = self.hf_ds_config
        if isinstance(given, HfDeepSpeedConfig):
            return given.place
        return fspath(given) if isinstance(given, (str, PathLike)) else "hf_ds_config"

    def source(self, field: str) -> str:
        """Return the source of a field's value: the argument, or an environment variable.

        Args:
            field: its name.
        """
        value = getattr(self, field)
        return self._sources.get(field, f"DeepSpeedPlugin({field}={value!r})")

    @property
    def decided(self) -> Mapping[str, tuple[object, str]]:
        """Values that the run decides, with their sources, by dotted key."""
        return self._decided

    def decide(self, key: str, value: object, source: str) -> None:
        """Set a value that the run decides, which the configuration may not contradict.

        Args:
            key: dotted key of DeepSpeed's configuration.
            value: the value there.
            source: what decides it, in messages.
        """
        self._decided[key] = value, source

    def fill(self, variables: Mapping[str, str]) -> list[Problem]:
        """Fill fields that are None from environment variables; return the invalid ones.

        Args:
            variables: those that are set, by name; "", "none" and "auto" leave a field None.
        """
        self._hide_defaults(self._shown())
        rule = "unknown variable of DeepSpeedPlugin"
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
                rule = f"invalid value of DeepSpeedPlugin.{field}"
                problems.append(Problem(f"{name}={text!r} (environment)", rule, "Correct it."))
                continue
            setattr(self, field, value)
            self._sources[field] = f"{name}={text} (environment)"
        problems += _field_problems(self)
        self._show_config()
        return problems

    @property
    def stage(self) -> int:
        """The stage of ZeRO in force."""
        return int(value_at(self.deepspeed_config, STAGE))

    def is_zero3_init_enabled(self) -> bool:
        """Return whether models are partitioned while they are built."""
        return bool(self.zero3_init_flag) and self.stage == 3

    def set_deepspeed_weakref(self) -> None:
        """Let transformers partition models while it builds them, where this plugin says so.

        It has an effect where transformers is imported. An `Accelerator` does it as well, and
        this serves models that are built before there is one.
        """
        seen = HfDeepSpeedConfig(self.deepspeed_config)
        for key in autos(seen.config):  # `deepspeed.zero.Init` takes no "auto"
            seen.del_config_sub_tree(key)
        seen.config.setdefault("train_micro_batch_size_per_gpu", 1)
        self._seen_by_transformers = seen  # transformers has a weak reference
        if "transformers" in sys.modules:
            importlib.import_module("transformers.integrations.deepspeed").set_hf_deepspeed_config(
                seen
            )

    def set_moe_leaf_modules(self, model: torch.nn.Module) -> None:
        """Let stage 3 gather mixture-of-experts modules all at once; `prepare` does it, too.

        Args:
            model: has the classes of `transformer_moe_cls_names`; nothing where that is None.

        Raises:
            ConfigError: for a class that the model does not have.
        """
        names = [name.strip() for name in (self.transformer_moe_cls_names or "").split(",")]
        kinds = {type(module).__name__: type(module) for module in model.modules()}
        wanted = [name for name in names if name]
        ConfigError.raise_if(
            [
                unknown_choice("transformer_moe_cls_names", name, sorted(kinds))
                for name in wanted
                if name not in kinds
            ]
        )
        if wanted:
            utils = importlib.import_module("deepspeed.utils")
            utils.set_z3_leaf_modules(model, [kinds[name] for name in wanted])

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Partition models while they are built, or do not, inside the context.

        Args:
            enable: whether it is on.
        """
        before = self.given("zero3_init_flag")
        self.zero3_init_flag = enable
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self._show_config()

    # -- values of the configuration, and "auto" ones given by hand ------------------------------

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Return a value of the configuration.

        Args:
            ds_key_long: key with dots, such as ``"zero_optimization.stage"``.
            default: what is returned where it is not set.
        """
        return value_at(self.deepspeed_config, ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Return whether a value of the configuration is to be resolved from the run.

        Args:
            ds_key_long: key with dots.
        """
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self,
        ds_key_long: str,
        mismatches: list[str] | None = None,
        must_match: bool = True,
        **kwargs: object,
    ) -> None:
        """Fill a value of the configuration that is "auto", or compare it with the given one.

        Args:
            ds_key_long: key with dots.
            mismatches: takes a line for a value that differs; None: it is an error.
            must_match: whether it is compared.
            kwargs: values by key with dots: ``**{"optimizer.params.lr": 1e-3}``.

        Raises:
            ConfigError: if the value is "auto" and not given, or differs.
        """
        found = self.get_value(ds_key_long)
        if found == AUTO:
            if ds_key_long not in kwargs:
                remedy = f"Give it, or write a value for {ds_key_long} into the configuration."
                raise ConfigError.of(f'{ds_key_long}="auto"', "its value is not given", remedy)
            set_at(self.deepspeed_config, ds_key_long, kwargs[ds_key_long])
            return
        given = kwargs.get(ds_key_long)
        if not must_match or None in (found, given) or found == given:
            return
        if mismatches is None:
            value, rule = f"{ds_key_long}={found!r}", f"{given!r} is given for it, too"
            raise ConfigError.of(value, rule, 'Make them equal, or write "auto".')
        mismatches.append(f"{ds_key_long}={found!r} in the configuration, and {given!r} is given")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: Mapping[str, object] | None = None,
        must_match: bool = True,
        **kwargs: object,
    ) -> None:
        """Fill every value of the configuration that is "auto", and compare the others.

        Args:
            prefix: dotted key of `config`, with a dot at its end; "": the full configuration.
            mismatches: takes a line for each value that differs; None: they are one error.
            config: the section of the configuration to go through; None: all of it.
            must_match: whether values are compared.
            kwargs: values by key with dots.

        Raises:
            ConfigError: naming the values that differ, or one that is "auto" and not given.
        """
        found: list[str] = [] if mismatches is None else mismatches
        for name, value in list((self.deepspeed_config if config is None else config).items()):
            key = f"{prefix}{name}"
            if isinstance(value, Mapping):
                self.deepspeed_config_process(f"{key}.", found, value, must_match, **kwargs)
            else:
                self.fill_match(key, found, must_match, **kwargs)
        if mismatches is None:
            rule, remedy = "given in two places with different values", "Make them equal."
            ConfigError.raise_if([Problem(line, rule, remedy) for line in found])

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Switch the number format of a run on in the configuration, where that leaves it open.

        Args:
            mixed_precision: no, fp16 or bf16.

        Raises:
            ConfigError: if the configuration switches another format on.
        """
        for name in ("fp16", "bf16"):
            key, wanted = f"{name}.enabled", name == str(mixed_precision)
            found = self.get_value(key)
            if found in (None, AUTO) and (wanted or found == AUTO):
                set_at(self.deepspeed_config, key, wanted)
            elif found and not wanted and str(mixed_precision) != "no":
                value = f"mixed_precision={str(mixed_precision)!r}"
                remedy = f'Write "auto" for {key}, or give mixed_precision={name!r}.'
                raise ConfigError.of(value, f"{self.place} enables {name}", remedy)


def share_selection(plugins: Sequence[DeepSpeedPlugin]) -> None:
    """Let exactly one plugin of a run be active: the one that is selected, else the first."""
    selection = Selection(next((one for one in plugins if one.selected), plugins[0]))
    for plugin in plugins:
        plugin._selection = selection


def _parsed(field: str, text: str) -> int | float | bool | str:
    if field == "zero_stage":
        return int(text)
    if field == "gradient_clipping":
        return float(text)
    if field in ("zero3_init_flag", "zero3_save_16bit_model"):
        value = parse_bool(text)
        if value is None:
            raise ValueError(f"expected true or false, not {text!r}")
        return value
    return text


def _field_problems(plugin: DeepSpeedPlugin) -> list[Problem]:
    problems = Problems(stage_problems("DeepSpeedPlugin.zero_stage", plugin.zero_stage))
    check_minimum(plugin, "gradient_accumulation_steps", 1, problems)
    check_minimum(plugin, "gradient_clipping", 0, problems)
    check_choice(plugin, "msamp_opt_level", ("O1", "O2"), problems)
    for name in ("optimizer", "param"):
        check_choice(plugin, f"offload_{name}_device", DEVICES, problems)
        device = getattr(plugin, f"offload_{name}_device")
        path = f"offload_{name}_nvme_path"
        if device == "nvme" and getattr(plugin, path) is None and not plugin.has_config:
            rule = "nvme needs a folder on a disk of this machine"
            value = f"DeepSpeedPlugin.offload_{name}_device='nvme'"
            problems.add(value, rule, f"Give {path}=…")
    return problems


class HasPlugins(Protocol):
    """A state of a run, as `AcceleratorState`."""

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """DeepSpeed's active plugin; None where it is off."""


def active(plugins: Mapping[str, DeepSpeedPlugin] | None) -> DeepSpeedPlugin | None:
    """Return the plugin that is selected; None where none is, or DeepSpeed is off."""
    return next((plugin for plugin in (plugins or {}).values() if plugin.selected), None)


def named(plugins: Mapping[str, DeepSpeedPlugin] | None, name: str) -> DeepSpeedPlugin:
    """Return the plugin called `name`, or raise `ConfigError`."""
    if plugins is None or name not in plugins:
        raise ConfigError(unknown_choice("DeepSpeed plugin", name, plugins or {}))
    return plugins[name]


def get_active_deepspeed_plugin(state: HasPlugins) -> DeepSpeedPlugin:
    """Return DeepSpeed's active plugin, which the next `prepare` follows.

    Args:
        state: of a run under DeepSpeed.

    Raises:
        ConfigError: if DeepSpeed is off.
    """
    plugin = state.deepspeed_plugin
    if plugin is None:
        raise ConfigError.of(
            "get_active_deepspeed_plugin",
            "DeepSpeed is off",
            "Switch it on with Accelerator(deepspeed_plugin=…).",
        )
    return plugin


class Claims:
    """Merge DeepSpeed's configuration with the plugin's fields and the values of the run.

    `problems` takes values that are given twice and differ. Raises `ConfigError` if the
    configuration cannot be read.
    """

    def __init__(self, plugin: DeepSpeedPlugin) -> None:
        self.plugin = plugin
        self.config = plugin.stated_config()
        self.problems = Problems()
        self._owners: dict[str, str] = {}
        for field, key in KEYS.items():
            value = plugin.given(field)
            if value is not None:
                self.claim(key, value, plugin.source(field))
        for key, (value, source) in plugin.decided.items():
            self.claim(key, value, source)

    def claim(self, key: str, value: object, source: str) -> None:
        """Set `key`, or note that the configuration has another value than `source`."""
        found = value_at(self.config, key)
        if found in (None, AUTO):
            set_at(self.config, key, value)
            self._owners[key] = source
        elif not is_equal(found, value):
            owner = self._owners.get(key) or self.plugin.filled_by(key)
            remedy = f'Write "auto" for {key}, or make them equal.'
            first = owner or f"{self.plugin.place}: {key}={found!r}"
            self.problems.add(
                f"{first} with {source}",
                "given in two places with different values",
                "Make them equal, or remove one." if owner else remedy,
            )

    def default(self, key: str, value: object) -> None:
        """Set `key` where the configuration has no value."""
        if value_at(self.config, key) in (None, AUTO):
            set_at(self.config, key, value)


def is_equal(found: object, value: object) -> bool:
    """Return whether two values of a configuration are equal, up to rounding."""
    if isinstance(found, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(found) == len(value) and all(map(is_equal, found, value))
    if isinstance(found, (int, float)) and isinstance(value, (int, float)):
        return math.isclose(found, value, rel_tol=1e-9)
    return bool(str(found) == str(value))
