"""L1, R9, R10: command lines of eval and predict."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from runner import cli
from runner.inference.load import load
from runner.runs import environment, json_files, provenance
from tests.helpers import about, python, started
from tests.runner.trained_runs import make_run
from tests.runner.written_runs import session_of, write_run

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "RUN", "--split", "none"], "invalid choice: 'none'"),
        (["predict", "RUN"], "required: --output"),
        (["predict", "--output", "p.jsonl"], "required: RUN_DIR\n"),
        (["eval"], "required: RUN_DIR"),
    ],
)
def test_wrong_arguments_of_a_command_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder, checkpoints=2, best=0), make_run(folder, "seed=1")]


def test_an_evaluation_is_written_with_the_run(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", str(runs[0]), "--split", "test"]) == 0
    (found,) = json_files.read_evaluations(runs[0])
    assert set(found["metrics"]) == {"test"}
    assert found["checkpoint"] == "checkpoints/checkpoint_0"
    assert found["num_processes"] == 1
    assert found["versions"]["torch"]
    assert "accuracy" in capsys.readouterr().out


def test_data_that_has_changed_since_is_said_and_kept_with_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path)
    file = {"path": "/d.csv", "files": 1, "bytes": 9, "newest": 1.0}
    (session_of(run_dir) / "environment.json").write_text(json.dumps({"data": {"data.path": file}}))
    now = {"data.path": {**file, "bytes": 12}}
    monkeypatch.setattr(environment, "data_files", lambda node: now)
    assert cli.main(["eval", str(run_dir), "--split", "test"]) == 0
    said = "data: not as it was trained with: data.path: 1 file of 9 bytes"
    assert said in capsys.readouterr().out
    assert said in json_files.read_evaluations(run_dir)[-1]["notes"][0]
    line = ["eval", str(run_dir), "--split", "test"]
    assert cli.main([*line, "data.num_variants=4"]) == 0  # it names no other file
    assert said in capsys.readouterr().out
    assert cli.main([*line, "data.num_variants=4", "data=digits"]) == 0
    assert "not as it was trained with" not in capsys.readouterr().out


def test_code_that_has_changed_since_is_said_and_kept_with_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path)
    (session_of(run_dir) / "environment.json").write_text(json.dumps({"code": {"mypkg": "a"}}))
    line = ["eval", str(run_dir), "--split", "test"]
    said = "code: not as it was trained with: the Python files of the package mypkg differ"
    for digest in ("a", "b"):
        monkeypatch.setattr(provenance, "package_digests", lambda names, d=digest: {"mypkg": d})
        assert cli.main(line) == 0
        assert (said in capsys.readouterr().out) == (digest == "b")
    same, other = json_files.read_evaluations(run_dir)
    assert (same["notes"], other["notes"]) == ([], [said])
    assert cli.main(["show", str(run_dir)]) == 0
    assert said in capsys.readouterr().out
    output = ["--output", str(tmp_path / "p.jsonl")]
    assert cli.main(["predict", str(run_dir), "--split", "test", *output]) == 0
    assert said in capsys.readouterr().out
    load(run_dir)
    assert f"runner.load: {said}" in capsys.readouterr().err


def test_it_is_said_that_other_weights_stand_in_for_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path, checkpoints=2, best=0)
    (run_dir / "checkpoints" / "checkpoint_0" / "model.safetensors").write_bytes(b"")
    assert cli.main(["eval", str(run_dir), "--split", "test"]) == 0
    note = "weights: the last state, as the best one is damaged"
    assert note in capsys.readouterr().out
    assert json_files.read_evaluations(run_dir)[-1]["notes"] == [note]


def test_samples_that_the_runs_own_limit_leaves_out_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(make_run(tmp_path, "trainer.limit_eval_batches=1", "trainer.eval_batch_size=50"))
    output = tmp_path / "p.jsonl"
    assert cli.main(["predict", run_dir, "--split", "test", "--output", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "data: a part, as in the run (trainer.limit_eval_batches=1)" in shown
    assert "50 predictions written" in shown
    for limit, part in (("null", 360), ("2", 100)):  # asked for
        line = ["predict", run_dir, "--split", "test", f"trainer.limit_eval_batches={limit}"]
        assert cli.main([*line, "--output", str(output)]) == 0
        shown = capsys.readouterr().out
        assert f"{part} predictions written" in shown
        assert "only a part" not in shown


@pytest.mark.slow  # it starts two processes, which import PyTorch
def test_two_processes_measure_what_one_does(runs: list[Path]) -> None:
    line = ["eval", str(runs[0]), "trainer.eval_batch_size=50"]
    assert cli.main(line) == 0
    one = json_files.read_evaluations(runs[0])[-1]
    assert cli.main([*line, "--processes", "2"]) == 0
    two = json_files.read_evaluations(runs[0])[-1]
    assert (one["num_processes"], two["num_processes"]) == (1, 2)
    for split, metrics in one["metrics"].items():
        assert two["metrics"][split] == about(metrics)
        assert two["metrics"][split]["accuracy"] == metrics["accuracy"]


@pytest.mark.slow  # it starts two processes, which import PyTorch
def test_two_processes_predict_what_one_does(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    for output, more in zip(outputs, ([], ["--processes", "2"]), strict=True):
        command = ["predict", str(runs[0]), "--output", str(output), *more]
        assert cli.main(command) == 0
        assert "360 predictions written" in capsys.readouterr().out
    first, second = ([json.loads(x) for x in o.read_text().splitlines()] for o in outputs)
    assert [row["prediction"] for row in first] == [row["prediction"] for row in second]
    assert [row["index"] for row in second] == list(range(360))


HANGING = """
import os, time
from runner.builtin.digits import digits

