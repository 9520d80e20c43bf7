"""R8, C2: what a run has recorded holds, whatever the environment and the files are by now."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.recipe import composition, hydra_setup
from runner.recipe.composition import Examined
from runner.recipe.serialization import frozen_plain
from tests.helpers import write_file

NAMES = "# @package _global_\noptimizer:\n  lr: ${oc.decode:${oc.env:R4_LR}}\n"


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> composition.Frozen:
    """A run of a file and an override that name a variable, which is not set any more."""
    monkeypatch.chdir(tmp_path)
    write_file(tmp_path / "conf" / "experiment" / "mine.yaml", NAMES)
    monkeypatch.setenv("R4_LR", "0.125")
    own = ["experiment=mine", "output_dir=${oc.env:R4_LR}"]
    with hydra_setup.session():
        recipe = composition.require(composition.new_run(own, "config"))
    monkeypatch.delenv("R4_LR")
    return composition.Frozen(frozen_plain(recipe), tuple(own), cwd=str(tmp_path))


@pytest.mark.parametrize("override", ["trainer.epochs=3", "scheduler=cosine", "precision=bf16"])
@pytest.mark.parametrize("compose", [composition.resumed, composition.again])
def test_a_variable_that_is_gone_keeps_its_recorded_value(
    compose: object, override: str, frozen: composition.Frozen
) -> None:
    with hydra_setup.session():
        found: Examined = compose(frozen, [override])  # type: ignore[operator]
    assert [p for p in found.problems if "R4_LR" in str(p)] == []
    assert found.recipe.optimizer["lr"] == 0.125
    assert found.recipe.output_dir == "0.125"
