"""When a run's states are written, and which of them is the best."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accel.checkpoint import directory as checkpoints
from accel.checkpoint.load import read_model
from accel.comm.ops import broadcast_object_list
from accel.machine.errors import CheckpointError, Problem
from runner.runs import directory

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.recipe.schema import Checkpoint
    from runner.training.state import TrainState

logger = logging.getLogger(__name__)

POINTER = "best.json"


class Stateful(Protocol):
    """An object with state: schedulers, callbacks, counters."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Any) -> object: ...


class RunState:
    """Everything but models and optimizers, as one object registered with the engine.

    Parts are stored by name, so that a callback may be added to a run or taken out of it.
    """

    def __init__(self, parts: Mapping[str, Stateful]) -> None:
        self.parts = dict(parts)
        self.added: list[str] = []
        self.dropped: list[str] = []

    def state_dict(self) -> dict[str, object]:
        """Return the state of each part."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def changes(self, knows: Callable[[str], bool]) -> str:
        """Return which parts the restored state lacked or had besides, as a note.

        `knows` tells whether a part that lacked a state is where it should be all the same.
        """
        added = [name for name in self.added if not knows(name)]
        notes = [f"Not in the checkpoint, starting fresh: {', '.join(added)}."] if added else []
        if self.dropped:
            notes.append(f"Not in the recipe, dropped: {', '.join(self.dropped)}.")
        return "\n".join(notes)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore each part that has a state; `added` and `dropped` then name the others."""
        self.added = sorted(self.parts.keys() - state.keys())
        self.dropped = sorted(state.keys() - self.parts.keys())
        for name in self.parts.keys() & state.keys():
            self.parts[name].load_state_dict(state[name])


