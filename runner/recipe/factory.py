"""The factories that the nodes of a recipe name: registered, found, checked, called.

A user registers with ``@register.model("my_model")`` in a package that the project trusts
(`[tool.runner] imports` in its pyproject.toml), for keys such as `model.name=my_model`. Built-in
factories are listed here by dotted name and imported when first used, so that names can be listed
without importing torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any, TypeVar

from accel.machine.errors import AccelError, ConfigError, Problem, Problems, nearest, text_of
from accel.machine.imports import load_attribute
from runner.recipe import facts, keys, trust, user_frames
from runner.recipe.keys import FACTORY_NODES, NAMED_NODES
from runner.recipe.schema import Recipe

# How many arguments the runner gives first: to a factory called by name, and to a `_target_`.
NUM_GIVEN = {"optimizer": (1, 1), "scheduler": (2, 1)}
# Parameters of a step's constructor that receive the objects built from these nodes.
STEP_PARTS = ("model", "objective", "optimizer", "scheduler")
SCHEDULES = (
    *("constant", "cosine", "inverse_sqrt", "linear", "multistep", "one_cycle", "plateau"),
    *("polynomial", "restarts", "step", "wsd"),
)
# Keys of a node that the runner itself answers, whatever factory the node names.
OF_THE_RUNNER = {"optimizer": ("groups", "layer_decay"), "scheduler": ("by_time",)}
# Arguments of torch's schedules that are the number of steps of the run where they are not given.
LENGTHS = ("T_max", "total_steps")
SCALARS = (bool, int, float, str)
SEQUENCES = (list, tuple, Sequence)
# Errors that no argument causes: the machine, or missing code.
OF_THE_MACHINE = (ImportError, MemoryError, OSError)

F = TypeVar("F", bound=Callable[..., object])

# -- registered factories ------------------------------------------------------------------


class Registry:
    """The factories for the node `kind`; built-in ones are ``"module:attribute"`` by name."""

    def __init__(self, kind: str, builtin: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.builtin = dict(builtin or {})
        self._factories: dict[str, Callable[..., object]] = {}

    def __call__(self, name: str) -> Callable[[F], F]:
        """Return a decorator that registers a function, class or other callable as `name`.

        Raises:
            ConfigError: if another factory has that name.
        """

        def decorate(factory: F) -> F:
            origin = taken = _origin(factory)
            if name in self.names():
                taken = self.builtin.get(name) or _origin(self._factories[name])
            if taken != origin:
                raise ConfigError.of(
                    f"@register.{self.kind}({name!r}) on {origin}",
                    f"the name belongs to {taken}",
                    "Choose another name.",
                )
            self._factories[name] = factory
            return factory

        return decorate

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        return sorted({*self.builtin, *self._factories})

    def get(self, name: str, key: str = "") -> Callable[..., object]:
        """Return the factory called `name`, importing it if it is built in.

        Raises:
            ConfigError: if there is none; the message names the node `key` and the nearest.
        """
        self.require(name, key)
        if name not in self._factories:
            self._factories[name] = load_attribute(self.builtin[name])
        return self._factories[name]

    def require(self, name: str, key: str = "") -> None:
        """Raise if there is no factory called `name`; nothing is imported.

        Raises:
            ConfigError: naming the nearest.
        """
        if name not in self.names():
            decorator = self.kind.removesuffix("s")
            raise ConfigError.of(
                f"{key or self.kind}.name={name!r}",
                f"no {self.kind} factory has that name",
                f"{nearest(name, self.names())} Register your own with "
                f"@register.{decorator}({name!r}) in a package named by [tool.runner] imports.",
            )


def _origin(factory: object) -> str:
    if not hasattr(factory, "__qualname__"):  # a partial, or an instance with `__call__`
        return repr(factory)
    return f"{factory.__module__}:{factory.__qualname__}"


class _Register:
    """The registries, one attribute per kind."""

    model = Registry(
        "model",
        {
            "cnn": "runner.builtin.digits:cnn",
            "byte_gpt": "runner.builtin.bytes_gpt:byte_gpt",
            "hf_causal_lm": "runner.language.models:hf_causal_lm",
            "hf_sequence_classification": "runner.language.models:hf_sequence_classification",
        },
    )
    peft = Registry("peft")
    data = Registry(
        "data",
        {
            "digits": "runner.builtin.digits:digits",
            "stdlib_bytes": "runner.builtin.bytes_gpt:stdlib_bytes",
            **dict.fromkeys(
                ("text", "jsonl", "parquet", "hf_dataset"), "runner.language.sources:text_data"
            ),
        },
    )
    objective = Registry(
        "objective",
        {
            "classification": "runner.builtin.digits:Classification",
            "next_byte": "runner.builtin.bytes_gpt:NextByte",
            "causal_lm": "runner.language.objectives:CausalLM",
            "sequence_classification": "runner.language.objectives:SequenceClassification",
        },
    )
    step = Registry(
        "step",
        {"supervised": "runner.training.step:SupervisedStep", "gan": "runner.builtin.gan:GANStep"},
    )
    optimizer = Registry(
        "optimizer",
        {name: f"runner.builtin.optimizers:{name}" for name in ("adamw", "muon", "schedule_free")},
    )
    scheduler = Registry(
        "scheduler", {name: f"runner.builtin.schedules:{name}" for name in SCHEDULES}
    )
    callback = Registry(
        "callbacks",
        {
            "ema": "runner.callbacks.averaging:EMA",
            "early_stopping": "runner.callbacks.early_stopping:EarlyStopping",
            "freeze": "runner.callbacks.freezing:Freeze",
            "generate": "runner.language.generation:Generate",
            "histograms": "runner.callbacks.monitors:Histograms",
            "model_summary": "runner.callbacks.monitors:ModelSummary",
            "optimizer_monitor": "runner.callbacks.monitors:OptimizerMonitor",
            "swa": "runner.callbacks.averaging:SWA",
            "lr_find": "runner.callbacks.finders:LRFind",
            "peak_memory": "runner.callbacks.finders:PeakMemory",
            "text_sample": "runner.builtin.bytes_gpt:TextSample",
        },
    )
    metric = Registry("metrics")


register = _Register()


# -- nodes ---------------------------------------------------------------------------------


def nodes_of(recipe: Recipe, problems: list[Problem]) -> Iterator[tuple[str, object, Registry]]:
    """Yield (key, node, registry) of each node that names a factory and is not null."""
    for key in FACTORY_NODES:
        if getattr(recipe, key) is not None:
            yield key, getattr(recipe, key), getattr(register, key)
    for head, kind in NAMED_NODES.items():
        nodes = getattr(recipe, head) or {}
        if not isinstance(nodes, Mapping):
            value, remedy = f"{head}={nodes!r}", f"Write {head}.x.name=…"
            problems.append(Problem(value, "it maps names to factories", remedy))
            continue
        for name, node in nodes.items():
            if node is not None:
                yield f"{head}.{name}", _named(node, str(name)), getattr(register, kind)


def _named(node: object, name: str) -> object:
    """Return a named node; where it names no factory, it is the one called as the node is."""
    if isinstance(node, Mapping) and not {"name", "_target_"} & set(node):
        return {"name": name, **node}
    return node


def name_and_arguments(
    key: str, node: object, registry: Registry
) -> tuple[object, str | None, dict[str, object]]:
    """Return name or `_target_` of a node (the other is None) and its arguments, or raise."""
    if not isinstance(node, Mapping):
        raise ConfigError.of(
            f"{key}={node!r}", "it names a factory", f"Write {key}.name={node}, or {key}=null."
        )
    arguments = {
        str(name): value for name, value in node.items() if name not in ("name", "_target_")
    }
    name, target = node.get("name"), node.get("_target_")
    if (name is None) == (target is None):
        rule = "it names a factory by `name` or by `_target_`, not both"
        if name is None:
            rule = "nothing is chosen: it names a factory by `name` or `_target_`"
        known = ", ".join(registry.names())
        remedy = f"Set {key}.name to one of: {known}." if known else f"Choose {key}=… first."
        raise ConfigError.of(f"{key}={dict(node)}", rule, remedy)
    return name, None if target is None else str(target), arguments


def unregistered(recipe: Recipe) -> bool:
    """Return whether a recipe names factories that are not registered so far."""
    return any(
        isinstance(node, Mapping) and node.get("name") not in (None, *registry.names())
        for _, node, registry in nodes_of(recipe, [])
    )


def wrong_names(recipe: Recipe) -> list[Problem]:
    """Return the problems of nodes that name no known factory; nothing is imported."""
    problems = Problems()
    for key, node, registry in nodes_of(recipe, problems):
        try:
            name, target, _ = name_and_arguments(key, node, registry)
            if target is None:
                registry.require(str(name), key)
            elif (distrusted := trust.distrust(target, f"{key}._target_")) is not None:
                problems.append(distrusted)
        except ConfigError as error:
            problems += error.problems
    return problems


# -- factories -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Factory:
    """The factory that the node `key` of a recipe names, and its arguments as plain containers.

    `label` names it in messages; `by_name`: it comes from the registry.
    """

    key: str
    label: str
    by_name: bool
    function: Callable[..., object]
    arguments: Mapping[str, object] = field(default_factory=dict)

    @functools.cached_property
    def signature(self) -> Signature:
        """The arguments that a recipe can set, without those that the runner gives."""
        num_given = NUM_GIVEN.get(self.key, (0, 0))[not self.by_name]
        return read(self.function, num_given, STEP_PARTS if self.key == "step" else ())

    @property
    def lengths(self) -> list[str]:
        """The arguments that the runner derives from the number of steps of the run."""
        given = self.arguments.get("epochs")  # of a recorded recipe it is null
        if self.key != "scheduler" or self.by_name or given is not None:
            return []
        unset = [name for name in LENGTHS if self.arguments.get(name) is None]
        return [name for name in unset if name in self.signature.parameters]

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of the arguments."""
        parameters = self.signature.parameters
        for name, value in self.arguments.items():
            if name in parameters:
                yield from self._mistyped(name, value, parameters[name])
            elif not self.signature.open or name.startswith("_"):
                remedy = nearest(name, parameters) if parameters else "It takes no arguments."
                if name.startswith("_"):
                    remedy = keys.remedy(name) or remedy
                rule = f"{self.label} has no such argument"
                yield Problem(f"{self.key}.{name}={value!r}", rule, remedy)
        for name, parameter in parameters.items():
            given = name in self.arguments or name in self.lengths
            if parameter.default is Parameter.empty and not given:
                place = f"{self.key}.{name}"
                yield Problem(place, f"{self.label} needs it", f"Give {place}=…")
        yield from _distrusted(self.arguments, self.key)

    def _mistyped(self, name: str, value: object, parameter: Parameter) -> Iterator[Problem]:
        """Yield the problem of a value that is neither of the annotated type nor the default."""
        default, hint, kind = parameter.default, parameter.annotation, type(value)
        as_default = kind is type(default) and value == default  # such as `size: int = None`
        if not as_default and not facts.is_late(value) and not fits(value, hint):
            rule = f"it is of type {shown_type(hint)}, not {kind.__name__}"
            remedy = f"Correct {self.key}.{name}."
            if kind is str:
                remedy += ' From the environment a number comes by "${oc.decode:${oc.env:NAME}}".'
            yield Problem(f"{self.key}.{name}={value!r}", rule, remedy)

    def defaults(self) -> dict[str, object]:
        """Return the defaults of arguments that the recipe does not give, where YAML holds them.

        A scheduler's mode has none: it follows the metric of the run.
        """
        return {
            name: parameter.default
            for name, parameter in self.signature.parameters.items()
            if name not in self.arguments
            and is_plain(parameter.default)
            and (self.key, name) != ("scheduler", "mode")
        }

    @property
    def place(self) -> str:
        """How the recipe names the factory."""
        return f"{self.key}.name={self.label}" if self.by_name else f"{self.key}: {self.label}"

    def __call__(self, *given: object, **named: object) -> Any:
        """Call the factory with the runner's arguments and those of the recipe.

        Raises:
            ConfigError: if torch or a shipped factory refuses a value.
            Exception: that of the user's own code, with a note on the node.
        """
        try:
            return self.function(*given, **named, **self._instantiated())
        except AccelError:
            raise
        except Exception as error:
            if user_frames.has_own(error) or isinstance(error, OF_THE_MACHINE):
                error.add_note(f"It was raised while {self.place} was built.")
                raise
            values = [f"{self.key}.{name}={value}" for name, value in self.arguments.items()]
            rule = (text_of(error) or type(error).__name__).splitlines()[0].rstrip(".")
            value = ", ".join(values) or self.place
            raise ConfigError.of(value, rule, f"Correct the arguments of {self.label}.") from error

    def _instantiated(self) -> dict[str, object]:
        arguments = dict(self.arguments)
        if next(_targets(arguments, self.key), None) is not None:
            from hydra.utils import instantiate

            ConfigError.raise_if(_distrusted(arguments, self.key))
            arguments = dict(instantiate(arguments, _convert_="all"))
        for name, parameter in self.signature.parameters.items():  # YAML has no tuples
            if isinstance(parameter.default, tuple) and isinstance(arguments.get(name), list):
                arguments[name] = tuple(arguments[name])  # type: ignore[arg-type]
        return arguments


