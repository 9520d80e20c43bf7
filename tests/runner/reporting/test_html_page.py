"""L1: the page of `runner report` is complete, self-contained, and nobody's HTML but ours."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from accel.machine.errors import MissingPackageError
from runner.reporting import html_page
from runner.reporting.curves import Band
from runner.runs import discovery
from tests.runner.written_runs import (
    change_summary,
    session_of,
    write_failure,
    write_run,
    write_sweep,
)

VOID = {"meta", "br"}


class Checked(HTMLParser):
    """Notes elements, and whether each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(folder: Path) -> tuple[str, Checked]:
    found = html_page.read(discovery.find_runs([folder]))
    text = html_page.page("runs & <more>", found)
    checked = Checked()
    checked.feed(text)
    assert checked.open == []
    return text, checked


def test_the_page_of_a_sweep(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    failed = write_run(sweep / "0012", {"model.width": 99}, summary=False)
    write_failure(failed, "ValueError: <script>alert(1)</script>")
    text, checked = page(tmp_path)
    assert "<script>alert" not in text
    assert "runs &amp; &lt;more&gt;" in text
    for title in ("Learning curves", "Groups of seeds", "Runs"):
        assert f"<h2>{title}</h2>" in text
    assert checked.seen["svg"] == 2
    assert "script" not in checked.seen
    assert text.count("<tr") == 1 + 6 + 1 + 13 + 1  # two tables: groups (one of a failed run), runs
    assert 'tr class="best"' in text
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert all(address.startswith("#") for address in checked.addresses)  # nothing is loaded
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.slow
def test_fifty_runs_fit_into_two_megabytes(tmp_path: Path) -> None:
    for number in range(50):
        values = {"optimizer.lr": 1e-3 * (number + 1), "seed": number}
        write_run(tmp_path / f"{number}", values, best=1 / (number + 1), metrics=400)
    text, _ = page(tmp_path)
    assert len(text.encode()) < 2_000_000


def test_a_group_of_one_seed_has_no_deviation(tmp_path: Path) -> None:
    for number, (width, seed) in enumerate(((16, 0), (16, 1), (32, 0))):
        values = {"model.width": width, "seed": seed}
        write_run(tmp_path / f"{number}", values, best=0.2 + number / 10)
    text, _ = page(tmp_path)
    (row,) = re.findall(r"<tr><td>model\.width=32</td>.*", text)
    assert ">0.4000</td><td></td></tr>" in row


def test_runs_without_anything_make_a_page(tmp_path: Path) -> None:
    (tmp_path / "20260101-120000-aaaa").mkdir()
    write_run(tmp_path / "b", summary=False, best=None)
    text, _ = page(tmp_path)
    assert "No run has measured an objective." in text


def band(num_runs: int = 2, points: int = 120) -> Band:
    steps = np.arange(1, points + 1, dtype=float)
    return Band(steps, 1 / steps, 0.9 / steps, 1.1 / steps, num_runs)


def test_learning_curves_name_the_best_groups_and_draw_the_others_thin() -> None:
    bands = {f"lr={n} _$x_<&>": band(1 + n % 2, 120 if n else 2) for n in range(12)}
    svg = html_page.learning_curves("validation/loss", bands)
    words = "".join(ElementTree.fromstring(svg).itertext())
    for text in ("step", "lr=0 _$x_<&>", "lr=7 _$x_<&> (2 seeds)"):
        assert text in words, text
    assert "lr=9" not in svg
    assert html_page.INK not in svg
    assert "currentColor" in svg
    assert len(svg) < 80_000


def test_a_page_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r"accel-runner\[report\]"):
        html_page.require_matplotlib()


def test_a_damaged_run_is_shown_as_such(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name)
    (session_of(tmp_path / "a") / "environment.json").write_text("{")
    text, _ = page(tmp_path)
    assert "2 runs: 2 finished" in text
    assert text.count('<span class="broken"> (damaged)</span>') == 1
    assert '<p class="broken">a: environment.json is damaged' in text


def test_a_sweep_is_read_with_the_best_run_first(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path)
    (sweep / "0012").mkdir()
    found = html_page.read(discovery.find_runs([sweep]))
    assert found.statuses == "13 runs: 12 finished, 1 broken"
    values = [run.objective.value for run in found.judged if run.objective]
    assert values == sorted(values)
    assert found.metrics == ["validation/loss", "train/loss"]
    bands = found.bands("validation/loss")
    assert [band.num_runs for band in bands.values()] == [2] * 6


def test_a_seed_counts_once_with_its_newest_finished_run(tmp_path: Path) -> None:
    for number, (seed, best) in enumerate(((0, 0.1), (0, 0.2), (1, 0.4))):
        values = {"seed": seed}
        write_run(tmp_path / f"{number}", values, best=best, metrics=2, started=1e9 + number)
    write_run(tmp_path / "3", {"seed": 1}, summary=False, metrics=9, started=2e9)
    found = html_page.read(discovery.find_runs([tmp_path]))
    (band,) = found.bands("train/loss").values()
    assert (band.num_runs, len(band.steps)) == (2, 2)
    text, _ = page(tmp_path)
    assert ">0.3000</td>" in text  # the mean of 0.2 and 0.4


def test_runs_of_different_code_are_not_averaged(tmp_path: Path) -> None:
    git = {"sha": "a" * 40, "branch": "main", "dirty": False}
    changed = {**git, "dirty": True, "diff_sha256": "d" * 64}
    for number, state in enumerate((git, git, changed, {**git, "branch": "side"})):
        write_run(tmp_path / f"{number}", {"seed": number}, best=0.1 * number, git=state)
    found = html_page.read(discovery.find_runs([tmp_path]))
    assert found.keys == ["code"]
    assert sorted(len(group.runs) for group in found.groups) == [1, 3]


def test_objectives_of_different_metrics_are_not_compared(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"{n}", best=0.5 - n / 10) for n in range(3)]
    change_summary(folders[0], metric="accuracy", mode="max")
    found = html_page.read(discovery.find_runs([tmp_path]))
    assert [run.path.name for run in found.runs] == ["2", "1", "0"]
    assert [run.path.name for run in found.judged] == ["2", "1"]
    assert "accuracy 0.5000" in page(tmp_path)[0]
