"""The plugin of fully sharded training (FSDP2), and the meaning of older spellings.

Some fields read as torch's own objects, which this module does not import: each is a descriptor
that holds a text, or None, and whoever reads it imports torch.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from accel.config.checks import FieldDefaults, check_minimum
from accel.machine import env
from accel.machine.env import parse_bool
from accel.machine.errors import (
    ConfigError,
    Problem,
    Problems,
    nearest,
    unknown_choice,
)

if TYPE_CHECKING:
    import torch


SHARDED: Final = "SHARDED_STATE_DICT"


@final
class StateDictTypeField:
    """A field that holds the name of a `StateDictType`, and reads as its member."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plugin: object, owner: type | None = None) -> Any:
        held = None if plugin is None else vars(plugin)[self._name]
        if held is None:
            return None  # the field's default, too
        kinds = importlib.import_module("torch.distributed.fsdp").StateDictType
        return getattr(kinds, held, held)

    def __set__(self, plugin: object, value: object) -> None:
        name = None if value is None else str(getattr(value, "name", value)).strip().upper()
        vars(plugin)[self._name] = name


@final
class StateDictConfigField:
    """A field that reads, unless another value was given, as the config of the state dict type.

    Args:
        kind: "" of models, "Optim" of optimizers.
    """

    def __init__(self, kind: str = "") -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, plugin: object, owner: type | None = None) -> Any:
        held = None if plugin is None else vars(plugin)[self._name]
        if held is not None or plugin is None or vars(plugin)["state_dict_type"] is None:
            return held
        fsdp = importlib.import_module("torch.distributed.fsdp")
        if vars(plugin)["state_dict_type"] == SHARDED:
            return getattr(fsdp, f"Sharded{self._kind}StateDictConfig")(offload_to_cpu=True)
        config = getattr(fsdp, f"Full{self._kind}StateDictConfig")
        return config(offload_to_cpu=True, rank0_only=True)

    def __set__(self, plugin: object, value: object) -> None:
        vars(plugin)[self._name] = value


DTYPES = {
    "no": None,
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
}


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type[torch.nn.Module] | None:
    """Return the class of that name of a module or one inside it; None where there is none.

    Args:
        module: any module.
        name: of a class, without its package.
    """
    return next((type(m) for m in module.modules() if type(m).__name__ == name), None)


