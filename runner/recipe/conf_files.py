"""The files of `conf/` folders as text, to locate mistakes in them. Free of torch.

Call these inside a Hydra session: they read the folders of its search path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

from accel.machine.errors import Problem, Problems, nearest
from runner.recipe import keys, paths, static_checks
from runner.recipe.registry import register
from runner.recipe.schema import Recipe

PACKAGE = re.compile(r"^\s*#\s*@package\s+(\S+)", re.M)
MAX_PROBLEMS = 8  # problems of one file that are reported at once


def folders() -> list[Path]:
    """Return the folders that recipes are read from, in Hydra's order."""
    return [Path(path) for path in _sources("file")]


def packages() -> list[str]:
    """Return the other packages than Hydra's that recipes are read from (`pkg://…`)."""
    return [name for name in _sources("pkg") if name.partition(".")[0] != "hydra"]


def _sources(scheme: str) -> list[str]:
    if not GlobalHydra.instance().is_initialized():
        return []
    sources = GlobalHydra.instance().config_loader().get_sources()
    return [source.path for source in sources if source.scheme() == scheme]


def files() -> Iterator[tuple[Path, Path]]:
    """Yield each file of the folders that recipes are read from, with its folder, in order."""
    for folder in folders():
        for path in _recipes_below(folder):
            yield folder, path


def own_files() -> Iterator[tuple[Path, str]]:
    """Yield each file of the user's, with its name below its folder: "experiment/own"."""
    shipped = paths.conf_folder().resolve()
    for folder in folders():
        if folder.is_dir() and folder.resolve() != shipped:
            for path in _recipes_below(folder):
                yield path, path.relative_to(folder).with_suffix("").as_posix()


def _recipes_below(folder: Path) -> list[Path]:
    """Return the files of a folder of recipes, in the order of their names."""
    return sorted(paths.files_below(folder, ".yaml"))


def file_of(name: str) -> Path | None:
    """Return the file that a name such as "experiment/own" stands for."""
    found = (folder / f"{name}.yaml" for folder in folders())
    return next((path for path in found if path.is_file()), None)


def undecodable() -> list[Problem]:
    """Return a problem for each file of the user's that is no UTF-8."""
    problems = Problems()
    for path, name in own_files():
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            line = path.read_bytes()[: error.start].count(b"\n") + 1
            rule = f"line {line} is not UTF-8 text (byte 0x{error.object[error.start]:02x})"
            problems.add(f"conf/{name}.yaml", rule, "Save the file as UTF-8.")
    return problems


def cycle() -> Problem | None:
    """Return the problem that defaults lists include each other in a cycle, or None."""
    includes = {name: list(_defaults(path, name)) for path, name in own_files()}
    for start in includes:
        chain = _cycle_from(start, includes, (start,))
        if chain:
            shown = " → ".join(chain)
            rule = "a file cannot be composed from itself"
            value = f"conf/{start}.yaml: its defaults list leads back to it ({shown})"
            return Problem(value, rule, f"Take {chain[1].rpartition('/')[2]} out of the list.")
    return None


def _cycle_from(
    start: str, includes: Mapping[str, list[str]], chain: tuple[str, ...]
) -> tuple[str, ...] | None:
    for name in includes.get(chain[-1], ()):
        if name == start:
            return (*chain, name)
        found = None if name in chain else _cycle_from(start, includes, (*chain, name))
        if found:
            return found
    return None


def _defaults(path: Path, name: str) -> Iterator[str]:
    """Yield the names of the files that a file's defaults list includes."""
    content = _content(path)
    group = name.rpartition("/")[0]
    for entry in content.get("defaults") or ():
        for key, options in entry.items() if isinstance(entry, Mapping) else (("", entry),):
            absolute = str(key).removeprefix("override ").removeprefix("optional ").strip()
            for option in options if isinstance(options, list) else [options]:
                if option is not None and option != "_self_":
                    yield _joined(group, absolute, str(option))


def _joined(group: str, key: str, option: str) -> str:
    if option.startswith("/"):
        return option[1:]
    place = key[1:] if key.startswith("/") else "/".join(part for part in (group, key) if part)
    return f"{place}/{option}" if place else option


def _content(path: Path) -> dict[str, Any]:
    try:
        content = safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError):  # reported by composing itself
        return {}
    return content if isinstance(content, dict) else {}


def wrong_keys(name: str) -> list[Problem]:
    """Return a problem for each key of a file (such as "experiment/own") that no recipe has."""
    path = file_of(name)
    if path is None:
        return []
    content = _content(path)
    chosen = str(content.pop("defaults", ""))
    header = PACKAGE.search(path.read_text(encoding="utf-8"))
    group = name.rpartition("/")[0]
    package = header.group(1) if header else group.replace("/", ".")
    prefix = {"_global_": "", "_group_": group.replace("/", ".")}.get(package, package)
    place = f"conf/{name}.yaml"
    if not header and group and group not in keys.nodes(Recipe):
        rule = f"without a header its keys would stand below {group!r}, which no recipe has"
        remedy = "Write `# @package _global_` as its first line."
        return [Problem(place, rule, remedy)]
    known = list(keys.typed_keys())
    found = [*_unknown(content, f"{prefix}." if prefix else "", known)]
    if not prefix:
        kept = {node: value for node, value in content.items() if f"/{node}" not in chosen}
        found += _arguments(kept)
    problems = [Problem(f"{place}: {one.value}", one.rule, one.remedy) for one in found]
    if len(problems) > MAX_PROBLEMS:
        more = f"{len(problems) - MAX_PROBLEMS} more unknown keys"
        rest = Problem(f"{place}: {more}", "no recipe has them", "Correct these first.")
        return [*problems[:MAX_PROBLEMS], rest]
    return problems


def _arguments(content: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the arguments that the factories of the default files do not have.

    A file that chooses others is checked once it can be composed.
    """
    for group, option in paths.default_files().items():
        node = content.get(group)
        path = paths.conf_folder() / group / f"{option}.yaml"
        if group not in keys.FACTORY_NODES or not isinstance(node, Mapping):
            continue
        factory = _content(path)
        if {"name", "_target_"} & node.keys() or "name" not in factory:
            continue
        registry = getattr(register, group)
        known = static_checks.arguments_of(registry, str(factory["name"]), group)
        for name, value in node.items():
            if known and name not in known:
                rule = f"{factory['name']} has no such argument"
                yield Problem(f"{group}.{name}={value}", rule, nearest(str(name), known))


def _unknown(node: Mapping[str, object], prefix: str, known: list[str]) -> Iterator[Problem]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if keys.is_free(key) or key == "hydra" or key.startswith("hydra."):
            continue
        if key not in known:
            shown = "" if isinstance(value, Mapping) else f"={value}"
            yield keys.unknown_key(key, known, shown)
        elif isinstance(value, Mapping):
            yield from _unknown(value, f"{key}.", known)


def containing(pattern: str) -> str:
    """Return "conf/<name>.yaml: " for the first file of the user's in which a pattern is, or ""."""
    for path, name in own_files():
        if re.search(pattern, path.read_text(encoding="utf-8", errors="replace")):
            return f"conf/{name}.yaml: "
    return ""
