"""R1, C1: the same texts give the same tokenizer, which encodes any text; what is refused."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError
from runner.language.samples import chat_tokens
from runner.language.tokenizer import load_tokenizer, train_bpe
from tests.runner.language.chats import TEXTS
from tests.runner.language.test_samples import messages_of, pieces

STDLIB = sorted(Path(json.__file__).parents[1].glob("*.py"))
ANY_TEXT = [
    *(
        "",
        " ",
        "\n\n\t x",
        "naïve façade – “quoted”",
        "日本語のテキスト",
        "🦙👩\u200d👧",
        "\x00\x07\x7f",
    ),
    *("e\u0301 is not \u00e9", "a , b . c 's", "<|im_end|> in text", "\r\n\u2028\ufeff"),
]


@pytest.mark.slow
def test_a_bpe_of_the_standard_librarys_text_encodes_any_text_without_loss() -> None:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in STDLIB]
    tokenizer = train_bpe(texts, 4096)
    assert len(tokenizer) == 4096
    tokens = 0
    for text in (*ANY_TEXT, *texts):
        ids = tokenizer(text).input_ids
        tokens += len(ids)
        assert tokenizer.decode(ids) == text
    assert sum(len(text.encode()) for text in texts) / tokens > 3  # bytes a token


@pytest.mark.slow
def test_the_same_texts_give_the_same_tokenizer_in_other_processes() -> None:
    code = (
        "import json, hashlib, pathlib; from runner.language.tokenizer import train_bpe\n"
        "files = sorted(pathlib.Path(json.__file__).parents[1].glob('*.py'))[:40]\n"
        "made = train_bpe((f.read_text(errors='replace') for f in files), 2000)\n"
        "print(hashlib.sha256(made.backend_tokenizer.to_str().encode()).hexdigest())"
    )
    ran = [
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads, "PATH": ""},
        ).stdout
        for threads in ("1", "3")
    ]
    texts = [path.read_text(errors="replace") for path in STDLIB[:40]]
    here = train_bpe(texts, 2000).backend_tokenizer.to_str()
    assert {*ran} == {hashlib.sha256(here.encode()).hexdigest() + "\n"}


def test_a_trained_tokenizer_is_loaded_again_from_its_folder_or_file(tmp_path: Path) -> None:
    trained = load_tokenizer("bpe:300", lambda: TEXTS)
    trained.save_pretrained(tmp_path)
    expected = chat_tokens(trained, messages_of())
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(str(name))
        assert chat_tokens(loaded, messages_of()) == expected
        assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|pad|>")
        assert len(loaded) == 300
    assert pieces(trained, expected)[1] == "I am a 🦙 é<|im_end|>"


def test_a_file_alone_is_a_tokenizer_of_which_only_the_vocabulary_is_known(tmp_path: Path) -> None:
    trained = train_bpe(TEXTS, 300)
    trained.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded("Hello").input_ids == trained("Hello").input_ids
    assert loaded.eos_token is None


def test_a_tokenizer_without_padding_pads_with_its_end(tmp_path: Path) -> None:
    trained = train_bpe(TEXTS, 300)
    trained.pad_token = None
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.pad_token_id == loaded.eos_token_id is not None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("./no/such", "no folder, file tokenizer.json or id of the hub"),
        ("bpe:100", "259 tokens or more"),
        ("bpe:many", "bpe:N trains N tokens"),
    ],
)
def test_what_is_no_tokenizer_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_tokenizer(name, lambda: TEXTS)


def test_a_bpe_needs_texts() -> None:
    with pytest.raises(ConfigError, match="on the texts of a data set"):
        load_tokenizer("bpe:4096")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer={tmp_path}"):
        load_tokenizer(str(tmp_path))
