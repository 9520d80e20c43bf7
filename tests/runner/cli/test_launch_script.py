"""``runner launch``: flags, the file of settings, and real scripts on two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accel.commands import launch_config
from accel.machine import env
from accel.machine.errors import ConfigError
from runner.cli import launch_script
from runner.cli.arguments import ParserExit
from runner.recipe import processes
from tests.helpers import ROOT, alive, python
from tests.signals.cells import wait_until

SCRIPT = """
import sys
import torch
from accel import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(2, 2)
loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=1)
accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
total = accelerator.gather(torch.ones(1)).sum().item()
line = [accelerator.process_index, accelerator.mixed_precision, accelerator.distributed_type.value]
line += [accelerator.gradient_accumulation_steps, total, *sys.argv[1:]]
print(" ".join(map(str, line)) + "\\n", end="", flush=True)  # in one write: ranks print at once
accelerator.end_training()
sys.exit(5 if "fail" in sys.argv else 0)
"""


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU and without a file of settings; two scripts are there."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "x.py"):
        Path(name).touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(processes, "num_accelerators", lambda: 0)


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("use_cpu: true\nnum_processes: 3\nmixed_precision: fp16\n")
    launch = launch_script.parse(
        ["--config-file", str(path), "--mixed-precision=bf16", "train.py", "--cpu", "x"]
    )
    assert "--nproc-per-node=3" in launch.command
    assert launch.command[-3:] == ["train.py", "--cpu", "x"]
    assert launch.variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    launch_config.write({"debug": True}, launch_config.default_config_file())
    launch = launch_script.parse(["train.py"])
    assert launch.command == [sys.executable, "train.py"]
    assert launch.variables["ACCELERATE_DEBUG_MODE"] == "true"


def test_flags_are_written_with_dashes_or_underscores() -> None:
    flags = ["--use-fsdp", "--fsdp_version", "2", "--fsdp-reshard-after-forward=false"]
    found = launch_script.parse([*flags, "-m", "package.train"])
    assert found.command == [sys.executable, "-m", "package.train"]
    assert found.variables["FSDP_VERSION"] == "2"
    assert found.variables["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    found = launch_script.parse(["--use_deepspeed", "--zero_stage=1", "x.py"])
    assert found.variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "1"
    found = launch_script.parse(["--cpu", "--num_processes=2", "--tee", "3", "x.py"])
    assert "--tee=3" in found.command


def test_a_recipe_of_fp8_is_handed_to_the_script() -> None:
    flags = ["--mixed_precision=fp8", "--fp8-backend=te", "--fp8_format", "E4M3"]
    found = launch_script.parse([*flags, "--fp8_use_autocast_during_eval", "x.py"]).variables
    assert found["ACCELERATE_MIXED_PRECISION"] == "fp8"
    assert found["ACCELERATE_FP8_BACKEND"] == "te"
    assert found["ACCELERATE_FP8_FORMAT"] == "E4M3"
    assert found["ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL"] == "true"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--fp8_backend=foo"], "--fp8_backend='FOO': it is one of AO, TE, MSAMP"),
        (["--fp8_format=E4M3"], "--fp8_format without --fp8_backend"),
        (["--mixed_precision=bf16", "--fp8_backend=te"], "--fp8_backend with mixed_precision=bf16"),
        (["--fp8_backend=ao", "--fp8_margin=1"], "AORecipeKwargs has no such field"),
        (["--fp8_backend=te", "--fp8_margin=x"], "--fp8_margin='x'"),
        (["--fp8_backend=te", "--fp8_interval=0"], "TERecipeKwargs.interval=0"),
        (["--fp8_backend=msamp"], "--fp8_backend=MSAMP"),
    ],
)
def test_settings_of_fp8_are_checked_before_the_start(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launch_script.parse(["--cpu", *flags, "train.py"])
    assert problem in str(refused.value)


def test_a_file_may_have_the_fields_of_each_backend_of_fp8(tmp_path: Path) -> None:
    settings = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO", "margin": 1}}
    launch_config.write(settings, tmp_path / "file.yaml")
    found = launch_script.parse(["--cpu", "--config_file", str(tmp_path / "file.yaml"), "x.py"])
    assert found.variables["ACCELERATE_FP8_BACKEND"] == "AO"
    launch_config.write({"fp8_config": {"backend": "A"}}, tmp_path / "file.yaml")
    with pytest.raises(ConfigError, match="fp8_backend='A'"):
        launch_script.parse(["--config_file", str(tmp_path / "file.yaml"), "x.py"])


def test_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_config.write({"use_cpu": True}, launch_config.default_config_file())
    monkeypatch.setattr(processes, "num_accelerators", lambda: 2)
    assert "--nproc-per-node=2" in launch_script.parse(["--multi_gpu", "x.py"]).command


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tpu"], "--tpu: TPUs are not built yet"),
        (["--tpu-use-sudo"], "--tpu-use-sudo: TPUs"),
        (["--num_processes", "2", "--megatron_lm_tp_degree", "2"], "--megatron_lm_tp_degree"),
        (["--mpirun_hostfile", "f"], "mpirun -hostfile"),
        (["--parallelism_config_tp_size=2"], "plugins to the Accelerator"),
        (["--deepspeed_hostfile=f"], "on each machine"),
        (["--multi_gpu", "--cpu"], "both choose the device"),
        (["--config_file", "/nowhere.yaml"], "it cannot be read"),
    ],
)
def test_flags_that_are_not_offered_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        launch_script.parse([*flags, "train.py"])


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``runner launch`` with a script of three lines, as a person types it."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    line = [str(script) if argument == "train.py" else argument for argument in arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        python("-m", "runner", "launch", *line),
        **{"capture_output": True, "text": True, "timeout": 300, "cwd": folder},
        env=environment,
    )


@pytest.mark.slow  # processes import PyTorch, twice
def test_a_script_runs_on_two_processes_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    launch_config.write_basic_config("bf16", path)
    file = ["--config_file", str(path), "--cpu", "--num_processes", "2"]
    answer = started(tmp_path, *file, "train.py", "--import", "x")
    assert answer.returncode == 0, answer.stderr
    expected = [f"{rank} bf16 MULTI_CPU 1 2.0 --import x" for rank in range(2)]
    assert sorted(answer.stdout.splitlines()) == expected


@pytest.mark.slow  # `test_agent.py` reads codes of processes
def test_one_process_keeps_its_exit_code(tmp_path: Path) -> None:
    answer = started(tmp_path, "--cpu", "train.py", "fail")
    assert answer.returncode == 5, answer.stderr
    assert answer.stdout == "0 no NO 1 1.0 fail\n"
    with env.patched(OMP_NUM_THREADS=None):
        answer = started(tmp_path, "--tpu", "train.py")
    assert answer.returncode == 2
    assert answer.stderr == "--tpu: TPUs are not built yet. Leave it out.\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_a_strategy_of_the_file_is_used(tmp_path: Path, kind: str) -> None:
    sections = "fsdp_config: {fsdp_version: 2}\ndeepspeed_config: {zero_stage: 1}\n"
    text = f"distributed_type: {kind}\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n"
    path = tmp_path / "settings.yaml"
    path.write_text(text + sections)
    answer = started(tmp_path, "--config_file", str(path), "train.py")
    assert answer.returncode == 0, answer.stderr
    assert sorted(line[:6] for line in answer.stdout.splitlines())[:1] == ["0 bf16"]
    assert f" {kind} " in answer.stdout


WAITING = """
import os, pathlib, time
from accel import Accelerator

