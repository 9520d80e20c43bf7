"""C2, C3, E6: what each form of the command line does, hands on, and never imports."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import runner
from runner import cli
from runner.launch import start_run
from runner.recipe import factory
from runner.recipe.composition import Examined
from runner.recipe.schema import Recipe
from runner.runs.job import Job
from tests.helpers import ROOT, python, ran, write_file
from tests.runner.sweep import stand_ins
from tests.runner.written_runs import write_run

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Examined]:
    """Record jobs in place of starting them."""
    jobs: list[Examined] = []

    def record(examined: Examined, **_: object) -> int:
        jobs.append(examined)
        return CODES.get(len(jobs), 0)

    CODES.clear()
    monkeypatch.setattr(start_run, "start", record)
    return jobs


CODES: dict[int, int] = {}


def shown(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    from omegaconf import OmegaConf

    assert cli.main(["--cfg", "job", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return OmegaConf.to_container(OmegaConf.create(out))


# -- help and the like ---------------------------------------------------------------------


def test_the_recipe_is_shown_with_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = shown("optimizer.lr=0.5", "precision=bf16", capsys=capsys)
    assert recipe["optimizer"]["lr"] == 0.5
    assert recipe["precision"]["mode"] == "bf16"
    assert recipe["distributed"]["ddp"]["comm_hook"] == "no"
    assert "hydra" not in recipe


def test_hydras_own_views_still_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--cfg", "hydra"]) == 0
    assert "output_subdir: null" in capsys.readouterr().out
    assert cli.main(["seed=1", "--info", "searchpath"]) == 0


def test_a_view_calls_nothing_that_a_recipe_names(tmp_path: Path) -> None:
    code = f"hydra: {{callbacks: {{x: {{_target_: pathlib.Path.touch, self: {tmp_path}/ran}}}}}}\n"
    write_file(tmp_path / "conf" / "mine.yaml", f"defaults: [config, _self_]\n{code}")
    assert cli.main(["--cfg", "hydra", "-cn", "mine"]) == 2
    assert not (tmp_path / "ran").exists()
    assert cli.main(["--info", "config", "+hydra.callbacks.x._target_=os.getcwd"]) == 2


def test_flags_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["seed=3", "--package", "seed", "--cfg", "job"]) == 0
    assert capsys.readouterr().out == "3\n"


# -- jobs ----------------------------------------------------------------------------------


def test_one_job(started: list[Examined], tmp_path: Path) -> None:
    assert cli.main(["model.width=4", "seed=3", "scheduler=null"]) == 0
    (job,) = started
    assert (job.recipe.model["width"], job.recipe.seed, job.recipe.scheduler) == (4, 3, None)
    assert job.overrides == ("model.width=4", "seed=3", "scheduler=null")
    assert list(tmp_path.iterdir()) == []  # Hydra leaves nothing


@pytest.mark.parametrize("code", [0, 1, 75, 130])
def test_the_code_of_a_job_is_that_of_the_command(started: list[Examined], code: int) -> None:
    CODES[1] = code
    assert cli.main([]) == code


def test_a_sweep_runs_every_combination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = stand_ins.installed(monkeypatch)
    arguments = [
        "optimizer.lr=0.1,0.2",
        "-m",
        "precision=no,bf16",
        "scheduler=null",
        "model.width=3",
    ]
    assert cli.main(arguments) == 0
    found = [(job.optimizer["lr"], job.precision.mode) for job in server.recipes]
    assert found == [(0.1, "no"), (0.1, "bf16"), (0.2, "no"), (0.2, "bf16")]
    assert all(job.scheduler is None and job.model["width"] == 3 for job in server.recipes)
    assert list(server.orders[1].arguments["overrides"])[:2] == [  # type: ignore[call-overload]
        "optimizer.lr=0.1",
        "precision=bf16",
    ]
    assert "job 0003 of 4 starts  optimizer.lr=0.2 precision=bf16" in capsys.readouterr().out
    assert server.closed
    (folder,) = tmp_path.glob("runs/digits/sweep-*")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("0000", "0001", "0002", "0003"),
        *("results.csv", "sweep.json"),
    ]


@pytest.mark.parametrize("flags", [["--dry-run"], ["--cfg", "job"]])
def test_jobs_are_listed_with_what_differs(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["-m", *flags, "seed=1,2", "optimizer.lr=0.5"]) == 0
    out = capsys.readouterr().out
    expected = {
        "--dry-run": ["2 jobs; all have: optimizer.lr=0.5", "0000  seed=1", "0001  seed=2"],
        "--cfg": ["# 0000  seed=1 optimizer.lr=0.5", "# 0001  seed=2 optimizer.lr=0.5", "seed: 2"],
    }[flags[0]]
    assert out.splitlines()[:3] == expected
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_one_job_checks_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--dry-run", "seed=1"]) == 0
    assert "nothing was started" in capsys.readouterr().out
    assert cli.main(["--dry-run", "trainer.epochs=-1"]) == 2
    assert cli.main(["--dry-run", "distributed.num_processes=3"]) == 2
    assert not list(tmp_path.iterdir())


def test_an_unexpected_error_keeps_its_traceback(
    started: list[Examined], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **named: Any) -> int:
        raise ValueError("disk on fire")

    monkeypatch.setattr(start_run, "start", fail)
    assert cli.main([]) == 1
    err = capsys.readouterr().err
    assert "ValueError: disk on fire" in err
    assert "Traceback" in err


def test_what_a_started_job_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.launch import launcher

    launched: list[Any] = []

    def record(job: Job, recipe: Recipe, **_: object) -> int:
        launched.append((job, recipe))
        return 0

    monkeypatch.setattr(launcher, "launch", record)
    assert cli.main(["name=mine", "seed=3", "output_dir=out"]) == 0
    ((job, recipe),) = launched
    assert job.run_dir.parent == tmp_path / "out" / "mine"
    assert Job.load(job.run_dir) == (job, factory.completed(recipe))
    assert job.place == job.run_dir / "sessions" / "0001"
    assert (job.cwd, job.resume_from, job.imports) == (str(tmp_path), None, ())
    assert json.loads((job.place / "job.json").read_text())["overrides"][1] == "seed=3"
    assert json.loads((job.place / "environment.json").read_text())["cwd"] == str(tmp_path)


def test_an_override_reaches_the_optimizer_in_14_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """E6: calls of ours that are open while the optimizer is made, in one process."""
    import torch

    calls: list[str] = []

    def made(*_: Any, lr: float, **__: Any) -> None:
        frame = inspect.currentframe()
        while (frame := frame and frame.f_back) is not None:
            if frame.f_code.co_filename.startswith(str(ROOT / "runner")):
                calls.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name} {lr}")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.optim.AdamW, "__init__", made)
    assert cli.main(["optimizer.lr=0.125", "tracker=none"]) == 130
    assert calls[0].endswith("adamw 0.125")
    assert len(calls) <= 14, calls


# -- going on with a run -------------------------------------------------------------------


@pytest.fixture
def resumable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every run for one with a complete checkpoint."""
    from runner.runs import directory

    monkeypatch.setattr(
        directory, "newest_checkpoint", lambda run_dir: Path(run_dir, "checkpoint_0")
    )


