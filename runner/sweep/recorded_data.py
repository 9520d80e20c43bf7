"""The states of a job's data files in the journal: many of them lie beside it. Free of torch.

A data factory may be given a list of thousands of files. Each attempt at each job records their
states twice; as they mostly stand alike, they are written once, to a file named by their digest.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from runner.run_dir import json_files
from runner.run_dir.json_files import Fields

logger = logging.getLogger(__name__)

MOST = 50  # in a record of the journal
DATA, FILE = "data", "data_file"
PREFIX, DIGITS = "data-", 16


def written(folder: Path, data: Mapping[str, Fields]) -> dict[str, object]:
    """Return the field of a record that stands for states, by dotted key; many are written first.

    `folder` is that of the sweep. A reader of an earlier version finds no data in such a record.

    Raises:
        OSError: if they cannot be written.
    """
    if len(data) <= MOST:
        return {DATA: dict(data)} if data else {}
    name = f"{PREFIX}{json_files.digest(data)[:DIGITS]}.json"
    if not (folder / name).exists():
        json_files.write_json(folder / name, data)
    return {FILE: name}


def reader(folder: Path) -> Callable[[Fields], Mapping[str, Fields] | None]:
    """Return a function that returns the states of a record; None: it has none.

    Each file is read once: records with the same states share them.
    """
    read = functools.cache(functools.partial(_read, folder))

    def of(record: Fields) -> Mapping[str, Fields] | None:
        name = record.get(FILE)
        found = read(name) if isinstance(name, str) else record.get(DATA)
        return found if isinstance(found, dict) else None

    return of


def _read(folder: Path, name: str) -> object:
    try:
        return json.loads((folder / Path(name).name).read_bytes())
    except (OSError, ValueError) as error:  # removed, or damaged: nothing is said of that data
        logger.debug("The states of a job's data cannot be read: %s", error)
        return None
