"""Modules without a test of their name: `accel/a/b.py` is tested by `tests/accel/a/test_b.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from tests.structure.source import Source

# Modules that need no test of their name, with the reason.
EXCUSED = {
    "accel/big_modeling.py": "re-exports names",
    "accel/checkpointing.py": "re-exports names",
    "accel/data_loader.py": "re-exports names",
    "accel/tracking.py": "re-exports names",
    "accel/hooks.py": "re-exports names",
    "accel/memory_utils.py": "re-exports a name",
    "accel/parallelism_config.py": "re-exports names",
    "accel/utils/constants.py": "constants",
    "accel/utils/dataclasses.py": "re-exports names",
    "accel/utils/deepspeed.py": "re-exports names",
    "accel/utils/fsdp_utils.py": "re-exports names",
    "accel/utils/imports.py": "re-exports names",
    "accel/utils/memory.py": "re-exports names",
    "accel/utils/modeling.py": "re-exports names",
    "accel/utils/offload.py": "re-exports names",
    "accel/utils/operations.py": "re-exports names",
    "accel/utils/other.py": "re-exports names",
    "accel/utils/random.py": "re-exports names",
    "accel/utils/tqdm.py": "re-exports a name",
    "accel/utils/versions.py": "re-exports names",
    "accel/strategies/mesh/merge.py": "re-exports a name",
    "accel/utils/environment.py": "re-exports names",
    "runner/exit_codes.py": "constants",
    "runner/training/callback.py": "a class of empty methods; its subclasses are tested",
    "runner/training/current_run.py": "a protocol; the training loop is tested",
    "accel/comm/base.py": "an abstract class; its implementations are tested",
    "accel/precision/base.py": "an abstract class; its implementations are tested",
}


def test_of(place: str) -> str:
    """Return the path of the test of a module: a leading underscore of its name is dropped."""
    path = PurePosixPath(place)
    return str("tests" / path.with_name(f"test_{path.stem.lstrip('_')}.py"))


def untested(root: Path, sources: Iterable[Source]) -> list[str]:
    """Return the modules whose test is missing: not packages, not `EXCUSED`."""
    return [
        source.place
        for source in sources
        if not source.place.endswith("__.py")
        and source.place not in EXCUSED
        and not (root / test_of(source.place)).exists()
    ]