def stopped(tmp_path: Path, *overrides: str, name: str = "digits") -> Path:
    """Freeze the recipe of a run that was stopped."""
    from runner.recipe import composition, hydra_setup

    run_dir = tmp_path / "runs" / name / "20260101-120000-aaaa"
    run_dir.mkdir(parents=True)
    with hydra_setup.session():
        recipe = composition.require(composition.new_run([f"name={name}", *overrides], "config"))
    Job(run_dir, (f"name={name}", *overrides)).save(recipe)
    return run_dir


def test_a_run_goes_on_with_its_own_recipe(
    started: list[Examined], resumable: None, tmp_path: Path
) -> None:
    run_dir = stopped(tmp_path, "model.width=4", "trainer.max_steps=60", "trainer.stop_after=30")
    assert cli.main([f"resume={run_dir}"]) == 0
    (job,) = started
    assert job.recipe.model["width"] == 4
    assert (job.recipe.trainer.max_steps, job.recipe.trainer.stop_after) == (60, None)
    assert job.recipe.resume == str(run_dir)


def test_new_overrides_change_the_frozen_recipe(
    started: list[Examined], resumable: None, tmp_path: Path
) -> None:
    cpu = ("distributed=multi_cpu", "distributed.num_processes=2")
    run_dir = stopped(tmp_path, "model.width=4", *cpu, "trainer.stop_after=5")
    frozen = run_dir / "sessions" / "0001" / "config.yaml"
    frozen.write_text(frozen.read_text().replace("epochs: 20", "epochs: 19"))  # conf/ has changed
    assert cli.main([f"resume={run_dir}", "distributed=none", "trainer.stop_after=5"]) == 0
    (job,) = started
    assert (job.recipe.distributed.kind, job.recipe.distributed.num_processes) == ("none", None)
    assert (job.recipe.model["width"], job.recipe.trainer.stop_after) == (4, 5)
    assert job.overrides == (
        "name=digits",
        "model.width=4",
        "distributed=none",
        "trainer.stop_after=5",
    )


def test_auto_takes_the_newest_run_of_that_name(
    started: list[Examined], resumable: None, tmp_path: Path
) -> None:
    run_dir = stopped(tmp_path, "model.width=4", name="mine")
    assert cli.main(["resume=auto", "name=mine", "model.width=4", "trainer.epochs=30"]) == 0
    assert cli.main(["resume=auto", "name=mine"]) == 0
    assert cli.main(["resume=auto", "name=none_yet"]) == 0
    first, another_recipe, second = started
    assert (first.recipe.resume, first.recipe.model["width"]) == (str(run_dir), 4)
    assert (first.recipe.trainer.epochs, first.overrides[-1]) == (30, "trainer.epochs=30")
    assert another_recipe.recipe.resume is second.recipe.resume is None