class Hanging:
    def __init__(self, data):
        self.data = data
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index > 100:
            time.sleep(300)
        return self.data[index]

def data(**options):
    found = digits(augment=False)
    return type(found)(found.train, found.validation, Hanging(found.test))
"""


@pytest.mark.slow  # it starts two processes, and waits for the time limit
def test_a_rank_that_hangs_in_an_evaluation_is_named(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    own = ["data.name=null", "+data._target_=hanging.data", "trainer.hang_timeout=3"]
    own += ["--import", "hanging"]
    command = python("-m", "runner", "eval", str(runs[0]), *own, "--processes", "2")
    with started(command, tmp_path) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            named = next((line for line in lines if "failed first" in line), "")
            told = (
                r"rank 1 failed first: it hangs: no progress for \d+ s in evaluation \(test\), at"
            )
            assert re.match(told, named) is not None, named
            assert "hanging.py:" in named
            assert process.wait(60) == 1
        finally:
            process.kill()


def test_a_run_that_fails_leaves_the_others(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write_run(tmp_path / "bad")  # it has no checkpoint
    assert cli.main(["eval", str(bad), *map(str, runs), "--split", "test"]) == 1
    out, err = capsys.readouterr()
    table = [line.split() for line in out.splitlines()]
    assert ["run", "step", "test", "loss", "test", "accuracy"] in table
    assert [one[0] for one in table if one[:1] in ([str(runs[0])], [str(runs[1])])] == [
        *map(str, runs)
    ]
    assert "the run has no checkpoint in" in err
    assert json_files.read_evaluations(runs[1])[0]["metrics"]["test"]["loss"] > 0
    assert cli.main(["predict", *map(str, runs), "--output", "p.jsonl"]) == 2
    assert "one run" in capsys.readouterr().err


def test_the_code_is_that_of_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.launch import launcher
    from runner.launch.failures import Ended

    both = [str(write_run(tmp_path / name)) for name in "ab"]
    for code in (2, 130):
        monkeypatch.setattr(launcher, "run_group", lambda *_, code=code: Ended(code))
        assert cli.main(["eval", *both, "--processes", "2"]) == code


def test_a_read_only_run_is_measured_and_it_is_said(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(json_files, "add_evaluation", refuse)
    assert cli.main(["eval", str(runs[1]), "--split", "test"]) == 0
    out, err = capsys.readouterr()
    assert "accuracy" in out
    assert "eval.json is not written (Permission denied)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--processes", "0"], "it is at least 1"),
        (["eval", "--processes", "2", "--device-map", "auto"], "is used by one process"),
        pytest.param(  # refused by processes that have imported PyTorch
            ["eval", "--processes", "3", "trainer.limit_eval_batches=1"],
            "it counts the batches of one process",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_processes_that_cannot_be_are_refused(
    arguments: list[str], message: str, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([arguments[0], str(runs[0]), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
