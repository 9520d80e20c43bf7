"""The recipe of a resumed run: the frozen one, plus what the new command line changes (C2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.recipe import composition, hydra_setup, serialization
from runner.recipe.schema import Recipe
from runner.recipe.serialization import REFUSED, refusals
from runner.runs import directory
from tests.helpers import write_file
from tests.resume_matrix.cells import tree
from tests.runner.trained_runs import make_run
from tests.runner.written_runs import session_of


def resumed(run_dir: Path, line: list[str], *, trains: bool = True) -> composition.Examined:
    return composition.resumed(directory.frozen(run_dir), line, trains=trains)


# -- what each override does ---------------------------------------------------------------


@pytest.mark.parametrize("key", REFUSED)
def test_what_cannot_change_is_refused_with_the_reason(key: str) -> None:
    before = serialization.to_plain(Recipe())
    before["optimizer"] = {"name": "adamw", "_target_": None}
    before["step"] = {"name": "supervised", "_target_": None}
    before["init_from"] = {"path": None} if key == "init_from.path" else None
    after = serialization.to_plain(before)
    node: Any = after
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node[parent]
    node[leaf] = "other" if node[leaf] != "other" else "another"
    (problem,) = refusals(before, after)
    assert problem.value == f"{key}=other with resume"
    assert "{" not in problem.rule + problem.remedy


def test_the_scale_may_be_chosen_where_there_was_no_scaler() -> None:
    before = serialization.to_plain(Recipe())
    after = serialization.to_plain(Recipe())
    after["precision"]["mode"], after["precision"]["scaler"]["init_scale"] = "fp16", 16.0
    assert refusals(before, after) == []
    before["precision"]["mode"] = "fp16"
    assert [p.value for p in refusals(before, after)] == [
        "precision.scaler.init_scale=16.0 with resume"
    ]


def test_a_resumed_run_is_refused_what_an_evaluation_is_not(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    before = tree(run_dir)
    with hydra_setup.session():
        line = ["seed=7", "optimizer=sgd", "optimizer.lr=0.5", "name=x"]
        problems = resumed(run_dir, line).problems
        told = "\n".join(map(str, problems))
        assert "seed=7 with resume: the order of the data" in told
        assert "optimizer._target_=torch.optim.SGD with resume" in told
        assert "name=x with resume: the run stays where it is (name=digits)" in told
        assert not resumed(run_dir, ["optimizer.lr=0.5"]).problems
        assert not resumed(run_dir, ["seed=7"], trains=False).problems
    assert tree(run_dir) == before


def own_file(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> Path:
    """Work in `folder`, where a file of its own is written; return it."""
    monkeypatch.chdir(folder)
    return write_file(folder / name, text)


def test_a_key_that_is_named_has_that_value_though_todays_files_have_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# @package _global_\noptimizer:\n  lr: 0.1\n"
    file = own_file(tmp_path, monkeypatch, "conf/experiment/own.yaml", text)
    run_dir = make_run(tmp_path / "runs", "experiment=own")
    file.write_text("# @package _global_\noptimizer:\n  lr: 0.3\n")
    with hydra_setup.session():
        for line, rate in (
            (["optimizer.lr=0.3"], 0.3),
            (["optimizer.lr=0.2"], 0.2),
            (["tags=[a]"], 0.1),
            (["experiment=own"], 0.1),
        ):
            examined = resumed(run_dir, line)
            assert not examined.problems
            assert examined.recipe.optimizer["lr"] == rate, line


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["experiment", "config"])
def test_a_run_whose_files_are_gone_is_resumed_with_its_recorded_recipe(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched = "defaults:\n  - override /fsdp: full_shard\n"
    text = f"# @package _global_\n{switched}optimizer:\n  lr: 0.1\ntags: [a]\n"
    file = own_file(tmp_path, monkeypatch, "conf/experiment/own.yaml", text)
    run_dir = make_run(tmp_path / "runs", "experiment=own", "fsdp.cpu_offload=true", "seed=3")
    if lost == "config":  # the primary file, in place of the experiment
        path = session_of(run_dir) / "job.json"
        path.write_text(path.read_text().replace('"config_name": "config"', '"config_name": "x"'))
    file.rename(file.with_name("renamed.yaml"))
    with hydra_setup.session():
        for line, rate in (
            (["optimizer.lr=0.3", "trainer.epochs=30"], 0.3),
            (["tags=[b]", "fsdp.cpu_offload=false"], 0.1),
            (["dataloader=workers"], 0.1),
            (["model.dropout=0.5"], 0.1),
        ):
            examined = resumed(run_dir, line)
            assert [str(p) for p in examined.problems] == []
            found = examined.recipe
            assert (found.optimizer["lr"], found.seed) == (rate, 3), line
            assert found.fsdp is not None
            assert found.fsdp.cpu_offload is not (line[0] == "tags=[b]")
            assert (found.dataloader.num_workers > 0) == (line[0] == "dataloader=workers")
        for line, why in (
            (["seed=4"], "seed=4 with resume"),
            (["optimzer.lr=1"], "Did you mean 'optimizer.lr'?"),
            (["precision=bf61"], "precision=bf61"),
        ):
            (only,) = resumed(run_dir, line).problems
            assert why in str(only)


def test_a_group_that_is_named_is_chosen_though_todays_files_choose_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "# @package _global_\ndefaults:\n  - override /scheduler: {}\n"
    file = own_file(tmp_path, monkeypatch, "conf/experiment/own.yaml", text.format("constant"))
    run_dir = make_run(tmp_path / "runs", "experiment=own")
    file.write_text(text.format("cosine"))
    with hydra_setup.session():
        for line, name in ((["scheduler=cosine"], "cosine"), (["tags=[a]"], "constant")):
            examined = resumed(run_dir, line)
            assert not examined.problems
            assert examined.recipe.scheduler["name"] == name


def test_a_group_of_a_run_whose_files_are_gone_is_refused_what_cannot_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "defaults: [default]\ndata_seed: 7\n"
    file = own_file(tmp_path, monkeypatch, "conf/dataloader/mine.yaml", text)
    run_dir = make_run(tmp_path / "runs", "dataloader=mine")
    for gone in (False, True):
        if gone:
            file.unlink()
        with hydra_setup.session():
            told = "\n".join(map(str, resumed(run_dir, ["dataloader=default"]).problems))
        assert "dataloader.data_seed=None with resume: the order of the data" in told
