"""R2, R4: the cache of tokenized text: a killed writer, two writers at once, changed content."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.machine.errors import ConfigError
from runner.language.cache import Arrays, cached
from tests.helpers import python
from tests.runner.language.texts import made, texts_of, words, write_jsonl

# Forks a child for each moment, which is killed there; then a last one that is not.
KILLED = """
import json, os, pathlib, signal, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # once, before the forks
from runner.language import cache
from tests.runner.language.texts import made
folder, path, out = map(pathlib.Path, sys.argv[1:])

def kill_at(owner, name, count, after):
    kept, calls = getattr(owner, name), []
    def told(*args, **kwargs):
        calls.append(1)
        if not after and len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        found = kept(*args, **kwargs)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    setattr(owner, name, told)

# Each ends the process; the entries before it exist by then.
of_tokenizer = [
    (cache.directory, "stage", 1, True), (cache.directory, "flush_file", 2, True),
    (cache.directory, "publish", 1, False), (cache.directory, "publish", 1, True),
]
of_tokens = [
    (cache.directory, "tidy", 1, True), (cache.Arrays, "extend", 1, False),
    (cache.Arrays, "extend", 40, True), (cache.Arrays, "_write_headers", 2, False),
    (cache.directory, "publish", 1, False), (cache.directory, "publish", 1, True),
]
of_rows = [
    (cache.Arrays, "extend", 2, False), (cache.directory, "publish", 1, False),
    (cache.directory, "publish", 2, False),
]
ends = []
for moment in [*of_tokenizer, *of_tokens, *of_rows, None]:
    pid = os.fork()
    if pid == 0:
        if moment:
            kill_at(*moment)
        data = made(folder, tokenizer="bpe:300", train=str(path), validation=0.2)
        out.write_text(json.dumps([row["input_ids"].tolist() for row in data.train]))
        os._exit(0)
    ends.append(os.waitpid(pid, 0)[1])
print(ends)
"""

# Two children that start at once; each entry of the cache that is written leaves a line.
AT_ONCE = """
import json, os, pathlib, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # once, before the forks
from runner.language import cache
from tests.runner.language.texts import made
folder, path, out = map(pathlib.Path, sys.argv[1:])
kept = cache.directory.publish
def publish(staged, final):
    with out.open("a") as file:
        file.write(f"{final.name}\\n")
    kept(staged, final)
cache.directory.publish = publish
waiting, go = os.pipe()
pids = []
for _ in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        os.close(go)
        os.read(waiting, 1)
        made(folder, tokenizer="bpe:300", train=str(path))
        os._exit(0)
os.close(go)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
"""


def ran(code: str, *arguments: object) -> str:
    command = [*python("-c", code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def entries(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").glob("[!.]*")}


@pytest.mark.slow
def test_what_a_killed_writer_leaves_is_never_read(tmp_path: Path) -> None:
    path = texts_of(tmp_path / "a.jsonl", [5 + n % 40 for n in range(60)])
    ends = json.loads(ran(KILLED, tmp_path, path, tmp_path / "rows.json"))
    assert ends == [9] * 13 + [0]
    undisturbed = made(tmp_path / "other", tokenizer="bpe:300", train=path, validation=0.2)
    wanted = [row["input_ids"].tolist() for row in undisturbed.train]
    assert json.loads((tmp_path / "rows.json").read_text()) == wanted
    assert entries(tmp_path) == entries(tmp_path / "other")
    assert not list((tmp_path / "cache").glob(".*partial*"))


@pytest.mark.slow
def test_two_processes_that_start_at_once_tokenize_once(tmp_path: Path) -> None:
    path = texts_of(tmp_path / "a.jsonl", [200] * 60)
    ran(AT_ONCE, tmp_path, path, tmp_path / "written")
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


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=50), max_size=20))
def test_arrays_that_are_written_piece_by_piece_are_read_back(tmp_path_factory, pieces) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    with Arrays(folder, values="int32", signs="bool") as arrays:
        for piece in pieces:
            arrays.extend("values", piece)
            arrays.extend("signs", [value > 0 for value in piece])
    wanted = np.array([*itertools.chain(*pieces)], np.int32)
    values, signs = (np.load(folder / f"{name}.npy") for name in ("values", "signs"))
    assert values.dtype == np.int32
    assert (values == wanted).all()
    assert (signs == (wanted > 0)).all()


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise RuntimeError("no more")

    entry = tmp_path / "entry"
    with pytest.raises(RuntimeError, match="no more"):
        cached(entry, fail)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]
    assert cached(entry, lambda folder: None) == entry
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data.cache_dir=.*file: .*under a lock"):
        cached(tmp_path / "file" / "entry", fail)
