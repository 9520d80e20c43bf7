"""What a checkpoint is made of: the objects of a run, and who writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from accel.checkpoint.optimizer_state import ParameterNames
from accel.machine.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.plan.plan import Plan
    from accel.run.accumulation import Accumulation
    from accel.strategies.base import Objects, Strategy
    from accel.trackers.group import TrackerGroup

T = TypeVar("T")
AnyPath = str | PathLike[str]
Hook = Callable[..., None]


@dataclass(frozen=True)
class RunObjects:
    """What a checkpoint is made of.

    Args:
        comm: how processes talk.
        strategy: how models are distributed.
        objects: prepared and registered ones.
        accumulation: counts micro-batches, and holds the gradient scaler.
        trackers: their run ids are kept, so that a resumed run continues them.
    """

    comm: Communicator
    strategy: Strategy
    objects: Objects
    accumulation: Accumulation
    trackers: TrackerGroup

    @property
    def plan(self) -> Plan:
        """The resolved configuration."""
        return self.strategy.plan

    @property
    def writes(self) -> bool:
        """Whether this rank writes what all ranks share."""
        plan = self.plan
        return (plan.local_rank if plan.project.save_on_each_node else plan.rank) == 0

    @property
    def folder(self) -> Path | None:
        """Where automatically named checkpoints lie; None where they are not named so."""
        project = self.plan.project
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            return None
        from accel.checkpoint import directory  # imported when the first state is saved or loaded

        return Path(project.project_dir) / directory.FOLDER

    @property
    def registered(self) -> list[str]:
        """The qualified names of the classes of the objects registered for checkpointing."""
        kinds = map(type, self.objects.custom)
        return [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds]

    def parameter_names(self) -> ParameterNames:
        """Return the names of all models' parameters."""
        unwrap = self.strategy.state.unwrap
        return ParameterNames([unwrap(model) for model in self.objects.models])


def require_path(path: Path | None) -> Path:
    """Return `path`; raise `CheckpointError` if it is None."""
    if path is None:
        rule = "a checkpoint needs a place"
        remedy = (
            "Name a directory, or pass ProjectConfiguration(project_dir=…, "
            "automatic_checkpoint_naming=True)."
        )
        raise CheckpointError(Problem("no directory was given", rule, remedy))
    return path


def hooked(remaining: list[T], every: list[T], what: str) -> list[tuple[int, T]]:
    """Return (index among `every`, entry) of the entries that hooks left in `remaining`."""
    if len(remaining) == len(every):
        return list(enumerate(remaining))
    positions = {id(entry): index for index, entry in enumerate(every)}
    if any(id(entry) not in positions for entry in remaining):
        rule = "a hook takes entries out of the list, or replaces them all"
        raise CheckpointError(Problem(f"a pre-hook of {what} added to the list", rule, "Do so."))
    return [(positions[id(entry)], entry) for entry in remaining]
