"""Text stays the text that was typed, on the command line and in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.recipe import composition, hydra_setup, serialization
from runner.recipe.verbatim_text import quoted, text_keys

ODD = (
    "1_2_1",
    "1e3",
    "on",
    "true",
    "0x10",
    "007",
    "2026-01-01",
    "12:30:45",
    "inf",
    "nan",
    "no",
    "1.0",
)


@pytest.mark.parametrize(
    "word", [*ODD[:5], *(pytest.param(word, marks=pytest.mark.slow) for word in ODD[5:])]
)
def test_a_name_is_what_was_typed_also_where_it_is_read_again(word: str, tmp_path: Path) -> None:
    with hydra_setup.session():
        found = composition.require(
            composition.new_run([f"name={word}", f"tags=[{word},a]"], "config")
        )
        assert (found.name, found.tags) == (word, [word, "a"])
        jobs = hydra_setup.expand([f"name={word},b"])
        assert [composition.new_run(job, "config").recipe.name for job in jobs] == [word, "b"]
    path = tmp_path / "config.yaml"
    path.write_text(serialization.yaml_text(serialization.to_plain(found)))
    assert serialization.parse_yaml(path.read_text(), path)["name"] == word


@pytest.mark.parametrize("text", ["2 layers", "1e3 x", "@me", "*all"])
def test_text_that_hydra_reads_as_such_stays_as_it_is(text: str) -> None:
    assert quoted([f"name={text}", f"tags=[{text},7]"]) == [f"name={text}", f"tags=[{text},'7']"]
    with hydra_setup.session():
        assert composition.require(composition.new_run([f"tags=[{text}, 7]"], "config")).tags == [
            text,
            "7",
        ]


def test_only_what_is_not_text_yet_gets_quotes() -> None:
    kept = [
        "name=abc",
        "name='1_2'",
        "resume=null",
        "seed=1_2",
        "name=${tags}",
        "trainer.epochs=1e3",
    ]
    kept += ["tracker.log_with=[tensorboard]", "output_dir=/a/1_2", "name=range(1,3)", "--flag"]
    assert quoted(kept) == kept
    assert quoted(["name=choice(1_2,b)"]) == ["name=choice('1_2',b)"]
    assert {"name", "tags", "output_dir", "checkpoint.monitor"} <= text_keys()


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("experiment/mine.yaml", "# @package _global_\nname: 1_2_1\n", "name: 1_2_1"),
        ("experiment/mine.yaml", "# @package _global_\ntags: [a, on]\n", "tags: on"),
        ("tracker/mine.yaml", "log_with: []\nproject_name: 1e3\n", "tracker.project_name: 1e3"),
    ],
)
def test_a_file_whose_text_yaml_reads_as_something_else_is_refused(
    file: str, content: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "conf" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with hydra_setup.session():
        problems = composition.new_run([f"{path.parent.name}=mine"], "config").problems
    (problem,) = problems
    assert problem.value.endswith(expected)
    assert "it is text, and YAML reads" in problem.rule
    assert f'"{expected.split()[-1]}"' in problem.remedy
    path.write_text(
        content.replace("1_2_1", '"1_2_1"').replace("on]", "'on']").replace("1e3", "'1e3'")
    )
    with hydra_setup.session():
        assert not composition.new_run([f"{path.parent.name}=mine"], "config").problems
