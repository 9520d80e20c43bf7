"""C1, R10: refusals have exit code 2, a line for each mistake with its remedy, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner import cli
from runner.inference import predict, session
from tests.helpers import ROOT, python, ran

pytestmark = pytest.mark.usefixtures("elsewhere")


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return [line for line in err.splitlines() if not line.endswith(": loading PyTorch …")]


# What `tests.mistakes` does not draw.
REFUSALS = {
    "+precision.foo=1": ("precision.foo=1", "autocast, fp8_te, fp8_torchao, mode, scaler"),
    "+trainer.epochs=2": ("there is such a key already", "trainer.epochs=2"),
    "~trainer.epochs": ("~trainer.epochs", "Give trainer.epochs=…"),
    "~model.widht": ("model.widht", "Did you mean 'model.width'?"),
    "model@x=cnn": ("model@x=cnn", "one place"),
    "callbacks.early_stoping.patience=1": ("callbacks.early_stoping", "'early_stopping'"),
    "step=gan": ("model=cnn with step=gan", "Set model=null."),
    "tracker=[csv,tensorbord]": ("tracker=tensorbord", "tracker is one of", "tensorboard"),
    "distributed=multi_node": ("distributed=multi_node", "Give distributed.rdzv_endpoint="),
    "--config-name=confg": ("--config-name confg", "Did you mean 'config'?"),
    "--import=not_there_at_all": ("'not_there_at_all'", "no such package", "Install"),
    "hydra.run.dir=x": ("hydra.run.dir=x", "Set output_dir and name"),
    "+hydra.callbacks.x._target_=os.system": ("hydra.callbacks.x._target_", "runner's own"),
}


@pytest.mark.parametrize("argument", REFUSALS)
def test_a_mistake_is_one_clear_message(
    argument: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = refused(argument, capsys=capsys)
    if argument != "step=gan":
        assert len(lines) == 1, lines
    for expected in REFUSALS[argument]:
        assert expected in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_all_mistakes_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (
        *("optimzer.lr=1", "precision=bf61", "trainer.epochs=-1", "+precision.foo=1"),
        *("trainer.log_every=x", "data.name=digts", "fsdp.x=1", "seed=0", "seed=1"),
    )
    text = "\n".join(refused(*wrong, capsys=capsys))
    for expected in (
        *("optimzer.lr=1", "precision=bf61", "trainer.epochs=-1", "precision.foo=1"),
        *("trainer.log_every=x", "data.name='digts'", "fsdp is off"),
        "seed=0 is overridden by seed=1",
    ):
        assert expected in text


@pytest.mark.parametrize(
    "engine", ["fsdp=full_shard", "deepspeed=zero1", "tensor_parallel=default"]
)
def test_clipping_that_an_engine_lacks_is_refused_before_workers_start(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("distributed=multi_cpu", engine, "trainer.clip_grad_value=0.5")
    (line,) = refused(*asked, capsys=capsys)
    assert f"trainer.clip_grad_value=0.5 with {engine.partition('=')[0]}=" in line
    assert "Set trainer.clip_grad_norm instead" in line


def test_deepspeeds_file_is_read_before_workers_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ("deepspeed=config_file", "deepspeed.hf_ds_config=ds.json")
    assert "hf_ds_config='ds.json': expected the path" in refused(*asked, capsys=capsys)[0]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ds.json").write_text("{")
    assert "hf_ds_config='ds.json': the file is not JSON" in refused(*asked, capsys=capsys)[0]


def test_what_deepspeed_and_the_recipe_decide_is_compared_before_workers_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_accumulation_steps": 4, "train_batch_size": 9}')
    asked = ("deepspeed=config_file", "deepspeed.hf_ds_config=ds.json", "distributed=multi_cpu")
    more = ("deepspeed.gradient_clipping=2", "trainer.clip_grad_norm=1")
    lines = refused(*asked, *more, capsys=capsys)
    assert [line.partition(":")[0] for line in lines] == [
        "ds.json",
        "ds.json",
        "deepspeed.gradient_clipping=2 with trainer.clip_grad_norm=1.0",
    ]
    assert "gradient_accumulation_steps=4 with 1 by the recipe's trainer" in lines[1]
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


def test_a_wrap_policy_of_an_untrusted_package_is_not_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    for key in ("auto_wrap_policy", "param_init_fn"):
        asked = ("distributed=multi_cpu", "fsdp=full_shard", f"fsdp.{key}=evil.policy")
        assert f"fsdp.{key}=evil.policy: the package 'evil'" in refused(*asked, capsys=capsys)[0]


def test_matrices_split_over_one_process_name_the_way_to_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (line,) = refused("tensor_parallel=default", capsys=capsys)
    assert "tensor_parallel.tp_size=2 with 1 process:" in line
    assert "Start a multiple of 2 processes" in line


def test_every_job_of_a_sweep_is_checked_before_the_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = refused("-m", "trainer.epochs=1,-1,-2", "seed=0,1", capsys=capsys)
    assert len(lines) == 2, lines  # each mistake once, though two jobs have each
    (line,) = refused("-m", "model.width=4,wide", "seed=0,1", capsys=capsys)
    assert "model.width='wide'" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "rule"),
    [
        ("/proc/predictions.jsonl", r"it cannot be written \(.*a folder that you may write to"),
        (".", "predictions are written to a file in a folder"),
    ],
)
def test_an_output_that_cannot_be_written(output: str, rule: str, tmp_path: Path) -> None:
    request = session.Request(tmp_path / "run", output=tmp_path / output)
    with pytest.raises(ConfigError, match=rf"^--output .*: {rule}"):
        predict.write_predictions(request)
    assert list(tmp_path.iterdir()) == []


def test_the_last_override_of_a_key_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    repeated = ("seed=1", "optimizer=sgd", "seed=2", "optimizer=adamw")
    assert cli.main(["--cfg", "job", *repeated]) == 0
    out, err = capsys.readouterr()
    assert "\nseed: 2\n" in out
    assert "_target_" not in out
    assert err.splitlines() == [
        "seed=1 is overridden by seed=2: the last one of a key is taken",
        "optimizer=sgd is overridden by optimizer=adamw: the last one of a key is taken",
    ]


def test_the_whole_command_refuses_alike(tmp_path: Path) -> None:
    answer = ran(python("-m", "runner", "model.name=cnm"), ROOT)
    assert (answer.returncode, answer.stdout) == (2, "")
    (line,) = answer.stderr.splitlines()
    assert "Did you mean 'cnn'?" in line
