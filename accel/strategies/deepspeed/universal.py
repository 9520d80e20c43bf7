"""DeepSpeed's universal checkpoint: weights and moments by parameter, for any world size.

For exchange with other programs on DeepSpeed, whose reader unpickles: it can run code.

Source: https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, final

import torch

from accel.machine.errors import CheckpointError, Problem
from accel.machine.imports import require
from accel.strategies.deepspeed.wrappers import TrainedEngine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from accel.comm.base import Communicator

TAG = "universal"
OWN = "engine"  # the engine's own files, which are converted
INFO = "universal_checkpoint_info"  # names of special parameters; here there are none
MOMENTS = ("exp_avg", "exp_avg_sq")


@final
class UniversalCheckpoint:
    """Save and load universal checkpoints."""

    def __init__(self, trained: TrainedEngine, comm: Communicator) -> None:
        self._trained = trained
        self._comm = comm

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        """Write ``<folder>/universal`` and ``<folder>/latest_universal``. Called on every rank.

        All processes share the disk of `folder`. Raise `CheckpointError` if the format cannot hold
        this engine's state.
        """
        engine: DeepSpeedEngine = model
        _check_engine(engine, "save_native")
        if not all(name in values for name in MOMENTS for values in _states(engine)):
            rule = f"the format holds {' and '.join(MOMENTS)} of each parameter"
            remedy = "Use Adam or AdamW, and make a step before; or call save_state."
            _refuse(f"save_native of {type(engine.basic_optimizer).__name__}", rule, remedy)
        own = folder / OWN
        engine.save_checkpoint(str(own), tag=OWN, client_state={INFO: {}})
        if self._comm.rank == 0:
            shutil.rmtree(folder / TAG, ignore_errors=True)
            _convert(own / OWN, folder / TAG)
            shutil.rmtree(own)

    def load(self, model: torch.nn.Module, folder: Path) -> None:
        """Read a checkpoint of `save`, or of DeepSpeed's ``ds_to_universal.py``. It can run code.

        Raise `CheckpointError` if `folder` has no ``latest_universal``, or if the format cannot
        hold this engine's state.
        """
        engine: DeepSpeedEngine = model
        _check_engine(engine, "load_native")
        if not (folder / "latest_universal").is_file():
            rule = "a universal checkpoint has a file latest_universal"
            remedy = "Convert it with ds_to_universal.py first."
            _refuse(f"load_native({str(folder)!r})", rule, remedy)
        with _universal(engine):
            engine.load_checkpoint(str(folder))
        engine.optimizer._hp_optimizer_states_linked = False
        optimizer = self._trained.require_optimizer("load_native")
        optimizer.set_clipping(optimizer.clipping)  # the checkpoint has its own


def _states(engine: DeepSpeedEngine) -> list[dict[str, object]]:
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


@contextlib.contextmanager
def _universal(engine: DeepSpeedEngine) -> Iterator[None]:
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False


def _check_engine(engine: DeepSpeedEngine, call: str) -> None:
    stage = getattr(engine, "zero_optimization_stage", lambda: None)()
    if stage not in (1, 2):
        # Under stage 3, DeepSpeed's reader gives all groups the settings of the first one.
        value = f"{call} of a model that " + (
            "DeepSpeed does not train" if stage is None else f"stage {stage} of ZeRO trains"
        )
        rule = "universal checkpoints require stage 1 or 2"
        _refuse(value, rule, "Use one of them, or call save_state and load_state.")


def _refuse(value: str, rule: str, remedy: str) -> NoReturn:
    raise CheckpointError(Problem(value, rule, remedy))
