"""Records of text files, JSONL, Parquet and data sets of Hugging Face, with their places.

A record is a mapping of columns. Its place, such as ``chats.jsonl:12``, is what messages name.
"""

from __future__ import annotations

import glob
import gzip
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from accel.machine.errors import ConfigError, nearest, text_of

Record = Mapping[str, Any]
Records = Iterable[tuple[str, Record]]
SampleBy = Literal["document", "paragraph", "line"]
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves in a folder
STDLIB = "stdlib:"  # before a glob: in the folder of Python's standard library


@dataclass(frozen=True)
class Source:
    """Records, from the beginning each time they are read.

    Args:
        key: the recipe's words for it, such as "data.train=chats.jsonl".
        read: yields (place, record).
        files: which hold all that is read.
        name: of what is read of them; "" is all.
        node: what the recipe says of this source: its weight, format, columns.
    """

    key: str
    read: Callable[[], Records]
    files: Sequence[Path]
    name: str
    node: Mapping[str, Any]


Opening = Callable[[str, Mapping[str, Any]], Source]


def opened(key: str, given: object, opening: Opening, keys: Sequence[str]) -> list[Source]:
    """Return the sources that an argument names: one, or a list of them.

    Args:
        key: the argument, such as "data.train".
        given: a text, or a mapping with `path` and others of `keys`; or a list of these.
        opening: makes a source of a mapping.
        keys: that a mapping may have.

    Raises:
        ConfigError: for an unknown key, and where only some have weights.
    """
    several = isinstance(given, list)
    items: list[Any] = given if isinstance(given, list) else [given]
    found = []
    for number, item in enumerate(items):
        here = f"{key}[{number}]" if several else key
        node = item if isinstance(item, Mapping) else {keys[0]: item}
        for name in set(node) - set(keys):
            rule = "a source has no such key"
            raise ConfigError.of(f"{here}.{name}={node[name]!r}", rule, nearest(name, keys))
        found.append(opening(here, node))
    weighted = [source for source in found if "weight" in source.node]
    if 0 < len(weighted) < len(found) or any(one.node["weight"] <= 0 for one in weighted):
        rule = "each of several sources has a weight above 0, or none has"
        raise ConfigError.of(f"{key}={given}", rule, f"Give {key}=[{{path: …, weight: 1}}, …].")
    return found


# -- files ---------------------------------------------------------------------------------


def of_files(read: Callable[[Path], Records], key: str, node: Mapping[str, Any]) -> Source:
    """Return the source of the files that a path or a glob names, in the order of their names.

    Raises:
        ConfigError: if there is none.
    """
    pattern = str(node.get("path"))
    if pattern.startswith(STDLIB):
        pattern = str(Path(sysconfig.get_path("stdlib"), pattern.removeprefix(STDLIB)))
    path = Path(pattern).expanduser()
    found = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
    files = sorted(file for file in found if file.is_file())
    if not files:
        near = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        rule = f"no file has that name, seen from {Path.cwd()}"
        raise ConfigError.of(f"{key}={node.get('path')}", rule, nearest(path.name, near))
    return Source(f"{key}={node['path']}", partial(_all_records, read, files), files, "", node)


def _all_records(read: Callable[[Path], Records], files: Sequence[Path]) -> Records:
    for file in files:
        for place, record in read(file):
            yield f"{file}{place}", record


def _open(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def text_records(sample_by: SampleBy, path: Path) -> Records:
    """Yield the texts of a file: all of it, its paragraphs, or its lines; empty ones are skipped.

    Raises:
        ConfigError: if it is no UTF-8.
    """
    with _open(path) as file:
        try:
            parts = _paragraphs(file) if sample_by == "paragraph" else file
            texts = [file.read()] if sample_by == "document" else parts
            for number, text in enumerate(texts, start=1):
                if decoded := text.decode().strip("\r\n" if sample_by != "document" else ""):
                    yield f":{number}", {"text": decoded}
        except UnicodeDecodeError as error:
            rule = f"text files are in UTF-8, and this one is not ({error})"
            raise ConfigError.of(str(path), rule, "Convert it: iconv -t utf-8.") from error


def _paragraphs(file: Iterable[bytes]) -> Iterator[bytes]:
    lines: list[bytes] = []
    for line in file:
        if line.strip():
            lines.append(line)
        elif lines:
            yield b"".join(lines)
            lines = []
    yield b"".join(lines)


def json_records(path: Path) -> Records:
    """Yield the objects of a file with one a line; empty lines are skipped.

    Raises:
        ConfigError: for another line, naming the file and the line.
    """
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError(f"a {type(record).__name__}")
                except ValueError as error:
                    rule = f"each line is one JSON object, and this one is not ({error})"
                    remedy = "Correct it; of one array make lines: jq -c '.[]' x.json > x.jsonl"
                    raise ConfigError.of(f"{path}:{number}", rule, remedy) from error
                yield f":{number}", record


def parquet_records(path: Path) -> Records:
    """Yield the rows of a Parquet file.

    Raises:
        ConfigError: if it is none.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        batches = parquet.ParquetFile(path).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, record in enumerate(rows, start=1):
            yield f":{number}", record
    except pyarrow.ArrowInvalid as error:
        rule = f"it is no Parquet file ({text_of(error)})"
        raise ConfigError.of(str(path), rule, "Name a Parquet file.") from error


# -- data sets of Hugging Face -------------------------------------------------------------


def of_splits(
    path: str, subset: str | None, stream: bool, key: str, node: Mapping[str, Any]
) -> Source:
    """Return the source of a split of a data set: a hub's, or a folder of `save_to_disk`.

    Raises:
        ConfigError: if the library refuses it.
    """
    import datasets

    path, subset = str(node.get("path", path)), node.get("subset", subset)
    split = str(node["split"])
    try:
        if any(Path(path, name).is_file() for name in SAVED):
            loaded = datasets.load_from_disk(path)
            found = loaded[split] if isinstance(loaded, dict) else loaded
        else:
            found = datasets.load_dataset(path, subset, split=split, streaming=stream)
    except (OSError, ValueError, KeyError) as error:
        rule = f"datasets cannot load it ({text_of(error).splitlines()[0].rstrip('.')})"
        remedy = "Correct data.path, data.subset or the name of the split."
        raise ConfigError.of(f"{key}={split} of {path}", rule, remedy) from error
    files = [] if stream else [Path(file["filename"]) for file in found.cache_files]
    place = f"{path}:{split}"
    return Source(f"{key}={split}", partial(_rows, found, place), files, place, node)


def _rows(dataset: Any, place: str) -> Records:
    return ((f"{place}:{number}", record) for number, record in enumerate(dataset))