def test_auto_finds_a_run_of_factories_of_the_users(
    started: list[Examined], resumable: None, registered: None, tmp_path: Path
) -> None:
    """R2: the arguments at a factory's default are recorded, and the factory is not loaded yet."""
    text = "from runner import register\n\n@register.model('own_r')\ndef own(width=3): ...\n"
    (tmp_path / "models_r.py").write_text(text)
    own = ["model={name: own_r}", "resume=auto"]
    sys.path.append(str(tmp_path))
    importlib.import_module("models_r")
    run_dir = stopped(tmp_path, *own)
    del sys.modules["models_r"], runner.register.model._factories["own_r"]
    assert cli.main(["--import", "models_r", "name=digits", *own]) == 0
    assert [job.recipe.resume for job in started] == [str(run_dir)]
    del sys.modules["models_r"]


def test_a_run_without_a_checkpoint_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stopped(tmp_path)
    assert cli.main([f"resume={run_dir}"]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


# -- the user's own code -------------------------------------------------------------------


def project(folder: Path, package: str) -> None:
    (folder / "pyproject.toml").write_text(f'[tool.runner]\nimports = ["{package}"]\n')
    write_file(
        folder / package / "__init__.py",
        "from runner import register\n\n"
        f"@register.model({package!r})\n"
        "def mlp(width: int = 64):\n    import torch\n    return torch.nn.Linear(width, width)\n",
    )
    text = f"# @package _global_\nname: own\nmodel: {{name: {package}, width: 8}}\n"
    write_file(folder / "conf" / "experiment" / "own.yaml", text)


def test_a_project_of_the_users_own(
    started: list[Examined], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from runner.recipe.factory import register

    project(tmp_path, "own_project_a")
    try:
        assert cli.main(["experiment=own", "model.width=4"]) == 0
        assert started[0].recipe.model == {"name": "own_project_a", "width": 4}
        assert cli.main(["experiment=own", "model.widht=4"]) == 2
        assert "Did you mean 'width'?" in capsys.readouterr().err
    finally:
        register.model._factories.pop("own_project_a", None)
        sys.modules.pop("own_project_a", None)


PROBE = """
import json, sys
from runner.cli import main
code = main(sys.argv[1:])
heavy = ("torch", "numpy", "sklearn", "tensorboard", "deepspeed", "matplotlib")
print(json.dumps([code, [name for name in heavy if name in sys.modules]]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--cfg", "job"], ["-sc", "query=bash"], ["--version"]),
        *([command, "a", "b"] for command in ("list", "show", "compare")),
    ],
)
def test_asking_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name)
    answer = ran(python("-c", PROBE, *arguments), tmp_path, COMP_LINE="runner model")
    assert json.loads(answer.stdout.splitlines()[-1]) == [0, []], answer.stderr


def test_folders_of_the_users_capture_nothing(tmp_path: Path) -> None:
    """A project's own `accel`, `conf` and `torch.py` are not taken for ours."""
    packages = (f"{name}/__init__.py" for name in ("accel", "hydra", "omegaconf", "conf"))
    for name in ("torch.py", *packages):
        write_file(tmp_path / name, "raise SystemExit('captured')\n")
    answer = ran(python("-m", "runner", "--cfg", "job", "--package", "name"), tmp_path)
    assert (answer.returncode, answer.stdout) == (0, "digits\n"), answer.stderr


def test_levels_of_loggers_reach_the_job(started: list[Examined]) -> None:
    assert cli.main(["hydra.verbose=[accel]"]) == 0
    assert cli.main([]) == 0
    assert [job.log_levels for job in started] == [{"accel": "DEBUG"}, {}]


BROKEN = """
import runner


@runner.register.data("lines")
def lines(train="train.jsonl"):
    return runner.Data(train=open(train).read().splitlines())


@runner.register.model("measured")
def measured(width=2):
    import torch

    model = torch.nn.Linear(width, 2)
    model.scale = model.weight.norm().item()
    return model
"""


def test_a_dry_run_builds_what_a_run_builds_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """C1: a file that the data factory does not find is no valid recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dry_broken.py").write_text(BROKEN)
    trusted = ("--import", "dry_broken", "--dry-run")
    assert cli.main([*trusted, "data={name: lines, train: nofile.jsonl}"]) == 1
    told = capsys.readouterr()
    assert "nofile.jsonl" in told.err
    assert "valid" not in told.out
    assert cli.main([*trusted, "model={name: measured, width: 2}"]) == 0
    assert "not looked at: the model" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
