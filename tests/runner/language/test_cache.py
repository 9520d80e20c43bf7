"""R2, R4: the cache of tokenized text: a killed writer, two writers at once, changed content."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runner.language import cache, packing
from runner.language.packing import Layout
from tests.runner.language.texts import made, texts_of, words, write_jsonl

FORK = multiprocessing.get_context("fork")
# Where a writer is killed: a function, at which call of it, and whether behind it. The entries
# before are written by then: the tokenizer, tokens, rows.
MOMENTS: list[tuple[Any, str, int, bool]] = [
    *((cache.directory, "stage", 1, True), (cache.directory, "flush_file", 2, True)),
    *((cache.directory, "publish", 1, False), (cache.directory, "publish", 1, True)),
    *((cache.directory, "tidy", 1, True), (packing, "append", 1, False)),
    *((packing, "append", 100, True), (cache.directory, "flush_file", 1, False)),
    *((cache.directory, "publish", 1, False), (cache.directory, "publish", 1, True)),
    *((Layout, "rows", 1, True), (cache.directory, "publish", 1, False)),
    (cache.directory, "publish", 2, False),
]


def killed(moment: tuple[Any, str, int, bool], folder: Path, path: str) -> None:
    """Make the data, and be killed at that moment."""
    owner, name, count, behind = moment
    kept, calls = getattr(owner, name), itertools.count(1)

    def call(*args: Any) -> Any:
        last = next(calls) == count
        if last and not behind:
            os.kill(os.getpid(), signal.SIGKILL)
        found = kept(*args)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, call)
    made(folder, tokenizer="bpe:300", train=path, validation=0.2)


def write_at_once(barrier: Any, folder: Path, path: str) -> None:
    """Make the data when the others do; leave a line for each entry that this process writes."""
    kept = cache.directory.publish

    def publish(staged: Path, final: Path) -> None:
        with (folder / "written").open("a") as file:
            file.write(f"{final.name}\n")
        kept(staged, final)

    cache.directory.publish = publish
    barrier.wait()
    made(folder, tokenizer="bpe:300", train=path)


def ends_of(*processes: Any) -> list[int]:
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def entries(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").glob("[!.]*")}


@pytest.mark.slow
def test_what_a_killed_writer_leaves_is_never_read(tmp_path: Path) -> None:
    path = texts_of(tmp_path / "a.jsonl", [5 + n % 40 for n in range(60)])
    given = {"tokenizer": "bpe:300", "train": path, "validation": 0.2}
    wanted = made(tmp_path / "undisturbed", **given)
    for moment in MOMENTS:
        process = FORK.Process(target=killed, args=(moment, tmp_path, path))
        assert ends_of(process) == [-signal.SIGKILL], moment
    found = made(tmp_path, **given)
    assert entries(tmp_path) == entries(tmp_path / "undisturbed")
    assert not list((tmp_path / "cache").glob(".*partial*"))
    for index in range(len(wanted.train)):
        assert found.train[index]["input_ids"].equal(wanted.train[index]["input_ids"])


@pytest.mark.slow
def test_processes_that_start_at_once_tokenize_once(tmp_path: Path) -> None:
    path = texts_of(tmp_path / "a.jsonl", [200] * 60)
    given = (FORK.Barrier(3), tmp_path, path)
    processes = [FORK.Process(target=write_at_once, args=given) for _ in range(3)]
    assert ends_of(*processes) == [0, 0, 0]
    written = (tmp_path / "written").read_text().split()
    assert sorted(name.partition("-")[0] for name in written) == ["rows", "tokenizer", "tokens"]
    assert set(written) == entries(tmp_path)


def test_other_content_or_settings_make_other_entries(tmp_path: Path, tokenizer: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": words(9, n), "b": "ki"} for n in range(3)])
    given = {"tokenizer": tokenizer, "train": path}
    data = made(tmp_path, **given)
    first, row = entries(tmp_path), data.train[0]["input_ids"]

    def new(**arguments: object) -> list[str]:
        before = entries(tmp_path)
        made(tmp_path, **{**given, **arguments})
        return sorted(name.partition("-")[0] for name in entries(tmp_path) - before)

    assert new() == []
    os.utime(path, (1, 1))
    assert new() == []  # content counts, not the time or the name
    (tmp_path / "b.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    assert new(train=str(tmp_path / "b.jsonl")) == []
    assert new(context=32) == ["rows"]
    assert new(columns={"text": "b"}) == ["rows", "tokens"]
    assert new(tokenizer="bpe:260") == ["rows", "tokenizer", "tokens"]
    times = os.stat(path)
    content = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(content.replace("text 0", "text 9"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert new() == ["rows", "tokens"]
    assert made(tmp_path, **given).train[0]["input_ids"].tolist() != row.tolist()
    assert first < entries(tmp_path)
