"""Hydra for recipes: schema, search path, overrides, and the settings that are the runner's own.

Free of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe import keys, launchers, paths, sweepers
from runner.recipe.schema import PLUGINS, Recipe
from runner.recipe.serialization import to_plain

VERSION_BASE = "1.3"
SCHEMA, TYPES = "recipe_schema", "recipe_types"
PRIMARY = "config"
# The run directory, the log and the working directory are the runner's own.
FIXED = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
SEARCHED = "hydra.searchpath"
OPEN_TO_USERS = (
    *(SEARCHED, "hydra.verbose", "hydra.sweeper", "hydra.launcher"),
    *("hydra/sweeper", "hydra/launcher"),
)
VERBOSE = "hydra.verbose"


def prepare() -> None:
    """Make the schema, and the keys of launchers and sweepers, known to Hydra."""
    store = ConfigStore.instance()
    others = {name: p for name, p in PLUGINS.items() if not (paths.conf_folder() / name).is_dir()}
    for name, plugin in others.items():  # of another package: its defaults are one choice
        store.store(group=name, name="default", node=plugin.kind, provider="runner")
    places = [TYPES, *({name: None} for name in others), "_self_"]
    store.store(name=TYPES, node=schema(), provider="runner")
    store.store(name=SCHEMA, node={"defaults": places}, provider="runner")
    launchers.store()
    sweepers.store()  # after the plugins, one of which may have such a name


def schema() -> DictConfig:
    """Return the typed schema, with enumerations as the words that YAML has for them.

    It is open: unknown keys are reported after composing, all at once.
    """
    node: DictConfig = OmegaConf.structured(Recipe)
    _spell_out(node)
    return node


def _spell_out(node: DictConfig) -> None:
    OmegaConf.set_struct(node, False)
    for name in node:
        value = None if OmegaConf.is_missing(node, name) else node[name]
        if isinstance(value, DictConfig):
            _spell_out(value)
        elif isinstance(value, Enum):
            node[name] = value.value


@contextlib.contextmanager
def session(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Initialize Hydra in the context, which may be nested in another use of Hydra.

    Groups and files are looked up in the folders of `hydra.searchpath`, too, if it is among the
    overrides (`--config-dir`).
    """
    prepare()
    outer, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    given, paths.given_conf_folders = paths.given_conf_folders, _searched(overrides)
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    try:
        with initialize_config_dir(
            config_dir=str(paths.conf_folder()), job_name="runner", version_base=VERSION_BASE
        ):
            yield
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = outer, config
        paths.given_conf_folders = given


