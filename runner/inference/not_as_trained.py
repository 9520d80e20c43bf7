"""What is not as it was when a run was trained, for those who use its weights. Free of torch.

The recipe and the weights are the run's; the code that builds the model and measures it is that of
today, and so are the data files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.run_dir import data_files, provenance, reproduction
from runner.run_dir.json_files import Fields


def code_now(run_dir: Path) -> dict[str, str]:
    """Return the digests of the project's packages that a run has recorded, as they are now."""
    return _digests(reproduction.recorded(run_dir).get("code") or {})


def other_code(run_dir: Path) -> list[str]:
    """Return how the project's code differs from that which a run was trained with last.

    By its packages' Python files; by git, too, where some are too large. A commit that leaves them
    alone is no difference.
    """
    then = reproduction.recorded(run_dir)
    recorded = then.get("code") or {}
    found = provenance.package_digests(recorded)
    known = {name: one for name, one in found.items() if one and recorded[name]}
    lines = provenance.code_differences({"code": recorded}, {"code": known})
    if len(known) < len(recorded):
        state = provenance.git_state(os.getcwd())
        lines += provenance.code_differences({"git": then.get("git")}, {"git": state})
    return [f"code: not as it was trained with: {line}" for line in lines]


def other_data(run_dir: Path, files: Fields, given: Iterable[str]) -> list[str]:
    """Return how data files differ from those that a run had.

    Args:
        run_dir: the run.
        files: the states of the files that the data factory is given now, by dotted key.
        given: keys that the command has changed; what lies below them is not compared.
    """
    recorded = reproduction.recorded(run_dir).get("data") or {}
    keys = list(given)
    then = {
        key: one
        for key, one in recorded.items()
        if not any(f"{key}.".startswith(f"{name}.") for name in keys)
    }
    lines = data_files.differences({"data": then}, {"data": files})
    return [f"data: not as it was trained with: {line}" for line in lines]


def _digests(recorded: Mapping[str, object]) -> dict[str, str]:
    found = provenance.package_digests(recorded)
    return {name: digest for name, digest in found.items() if digest}