# The older wrapper's strategies in the order of their numbers, from 1:
# (reshard_after_forward, dp_replicate_size).
STRATEGIES: dict[str, tuple[bool, int | str]] = {
    "FULL_SHARD": (True, 1),
    "SHARD_GRAD_OP": (False, 1),
    "NO_SHARD": (False, "all"),
    "HYBRID_SHARD": (True, "nodes"),
    "HYBRID_SHARD_ZERO2": (False, "nodes"),
}
STATE_TYPES = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
# Fields that only one wrapping policy takes.
WANTED_BY = {
    "transformer_cls_names_to_wrap": "transformer_based_wrap",
    "min_num_params": "size_based_wrap",
}
REPLICAS = ("nodes", "all")
OFFLOADS = ("OffloadPolicy", "CPUOffload")  # torch's classes, which this module does not import
FORMATS = {"no": "fp32", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
POLICY_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
TRANSLATED = (*POLICY_FIELDS, "buffer_dtype", "cast_root_forward_inputs")
OLDER_POLICY_FIELDS = ("buffer_dtype", "keep_low_precision_grads", "cast_root_forward_inputs")
SWITCH_FIELDS = (
    "limit_all_gathers",
    "use_orig_params",
    "sync_module_states",
    "forward_prefetch",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "cpu_ram_efficient_loading",
)
# Fields that say one thing together.
TOGETHER = (
    ("sharding_strategy", "reshard_after_forward", "dp_replicate_size"),
    ("auto_wrap_policy", "transformer_cls_names_to_wrap", "min_num_params"),
)
PREFIX = "FSDP_"  # of documented environment variables
# The meaning of fields that nobody gave, which they show.
DEFAULTS: dict[str, object] = {
    "reshard_after_forward": True,
    "cpu_offload": False,
    "state_dict_type": "FULL_STATE_DICT",
    "activation_checkpointing": False,
    "activation_checkpointing_offload": False,
    "cpu_ram_efficient_loading": False,
}
# Documented environment variables, without FSDP_: the field that each one fills.
VARIABLES = {
    "VERSION": "fsdp_version",
    "SHARDING_STRATEGY": "sharding_strategy",
    "RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "BACKWARD_PREFETCH": "backward_prefetch",
    "AUTO_WRAP_POLICY": "auto_wrap_policy",
    "OFFLOAD_PARAMS": "cpu_offload",
    "STATE_DICT_TYPE": "state_dict_type",
    "USE_ORIG_PARAMS": "use_orig_params",
    "SYNC_MODULE_STATES": "sync_module_states",
    "FORWARD_PREFETCH": "forward_prefetch",
    "ACTIVATION_CHECKPOINTING": "activation_checkpointing",
    "ACTIVATION_CHECKPOINTING_OFFLOAD": "activation_checkpointing_offload",
    "CPU_RAM_EFFICIENT_LOADING": "cpu_ram_efficient_loading",
    "TRANSFORMER_CLS_TO_WRAP": "transformer_cls_names_to_wrap",
    "MIN_NUM_PARAMS": "min_num_params",
    "IGNORED_MODULES": "ignored_modules",
}


@dataclass
class FullyShardedDataParallelPlugin(FieldDefaults):
    """How FSDP2 shards a model.

    Fields that nobody gives are filled from the environment variables ``FSDP_…``, then with the
    meaning given here, which most of them show; `given` tells the difference. Arguments of the
    older wrapper are translated once, and are None afterwards.

    Args:
        fsdp_version: 2, the only one; 1 is translated.
        sharding_strategy: older: FULL_SHARD (1), SHARD_GRAD_OP (2), NO_SHARD (3), HYBRID_SHARD (4)
            or HYBRID_SHARD_ZERO2 (5), as a name, number or torch's enum.
        reshard_after_forward: whether parameters are freed between forward and backward; a number:
            kept over groups of so many processes; not given: True, but for the outermost module.
        backward_prefetch: older: BACKWARD_PRE, which FSDP2 always does.
        mixed_precision_policy: torch's `MixedPrecisionPolicy`, a dict of its fields (dtypes by
            name), or a precision; it decides the run's where that is "no". Without a param_dtype,
            its other fields follow `mixed_precision`; so do all under None.
        auto_wrap_policy: modules that are all-gathered as a unit: transformer_based_wrap,
            size_based_wrap, no_wrap, a callable ``(module, recurse, nonwrapped_numel) -> bool``, or
            its dotted name. None: as `transformer_cls_names_to_wrap` or `min_num_params` say, else
            the model's own ``_no_split_modules``, else the full model is one.
        cpu_offload: whether parameters, gradients and optimizer state rest in the host's memory; or
            torch's `OffloadPolicy`, or `CPUOffload` (a dict of its field, too).
        ignored_modules: modules that are replicated, not sharded, or names and regular expressions
            of names. `Accelerator.backward` averages the gradients of those that are trained.
        state_dict_type: what `save_state` writes: FULL_STATE_DICT, gathered and written by rank 0,
            or SHARDED_STATE_DICT, where each rank writes its own shards. Given as a name or as
            torch's `StateDictType`, as which it reads.
        state_dict_config: older; reads as what holds for `state_dict_type`: state dicts are on the
            host, full ones on rank 0.
        optim_state_dict_config: older; the same of optimizers.
        limit_all_gathers: older: True, which FSDP2 always does.
        use_orig_params: older: FSDP2 always keeps each parameter.
        param_init_fn: called with each module that has parameters on the meta device, to put them
            on a device; None: they are allocated and get the values of rank 0.
        sync_module_states: whether all ranks start from the weights of rank 0; None: yes.
        forward_prefetch: whether the next unit is gathered while one computes (the order must not
            change from step to step).
        activation_checkpointing: whether units recompute their activations in backward.
        activation_checkpointing_offload: whether inputs of units rest in the host's memory.
        cpu_ram_efficient_loading: whether only rank 0 holds weights before `prepare`, and the model
            of other ranks may be on the meta device. The runner then builds models so.
        transformer_cls_names_to_wrap: names of the classes that are units.
        min_num_params: fewest parameters of a unit.
        dp_replicate_size: replicas of the sharded model (a 2-D mesh): a number, "nodes" (one each)
            or "all" (nothing is sharded); None: 1.

    Raises:
        ConfigError: naming every value that FSDP2 cannot follow.

    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = StateDictTypeField()
    state_dict_config: Any = StateDictConfigField()
    optim_state_dict_config: Any = StateDictConfigField("Optim")
    limit_all_gathers: bool | None = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None
    dp_replicate_size: Any = None

    @property
    def policy_format(self) -> str | None:
        """The format of computation that the policy names: fp32, bf16, fp16, …; None: none."""
        policy: object = self.mixed_precision_policy
        if isinstance(policy, Mapping):
            policy = policy.get("param_dtype")
        elif not isinstance(policy, str):
            policy = getattr(policy, "param_dtype", None)
        if policy is None:
            return None
        name = str(policy).removeprefix("torch.").lower()
        return FORMATS.get(name, name)

    def __post_init__(self, _defaulted: Mapping[str, object] | None) -> None:
        self._hide_defaults(_defaulted)
        for name, value in self.lacking(env.prefixed(PREFIX)).items():
            setattr(self, name, value)
        problems = Problems()
        _parse_switches(self, problems)
        replaced = _translate(self, problems)
        _check_wrapping(self, problems)
        _check_values(self, problems)
        if self.activation_checkpointing_offload:
            name = "FullyShardedDataParallelPlugin.activation_checkpointing_offload=True"
            problems.add_not_built(name, "Leave it out.")
        problems.raise_if()
        if replaced:
            warnings.warn(
                "FullyShardedDataParallelPlugin: " + "; ".join(replaced) + ".",
                FutureWarning,
                stacklevel=3,
            )
        self._show_defaults(DEFAULTS)

    def lacking(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields that nobody gave and that environment variables fill.

        A field that says how parameters are sharded or wrapped decides for its group of fields.

        Args:
            variables: those that begin with ``FSDP_``.

        Raises:
            ConfigError: naming each one whose text makes no sense.
        """
        fields = from_variables(
            {name.removeprefix(PREFIX): text for name, text in variables.items()}
        )
        for group in TOGETHER:
            if any(self.given(name) is not None for name in group):
                fields = {name: value for name, value in fields.items() if name not in group}
        return {name: value for name, value in fields.items() if self.given(name) is None}

    # -- after it was built ----------------------------------------------------------------

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its own shards."""
        return vars(self)["state_dict_type"] == SHARDED

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Replace the name of a wrapping policy by torch's function for the units of a model.

        A callable, None and no_wrap stay as they are.

        Args:
            model: names its blocks (``_no_split_modules``) where `transformer_cls_names_to_wrap`
                does not.

        Raises:
            ConfigError: naming every class that the model does not have.
        """
        wrap = importlib.import_module("torch.distributed.fsdp.wrap")
        if self.auto_wrap_policy == "size_based_wrap":
            self.auto_wrap_policy = functools.partial(
                wrap.size_based_auto_wrap_policy, min_num_params=int(self.min_num_params or 0)
            )
        elif self.auto_wrap_policy == "transformer_based_wrap":
            self.auto_wrap_policy = functools.partial(
                wrap.transformer_auto_wrap_policy, transformer_layer_cls=self._blocks(model)
            )
        else:
            return
        self.transformer_cls_names_to_wrap = self.min_num_params = None  # they are in it

    def _blocks(self, model: torch.nn.Module) -> set[type[torch.nn.Module]]:
        names = self.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None)
        found = {name: get_module_class_from_name(model, name) for name in names or ()}
        present = {type(module).__name__ for module in model.modules()}
        problems = [
            unknown_choice("transformer_cls_names_to_wrap", name, sorted(present))
            for name, kind in found.items()
            if kind is None
        ]
        ConfigError.raise_if(problems)
        return {kind for kind in found.values() if kind is not None}

    def set_mixed_precision(
        self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set `mixed_precision_policy` from a precision.

        Args:
            mixed_precision: fp16, bf16 or fp32, of computation; gradients are reduced in fp32, and
                the model returns fp32.
            buffer_autocast: whether floating-point buffers are cast, too.
            override: whether a policy that is set is replaced.

        Raises:
            ConfigError: for another precision.
        """
        name = str(mixed_precision).removeprefix("torch.").lower()
        if DTYPES.get(name) is None:
            known = [name for name, dtype in DTYPES.items() if dtype is not None]
            raise ConfigError(unknown_choice("mixed_precision", mixed_precision, known))
        if self.mixed_precision_policy is not None and not override:
            return
        if buffer_autocast:
            fields = ("param_dtype", "buffer_dtype")
            self.mixed_precision_policy = dict.fromkeys(fields, DTYPES[name])
            return
        torch = importlib.import_module("torch")
        policy = importlib.import_module("torch.distributed.fsdp").MixedPrecisionPolicy
        full = torch.float32
        self.mixed_precision_policy = policy(
            param_dtype=getattr(torch, str(DTYPES[name])), reduce_dtype=full, output_dtype=full
        )

    def set_state_dict_type(self, state_dict_type: str | None = None) -> None:
        """Set `state_dict_type`.

        Args:
            state_dict_type: FULL_STATE_DICT or SHARDED_STATE_DICT, as a name or torch's enum; None:
                as it is, or the first.

        Raises:
            ConfigError: for one that FSDP2 cannot follow.
        """
        wanted = state_dict_type or self.state_dict_type or "FULL_STATE_DICT"
        self.state_dict_type = replace(self, state_dict_type=wanted).state_dict_type

    def set_cpu_offload(self) -> None:
        """Replace a `cpu_offload` that is true or false by torch's `OffloadPolicy`."""
        fsdp = importlib.import_module("torch.distributed.fsdp")
        if isinstance(self.cpu_offload, bool):
            offloads = self.cpu_offload
            self.cpu_offload = fsdp.CPUOffloadPolicy() if offloads else fsdp.OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise `ConfigError` if `cpu_offload` is neither true, false nor torch's policy."""
        replace(self, cpu_offload=self.cpu_offload)

    def validate_mixed_precision_policy(self) -> None:
        """Raise `ConfigError` if `mixed_precision_policy` is none that FSDP2 can follow."""
        replace(self, mixed_precision_policy=self.mixed_precision_policy)


def from_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that environment variables fill, given without ``FSDP_``.

    Raise a `ConfigError` that names each one whose text makes no sense.
    """
    fields: dict[str, Any] = {}
    problems = Problems()
    for name, text in variables.items():
        if name not in VARIABLES:
            continue
        try:
            fields[VARIABLES[name]] = _parsed(name, text)
        except ValueError:
            what = "a whole number" if name in ("VERSION", "MIN_NUM_PARAMS") else "a switch"
            what += " or a number of processes" if name == "RESHARD_AFTER_FORWARD" else ""
            problems.add(f"FSDP_{name}={text!r} (environment)", f"it is {what}", "Correct it.")
    problems.raise_if()
    return _chosen(fields)


def _chosen(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out what another wrapping policy would need: launchers export the values of all."""
    policy = str(fields.get("auto_wrap_policy")).strip().lower()
    unused = [field for field, wanted in WANTED_BY.items() if wanted != policy]
    return {k: v for k, v in fields.items() if policy not in WRAP_POLICIES or k not in unused}


def _parsed(name: str, text: str) -> object:
    if name in ("VERSION", "MIN_NUM_PARAMS"):
        return int(text)
    if name == "TRANSFORMER_CLS_TO_WRAP":
        return [part.strip() for part in text.split(",") if part.strip()]
    if name in ("SHARDING_STRATEGY", "BACKWARD_PREFETCH", "AUTO_WRAP_POLICY", "STATE_DICT_TYPE"):
        return text
    if name == "IGNORED_MODULES":
        return text
    switch = parse_bool(text)
    if name == "RESHARD_AFTER_FORWARD" and switch is None:
        strategy = text.strip().upper()
        return strategy if strategy in STRATEGIES else int(text)
    if switch is None:
        raise ValueError(text)
    return switch


def _parse_switches(plugin: FullyShardedDataParallelPlugin, problems: Problems) -> None:
    """Turn texts such as "no", which YAML takes for truth as any other, into booleans."""
    for name in SWITCH_FIELDS:
        given = getattr(plugin, name)
        if given is not None:
            setattr(plugin, name, parse_bool(given))
            if parse_bool(given) is None:
                problems.append(_not_a_boolean(name, given))
    reshard = plugin.reshard_after_forward
    if isinstance(reshard, str) and parse_bool(reshard) is not None:
        plugin.reshard_after_forward = parse_bool(reshard)
    given = plugin.cpu_offload
    if isinstance(given, Mapping) and set(given) == {"offload_params"}:
        given = given["offload_params"]
    if given is None or any(kind.__name__ in OFFLOADS for kind in type(given).__mro__):
        return
    plugin.cpu_offload = parse_bool(given)
    if plugin.cpu_offload is None:
        problems.append(_not_a_boolean("cpu_offload", given))


def _not_a_boolean(name: str, given: object) -> Problem:
    where = f"FullyShardedDataParallelPlugin.{name}={given!r}"
    return Problem(where, "expected true or false", "Give True or False.")


# -- older spellings -----------------------------------------------------------------------


def _translate(plugin: FullyShardedDataParallelPlugin, problems: Problems) -> list[str]:
    """Replace the older wrapper's arguments; return the replacements in words."""
    replaced: list[str] = []
    if plugin.fsdp_version == 1:
        replaced.append("fsdp_version=1 is FSDP2 here")
    elif plugin.fsdp_version not in (None, 2):
        _add(problems, plugin, "fsdp_version", "there are FSDP 1 and 2", "Leave it out.")
    plugin.fsdp_version = 2
    _translate_strategy(plugin, problems, replaced)
    _translate_prefetch(plugin, problems, replaced)
    if plugin.use_orig_params is not None:
        replaced.append("use_orig_params has no meaning any more: each parameter is kept")
        plugin.use_orig_params = None
    if plugin.limit_all_gathers is False:
        rule = "FSDP2 always bounds the all-gathers in flight"
        _add(problems, plugin, "limit_all_gathers", rule, "Leave it out.")
    _translate_states(plugin, problems, replaced)
    return replaced


def _translate_strategy(
    plugin: FullyShardedDataParallelPlugin, problems: Problems, replaced: list[str]
) -> None:
    for name in ("sharding_strategy", "reshard_after_forward"):
        given = getattr(plugin, name)
        if given is None or (name == "reshard_after_forward" and isinstance(given, (bool, int))):
            continue
        strategy = _strategy_name(given)
        if strategy not in STRATEGIES:
            rule = f"it is one of {', '.join(STRATEGIES)}"
            _add(problems, plugin, name, rule, nearest(strategy, STRATEGIES))
            continue
        reshard, replicas = STRATEGIES[strategy]
        other = plugin.reshard_after_forward
        if name == "sharding_strategy" and other not in (None, given, reshard):
            rule = f"reshard_after_forward={other!r} says otherwise"
            _add(problems, plugin, name, rule, "Give only reshard_after_forward.")
            continue
        if plugin.dp_replicate_size not in (None, replicas):
            rule = f"dp_replicate_size={plugin.dp_replicate_size!r} says otherwise"
            _add(problems, plugin, name, rule, "Give only dp_replicate_size.")
            continue
        plugin.sharding_strategy = None
        plugin.reshard_after_forward = reshard
        plugin.dp_replicate_size = replicas
        spelling = "" if replicas == 1 else f", dp_replicate_size={replicas!r}"
        replaced.append(f"{name}={strategy!r} is now reshard_after_forward={reshard}{spelling}")


def _strategy_name(given: object) -> str:
    text = str(getattr(given, "name", given)).strip(" _").upper()
    if text.isdigit() and 1 <= int(text) <= len(STRATEGIES):
        return list(STRATEGIES)[int(text) - 1]
    return text


def _translate_prefetch(
    plugin: FullyShardedDataParallelPlugin, problems: Problems, replaced: list[str]
) -> None:
    given = plugin.backward_prefetch
    if given is None:
        return
    name = str(getattr(given, "name", given)).strip().upper()
    if name == "BACKWARD_PRE":
        replaced.append("backward_prefetch='BACKWARD_PRE' needs no argument any more")
        plugin.backward_prefetch = None
    elif name in PREFETCHES:
        rule = "FSDP2 always gathers the next unit before a backward pass"
        _add(problems, plugin, "backward_prefetch", rule, "Leave it out.")
    else:
        rule = f"it is one of {', '.join(PREFETCHES)}"
        _add(problems, plugin, "backward_prefetch", rule, nearest(name, PREFETCHES))


def _translate_states(
    plugin: FullyShardedDataParallelPlugin, problems: Problems, replaced: list[str]
) -> None:
    name = plugin.given("state_dict_type")
    where = f"{type(plugin).__name__}.state_dict_type={name!r}"
    if name == "LOCAL_STATE_DICT":
        rule = "flattened shards exist only in the older wrapper"
        problems.add(where, rule, "Give SHARDED_STATE_DICT.")
    elif name is not None and name not in STATE_TYPES:
        rule = f"it is one of {', '.join(STATE_TYPES)}"
        problems.add(where, rule, nearest(name, STATE_TYPES))
    for field in ("state_dict_config", "optim_state_dict_config"):
        config = plugin.given(field)
        if config is None:
            continue
        if not type(config).__name__.startswith(("Full", "Sharded")):
            rule = "full or sharded state dicts are saved"
            _add(problems, plugin, field, rule, "Leave it out.")
            continue
        # State dicts rest on the host, and full ones are written by rank 0.
        if not (getattr(config, "offload_to_cpu", False) and getattr(config, "rank0_only", True)):
            replaced.append(f"{field} needs no argument any more: state_dict_type says all")
        setattr(plugin, field, None)


# -- checks --------------------------------------------------------------------------------


def _check_wrapping(plugin: FullyShardedDataParallelPlugin, problems: Problems) -> None:
    policy, names = plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap
    if isinstance(names, str):
        plugin.transformer_cls_names_to_wrap = [n.strip() for n in names.split(",") if n.strip()]
    elif names is not None:
        plugin.transformer_cls_names_to_wrap = [str(name) for name in names]
    check_minimum(plugin, "min_num_params", 1, problems)
    if policy is None or callable(policy) or hasattr(policy, "_run_policy"):
        return
    name = str(policy).strip().lower()
    if name in WRAP_POLICIES:
        plugin.auto_wrap_policy = name
    elif "." not in name:
        rule = f"it is one of {', '.join(WRAP_POLICIES)}, or a callable"
        _add(problems, plugin, "auto_wrap_policy", rule, nearest(name, WRAP_POLICIES))
        return
    for field, wanted in WANTED_BY.items():
        if getattr(plugin, field) and name != wanted:
            rule = f"auto_wrap_policy={policy!r} does not ask for it"
            remedy = f"Give auto_wrap_policy='{wanted}', or leave {field} out."
            _add(problems, plugin, field, rule, remedy)
    if name == "size_based_wrap" and plugin.min_num_params is None:
        rule = "min_num_params is the size of a unit"
        _add(problems, plugin, "auto_wrap_policy", rule, "Give min_num_params.")


def _check_values(plugin: FullyShardedDataParallelPlugin, problems: Problems) -> None:
    size, replicas = plugin.reshard_after_forward, plugin.dp_replicate_size
    if isinstance(size, int) and not isinstance(size, bool) and size < 2:
        rule = "as a number, it is the size of a group of processes, at least 2"
        remedy = "Give True, False or such a number."
        _add(problems, plugin, "reshard_after_forward", rule, remedy)
    is_number = isinstance(replicas, int) and not isinstance(replicas, bool) and replicas >= 1
    if replicas is not None and replicas not in REPLICAS and not is_number:
        rule = "it is a number, at least 1, or one of nodes, all"
        _add(problems, plugin, "dp_replicate_size", rule, "Leave it out for 1.")
    if plugin.cpu_ram_efficient_loading and plugin.sync_module_states is False:
        rule = "cpu_ram_efficient_loading=True sends the weights of rank 0 to all"
        _add(problems, plugin, "sync_module_states", rule, "Leave it out.")
    if plugin.activation_checkpointing_offload and not plugin.activation_checkpointing:
        rule = "it needs activation_checkpointing=True"
        _add(problems, plugin, "activation_checkpointing_offload", rule, "Give both.")
    _check_precision(plugin, problems)


def _check_precision(plugin: FullyShardedDataParallelPlugin, problems: Problems) -> None:
    policy = plugin.mixed_precision_policy
    where = "FullyShardedDataParallelPlugin.mixed_precision_policy"
    if isinstance(policy, (str, Mapping)):
        entries = {"param_dtype": policy} if isinstance(policy, str) else dict(policy)
        known = (*POLICY_FIELDS, *OLDER_POLICY_FIELDS)
        for name in [name for name in entries if name not in known]:
            rule, remedy = f"known are {', '.join(known)}", nearest(str(name), known)
            problems.add(f"{where}[{name!r}]={entries.pop(name)!r}", rule, remedy)
        for name in entries:
            entries[name] = _policy_entry(where, name, entries[name], problems)
        if isinstance(policy, Mapping):
            plugin.mixed_precision_policy = entries
    elif dataclasses.is_dataclass(policy):
        entries = vars(policy)
        replaced = [name for name, value in entries.items() if value != getattr(type(policy), name)]
        for name in [name for name in replaced if name not in TRANSLATED]:
            problems.append(_no_choice(f"{where}.{name}={entries[name]!r}"))
    elif policy is not None:
        rule = "it is a MixedPrecisionPolicy, a dict of its fields, or a precision"
        problems.add(f"{where}={policy!r}", rule, "Give such a one, or leave it out.")


def _policy_entry(where: str, name: str, value: object, problems: Problems) -> object:
    """Return the value of one field, switches as booleans; add what is wrong with it."""
    entry = f"{where}[{name!r}]={value!r}"
    if not name.endswith("_dtype"):
        switch = None if value is None else parse_bool(value)
        if value is not None and switch is None:
            problems.add(entry, "expected true or false", "Give True or False.")
        if switch and name not in TRANSLATED:
            problems.append(_no_choice(entry))
        return switch
    text = str(value).removeprefix("torch.").lower()
    if isinstance(value, str) and text not in DTYPES:
        rule = f"it is one of {', '.join(DTYPES)}"
        problems.add(entry, rule, nearest(text, DTYPES))
    return value


def _no_choice(where: str) -> Problem:
    return Problem(where, "FSDP2 does not offer it", "Leave it out.")


def _add(problems: Problems, owner: object, name: str, rule: str, remedy: str) -> None:
    value = getattr(owner, name)
    problems.add(f"{type(owner).__name__}.{name}={value!r}", rule, remedy)
