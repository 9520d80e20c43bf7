"""Hydra for recipes: schema, search path, overrides, and the settings that are the runner's own.

Free of torch.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from accel.machine.errors import ConfigError, Problem, Problems
from runner.recipe import paths, plugins
from runner.recipe.keys import FACTORY_NODES
from runner.recipe.schema import PLUGINS
from runner.recipe.serialization import to_plain, typed

VERSION_BASE = "1.3"
SCHEMA, TYPES = "recipe_schema", "recipe_types"
PRIMARY = "config"
# The run directory and the log are the runner's own.
NO_LOGS = ("hydra/job_logging=none", "hydra/hydra_logging=none")
FIXED = ("hydra.run.dir=.", "hydra.output_subdir=null", *NO_LOGS)
SEARCHED = "hydra.searchpath"
OPEN_TO_USERS = (
    *(SEARCHED, "hydra.verbose", "hydra.sweeper", "hydra.launcher"),
    *("hydra/sweeper", "hydra/launcher"),
)
VERBOSE = "hydra.verbose"


def prepare() -> None:
    """Make the schema, and the nodes of the launcher and the sweepers, known to Hydra."""
    store = ConfigStore.instance()
    others = {name: p for name, p in PLUGINS.items() if not (paths.conf_folder() / name).is_dir()}
    for name, plugin in others.items():  # of another package: its defaults are one choice
        store.store(group=name, name="default", node=plugin.kind, provider="runner")
    places = [TYPES, *({name: None} for name in others), "_self_"]
    store.store(name=TYPES, node=typed(), provider="runner")
    store.store(name=SCHEMA, node={"defaults": places}, provider="runner")
    plugins.store()


@contextlib.contextmanager
def session(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Initialize Hydra in the context, which may be nested in another use of Hydra.

    Groups and files are looked up in the folders of `hydra.searchpath`, too, if it is among the
    overrides (`--config-dir`).
    """
    outer, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    given, paths.given_conf_folders = paths.given_conf_folders, search_places(overrides)
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


def search_places(overrides: Sequence[str]) -> tuple[str, ...]:
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
        for path in paths.files_below(folder, ".yaml"):
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


def own_nodes(choices: Sequence[str], config_name: str) -> Iterator[tuple[str, DictConfig]]:
    """Yield the content of each chosen file of the user's, with its name in messages.

    The content lies at its place in a recipe.

    Raises:
        Exception: Hydra's and OmegaConf's own, if a file cannot be read.
    """
    names = {name for _, name in own_files()}
    for default in chosen_files(choices, config_name):
        name = f"conf/{default.config_path}.yaml"
        if name in names:
            content = _content(str(default.config_path))
            node = OmegaConf.create()
            package = default.package or ""
            if package:
                OmegaConf.update(node, package, content)
            yield name, node if package else content


def _content(name: str) -> Any:
    sources = GlobalHydra.instance().config_loader().get_sources()
    return next(one for one in sources if one.is_config(name)).load_config(name).config


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
    OmegaConf.set_struct(config, False)
    _take_inline_nodes(config, choices, config_name)
    for node in [key_of(choice) for choice in choices if switches_off(choice)]:
        if node in typed():
            config[node] = typed()[node]  # an experiment may give it values, which come later
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
        config_name, overrides=[*NO_LOGS, *for_hydra(overrides)], return_hydra_config=True
    )


def _take_inline_nodes(config: DictConfig, choices: Sequence[str], config_name: str) -> None:
    """Leave out files of factories that a later file, such as an experiment, names otherwise.

    Hydra merges both, but the arguments of the one are not those of the other.
    """
    files = {node: config.hydra.runtime.choices.get(node) for node in FACTORY_NODES}
    own = {node: factory_named(_content(f"{node}/{file}")) for node, file in files.items() if file}
    inline = [node for node, found in own.items() if found != factory_named(config[node])]
    problems = [
        Problem(
            choice,
            "a file that comes later, such as an experiment, names another factory",
            f"Give '{key_of(choice)}={{name: …}}', or write `- override /{key_of(choice)}: …` in "
            "the defaults list of that file, which the command line then overrides.",
        )
        for choice in choices
        if key_of(choice) in inline
    ]
    ConfigError.raise_if(problems)
    if inline:
        off = [f"{node}=null" for node in inline]
        without = composed_with_hydra([*choices, *off], config_name)
        for node in inline:
            config[node] = without[node]


