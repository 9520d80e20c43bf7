"""DeepSpeed's universal checkpoint: weights and moments by parameter, for any number of processes.

An exchange with other programs on DeepSpeed. DeepSpeed reads it in a way that runs code.

Source: https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel.errors import CheckpointError, Problem
from accel.imports import require

TAG = "universal"
OWN = "engine"  # the engine's own files, which are converted
INFO = "universal_checkpoint_info"  # which names of parameters are special; here none are
MOMENTS = ("exp_avg", "exp_avg_sq")


def save(engine: Any, folder: Path, main: bool) -> None:
    """Write a universal checkpoint: ``<folder>/universal`` and ``<folder>/latest_universal``.

    Args:
        engine: DeepSpeed's.
        folder: created if it does not exist; on a disk that all processes see.
        main: whether this process converts what all have written.

    Raises:
        CheckpointError: if the format has no place for this engine's state.
    """
    _check_engine(engine, "save_native")
    if not all(name in values for name in MOMENTS for values in _states(engine)):
        rule = f"the format holds {' and '.join(MOMENTS)} of each parameter"
        remedy = "Use Adam or AdamW, and make a step before; or call save_state."
        _refuse(f"save_native of {type(engine.basic_optimizer).__name__}", rule, remedy)
    own = folder / OWN
    engine.save_checkpoint(str(own), tag=OWN, client_state={INFO: {}})
    if main:
        shutil.rmtree(folder / TAG, ignore_errors=True)
        _convert(own / OWN, folder / TAG)
        shutil.rmtree(own)


def _states(engine: Any) -> list[Any]:
    stepped = [group["params"][0] for group in engine.basic_optimizer.param_groups]
    return [engine.basic_optimizer.state.get(parameter, {}) for parameter in stepped]


def _convert(source: Path, target: Path) -> None:
    converter = require("deepspeed.checkpoint.ds_to_universal", "save_native")
    options = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,  # more would be processes of their own
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        converter.main(options)


def load(engine: Any, folder: Path) -> None:
    """Read what `save`, or DeepSpeed's ``ds_to_universal.py``, has written. It can run code.

    Args:
        engine: DeepSpeed's, of any number of processes.
        folder: holds ``latest_universal``.

    Raises:
        CheckpointError: if it does not, or if this engine's state has no place in the format.
    """
    _check_engine(engine, "load_native")
    if not (folder / "latest_universal").is_file():
        rule = "a universal checkpoint has a file latest_universal"
        _refuse(f"load_native({str(folder)!r})", rule, "Convert it with ds_to_universal.py first.")
    with _universal(engine):
        engine.load_checkpoint(str(folder))
    engine.optimizer._hp_optimizer_states_linked = False


@contextlib.contextmanager
def _universal(engine: Any) -> Iterator[None]:
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False


def _check_engine(engine: Any, what: str) -> None:
    stage = getattr(engine, "zero_optimization_stage", lambda: None)()
    if stage not in (1, 2):
        # Reading it, DeepSpeed gives all groups the settings of the first one under stage 3.
        value = f"{what} of a model that " + (
            "DeepSpeed does not train" if stage is None else f"stage {stage} of ZeRO trains"
        )
        rule = "universal checkpoints are exchanged under stages 1 and 2"
        _refuse(value, rule, "Use one of them, or call save_state and load_state.")


def _refuse(value: str, rule: str, remedy: str) -> None:
    raise CheckpointError(Problem(value, rule, remedy))
