"""What is not as it was when a run was trained, for those who use its weights. Free of torch.

The recipe and the weights are the run's; the code that builds the model and measures it is that of
today, and so are the data files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from runner.run_dir import environment, provenance
from runner.run_dir.json_files import Fields


def code_now(recorded: Fields) -> dict[str, str | None]:
    """Return the digests of the packages in a recorded environment as they are now.

    None: one is not found, or too large.
    """
    return provenance.package_digests(recorded.get("code") or {})


def other_code(recorded: Fields, now: Mapping[str, str | None]) -> list[str]:
    """Return how the project's code differs from that which a run was trained with last.

    By its packages' Python files; by git, too, where some are too large. A commit that leaves them
    alone is no difference.

    Args:
        recorded: content of the run's environment.json; empty where it is missing or damaged.
        now: `code_now` of it.
    """
    then = recorded.get("code") or {}
    known = {name: one for name, one in now.items() if one and then[name]}
    lines = provenance.code_differences({"code": then}, {"code": known})
    if len(known) < len(then):
        state = provenance.git_state(os.getcwd())
        lines += provenance.code_differences({"git": recorded.get("git")}, {"git": state})
    return [f"code: not as it was trained with: {line}" for line in lines]


def other_data(recorded: Fields, files: Fields, given: Iterable[str]) -> list[str]:
    """Return how data files differ from those that a run had.

    Args:
        recorded: as `other_code` takes it.
        files: the states of the files that the data factory is given now, by dotted key.
        given: keys that the command has changed; what lies below them is not compared.
    """
    lines = environment.data_differences(recorded, {"data": files}, list(given))
    return [f"data: not as it was trained with: {line}" for line in lines]
