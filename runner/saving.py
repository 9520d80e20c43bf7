"""When a run's states are written, and which of them is the best."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accel.checkpoint import files
from accel.checkpoint.common import read_model
from accel.errors import CheckpointError
from accel.ops import broadcast_object_list

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.schema import Checkpoint
    from runner.state import TrainState

POINTER = "best.json"
OWN = "recipe"  # the runner's own part, which checkpoints of earlier versions lack


class Stateful(Protocol):
    """What can be saved: schedulers, callbacks, counters."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class RunState:
    """Everything but models and optimizers, as one object registered with the engine.

    Parts are stored by name, so that a callback may be added to a run or taken out of it.

    Args:
        parts: by name.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.parts = dict(parts)
        self.added: list[str] = []
        self.dropped: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each part."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore each part that has a state; `added` and `dropped` then name the others."""
        self.added = sorted(self.parts.keys() - state.keys() - {OWN})
        self.dropped = sorted(state.keys() - self.parts.keys())
        for name in self.parts.keys() & state.keys():
            self.parts[name].load_state_dict(state[name])


@dataclass(frozen=True)
class Best:
    """Which checkpoint holds the best state.

    Attributes:
        checkpoint: its directory's name.
        step: its optimizer step.
        metric: name of the monitored metric.
        value: the metric's value.
    """

    checkpoint: str
    step: int
    metric: str
    value: float

    def write(self, folder: Path) -> None:
        """Write the pointer file in `folder`, in one piece."""
        text = json.dumps(self.__dict__, indent=2) + "\n"
        files.write_atomically(folder / POINTER, text.encode())


def read_best(folder: Path) -> Best | None:
    """Return the best checkpoint that `folder` names; None if it names none that is there.

    Raises:
        CheckpointError: if the pointer cannot be read.
    """
    pointer = folder / POINTER
    if not pointer.is_file():
        return None
    try:
        best = Best(**json.loads(pointer.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{pointer}: it does not name a checkpoint ({error}). Remove it to go on without."
        ) from error
    return best if (folder / best.checkpoint).is_dir() else None


class Saver:
    """Writes checkpoints through the engine and keeps track of the best.

    Args:
        accelerator: the run's engine.
        settings: the recipe's node.
        folder: where checkpoints lie.
        state: where the run stands.
    """

    def __init__(
        self, accelerator: Accelerator, settings: Checkpoint, folder: Path, state: TrainState
    ) -> None:
        self._accelerator = accelerator
        self._settings = settings
        self.folder = folder
        self._state = state
        self.saved_step = -1
        self.last: str | None = None
        self.best: Best | None = None

    def due(self) -> bool:
        """Return whether the recipe wants a checkpoint at this step boundary."""
        state, settings = self._state, self._settings
        if state.step == self.saved_step or state.step == 0:
            return False
        if settings.every_steps is not None and state.step % settings.every_steps == 0:
            return True
        at_epoch_end = state.step_in_epoch == 0
        return (
            settings.every_epochs is not None
            and at_epoch_end
            and state.epoch % settings.every_epochs == 0
        )

    def save(self, metadata: Mapping[str, Any]) -> str:
        """Write a checkpoint; return its path. Every process must call this together."""
        automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
        own = str(self.folder / f"checkpoint_{self._state.step}")
        self.last = self._accelerator.save_state(
            None if automatic else own,
            metadata=dict(metadata),
            protected=[] if self.best is None else [self.best_path],
        )
        self.saved_step = self._state.step
        return self.last

    @property
    def best_path(self) -> Path:
        """The checkpoint that holds the best state."""
        if self.best is None:
            raise CheckpointError("No checkpoint holds a best state yet.")
        return self.folder / self.best.checkpoint

    def load_best(self) -> int:
        """Give the models the weights of the best state, and return its step.

        Without a best state they keep the last weights.
        """
        if self.best is None or self.best.step == self._state.step:
            return self._state.step
        path, strategy = self.best_path, self._accelerator.strategy
        files.verify(path)
        for index, model in enumerate(self._accelerator._models):
            strategy.load_model_state(model, read_model(path, index))
        return self.best.step

    def point(self, metric: str, value: float) -> None:
        """Make the checkpoint that was written last the best one."""
        if self.last is None:
            raise CheckpointError("There is no checkpoint to call the best: call save first.")
        path = Path(self.last)
        self.best = Best(path.name, self._state.step, metric, value)
        if self._accelerator.is_main_process:
            self.best.write(path.parent)

    def resumed(self, checkpoint: str) -> bool:
        """Take up after a resume: find the checkpoint that holds the best state.

        Returns:
            Whether it was found, or there is none to find.
        """
        self.last, self.saved_step = checkpoint, self._state.step
        if self._state.best_step is None or not self._settings.save_best:
            return True
        found = [self._find_best() if self._accelerator.is_main_process else None]
        if self._accelerator.num_processes > 1:
            broadcast_object_list(found)
        self.best = found[0]
        if self.best is not None and self._accelerator.is_main_process:
            self.best.write(self.folder)
        return self.best is not None

    def _find_best(self) -> Best | None:
        """Return the checkpoint of the best step that the resumed state knows."""
        pointed = read_best(self.folder)
        step, value = self._state.best_step, self._state.best
        if pointed is not None and pointed.step == step:
            return pointed
        # Cut off between a save and its pointer, or resumed from before the pointer's step.
        for path in reversed(files.checkpoints(self.folder)):
            if files.is_complete(path):
                metadata = files.read_manifest(path).metadata
                if metadata.get("step") == step and value is not None and step is not None:
                    return Best(path.name, step, metadata.get("monitor", "loss"), value)
        return None