def factory_of(key: str, node: object, registry: Registry) -> Factory:
    """Return the factory that a node names; a ConfigError if it is missing or not trusted."""
    name, target, arguments = name_and_arguments(key, node, registry)
    arguments = {k: v for k, v in arguments.items() if k not in OF_THE_RUNNER.get(key, ())}
    if target is not None:
        label = str(target).rpartition(".")[2]
        return Factory(key, label, False, trust.resolve(str(target), f"{key}._target_"), arguments)
    return Factory(key, str(name), True, registry.get(str(name), key), arguments)


def check_factories(recipe: Recipe) -> list[Problem]:
    """Import the factories of a recipe, and return what is wrong with the nodes that name them."""
    problems = Problems()
    found: dict[str, Factory] = {}
    for key, node, registry in nodes_of(recipe, problems):
        if (factory := problems.collect(factory_of, key, node, registry)) is not None:
            found[key] = factory
    for factory in found.values():
        problems += factory.problems()
    for key in ("step", "data"):
        if getattr(recipe, key) is None:
            names = ", ".join(getattr(register, key).names())
            problems.add(f"{key}=null", "a run needs it", f"Choose {key}.name from: {names}.")
    if recipe.peft is not None and recipe.model is None:
        rule = "adapters are put on the model of the recipe"
        problems.add("peft with model=null", rule, "Choose model=…, or set peft=null.")
    if "step" in found:
        problems += _step_problems(recipe, found["step"].label, read(found["step"].function))
    return problems