def factory_named(node: object) -> tuple[object, object]:
    """Return the `name` and the `_target_` of a node."""
    found = node if isinstance(node, (DictConfig, Mapping)) else {}
    return found.get("name"), found.get("_target_")


def _merge_trackers(config: DictConfig, choices: Sequence[str], config_name: str) -> None:
    """Use the trackers of all files of ``tracker=[a,b]``: Hydra keeps the last file's list."""
    if "tracker" in config.hydra.runtime.choices or "tracker" not in config:
        return
    names = [str(default.config_path) for default in chosen_files(choices, config_name)]
    lists = [list(_content(n).get("log_with") or ()) for n in names if n.startswith("tracker/")]
    if not lists or config.tracker.log_with == lists[-1]:  # else an experiment has another list
        config.tracker.log_with = list(dict.fromkeys(itertools.chain(*lists)))


def chosen_files(overrides: Sequence[str], config_name: str) -> list[ResultDefault]:
    """Return the files that a recipe is composed from, in order; their values don't matter.

    Raises:
        Exception: Hydra's own, if there is no such file.
    """
    loader = GlobalHydra.instance().config_loader()
    words = [*NO_LOGS, *for_hydra(overrides)]
    return list(loader.compute_defaults_list(config_name, words, RunMode.RUN).defaults)


def plain(config: DictConfig) -> dict[str, object]:
    """Return a composed recipe as plain containers, interpolations resolved."""
    return dict(to_plain(OmegaConf.to_container(config, resolve=True, throw_on_missing=True)))


# -- overrides -----------------------------------------------------------------------------


def merge(own: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return `own` overrides and then `new` ones, which replace those of their keys and below."""
    chosen = tuple(f"{key_of(override)}." for override in new)
    return [*(o for o in own if not f"{key_of(o)}.".startswith(chosen)), *new]


def key_of(override: str) -> str:
    """Return the dotted key, or the group, that an override sets."""
    return override.lstrip("+~").partition("=")[0]


def switches_off(choice: str) -> bool:
    """Return whether a choice leaves a group out: ``scheduler=null``, ``~scheduler``."""
    return choice.startswith("~") or choice.partition("=")[2] in ("null", "[]")


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Return overrides for Hydra, whose grammar leaves a group out by an empty list of files."""
    nulls = [one for one in overrides if one.endswith("=null")]
    off = {f"{group}=null" for group in (groups() if nulls else ())}
    return [f"{key_of(one)}=[]" if one in off else one for one in overrides]


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
        ConfigError: if a value is a range without steps or values.
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
        if re.split(r"[./@]", key_of(override))[0] == "hydra"
        and not key_of(override).startswith(OPEN_TO_USERS)
    ]


def _forbidden_settings(hydra: DictConfig) -> Iterator[Problem]:
    """Yield settings of Hydra's node in files that would run code or change the process."""
    node: Any = OmegaConf.to_container(hydra, resolve=False)
    outputs: Any = OmegaConf.to_container(_content("hydra/output/default"), resolve=False)
    sweeper, mode = node.get("sweeper") or {}, str(node.get("mode") or "RUN").rpartition(".")[2]
    harmless = ("version", "disable_existing_loggers")
    found = {
        "hydra.sweeper.params": None if plugins.is_own(sweeper) else sweeper.get("params"),
        "hydra.callbacks": node.get("callbacks"),
        "hydra.job.env_set": node["job"].get("env_set"),
        "hydra.job.env_copy": node["job"].get("env_copy"),
        "hydra.job.chdir": node["job"].get("chdir"),
        "hydra.mode": None if mode == "RUN" else mode,
    }
    for section, usual in outputs.items():
        own = ((key, node[section][key]) for key in usual)
        found |= {f"hydra.{section}.{key}": v for key, v in own if v != usual[key]}
    for logs in ("job_logging", "hydra_logging"):
        found[f"hydra.{logs}"] = {k: v for k, v in node[logs].items() if v and k not in harmless}
    for key, value in found.items():
        if value:
            yield Problem(
                f"{key}={value}",
                "a recipe does not change the command or the process that it runs in",
                "Take it out. Sweep with -m; ranges need `- override /hydra/sweeper: optuna`.",
            )


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
