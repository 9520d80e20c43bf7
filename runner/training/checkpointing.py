"""A run's checkpoints, and which of them are the best.

Each checkpoint says which steps are the best so far; no other file does.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.checkpoint import directory as checkpoints
from accel.checkpoint.load import read_model
from accel.comm.base import together
from accel.machine.errors import CheckpointError
from runner.runs.json_files import WEIGHTS_ONLY

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.recipe.schema import Checkpoint
    from runner.training.state import TrainState

logger = logging.getLogger(__name__)

_WEIGHTS = ("model", "pytorch_model", "fp8_scales")  # how the names of their files begin


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
        self.best_is_loaded = False  # the models have the weights of an earlier step
        self._paths: dict[int, Path] = {}  # of checkpoints, by step

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best state; None: none is kept."""
        step = self._state.best_step
        return None if step is None or not self._settings.keep_best else self._paths.get(step)

    def keeps(self, step: int) -> bool:
        """Return whether the checkpoint of a step is kept although newer ones are complete."""
        settings = self._settings
        if settings.keep_every is not None and step % settings.keep_every == 0:
            return True
        return settings.keep_best > 0 and any(step == other for _, other in self._state.top)

    def save(self, metadata: Mapping[str, object], monitor: str) -> str:
        """Write a checkpoint, which says the best value of `monitor` so far; return its path."""
        state, project = self._state, self._accelerator.project_configuration
        own = self.folder / f"checkpoint_{state.step}"
        best = {"step": state.best_step, "metric": monitor, "value": state.best}
        told = self._settings.keep_best and state.best_step is not None
        path = self._accelerator.save_state(
            None if project.automatic_checkpoint_naming else str(own),
            metadata={**metadata, "best": best if told else None},
            protected=[path for step, path in self._paths.items() if self.keeps(step)],
        )
        self.last = self._paths[state.step] = Path(path)
        self.saved_step = state.step
        if self._settings.weights_only and project.total_limit is not None:
            run = self._accelerator._run
            with together(run.comm, "reducing old checkpoints to their weights"):
                for old in checkpoints.checkpoints(self.folder)[: -project.total_limit]:
                    if run.writes:
                        reduce_to_weights(old)
        return path

    def resume(self, checkpoint: str) -> str:
        """Find the best checkpoints after a resume; forget best values whose checkpoint is gone.

        Returns:
            A note that some are gone; else nothing.
        """
        state = self._state
        self.last, self.saved_step = Path(checkpoint), state.step
        for path in checkpoints.checkpoints(self.folder):
            with suppress(CheckpointError):
                self._paths[checkpoints.read_manifest(path).metadata["step"]] = path
        if not self._settings.keep_best:
            return ""
        lost = [
            step
            for _, step in state.top
            if step not in self._paths or not self._is_intact(self._paths[step])
        ]
        if not lost:
            return ""
        what = f"best state (step {', '.join(map(str, lost))})"
        state.top = [entry for entry in state.top if entry[1] not in lost]
        return f"No checkpoint holds the {what} any more: the best value is reset."

    def load_best(self) -> int:
        """Give the models the weights of the best state, and return its step.

        Without a best state they keep the last weights, and also, with a warning, where its
        checkpoint is damaged.
        """
        state, strategy, best = self._state, self._accelerator.strategy, self.best
        if best is None or state.best_step is None or state.best_step == state.step:
            return state.step
        if not self._is_intact(best):
            del self._paths[state.best_step]
            return state.step
        for index, model in enumerate(self._accelerator._models):
            weights = read_model(best, index, strategy.state.allocate_weights(model))
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


def reduce_to_weights(path: Path) -> None:
    """Leave only weights in a checkpoint, atomically; a damaged one stays as it is."""
    try:
        manifest = checkpoints.read_manifest(path)
        if manifest.metadata.get(WEIGHTS_ONLY):
            return
        checkpoints.verify(path)  # what is damaged must not get a digest that says it is not
    except CheckpointError as error:
        logger.warning("A checkpoint is not reduced to its weights. %s", error)
        return
    staged = checkpoints.stage(path)
    for name in (name for name in manifest.files if name.startswith(_WEIGHTS)):
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path / name, staged / name)
    checkpoints.seal(staged, manifest.engine, {**manifest.metadata, WEIGHTS_ONLY: True})
    checkpoints.publish(staged, path)
