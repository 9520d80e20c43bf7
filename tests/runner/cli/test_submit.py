"""The command line of `runner submit`, without a Slurm (R3, C1)."""

from __future__ import annotations

import pytest

from runner import cli

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_dry_run_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["submit", "--dry-run", "submit.nodes=2", "distributed=multi_cpu"]
    assert cli.main([*line, "submit.time=04:00:00"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("#!/bin/bash\n#SBATCH")
    assert "--ntasks-per-node=2" in shown
    assert "--time=240:00" in shown


def test_gpus_that_this_machine_lacks_are_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes that take submissions have none."""
    gpus = ["submit.nodes=2", "submit.gpus_per_node=4", "distributed=multi_gpu"]
    assert cli.main(["submit", "--dry-run", *gpus, "fsdp=full_shard"]) == 0
    assert "--gpus-per-node=4" in capsys.readouterr().out
    assert cli.main(["submit", "--dry-run", *gpus, "trainer.micro_batch_size=60"]) == 2
    assert "micro" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["submit", "-m", "seed=1,2"], "hydra/launcher=submitit_slurm"),
        (["submit", "--dry-run", "sweep.jobs=2"], "Add -m"),
        (["submit", "--cfg", "job"], "runner --cfg job"),
        (["submit.nodes=2"], "Write runner submit"),
        (["-m", "seed=1,2", "submit.nodes=2"], "hydra.launcher.*"),
        (["submit", "--dry-run", "submit.nods=2"], "submit.nodes"),
        (["submit", "--dry-run", "submit.nodes=2", "optimzer.lr=1"], "optimizer.lr"),
        (["submit", "--dry-run", "submit.nodes=2"], "one process"),
    ],
)
def test_mistakes_are_refused(
    line: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line) == 2
    assert told in capsys.readouterr().err


def test_without_slurm_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert cli.main(["submit"]) == 2
    assert "there is no sbatch on this machine" in capsys.readouterr().err
