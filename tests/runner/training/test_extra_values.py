"""C3, R1: an objective's further values are averaged over all samples of a step, and logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from runner.recipe.schema import Parallelism
from runner.training.step import Objective
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.loops import Fit, recipe_of, records, run


class Both(Fit):
    """Squared and absolute errors, per weight."""

    evaluate, summarize = Objective.evaluate, Objective.summarize

    def losses(self, model: nn.Module, batch: Any) -> Any:
        error = (model(batch[0]).squeeze(-1) - batch[1]) * self.weights(batch)
        return {"absolute": error.abs(), "loss": error.square()}

    def weights(self, batch: Any) -> torch.Tensor:
        return 1.0 + (batch[1] > 0)


def logged(run_dir: str, micro_batch: int, stages: int = 1) -> list[Any]:
    """Steps have 12 samples; the last of an epoch has 4."""
    recipe = recipe_of(
        trainer__epochs=2,
        trainer__global_batch_size=12,
        trainer__micro_batch_size=micro_batch,
        parallelism=Parallelism(pp_size=stages, pp_split=["3"][: stages - 1] or None),
    )
    run(Path(run_dir), recipe, objective=Both())
    loops.forget()
    found = records(Path(run_dir)) + records(Path(run_dir), "validation")
    return [(one["loss"], one["absolute"]) for one in found]


def test_they_do_not_depend_on_accumulation(tmp_path: Path) -> None:
    one = logged(str(tmp_path / "one"), 12)
    assert len(one) == 2 * 4 + 2
    torch.testing.assert_close(logged(str(tmp_path / "four"), 3), one, rtol=1e-5, atol=0)


@pytest.mark.slow  # it starts two processes, which import PyTorch
@pytest.mark.parametrize(("micro_batch", "stages"), [(6, 1), (2, 1), (12, 2), (3, 2)])
def test_they_do_not_depend_on_processes(micro_batch: int, stages: int, tmp_path: Path) -> None:
    one = logged(str(tmp_path / "one"), 12)
    two = run_distributed(logged, 2, str(tmp_path / "two"), micro_batch, stages)[0]
    torch.testing.assert_close(two, one, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("names", "found"), [("", ".losses returned "), ("loss weight", "weight"), ("loss lr", "'lr'")]
)
def test_other_names_are_refused(names: str, found: str, tmp_path: Path) -> None:
    class Wrong(Fit):
        def losses(self, model: nn.Module, batch: Any) -> Any:
            return dict.fromkeys(names.split(), super().losses(model, batch))

    with pytest.raises(ConfigError, match=found):
        run(tmp_path, recipe_of(), objective=Wrong())
