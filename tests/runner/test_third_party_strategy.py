"""A strategy of another package in recipes: a node, a choice, checks, help, and a run (X1)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT, python, ran
from tests.third_party import write_package

SMALL = (
    *("distributed=multi_cpu", "trainer.max_steps=2", "tracker=none", "data.augment=false"),
    "trainer.eval_every=2",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("site"))


def runner(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    both = os.pathsep.join([str(site), str(ROOT)])
    return ran(python("-m", "runner", *arguments), folder, PYTHONPATH=both)


@pytest.mark.slow  # the tests below compose its recipe
def test_a_run_trains_and_is_evaluated(site: Path, tmp_path: Path) -> None:
    ended = runner(site, tmp_path, "averaging=default", "averaging.order=large", *SMALL)
    assert ended.returncode == 0, ended.stderr
    assert "averaging · mesh dp_replicate 2" in ended.stdout
    (run_dir,) = (tmp_path / "runs" / "digits").iterdir()
    assert "averaging:\n  order: large" in (run_dir / "config.yaml").read_text()
    assert "fsdp" not in (run_dir / "config.yaml").read_text()
    ended = runner(site, tmp_path, "eval", str(run_dir), "--split", "test")
    assert ended.returncode == 0, ended.stderr
    assert "accuracy" in ended.stdout
    ended = runner(tmp_path, tmp_path, "eval", str(run_dir))  # without the package
    assert "averaging.order=large: a recipe has no such key" in ended.stderr
    ended = runner(tmp_path, tmp_path, f"resume={run_dir}", "trainer.max_steps=4")
    assert "averaging.order=large: a recipe has no such key" in ended.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["averaging=default", "averaging.order=smal"], "Did you mean 'small'?"),
        *(
            pytest.param(*refused, marks=pytest.mark.slow)
            for refused in (
                (["averaging=default", "averaging.facto=2"], "Did you mean 'averaging.factor'?"),
                (["averaging.factor=2"], "averaging is off. Switch it on with averaging=default."),
                (["averaging=default", "fsdp=full_shard"], "fsdp= and averaging= are both on"),
                (["averaging=default", "averaging.factor=0"], "averaging.factor=0: a factor of 0"),
                (
                    ["averaging=default", "averaging.replicas=4"],
                    "(dp_replicate=4) need as many processes as their product, 4, and the world "
                    "size is 1",
                ),
            )
        ),
    ],
)
def test_bad_options_are_refused(
    overrides: list[str], message: str, site: Path, tmp_path: Path
) -> None:
    ended = runner(site, tmp_path, *overrides)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_the_recipe_and_the_help_show_its_node(site: Path, tmp_path: Path) -> None:
    shown = runner(site, tmp_path, "--cfg", "job", "averaging=default", "averaging.factor=2")
    assert "averaging:\n  order: small\n  factor: 2.0" in shown.stdout
    assert "averaging: null" in runner(site, tmp_path, "--cfg", "job").stdout
    assert "  averaging     default" in runner(site, tmp_path, "--help").stdout


def test_a_package_that_cannot_be_loaded_is_named(site: Path, tmp_path: Path) -> None:
    broken = write_package(tmp_path / "broken")
    (broken / "averaging" / "spec.py").write_text("import no_such_module")
    ended = runner(broken, tmp_path, "--help")
    assert ended.returncode == 2
    assert "entry point accel.strategies: any = averaging.spec:SPEC (averaging)" in ended.stderr