rank = Accelerator().process_index
place = pathlib.Path(f"pid_{rank}.part")
place.write_text(str(os.getpid()))
place.rename(f"pid_{rank}")
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_the_processes_end_with_their_launcher(
    tmp_path: Path, number: signal.Signals, expected: int
) -> None:
    (tmp_path / "train.py").write_text(WAITING)
    flags = ["--cpu", "--num_processes", "2"]
    launch = subprocess.Popen(
        python("-m", "runner", "launch", *flags, "train.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    places = [tmp_path / f"pid_{rank}" for rank in range(2)]
    try:
        assert wait_until(lambda: all(place.exists() for place in places), 120.0)
        launch.send_signal(number)
        assert launch.wait(60) == expected
        pids = [int(place.read_text()) for place in places]
        assert wait_until(lambda: not any(map(alive, pids)), 30.0)
    finally:
        launch.kill()


@pytest.mark.slow
def test_a_failed_group_starts_anew_and_its_failure_is_the_exit_code(tmp_path: Path) -> None:
    flags = ["--cpu", "--num_processes=2", "--max_restarts=1"]
    answer = started(tmp_path, *flags, "train.py", "fail")
    assert answer.returncode == 5
    assert sorted(answer.stdout.splitlines()).count("0 no MULTI_CPU 1 2.0 fail") == 2


def test_a_misspelt_flag_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ParserExit):
        launch_script.parse(["--num_proceses", "2", "train.py"])
    error = capsys.readouterr().err
    assert "unrecognized arguments: --num_proceses. Did you mean '--num_processes'?" in error
