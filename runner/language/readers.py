"""Records of text files, JSONL, Parquet and data sets of Hugging Face, with their places.

A record is a mapping of columns. Its place, such as ``chats.jsonl:12``, is what messages name.
"""

from __future__ import annotations

import glob
import gzip
import itertools
import json
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from accel.machine.errors import ConfigError, nearest, text_of
from runner.recipe import paths

Record = Mapping[str, Any]
Records = Iterable[tuple[str, Record]]
SampleBy = Literal["document", "paragraph", "line"]
JSON = (".jsonl", ".json", ".ndjson")
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves in a folder
# Before a colon and a glob: the folder of Python's standard library, or of the examples.
FOLDERS = {
    "stdlib": lambda: Path(sysconfig.get_path("stdlib")),
    "examples": lambda: paths.conf_folder().parent / "examples",
}


@dataclass(frozen=True)
class Source:
    """Records, from the beginning each time they are read.

    Args:
        key: the recipe's words for it, such as "data.train=chats.jsonl".
        read: yields (place, record).
        files: which hold all that is read.
        name: how it is read of them.
        node: what the recipe says of this source: its weight, format, columns.
    """

    key: str
    read: Callable[[], Records]
    files: Sequence[Path]
    name: str
    node: Mapping[str, Any]


Opening = Callable[[str, Mapping[str, Any]], Source]


def opened(key: str, given: object, opening: Opening, keys: Sequence[str]) -> list[Source]:
    """Return the sources that an argument names.

    Args:
        key: the argument, such as "data.train".
        given: a text, or a mapping with some of `keys`; or a list of these.
        opening: makes a source of a mapping.
        keys: that a mapping may have; a text is the first of them.

    Raises:
        ConfigError: for an unknown key, and where only some have weights.
    """
    items: list[Any] = given if isinstance(given, list) else [given]
    nodes = [item if isinstance(item, Mapping) else {keys[0]: item} for item in items]
    for name in {name for node in nodes for name in node} - set(keys):
        rule = "a source has no such key"
        raise ConfigError.of(f"{key}: {name}", rule, nearest(str(name), keys))
    weights = [node["weight"] for node in nodes if "weight" in node]
    if len(weights) not in (0, len(nodes)) or any(weight <= 0 for weight in weights):
        rule = "each of several sources has a weight above 0, or none has"
        raise ConfigError.of(f"{key}={given}", rule, f"Give {key}=[{{path: …, weight: 1}}, …].")
    return [opening(key, node) for node in nodes]


def source(
    sample_by: SampleBy,
    path: str | None,
    subset: str | None,
    stream: bool,
    key: str,
    node: Mapping[str, Any],
) -> Source:
    """Return the source of files, or of a split where the node or `path` names a data set."""
    if path is None and "split" not in node:
        return of_files(sample_by, key, node)
    return _of_split({"path": path, "subset": subset, "split": "train", **node}, stream, key)


def of_files(sample_by: SampleBy, key: str, node: Mapping[str, Any]) -> Source:
    """Return the source of the files that a path or a glob names, in the order of their names.

    Raises:
        ConfigError: if there is none.
    """
    pattern = str(node.get("path"))
    head, _, rest = pattern.partition(":")
    path = FOLDERS[head]() / rest if head in FOLDERS else Path(pattern).expanduser()
    found = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
    files = sorted(file for file in found if file.is_file())
    if not files:
        near = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        rule = f"no file has that name, seen from {Path.cwd()}"
        raise ConfigError.of(f"{key}={pattern}", rule, nearest(path.name, near))
    return Source(f"{key}={pattern}", partial(_records, sample_by, files), files, sample_by, node)


def _records(sample_by: SampleBy, files: Sequence[Path]) -> Records:
    for file in files:
        kind = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
        plain = partial(_texts, sample_by)
        read = _objects if kind in JSON else _rows if kind == ".parquet" else plain
        try:
            for number, record in read(file):
                yield f"{file}:{number}", record
        except UnicodeDecodeError as error:
            rule = f"text files are in UTF-8, and this one is not ({error})"
            raise ConfigError.of(str(file), rule, "Convert it: iconv -t utf-8.") from error


def _open(path: Path) -> Any:
    return (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8")
    )


def _texts(sample_by: SampleBy, path: Path) -> Iterable[tuple[int, Record]]:
    with _open(path) as file:
        texts: Iterable[str] = [file.read()] if sample_by == "document" else file
        if sample_by == "paragraph":
            texts = ("".join(lines) for _, lines in itertools.groupby(file, str.isspace))
        for number, text in enumerate(texts, start=1):
            if text.strip():
                yield number, {"text": text if sample_by == "document" else text.strip("\n")}


def _objects(path: Path) -> Iterable[tuple[int, Record]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line) if line.strip() else {}
                if not isinstance(record, dict):
                    raise ValueError(f"a {type(record).__name__}")
            except ValueError as error:
                rule = f"each line is one JSON object, and this one is not ({error})"
                remedy = "Correct it; of one array make lines: jq -c '.[]' x.json > x.jsonl"
                raise ConfigError.of(f"{path}:{number}", rule, remedy) from error
            if record:
                yield number, record


def _rows(path: Path) -> Iterable[tuple[int, Record]]:
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches()
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except pyarrow.ArrowInvalid as error:
        rule = f"it is no Parquet file ({text_of(error)})"
        raise ConfigError.of(str(path), rule, "Name a Parquet file.") from error


def _of_split(node: Mapping[str, Any], stream: bool, key: str) -> Source:
    import datasets

    path, split = str(node["path"]), str(node["split"])
    try:
        if any(Path(path, name).is_file() for name in SAVED):
            loaded = datasets.load_from_disk(path)
            found = loaded[split] if isinstance(loaded, dict) else loaded
        else:
            found = datasets.load_dataset(path, node["subset"], split=split, streaming=stream)
    except (OSError, ValueError, KeyError) as error:
        rule = f"datasets cannot load it ({text_of(error).splitlines()[0].rstrip('.')})"
        remedy = "Correct data.path, data.subset or the name of the split."
        raise ConfigError.of(f"{key}={split} of {path}", rule, remedy) from error
    files = [] if stream else [Path(file["filename"]) for file in found.cache_files]
    place = f"{path}:{split}"
    return Source(f"{key}={split}", partial(_numbered, found, place), files, place, node)


def _numbered(dataset: Any, place: str) -> Records:
    return ((f"{place}:{number}", record) for number, record in enumerate(dataset))
