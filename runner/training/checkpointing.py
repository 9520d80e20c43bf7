"""A run's checkpoints, and which of them is the best.

Each checkpoint says which step is the best so far; no other file does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import directory as checkpoints
from accel.checkpoint.load import read_model
from accel.machine.errors import CheckpointError

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.recipe.schema import Checkpoint
    from runner.training.state import TrainState

logger = logging.getLogger(__name__)


class RunState:
    """Everything but models and optimizers, as one object registered with the engine.

    A part has `state_dict` and `load_state_dict`: counters, schedules, callbacks.
    Parts are stored by name, so that a callback may be added to a run or taken out of it. After a
    restore, `added` names the parts that had no state, `dropped` the states that had no part.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.added: list[str] = []
        self.dropped: list[str] = []

    def state_dict(self) -> dict[str, object]:
        """Return the state of each part."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore each part that has a state."""
        self.added = sorted(self.parts.keys() - state.keys())
        self.dropped = sorted(state.keys() - self.parts.keys())
        for name in self.parts.keys() & state.keys():
            self.parts[name].load_state_dict(state[name])


def best_checkpoint(folder: Path, step: int | None = None) -> Path | None:
    """Return the checkpoint with the best state; None: none is kept.

    Args:
        folder: of the checkpoints.
        step: of the best state; None: what the newest readable checkpoint says.
    """
    for path in reversed(checkpoints.checkpoints(folder)):
        try:
            metadata = checkpoints.read_manifest(path).metadata
        except CheckpointError:
            continue
        if step is None:
            step = (metadata.get("best") or {}).get("step")
            if step is None:
                return None
        if metadata.get("step") == step:
            return path
    return None


class Saver:
    """Writes checkpoints through the engine; `last` is the newest, `best` that of the best state.

    Every process must call its methods together.
    """

    def __init__(
        self, accelerator: Accelerator, settings: Checkpoint, state: TrainState, run_dir: Path
    ) -> None:
        self._accelerator = accelerator
        self._settings = settings
        self.folder = Path(accelerator.project_dir or run_dir) / checkpoints.FOLDER
        self._state = state
        self.saved_step = -1
        self.last: Path | None = None
        self.best: Path | None = None
        self.best_is_loaded = False  # the models have the weights of an earlier step

    def save(self, metadata: Mapping[str, object], monitor: str) -> str:
        """Write a checkpoint, which says the best value of `monitor` so far; return its path."""
        state = self._state
        automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
        own = self.folder / f"checkpoint_{state.step}"
        best = {"step": state.best_step, "metric": monitor, "value": state.best}
        kept = self._settings.save_best and state.best_step is not None
        path = self._accelerator.save_state(
            None if automatic else str(own),
            metadata={**metadata, "best": best if kept else None},
            protected=[] if self.best is None else [self.best],
        )
        self.last, self.saved_step = Path(path), state.step
        self.follow_best()
        return path

    def follow_best(self) -> None:
        """Take the newest checkpoint for the best one, if it holds the best state."""
        if self._settings.save_best and self.saved_step == self._state.best_step:
            self.best = self.last

    def resume(self, checkpoint: str) -> str:
        """Find the best checkpoint after a resume; reset the best value if it is gone.

        Returns:
            A note that it is gone; else nothing.
        """
        state = self._state
        self.last, self.saved_step = Path(checkpoint), state.step
        if state.best_step is None or not self._settings.save_best:
            return ""
        self.best = best_checkpoint(self.folder, state.best_step)
        if self.best is not None and self._is_intact(self.best):
            return ""
        note = f"No checkpoint holds the best state (step {state.best_step}) any more: "
        self.best = state.best = state.best_step = None
        return f"{note}the best value is reset."

    def load_best(self) -> int:
        """Give the models the weights of the best state, and return its step.

        Without a best state they keep the last weights, and also, with a warning, where its
        checkpoint is damaged.
        """
        state, strategy = self._state, self._accelerator.strategy
        if self.best is None or state.best_step is None or state.best_step == state.step:
            return state.step
        if not self._is_intact(self.best):
            self.best = None
            return state.step
        for index, model in enumerate(self._accelerator._models):
            weights = read_model(self.best, index, strategy.state.allocate_weights(model))
            strategy.state.load_model_state(model, weights)
        self.best_is_loaded = True
        return state.best_step

    def _is_intact(self, path: Path) -> bool:
        """Return whether a checkpoint is intact on every rank; warn where it is not."""
        wrong = ""
        try:
            checkpoints.verify(path)
        except CheckpointError as error:
            wrong = str(error)
        every = self._accelerator.comm.all_gather_object(wrong)
        first = next((one for one in every if one), None)
        if first is not None and self._accelerator.is_main_process:
            logger.warning("The best checkpoint is skipped. %s", first)
        return first is None