def completed(recipe: Recipe) -> Recipe:
    """Return a recipe whose nodes hold all arguments, those at a factory's default included.

    Nodes whose factory cannot be imported stay as they are.
    """
    nodes: dict[str, Any] = {}
    for key, node, registry in nodes_of(recipe, []):
        try:
            factory = factory_of(key, node, registry)
        except (ConfigError, ImportError):
            continue
        assert isinstance(node, Mapping)
        nodes[key] = {**node, **factory.defaults()}
    for head in NAMED_NODES:
        named = getattr(recipe, head)
        if isinstance(named, Mapping):
            named = {name: nodes.pop(f"{head}.{name}", node) for name, node in named.items()}
        nodes[head] = named
    return replace(recipe, **nodes)


def _step_problems(recipe: Recipe, label: str, signature: Signature) -> Iterator[Problem]:
    """Yield parts that the step needs and lacks, and those that it would not use."""
    for key in STEP_PARTS:
        parameter = signature.parameters.get(key)
        given = getattr(recipe, key) is not None
        if parameter is None and given and not signature.open:
            yield Problem(
                f"{key}={_label(getattr(recipe, key))} with step={label}",
                f"{label} builds its own and takes no {key}",
                f"Set {key}=null.",
            )
        elif parameter is not None and parameter.default is parameter.empty and not given:
            yield Problem(
                f"{key}=null with step={label}",
                f"{label} needs {'an' if key[0] in 'aeiou' else 'a'} {key}",
                f"Choose {key}=…",
            )


