"""``accel launch``: flags, the file of settings, and real scripts on two processes (E1)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel.commands import launch, launch_config
from accel.commands.launch import Launch, Script, plan
from accel.machine import env
from accel.machine.errors import ConfigError
from tests.helpers import ROOT, alive, python
from tests.signals.cells import wait_until

TRAIN = Script("train.py", ["--lr", "1"])
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
    monkeypatch.setattr(launch, "num_gpus", lambda: 0)


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("use_cpu: true\nnum_processes: 3\nmixed_precision: fp16\n")
    found = launch.parse(
        ["--config-file", str(path), "--mixed-precision=bf16", "train.py", "--cpu", "x"]
    )
    assert "--nproc-per-node=3" in found.command
    assert found.command[-3:] == ["train.py", "--cpu", "x"]
    assert found.variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
    launch_config.write({"debug": True}, launch_config.default_config_file())
    found = launch.parse(["train.py"])
    assert found.command == [sys.executable, "train.py"]
    assert found.variables["ACCELERATE_DEBUG_MODE"] == "true"


def test_flags_are_written_with_dashes_or_underscores() -> None:
    flags = ["--use-fsdp", "--fsdp_version", "2", "--fsdp-reshard-after-forward=false"]
    found = launch.parse([*flags, "-m", "package.train"])
    assert found.command == [sys.executable, "-m", "package.train"]
    assert found.variables["FSDP_VERSION"] == "2"
    assert found.variables["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    found = launch.parse(["--use_deepspeed", "--zero_stage=1", "x.py"])
    assert found.variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "1"
    found = launch.parse(["--cpu", "--num_processes=2", "--tee", "3", "x.py"])
    assert "--tee=3" in found.command


def test_one_process_gets_all_tpu_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    file = tmp_path / "settings.yaml"
    file.write_text("distributed_type: TPU\nnum_processes: 1\n")
    for flags in (["--tpu"], ["--config_file", str(file)]):
        found = launch.parse([*flags, "train.py"])
        assert found.command == [sys.executable, "train.py"]
        assert found.variables["PJRT_DEVICE"] == "TPU"
        assert found.variables["ACCELERATE_TORCH_DEVICE"] == "xla"
    found = launch.parse(["--config_file", str(file), "--cpu", "train.py"])
    assert "PJRT_DEVICE" not in found.variables
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert launch.parse(["--tpu", "train.py"]).variables["PJRT_DEVICE"] == "CPU"


def test_a_recipe_of_fp8_is_handed_to_the_script() -> None:
    flags = ["--mixed_precision=fp8", "--fp8-backend=te", "--fp8_format", "E4M3"]
    found = launch.parse([*flags, "--fp8_use_autocast_during_eval", "x.py"]).variables
    assert found["ACCELERATE_MIXED_PRECISION"] == "fp8"
    assert found["ACCELERATE_FP8_BACKEND"] == "te"
    assert found["ACCELERATE_FP8_FORMAT"] == "E4M3"
    assert found["ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL"] == "true"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--fp8_backend=foo"], "FP8_BACKEND='FOO': it is one of AO, TE, MSAMP"),
        (["--fp8_format=E4M3"], "--fp8_format without --fp8_backend"),
        (["--mixed_precision=bf16", "--fp8_backend=te"], "--fp8_backend with mixed_precision=bf16"),
        (["--fp8_backend=ao", "--fp8_margin=1"], "AORecipeKwargs has no such field"),
        (["--fp8_backend=te", "--fp8_margin=x"], "FP8_MARGIN='x'"),
        (["--fp8_backend=te", "--fp8_interval=0"], "TERecipeKwargs.interval=0"),
        (["--fp8_backend=msamp"], "--fp8_backend=MSAMP"),
    ],
)
def test_settings_of_fp8_are_checked_before_the_start(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        launch.parse(["--cpu", *flags, "train.py"])
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tpu", "--num_processes=8"], "one process drives all TPU cores of one machine"),
        (["--tpu", "--cpu"], "--cpu with --tpu: each chooses the device"),
        (["--tpu-use-sudo"], "--tpu-use-sudo: the script starts on this machine"),
        (["--downcast_bf16"], "use --mixed_precision=bf16"),
        (["--mpirun_hostfile", "f"], "mpirun -hostfile"),
        (["--parallelism_config_tp_size=2"], "plugins to the Accelerator"),
        (["--deepspeed_hostfile=f"], "on each machine"),
        (["--multi_gpu", "--cpu"], "each chooses the device"),
        (["--config_file", "/nowhere.yaml"], "it cannot be read"),
    ],
)
def test_flags_that_are_not_offered_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        launch.parse([*flags, "train.py"])


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``accel launch`` with a script of three lines, as a person types it."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    line = [str(script) if argument == "train.py" else argument for argument in arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        python("-m", "accel.commands", "launch", *line),
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
    started_launch = subprocess.Popen(
        python("-m", "accel.commands", "launch", *flags, "train.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    places = [tmp_path / f"pid_{rank}" for rank in range(2)]
    try:
        assert wait_until(lambda: all(place.exists() for place in places), 120.0)
        started_launch.send_signal(number)
        assert started_launch.wait(60) == expected
        pids = [int(place.read_text()) for place in places]
        assert wait_until(lambda: not any(map(alive, pids)), 30.0)
    finally:
        started_launch.kill()


@pytest.mark.slow
def test_a_failed_group_starts_anew_and_its_failure_is_the_exit_code(tmp_path: Path) -> None:
    flags = ["--cpu", "--num_processes=2", "--max_restarts=1"]
    answer = started(tmp_path, *flags, "train.py", "fail")
    assert answer.returncode == 5
    assert sorted(answer.stdout.splitlines()).count("0 no MULTI_CPU 1 2.0 fail") == 2


def with_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(launch, "num_gpus", lambda: number)


def torchrun(found: Launch) -> list[str]:
    """Return the flags of torchrun, which ends with the script and its arguments."""
    assert found.command[:3] == [sys.executable, "-m", "accel.commands.agent"]
    return found.command[3:]


def test_one_process_is_started_as_it_is() -> None:
    assert plan({}, TRAIN).command == [sys.executable, "train.py", "--lr", "1"]
    module = Script("package.train", is_module=True)
    assert plan({}, module).command == [sys.executable, "-m", "package.train"]
    assert plan({}, Script("./train", no_python=True)).command == ["./train"]


def test_processes_on_the_cpu_meet_at_a_free_port() -> None:
    found = plan({"use_cpu": True, "num_processes": 3}, TRAIN)
    flags = ["--nproc-per-node=3", "--max-restarts=0", "--standalone"]
    assert torchrun(found) == [*flags, "train.py", "--lr", "1"]
    assert found.variables["ACCELERATE_USE_CPU"] == "true"


def test_all_gpus_are_used_unless_some_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    assert "--nproc-per-node=4" in plan({}, TRAIN).command
    found = plan({"gpu_ids": "1, 3"}, TRAIN)
    assert "--nproc-per-node=2" in found.command
    assert found.variables["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "CUDA_VISIBLE_DEVICES" not in plan({"gpu_ids": "all"}, TRAIN).variables
    assert plan({"use_cpu": True}, TRAIN).command == TRAIN.command


def test_machines_meet_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    settings: dict[str, object] = {"num_machines": 2, "num_processes": 4, "machine_rank": 1}
    settings |= {"main_process_ip": "10.0.0.1", "rdzv_backend": "static"}
    flags = torchrun(plan(settings, TRAIN))
    assert flags[0] == "--nproc-per-node=2"
    assert flags[2:6] == [
        *("--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500")
    ]
    flags = torchrun(plan({**settings, "rdzv_backend": "c10d", "main_process_port": 7}, TRAIN))
    assert "--rdzv-endpoint=10.0.0.1:7" in flags
    assert "--rdzv-conf=is_host=false" in flags
    flags = torchrun(plan({**settings, "rdzv_backend": "c10d", "rdzv_conf": "a=1"}, TRAIN))
    assert "--rdzv-conf=a=1" in flags


def test_flags_of_torchrun_are_handed_on() -> None:
    settings = {"max_restarts": "3", "monitor_interval": 0.5, "main_process_port": 4242}
    flags = torchrun(plan(settings, Script("x", no_python=True), ["--tee=3"]))
    expected = ["--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.5", "--nnodes=1"]
    expected += ["--node-rank=0", "--master-addr=127.0.0.1", "--master-port=4242", "--tee=3"]
    assert flags == [*expected, "--no-python", "x"]


def test_settings_reach_the_script_by_variables() -> None:
    settings: dict[str, Any] = {
        **{"mixed_precision": "bf16", "debug": True, "num_cpu_threads_per_process": 4},
        **{"gradient_accumulation_steps": 2, "enable_cpu_affinity": False, "zero_stage": 3},
        **{"dynamo_backend": "EAGER", "dynamo_use_fullgraph": True, "use_fsdp": True},
        **{"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": ["A", "B"]},
    }
    found = dict(plan(settings, TRAIN).variables)
    found.pop("PYTHONPATH", None)
    assert found == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DEBUG_MODE": "true",
        "OMP_NUM_THREADS": "4",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
        "ACCELERATE_CPU_AFFINITY": "false",
        "ACCELERATE_DYNAMO_BACKEND": "EAGER",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "true",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
    }
    found = dict(plan({"use_deepspeed": True, "zero_stage": 3}, TRAIN).variables)
    assert found["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert "ACCELERATE_USE_FSDP" not in found


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_processes": 2}, "num_processes=2: torch finds no GPU.*--cpu"),
        ({"num_processes": "two"}, "num_processes='two': expected an integer"),
        ({"num_processes": -1}, "num_processes=-1"),
        ({"num_machines": 2, "num_processes": 3, "use_cpu": True}, "Give 2, or a multiple"),
        ({"num_machines": 2, "num_processes": 2}, "Give --main_process_ip"),
        ({"machine_rank": 1}, "machine_rank=1: it is from 0 to 0"),
        ({"mixed_precision": "bf61"}, "mixed_precision='bf61'.*bf16"),
        ({"use_fsdp": True, "use_deepspeed": True}, "use_fsdp with use_deepspeed"),
        ({"use_fsdp": True, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "LOCAL_STATE_DICT"),
    ],
)
def test_what_contradicts_the_machine_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan(settings, TRAIN)


def test_a_launcher_that_starts_several_launches_is_refused() -> None:
    settings: dict[str, object] = {"use_cpu": True, "num_processes": 2}
    two = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    with env.patched(**two):
        with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2, num_machines=1: each of"):
            plan(settings, TRAIN)
        assert plan({}, TRAIN).command == TRAIN.command  # one of its processes
        machines = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "node0"}
        assert "--nnodes=2" in plan({**settings, **machines}, TRAIN).command


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"offers 2\. Give --num_processes=2"):
        plan({"num_processes": 3}, TRAIN)


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SCRIPT 'trian.py': there is no such file"):
        plan({}, Script("trian.py"))
    (tmp_path / "package").mkdir()
    with pytest.raises(ConfigError, match=r"it is a folder without __main__\.py"):
        plan({}, Script("package"))
    (tmp_path / "package" / "__main__.py").touch()
    assert plan({}, Script("package")).command == [sys.executable, "package"]


FLAGS = ["--standalone", "--nproc-per-node=1", "--no-python", "sh"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("exit 7", 7),
        pytest.param("exit 0", 0, marks=pytest.mark.slow),
        pytest.param("kill -KILL $$", 128 + signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_is_that_of_the_process(tmp_path: Path, text: str, code: int) -> None:
    place = tmp_path / "x.sh"
    place.write_text(text)
    done = subprocess.run(
        python("-m", "accel.commands.agent", *FLAGS, str(place)),
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120},
    )
    assert done.returncode == code, done.stderr