def _searched(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the places of `hydra.searchpath`; what cannot be read is reported by composing."""
    given = [override for override in overrides if key_of(override) == SEARCHED]
    try:
        values = [one.value() for one in OverridesParser.create().parse_overrides(given)]
    except HydraException:
        return ()
    places = [place for value in values if isinstance(value, list) for place in value]
    return tuple(place for place in map(str, places) if "://" in place)


# -- folders of recipes --------------------------------------------------------------------


def packages() -> list[str]:
    """Return the other packages than Hydra's that recipes are read from (`pkg://…`)."""
    return [name for name in _sources("pkg") if name.partition(".")[0] != "hydra"]


def files() -> Iterator[tuple[Path, Path]]:
    """Yield each file of the folders that recipes are read from, with its folder, in order."""
    for folder in map(Path, _sources("file")):
        for path in sorted(paths.files_below(folder, ".yaml")):
            yield folder, path


def _sources(scheme: str) -> list[str]:
    if not GlobalHydra.instance().is_initialized():
        return []
    sources = GlobalHydra.instance().config_loader().get_sources()
    return [source.path for source in sources if source.scheme() == scheme]


def own_files() -> Iterator[tuple[Path, str]]:
    """Yield each file of the user's with its name in messages: "conf/experiment/own.yaml"."""
    shipped = paths.conf_folder().resolve()
    for folder, path in files():
        if folder.resolve() != shipped:
            yield path, f"conf/{path.relative_to(folder).as_posix()}"


def file_of(group: str, option: str) -> object:
    """Return the content of the file that a choice stands for; None: there is no such file."""
    found = (Path(folder, group, f"{option}.yaml") for folder in _sources("file"))
    path = next((path for path in found if path.is_file()), None)
    return None if path is None else OmegaConf.load(path)


def groups() -> list[str]:
    """Return the names of all groups of `conf/`, the project's own included."""
    found: list[str] = GlobalHydra.instance().config_loader().list_groups("")
    return [name for name in found if name != "hydra"]


# -- composing -----------------------------------------------------------------------------


def compose(
    choices: Sequence[str], config_name: str = PRIMARY, number: int = 0, task: Sequence[str] = ()
) -> DictConfig:
    """Compose a recipe from chosen files, inside a `session`: no values, no sweeps.

    It lacks Hydra's own node, with which `${hydra:…}` can still be resolved: `${hydra:job.num}` is
    `number`, and `${hydra:overrides.task}` are the overrides `task`.

    Raises:
        ConfigError: if a file of the project is shadowed, or Hydra's own node is tampered with.
        Exception: Hydra's and OmegaConf's own for anything else; `diagnose` translates them.
    """
    config = composed_with_hydra(choices, config_name)
    ConfigError.raise_if([*_shadowed(), *_forbidden_settings(config.hydra)])
    renamed = _nodes_of_other_factories(config)
    ConfigError.raise_if(_without_effect(choices, renamed, config))
    if renamed:  # the arguments of their files belong to another factory
        others = [choice for choice in choices if key_of(choice) not in renamed]
        off = [f"{node}=null" for node in renamed]
        without = composed_with_hydra([*others, *off], config_name)
        OmegaConf.set_struct(config, False)
        for node in renamed:
            config[node] = without[node]
    OmegaConf.set_struct(config, False)
    off = [key_of(choice) for choice in choices if switches_off(choice)]
    nodes = schema() if off else {}  # it takes a while, and jobs are many
    for node in filter(nodes.__contains__, off):
        config[node] = nodes[node]  # an experiment may give it values, which come later
    for node, name in _missing_values(config):
        config[node][name] = MISSING
    _merge_trackers(config, choices, config_name)
    config.hydra.job.num, config.hydra.job.id = number, str(number)
    own = [override for override in task if not key_of(override).startswith("hydra")]
    config.hydra.overrides.task = own
    config.hydra.job.override_dirname = ",".join(sorted(own))
    HydraConfig.instance().set_config(config)
    del config["hydra"]
    return config


def composed_with_hydra(overrides: Sequence[str], config_name: str) -> DictConfig:
    """Return what Hydra composes, its own node included, inside a `session`.

    Raises:
        Exception: Hydra's and OmegaConf's own.
    """
    return hydra_compose(
        config_name, overrides=[*FIXED, *opened(overrides)], return_hydra_config=True
    )


def _merge_trackers(config: DictConfig, choices: Sequence[str], config_name: str) -> None:
    """Use the trackers of all files of ``tracker=[a,b]``: Hydra keeps the last file's list."""
    if "tracker" in config.hydra.runtime.choices or "tracker" not in config:
        return
    names = chosen_files(choices, config_name)
    options = [name.removeprefix("tracker/") for name in names if name.startswith("tracker/")]
    loaded = [file_of("tracker", option) for option in options]
    chosen = [list(file.get("log_with") or ()) for file in loaded if isinstance(file, DictConfig)]
    if not options:
        config.tracker.log_with = []
    elif chosen and config.tracker.log_with == chosen[-1]:  # else an experiment has another list
        config.tracker.log_with = list(dict.fromkeys(name for names in chosen for name in names))


def chosen_files(overrides: Sequence[str], config_name: str) -> list[str]:
    """Return the files that a recipe is composed from, as group/option; their values don't matter.

    Raises:
        Exception: Hydra's own, if there is no such file.
    """
    loader = GlobalHydra.instance().config_loader()
    found = loader.compute_defaults_list(config_name, [*FIXED, *opened(overrides)], RunMode.RUN)
    return [str(default.config_path) for default in found.defaults]


def _without_effect(
    choices: Sequence[str], renamed: Sequence[str], config: DictConfig
) -> list[Problem]:
    """Return the problems of files chosen on the command line for nodes that name others."""
    problems = Problems()
    for choice in choices:
        node = key_of(choice)
        if node in renamed:
            own = factory_named(file_of(node, choice.partition("=")[2]))
            named = factory_named(config[node])
            other = next((name for name in named if name and name not in own), "nothing")
            problems.add(
                choice,
                f"a file that comes later, such as an experiment, names {other} there",
                f"Leave it out, give '{node}={{name: …}}', or write `- override /{node}: …` in the "
                "defaults list of that file, which the command line then overrides.",
            )
    return problems


def _nodes_of_other_factories(config: DictConfig) -> list[str]:
    """Return the nodes whose chosen file has arguments for another factory than they name."""
    renamed = []
    for node in keys.FACTORY_NODES:
        chosen = config.hydra.runtime.choices.get(node)
        own = factory_named(file_of(node, chosen)) if chosen else (None, None)
        if any(own) and own != factory_named(config[node]):
            renamed.append(node)
    return renamed


def factory_named(node: object) -> tuple[object, object]:
    """Return the `name` and the `_target_` of a node."""
    if isinstance(node, (DictConfig, Mapping)):
        return node.get("name"), node.get("_target_")
    return None, None


def _missing_values(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Yield (node, key) of each mandatory value (``???``) of a chosen file that was not given.

    The composed node has the schema's default there: OmegaConf merges no missing value over one.
    """
    for node, chosen in config.hydra.runtime.choices.items():
        own = file_of(node, chosen) if chosen and node in config else None
        for name in own if isinstance(own, DictConfig) else ():
            if OmegaConf.is_missing(own, name) and config[node].get(name) is None:
                yield node, str(name)


def won_over_choices(choices: Sequence[str], config: DictConfig) -> list[str]:
    """Return a line for each value of a file chosen on the command line that another file replaced.

    An experiment comes last, so that its values win over those of ``model=cnn``.
    """
    lines = []
    for choice in choices:
        group, _, option = choice.partition("=")
        own = file_of(group, option) if group in config and group != "experiment" else None
        node = config.get(group) if own is not None else None
        if not isinstance(own, DictConfig) or not isinstance(node, DictConfig):
            continue
        given: Any = OmegaConf.to_container(own, resolve=False)
        taken: Any = to_plain(OmegaConf.to_container(node, resolve=False))
        lines += [
            f"{group}.{name}={taken[name]} of a file that comes later is taken, not {value} of "
            f"{choice}"
            for name, value in given.items()
            if name in taken and value != "???" and value != taken[name]
        ]
    return lines


def plain(config: DictConfig) -> dict[str, object]:
    """Return a composed recipe as plain containers, interpolations resolved."""
    content = to_plain(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    return dict(content)


# -- overrides -----------------------------------------------------------------------------


def merge(own: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return `own` overrides and then `new` ones, which replace those of their keys and below."""
    chosen = tuple(f"{key_of(override)}." for override in new)
    out = {key_of(override) for override in new if takes_out(override)}
    kept = [o for o in own if key_of(o) in out or not f"{key_of(o)}.".startswith(chosen)]
    return [*kept, *new]


def key_of(override: str) -> str:
    """Return the dotted key, or the group, that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def switches_off(choice: str) -> bool:
    """Return whether a choice leaves a group out: ``scheduler=null``, ``~scheduler``."""
    return choice.startswith("~") or choice.partition("=")[2] in ("null", "[]")


def takes_out(override: str) -> bool:
    """Return whether an override takes out an argument of a factory, or another free key.

    An earlier override of the key is kept with it, so that no file needs to have the key.
    """
    return override.startswith("~") and keys.is_free(key_of(override))


def opened(overrides: Sequence[str]) -> list[str]:
    """Return overrides as Hydra wants them.

    Open mappings take keys with or without a ``+``, present or not, and a group is switched off by
    ``group=null``.
    """
    return [_opened(override) for override in overrides]


def _opened(override: str) -> str:
    key, _, value = override.partition("=")
    of_plugin = sweepers.opened(key, value) or launchers.opened(key, value)
    if of_plugin is not None:
        return of_plugin
    if value == "null" and key in groups():
        return f"{key}=[]" if key == "callbacks" else f"~{key}"
    mapping = value.startswith("{") and "." in key and keys.node_of(key) is None
    if key[:1] == "+" and key[:2] != "++" and keys.is_free(key[1:]):
        return f"+{override}"
    known = key[:1] not in ("+", "~")
    return f"++{override}" if known and (keys.is_free(key) or mapping) else override


def closed(override: str) -> str:
    """Return an override of `opened` as it is written on a command line."""
    if override.startswith("~"):
        return f"{key_of(override)}=null"
    if override == "callbacks=[]":
        return "callbacks=null"
    return override.removeprefix("++")


def not_swept(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that have one value in all jobs."""
    return [o for o in overrides if not any(one.is_sweep_override() for one in parse([o]))]


def probes(overrides: Sequence[str]) -> list[list[str]]:
    """Return jobs to check before a sweeper that chooses its own samples begins.

    Each value that the command line lists stands in one of them, beside the first value of every
    other key; of a range or an interval that is its beginning.
    """
    values: list[list[str]] = []
    for override in parse(overrides):
        if not override.is_sweep_override():
            values.append([str(override.input_line)])
        elif override.is_discrete_sweep():
            key = override.get_key_element()
            values.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            start = getattr(override.value(), "start", None)
            if isinstance(start, float) and start.is_integer():
                start = int(start)
            values.append([f"{override.get_key_element()}={start}"])
    first = [found[0] for found in values]
    others = [
        [*first[:index], value, *first[index + 1 :]]
        for index, found in enumerate(values)
        for value in found[1:]
    ]
    return [first, *others]


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, in the basic sweeper's order.

    Raises:
        ConfigError: if a value is a range without steps or values, or would switch a group off.
    """
    choices: list[list[str]] = []
    problems = Problems()
    for override in parse(overrides):
        line, key = str(override.input_line), override.get_key_element()
        if not override.is_sweep_override():
            choices.append([line])
        elif not override.is_discrete_sweep():
            rule = "the basic sweeper goes through lists of values"
            problems.add(line, rule, f"Give {key}=a,b,c.")
        else:
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
            if not choices[-1]:
                problems.add(line, "it has no values", f"Give {key}=a,b,c.")
            elif override.key_or_group in groups() and f"{key}=null" in choices[-1]:
                rule = "a sweep goes through the files of a group"
                problems.add(line, rule, f"Start the job with {key}=null by itself.")
    problems.raise_if()
    return [list(job) for job in itertools.product(*choices)]


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides inside a `session`."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return parser.parse_overrides(list(overrides))


# -- Hydra's own settings -----------------------------------------------------------------


def hydra_problems(overrides: Sequence[str]) -> list[Problem]:
    """Return the problems of overrides of Hydra's own configuration."""
    return [
        Problem(
            override,
            "the run directory, the log and the process are the runner's own",
            "Set output_dir and name, or leave it out. Open are: " + ", ".join(OPEN_TO_USERS) + ".",
        )
        for override in overrides
        if re.match(r"hydra([./@]|$)", key_of(override))
        and not key_of(override).startswith(OPEN_TO_USERS)
    ]


def _forbidden_settings(hydra: DictConfig) -> Iterator[Problem]:
    """Yield settings of Hydra's node in files that would run code or change the process."""
    node: Any = OmegaConf.to_container(hydra, resolve=False)
    sweeper = node.get("sweeper") or {}
    params = sweeper.get("params")
    if params and not sweepers.is_own(sweeper):
        yield Problem(
            f"hydra.sweeper.params={params}",
            "the values of a sweep are given on its command line, or belong to a search",
            "Start with -m key=a,b; or write `- override /hydra/sweeper: optuna` in its defaults.",
        )
    found = {
        "hydra.callbacks": node.get("callbacks"),
        "hydra.job.env_set": node["job"].get("env_set"),
        "hydra.job.env_copy": node["job"].get("env_copy"),
        **{f"hydra.{name}": _log_settings(node[name]) for name in ("job_logging", "hydra_logging")},
    }
    for key, value in found.items():
        if value:
            yield Problem(
                f"{key}={value}",
                "a recipe does not change the process it runs in",
                "Take it out of the file. Set variables in the shell that starts the runner.",
            )
    if str(node.get("mode") or "RUN").rpartition(".")[2] != "RUN":
        yield Problem(f"hydra.mode={node['mode']}", "the command line decides", "Use -m.")


def _log_settings(node: Mapping[str, object]) -> dict[str, object]:
    harmless = ("version", "disable_existing_loggers")
    return {name: value for name, value in node.items() if value and name not in harmless}


def _shadowed() -> Iterator[Problem]:
    """Yield files of the user's that would never be read, since an earlier folder has that name."""
    seen: dict[str, Path] = {}
    for folder, path in files():
        name = path.relative_to(folder).as_posix()
        first = seen.setdefault(name, path)
        if first != path and first.read_bytes() != path.read_bytes():
            yield Problem(
                str(path),
                f"{first} has the same name and is read instead",
                "Rename your file, and choose it by its new name.",
            )


def log_levels(overrides: Sequence[str]) -> dict[str, str]:
    """Return by logger ("": the root) the level that `hydra.verbose` sets.

    Inside a session. Where the command line has no `hydra.verbose`, that of the recipe's files
    holds, if one has been composed.
    """
    composed: Any = HydraConfig.instance().cfg
    verbose: object = False if composed is None else composed.hydra.verbose
    for override in filter(is_of_logging, overrides):
        verbose = parse([override])[0].value()
    if isinstance(verbose, bool):
        return {"": "DEBUG"} if verbose else {}
    named = [verbose] if isinstance(verbose, str) else verbose
    return {str(name): "DEBUG" for name in named} if isinstance(named, Sequence) else {}


def is_of_logging(override: str) -> bool:
    """Return whether an override only says what is logged."""
    return key_of(override) == VERBOSE


def without_levels(overrides: Sequence[str]) -> list[str]:
    """Return the overrides but for those of `log_levels`."""
    return [override for override in overrides if not is_of_logging(override)]
