"""R1, C1: the same texts give the same tokenizer, which encodes any text; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel.machine.errors import ConfigError, MissingPackageError
from runner.language import tokenizer as tokenizers
from runner.language.samples import chat_tokens
from runner.language.tokenizer import load_tokenizer, train_bpe
from tests.runner.language.chats import TEXTS
from tests.runner.language.test_samples import messages_of

STDLIB = sorted(Path(json.__file__).parents[1].glob("*.py"))
ANY_TEXT = [
    *("", " ", "\n\n\t x", "naïve façade – “quoted”", "日本語の", "🦙👩\u200d👧", "\x00\x07\x7f"),
    *("e\u0301 is not \u00e9", "a , b . c 's", "<|im_end|> in text", "\r\n\u2028\ufeff"),
]


@pytest.mark.slow
def test_a_bpe_of_the_standard_librarys_text_encodes_any_text_without_loss() -> None:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in STDLIB]
    tokenizer = train_bpe(texts, 4096)
    assert len(tokenizer) == 4096
    for text in (*ANY_TEXT, *texts):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_tokenizer_is_loaded_again_from_its_folder_or_file(tmp_path: Path) -> None:
    trained = load_tokenizer("bpe:300", lambda: TEXTS)
    expected = chat_tokens(trained, messages_of())
    trained.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    for name in (tmp_path, file):
        loaded = load_tokenizer(str(name))
        assert chat_tokens(loaded, messages_of()) == expected
        assert (len(loaded), loaded.eos_token, loaded.pad_token) == (300, "<|im_end|>", "<|pad|>")
    trained.pad_token = None
    trained.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "<|im_end|>"
    (tmp_path / "tokenizer_config.json").unlink()  # a file alone does not tell the end token
    alone = load_tokenizer(str(file))
    assert (alone("Who?").input_ids, alone.eos_token) == (trained("Who?").input_ids, None)


REFUSED = {
    "no folder, file tokenizer.json or id of the hub": ("./no/such", None),
    "tokenizer=.: no folder": (".", None),
    "259 tokens or more": ("bpe:100", TEXTS),
    "bpe:N trains N tokens": ("bpe:many", TEXTS),
    "on the texts of a data set": ("bpe:4096", None),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.usefixtures("elsewhere")
def test_what_is_no_tokenizer_is_refused(reason: str) -> None:
    name, texts = REFUSED[reason]
    with pytest.raises(ConfigError, match=reason):
        load_tokenizer(name, None if texts is None else lambda: texts)


def test_without_transformers_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match=r"accel-runner\[hf\]"):
        load_tokenizer("bpe:300", lambda: TEXTS)