def _label(node: object) -> str:
    if isinstance(node, Mapping):
        return str(node.get("name") or node.get("_target_"))
    return str(node)


def _targets(value: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, dotted name) of each `_target_` in nested arguments."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield f"{key}._target_", str(value["_target_"])
        for name, item in value.items():
            yield from _targets(item, f"{key}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _targets(item, f"{key}[{index}]")


def _distrusted(arguments: Mapping[str, object], key: str) -> list[Problem]:
    """Return the problems of the `_target_`s in nested arguments."""
    problems = Problems()
    for place, name in _targets(arguments, key):
        problems.collect(trust.resolve, name, place)
    return problems


# -- signatures ----------------------------------------------------------------------------


def is_plain(value: object) -> bool:
    """Return whether YAML holds a value (tuples as lists)."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or type(value) in SCALARS


@dataclass(frozen=True)
class Signature:
    """The arguments of a factory that a recipe can set; `open`: any other name is taken, too."""

    parameters: Mapping[str, Parameter]
    open: bool


def read(
    factory: Callable[..., object], num_given: int = 0, given: Collection[str] = ()
) -> Signature:
    """Return the arguments of `factory` that a recipe can set.

    The runner gives its first `num_given` positional parameters, and those named in `given`.
    """
    for eval_str in (True, False):  # annotations may be for type checkers only
        with contextlib.suppress(NameError, TypeError, AttributeError, SyntaxError, ValueError):
            parameters = list(inspect.signature(factory, eval_str=eval_str).parameters.values())
            break
    else:  # some built-in functions have no signature
        return Signature({}, True)
    if dataclasses.is_dataclass(factory):  # whose fields may be annotated in several modules
        hints = typing.get_type_hints(factory)
        parameters = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters]
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    own = {p.name: p for p in parameters[num_given:] if p.kind in named and p.name not in given}
    return Signature(own, any(p.kind is Parameter.VAR_KEYWORD for p in parameters))


def shown_type(hint: object) -> str:
    """Return a type as people write it: "int", "float | None"."""
    return hint.__name__ if type(hint) is type else str(hint).replace("typing.", "")


def fits(value: object, hint: object) -> bool:
    """Return whether a value of YAML may be of a type; types that YAML does not have always fit."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) in SEQUENCES:
        return _fits_sequence(value, hint)
    if hint is type(None):
        return value is None
    if hint not in SCALARS or isinstance(value, Mapping):
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint


def _fits_sequence(value: object, hint: object) -> bool:
    if isinstance(value, Mapping):  # nodes with a `_target_` become anything
        return True
    if not isinstance(value, (list, tuple)):
        return False
    kinds = typing.get_args(hint)
    if getattr(hint, "__args__", None) is None:  # `typing.List` by itself: any elements
        return True
    if typing.get_origin(hint) is tuple and Ellipsis not in kinds:
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    return all(fits(element, kinds[0]) for element in value)
