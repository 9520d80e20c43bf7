"""C3, R1: an objective's further values are averaged over all samples of a step, and logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.machine.errors import ConfigError
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.loops import Fit, recipe_of, records, run


class Both(Fit):
    """Squared and absolute errors, per weight."""

    def losses(self, model: nn.Module, batch: Any) -> Any:
        error = (model(batch[0]).squeeze(-1) - batch[1]) * self.weights(batch)
        return {"absolute": error.abs(), "loss": error.square()}

    def weights(self, batch: Any) -> torch.Tensor:
        return 1.0 + (batch[1] > 0)

    def summarize(self, values: Any) -> dict[str, float]:
        return super(Fit, self).summarize(values)


class Own(Both):
    evaluate = loops.Objective.evaluate


def logged(run_dir: str, micro_batch: int, samples: int = 8) -> list[Any]:
    recipe = recipe_of(
        trainer__epochs=2, trainer__global_batch_size=samples, trainer__micro_batch_size=micro_batch
    )
    run(Path(run_dir), recipe, objective=Own())
    loops.forget()
    found = records(Path(run_dir)) + records(Path(run_dir), "validation")
    return [(one["loss"], one["absolute"]) for one in found]


def test_they_do_not_depend_on_accumulation(tmp_path: Path) -> None:
    one = logged(str(tmp_path / "one"), 8)
    assert len(one) == 2 * 5 + 2
    torch.testing.assert_close(logged(str(tmp_path / "four"), 2), one, rtol=1e-5, atol=0)


@pytest.mark.slow  # it starts two processes, which import PyTorch
@pytest.mark.parametrize("micro_batch", [6, 2])
def test_they_do_not_depend_on_processes(micro_batch: int, tmp_path: Path) -> None:
    """The last step of an epoch has 4 samples of 12, one process none of them."""
    one = logged(str(tmp_path / "one"), 12, 12)
    two = run_distributed(logged, 2, str(tmp_path / "two"), micro_batch, 12)[0]
    torch.testing.assert_close(two, one, rtol=1e-5, atol=0)


def test_an_evaluation_of_its_own_has_its_own_metrics(tmp_path: Path) -> None:
    run(tmp_path, recipe_of(trainer__epochs=1), objective=Both())
    assert "absolute" not in records(tmp_path, "validation")[0]


@pytest.mark.parametrize(
    ("value", "found"),
    [({}, ""), ({"loss": 0, "weight": 0}, "loss, weight"), ({"loss": 0}, "an int")],
)
def test_others_are_refused(value: Any, found: str, tmp_path: Path) -> None:
    class Wrong(Fit):
        def losses(self, model: nn.Module, batch: Any) -> Any:
            return value

    with pytest.raises(ConfigError, match=f"Wrong.losses returned {found}"):
        run(tmp_path, recipe_of(), objective=Wrong())


def test_a_name_of_the_run_itself_is_refused(tmp_path: Path) -> None:
    class Reserved(Fit):
        def losses(self, model: nn.Module, batch: Any) -> Any:
            losses = super().losses(model, batch)
            return {"loss": losses, "lr": losses}

    with pytest.raises(ConfigError, match="'lr'"):
        run(tmp_path, recipe_of(), objective=Reserved())
