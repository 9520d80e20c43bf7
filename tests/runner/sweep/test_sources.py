"""The fingerprint of what recipes are composed from."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.recipe import hydra_setup
from runner.sweep import directory, sources
from tests.runner.sweep.large import make_large

pytestmark = pytest.mark.usefixtures("elsewhere")


def fingerprint(*overrides: str) -> str | None:
    with hydra_setup.session(overrides):
        return sources.fingerprint()


def test_a_fingerprint_is_of_every_file_of_recipes(tmp_path: Path) -> None:
    shipped = fingerprint()
    assert shipped is not None
    file = tmp_path / "conf" / "model" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("width: 4\n")
    first = fingerprint()
    file.write_text("width: 5\n")
    second = fingerprint()
    file.rename(file.with_name("other.yaml"))
    third = fingerprint()
    assert None not in (first, second, third)
    assert len({shipped, first, second, third}) == 4
    file.with_name("notes.txt").write_text("no recipe")
    assert fingerprint() == third


def test_a_folder_of_the_command_line_is_one_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "others" / "experiment"
    folder.mkdir(parents=True)
    (folder / "own.yaml").write_text("seed: 4\n")
    searched = f"hydra.searchpath=['file://{folder.parent}']"
    first = fingerprint(searched)
    assert None is not first != fingerprint()
    (folder / "own.yaml").write_text("seed: 5\n")
    assert None is not fingerprint(searched) != first


def test_linked_folders_are_read_as_hydra_reads_them(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    (real / "own.yaml").write_text("seed: 4\n")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "experiment").symlink_to(real)
    first = fingerprint()
    (real / "own.yaml").write_text("seed: 5\n")
    assert None is not fingerprint() != first


def test_recipes_of_a_package_have_no_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes_of_sources").mkdir()
    (tmp_path / "recipes_of_sources" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert fingerprint("hydra.searchpath=[pkg://recipes_of_sources]") is None


@pytest.mark.parametrize("value", ["${oc.env:WIDTH}", "${oc.decode:${oc.env:WIDTH}}"])
def test_values_from_elsewhere_have_no_fingerprint(value: str, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text("name: ${model.width}\n")
    assert fingerprint() is not None
    (tmp_path / "conf" / "mine.yaml").write_text(f"name: {value}\n")
    assert fingerprint() is None


def test_a_sweep_of_another_version_is_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_large(tmp_path, 1)
    (path,) = tmp_path.glob("runs/digits/sweep-*")
    there, here = directory.read(path).description, fingerprint()
    assert sources.are_of(there, here)
    assert not sources.are_of(there, None)
    assert not sources.are_of(there, "0" * 64)
    monkeypatch.setattr(sources, "version", lambda: "0.0.1")
    assert not sources.are_of(there, here)
