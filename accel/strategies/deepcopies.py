"""Deep copies of models that hold shards: an average of weights made so would average nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch

from accel.machine.errors import Problem, StateError


class RefusedCopy:
    """Takes the place of ``__deepcopy__`` of a module, and raises."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __call__(self, memo: object) -> NoReturn:
        raise StateError(str(self.problem))


def refuse_copies(modules: Iterable[torch.nn.Module], name: str, remedy: str) -> None:
    """Let `copy.deepcopy` of each of `modules` raise `StateError`.

    `name`: of what shards them; `remedy`: how an average of the weights is kept instead.
    """
    refused = RefusedCopy(
        Problem(
            f"copy.deepcopy of a model under {name} (also torch's AveragedModel)",
            "its parameters are shards that belong to the engine; a copy would not follow them",
            remedy,
        )
    )
    for module in modules:
        module.__deepcopy__ = refused  # type: ignore[assignment]


# Of a whole copy, on each process or on one of them.
WHOLE_AVERAGE = (
    "To average weights, copy the model before prepare, and update the copy from "
    "accelerator.get_state_dict(model), which all processes call."
)
