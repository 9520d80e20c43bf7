"""Untracked Python files as a patch that git applies."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner.run_dir import untracked_files

FILES = {
    "plain.py": b"x = 1\n",
    "deep/er/module.py": b"x = 1\n\ny = 2\n",
    "no_newline.py": b"x = 1",
    "empty.py": b"",
    "only_newline.py": b"\n",
    "a name.py": b"x = 1\n",
    'quo"te\\.py': b"x = 1\n",
    "tab\there.py": b"x = 1\n",
    "f\u00fcr.py": "gr\u00fc\u00dfe = 1\n".encode(),
    "byte\udcff.py": b"x = '\xff'\n",
    "windows.py": b"x = 1\r\ny = 2\r\n",
    "return.py": b"x = 1\ry = 2",
    "looks_like_a_patch.py": b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-- \ndiff --git a/x b/x\n",
}


def apply(patch: bytes, folder: Path) -> None:
    folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", "-"], cwd=folder, check=True, input=patch, capture_output=True)


def test_any_name_and_any_text_come_back(tmp_path: Path) -> None:
    root, target = tmp_path / "root", tmp_path / "target"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    (root / "plain.py").chmod(0o755)
    patch, number = untracked_files.creation_patch(root, FILES)
    assert number == len(FILES)
    apply(patch, target)
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    modes = [os.access(target / name, os.X_OK) for name in ("plain.py", "empty.py")]
    assert modes == [True, False]


def test_what_is_no_text_or_gone_is_skipped_and_a_link_is_followed(tmp_path: Path) -> None:
    root, target = tmp_path / "root", tmp_path / "target"
    root.mkdir()
    (root / "binary.py").write_bytes(b"\0\n")
    (root / "dangling.py").symlink_to("nowhere")
    (tmp_path / "elsewhere.py").write_text("x = 1\n")
    (root / "link.py").symlink_to(tmp_path / "elsewhere.py")
    names = ["binary.py", "dangling.py", "gone.py", "link.py"]
    patch, number = untracked_files.creation_patch(root, names)
    assert number == 1
    apply(patch, target)
    assert (target / "link.py").read_text() == "x = 1\n"
    assert untracked_files.creation_patch(root, []) == (b"", 0)


def test_files_near_the_root_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["environment/lib/os.py", "model.py", "large.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n" * (50 if name == "large.py" else 1))
    monkeypatch.setattr(untracked_files, "MOST_BYTES", 10)
    patch, number = untracked_files.creation_patch(tmp_path, names)
    assert (number, b"b/model.py" in patch) == (1, True)
    monkeypatch.setattr(untracked_files, "MOST_BYTES", 1_000)
    monkeypatch.setattr(untracked_files, "MOST_FILES", 2)
    patch, number = untracked_files.creation_patch(tmp_path, names)
    assert (number, b"environment" in patch) == (2, False)


def test_the_first_names_are_said() -> None:
    assert untracked_files.described({}) == ""
    names = ["a.py", "b.py", "c.py", "d.py", "notes.txt"]
    said = "4 untracked Python files: a.py, b.py, c.py, …"
    assert untracked_files.described({"untracked": names}) == said
    said = "1 untracked Python file: a.py"
    assert untracked_files.described({"untracked": ["a.py"], "num_untracked_python": 1}) == said
