"""The file of settings: its place, what is written there, and what other programs wrote (E1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from accel.commands import launch_config
from accel.machine import env
from accel.machine.errors import ConfigError

# Written by the public package's command line, release 1.15, on a machine without a GPU.
PUBLIC = """{
  "compute_environment": "LOCAL_MACHINE",
  "debug": false,
  "distributed_type": "NO",
  "downcast_bf16": false,
  "enable_cpu_affinity": false,
  "machine_rank": 0,
  "main_training_function": "main",
  "mixed_precision": "no",
  "num_machines": 1,
  "num_processes": 1,
  "rdzv_backend": "static",
  "same_network": false,
  "tpu_use_cluster": false,
  "tpu_use_sudo": false,
  "use_cpu": true
}
"""
# As its command line asks for it, with answers for FSDP2.
FSDP = """
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: FSDP
downcast_bf16: 'no'
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_use_fullgraph: true
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
machine_rank: 0
main_process_ip: null
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep files without a place of their own, mutants' for one, out of the user's home."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_the_machines_settings_are_those_of_the_public_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    path = tmp_path / "folder" / "settings.yaml"
    assert launch_config.write_basic_config(save_location=path) == path
    assert path.read_text() == PUBLIC


def test_the_precision_is_written(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    launch_config.write_basic_config("BF16", str(path))
    assert json.loads(path.read_text())["mixed_precision"] == "bf16"
    with pytest.raises(ConfigError, match="mixed_precision='bf61'"):
        launch_config.write_basic_config("bf61")


def test_all_gpus_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_config.device, "default_device_type", lambda: "cuda")
    monkeypatch.setattr(launch_config.device, "device_count", lambda kind: 4)
    found = launch_config.basic_config()
    assert (found["distributed_type"], found["num_processes"]) == ("MULTI_GPU", 4)
    assert found["use_cpu"] is False
    monkeypatch.setattr(launch_config.device, "device_count", lambda kind: 1)
    assert launch_config.basic_config()["distributed_type"] == "NO"
    monkeypatch.setattr(launch_config.device, "default_device_type", lambda: "xla")
    assert launch_config.basic_config()["distributed_type"] == "XLA"


def test_the_place_follows_the_documented_variables(tmp_path: Path) -> None:
    home, cache = str(tmp_path / "home"), str(tmp_path / "cache")
    with env.patched(HF_HOME=home, XDG_CACHE_HOME=cache):
        folder = tmp_path / "home" / "accelerate"
        assert launch_config.default_config_file() == folder / "default_config.yaml"
        launch_config.write({}, folder / "default_config.json")  # of an older release
        assert launch_config.default_config_file() == folder / "default_config.json"
        path = folder / "default_config.yaml"
        launch_config.write({}, path)
        assert launch_config.default_config_file() == path
    with env.patched(HF_HOME=None, XDG_CACHE_HOME=cache):
        folder = tmp_path / "cache" / "huggingface" / "accelerate"
        assert launch_config.write_basic_config() == folder / "default_config.yaml"
    with env.patched(HF_HOME=None, XDG_CACHE_HOME=None, HOME=str(tmp_path)):
        folder = tmp_path / ".cache" / "huggingface" / "accelerate"
        assert launch_config.default_config_file() == folder / "default_config.yaml"


def test_an_unquoted_no_is_a_precision(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("mixed_precision: no\nnum_processes: 1\n")
    assert launch_config.read(tmp_path / "file.yaml")["mixed_precision"] == "no"


def test_a_file_of_the_public_package_is_read(tmp_path: Path) -> None:
    found = launch_config.read(written(tmp_path, PUBLIC))
    assert (found["num_processes"], found["use_cpu"], found["mixed_precision"]) == (1, True, "no")
    assert "use_fsdp" not in found
    found = launch_config.read(written(tmp_path, FSDP))
    assert found["use_fsdp"] is True
    assert found["fsdp_transformer_layer_cls_to_wrap"] == "Block"
    assert (found["dynamo_backend"], found["num_processes"]) == ("INDUCTOR", 8)
    assert "main_process_ip" not in found


def test_a_section_of_another_strategy_is_left_out(tmp_path: Path) -> None:
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nfsdp_config: {}\n"
    found = launch_config.read(written(tmp_path, text))
    assert (found["use_deepspeed"], found["zero_stage"]) == (True, 3)
    text = "distributed_type: MULTI_CPU\nfsdp_config: {fsdp_version: 2}\nnum_processes: 2\n"
    found = launch_config.read(written(tmp_path, text))
    assert found == {"use_cpu": True, "num_processes": 2}


def test_the_section_of_fp8(tmp_path: Path) -> None:
    text = """
mixed_precision: fp8
fp8_config:
  backend: TE
  amax_compute_algo: max
  amax_history_length: 16
  fp8_format: E4M3
  override_linear_precision: (false, false, true)
  use_autocast_during_eval: true
"""
    assert launch_config.read(written(tmp_path, text)) == {
        "mixed_precision": "fp8",
        "fp8_backend": "TE",
        "fp8_amax_compute_algo": "max",
        "fp8_amax_history_len": 16,
        "fp8_format": "E4M3",
        "fp8_override_linear_precision": "(false, false, true)",
        "fp8_use_autocast_during_eval": True,
    }
    text = "fp8_config: {backend: AO, pad_inner_dim: true}"
    found = launch_config.read(written(tmp_path, text))
    assert found == {"fp8_backend": "AO", "fp8_pad_inner_dim": True}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("compute_environment: AMAZON_SAGEMAKER", "compute_environment=AMAZON_SAGEMAKER"),
        ("distributed_type: MULTI_GPUS", "distributed_type='MULTI_GPUS'.*'MULTI_GPU'"),
        ("num_proceses: 2", "num_proceses: unknown key. Did you mean 'num_processes'"),
        ("fsdp_config: {fsdp_versio: 2}", "fsdp_config.fsdp_versio: unknown key"),
        ("tpu_name: mine", "tpu_name='mine'.*all of its TPU cores"),
        ("downcast_bf16: 'yes'", "downcast_bf16='yes'.*mixed_precision: bf16"),
        ("mpirun_config: {mpirun_hostfile: hosts}", "mpirun_config=.*mpirun -hostfile"),
        ("fp8_config: {backnd: TE}", "fp8_config.backnd: unknown key. Did you mean 'backend'"),
        ("[1, 2]", "it holds key: value lines"),
        ("a: [", "it cannot be read"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        launch_config.read(written(tmp_path, text))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read"):
        launch_config.read(tmp_path / "none.yaml")