@dataclass(frozen=True)
class Best:
    """The checkpoint (by its directory's name) that holds the best state by a monitored metric."""

    checkpoint: str
    step: int
    metric: str
    value: float

    def write(self, folder: Path) -> None:
        """Write the pointer file in `folder`, in one piece."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        checkpoints.write_atomically(folder / POINTER, text.encode())


def read_best(folder: Path, owns: Callable[[Path], bool] = lambda path: True) -> Best | None:
    """Return the best checkpoint that `folder` names; None if it names none that is there.

    Where its pointer is missing or damaged, or names the checkpoint of another run, the best state
    that the newest checkpoint records is used. `owns` (`directory.owner` gives it) tells whether a
    checkpoint is one of the run.

    Raises:
        CheckpointError: if the pointer is damaged, and no checkpoint knows of a best.
    """
    pointer, known = folder / POINTER, _best_in_newest(folder, owns)
    try:
        best = _pointed(pointer)
    except FileNotFoundError:
        return known
    except (OSError, ValueError, TypeError) as error:
        wrong = f"it does not name a checkpoint ({error})"
        if known is None:
            remedy = 'Remove it, or name a checkpoint: --checkpoint last, runner.load(…, "last").'
            raise CheckpointError(Problem(str(pointer), wrong, remedy)) from error
        logger.warning("%s: %s. By the newest state it is %s.", pointer, wrong, known.checkpoint)
        return known
    if known is not None and known.step > best.step:
        return known  # killed between a save and its pointer
    pointed = folder / best.checkpoint
    return best if pointed.is_dir() and owns(pointed) else known


def _pointed(pointer: Path) -> Best:
    """Return the content of a pointer file; raises OSError, TypeError or ValueError."""
    content = json.loads(pointer.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        raise TypeError("it is no mapping")
    best = Best(**content)
    numbers = isinstance(best.step, int) and isinstance(best.value, int | float)
    words = isinstance(best.checkpoint, str) and isinstance(best.metric, str)
    if not numbers or not words or isinstance(best.step, bool):
        raise TypeError(f"{dict(content)}")
    if best.checkpoint in ("", ".", "..") or Path(best.checkpoint).name != best.checkpoint:
        raise ValueError(f"checkpoint={best.checkpoint!r} is no folder beside it")
    return best


def _best_in_newest(folder: Path, owns: Callable[[Path], bool]) -> Best | None:
    """Return the best state that the newest checkpoint knows of, if a checkpoint holds it."""
    manifests = {}
    for path in filter(owns, reversed(checkpoints.checkpoints(folder))):
        with contextlib.suppress(CheckpointError):
            manifests[path.name] = checkpoints.read_manifest(path).metadata
    known = next(iter(manifests.values()), {}).get("best")
    if not isinstance(known, Mapping):
        return None
    holders = [name for name, other in manifests.items() if other.get("step") == known["step"]]
    if not holders:
        return None
    return Best(holders[0], known["step"], known["metric"], known["value"])


class Saver:
    """Writes checkpoints to a folder through the engine and keeps track of the best."""

    def __init__(
        self,
        accelerator: Accelerator,
        settings: Checkpoint,
        folder: Path,
        state: TrainState,
        run_dir: Path,
    ) -> None:
        self._accelerator = accelerator
        self._settings = settings
        self.folder = folder
        self._state = state
        self._owns = directory.owner(run_dir)
        self.saved_step = -1
        self.last: str | None = None
        self.best: Best | None = None

    def due(self, at_end: bool) -> bool:
        """Return whether a checkpoint is due at this step boundary; `at_end`: of the run."""
        state, settings = self._state, self._settings
        if state.step == self.saved_step or state.step == 0:
            return False
        if at_end:
            return True
        if settings.every_steps is not None and state.step % settings.every_steps == 0:
            return True
        at_epoch_end = state.step_in_epoch == 0
        return (
            settings.every_epochs is not None
            and at_epoch_end
            and state.epoch % settings.every_epochs == 0
        )

    def save(self, metadata: Mapping[str, object]) -> str:
        """Write a checkpoint; return its path. Every process must call this together.

        Raises:
            CheckpointError: if it would overwrite that of another run.
        """
        automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
        own = self.folder / f"checkpoint_{self._state.step}"
        others = [path for path in checkpoints.checkpoints(self.folder) if not self._owns(path)]
        if own in others and not automatic:
            rule = f"it is a checkpoint of another run ({directory.run_of(own)})"
            remedy = "Give each run a checkpoint.project.project_dir of its own."
            raise CheckpointError(Problem(str(own), rule, remedy))
        self.last = self._accelerator.save_state(
            None if automatic else str(own),
            metadata={**metadata, "best": self._known_best(metadata.get("monitor", "loss"))},
            protected=others if self.best is None else [*others, self.best_path],
        )
        self.saved_step = self._state.step
        return self.last

    def _known_best(self, metric: object) -> dict[str, object] | None:
        """Return the best state so far, for a checkpoint; None: the run keeps none."""
        step, value = self._state.best_step, self._state.best
        if step is None or not self._settings.save_best:
            return None
        return {"step": step, "metric": metric, "value": value}

    @property
    def best_path(self) -> Path:
        """The checkpoint that holds the best state."""
        if self.best is None:
            raise CheckpointError("No checkpoint holds a best state yet.")
        return self.folder / self.best.checkpoint

    def load_best(self) -> int:
        """Give the models the weights of the best state, and return its step.

        Without a best state they keep the last weights, and also, with a warning, where its
        checkpoint is damaged. Every process must call this together.
        """
        if self.best is None or self.best.step == self._state.step:
            return self._state.step
        path, strategy = self.best_path, self._accelerator.strategy
        if not self._is_intact(path):
            self.best = None
            return self._state.step
        for index, model in enumerate(self._accelerator._models):
            weights = read_model(path, index, strategy.state.allocate_weights(model))
            strategy.state.load_model_state(model, weights)
        return self.best.step

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
            logger.warning("The best checkpoint is skipped: the last weights are kept. %s", first)
        return first is None

    def saved_metrics(self, checkpoint: str) -> dict[str, dict[str, float]]:
        """Return the last metrics of each split that a checkpoint records."""
        found = checkpoints.read_manifest(checkpoint).metadata.get("metrics")
        return {"validation": dict(found)} if found else {}

    def mark_best(self, metric: str, value: float | None) -> None:
        """Record the last checkpoint as the best one."""
        if self.last is None or value is None:
            raise CheckpointError("There is no checkpoint to call the best: call save first.")
        path = Path(self.last)
        self.best = Best(path.name, self._state.step, metric, value)
        if self._accelerator.is_main_process:
            self.best.write(path.parent)

    def find_best(self, checkpoint: str) -> str:
        """Find the best checkpoint after a resume; reset the best value if it is gone.

        Returns:
            A note that it is gone; else nothing.
        """
        self.last, self.saved_step = checkpoint, self._state.step
        step = self._state.best_step
        if step is None or not self._settings.save_best:
            return ""
        found = [self._best_of_state() if self._accelerator.is_main_process else None]
        if self._accelerator.num_processes > 1:
            broadcast_object_list(found)
        self.best = found[0]
        if self.best is not None:
            return ""
        self._state.best = self._state.best_step = None
        return (
            f"No checkpoint holds the best state (step {step}) any more: the best value is reset."
        )

    def write_pointer(self) -> None:
        """Write the best state that `find_best` has found to the pointer, if that differs."""
        if self.best is None or not self._accelerator.is_main_process:
            return
        with contextlib.suppress(OSError, ValueError, TypeError):
            if _pointed(self.folder / POINTER) == self.best:
                return
        self.best.write(self.folder)

    def _best_of_state(self) -> Best | None:
        """Return the checkpoint of the best step that the resumed state knows."""
        step, value = self._state.best_step, self._state.best
        present = filter(self._owns, reversed(checkpoints.checkpoints(self.folder)))
        for path in dict.fromkeys([*self._pointed(), *present]):
            try:
                metadata = checkpoints.read_manifest(path).metadata
                if metadata.get("step") != step:
                    continue
                checkpoints.verify(path)
            except CheckpointError as error:
                logger.warning(
                    "Skipping a broken checkpoint. %s", checkpoints.without_remedy(error)
                )
                continue
            # Killed between a save and its pointer, or resumed from before the pointer's step.
            if value is not None and step is not None:
                return Best(path.name, step, metadata.get("monitor", "loss"), value)
        return None

    def _pointed(self) -> list[Path]:
        """Return the checkpoint that the pointer names, if that can be read."""
        try:
            best = read_best(self.folder, self._owns)
        except CheckpointError as error:
            logger.warning("%s It is rewritten.", error)
            return []
        return [] if best is None else [self.folder / best.checkpoint]
