"""`runner data`: samples with what the loss counts, and a tokenizer of one's own (L1, C1, R10)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from runner import cli
from runner.language.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("elsewhere")
CHATS = [
    [("user", "Who?"), ("assistant", "I, 🦙")],
    [("user", "Hm?"), ("assistant", "Yes.\nNo."), ("user", "So?"), ("assistant", "So.")],
]
ASKED, SAID = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "⟦{}<|im_end|>⟧\n"
LEGEND = "⟦counted by the loss⟧, the rest is not\n"

Show = Callable[..., str]


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Return a function of arguments and an exit code, which returns what `data show` prints."""
    records = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in CHATS]
    Path("chats.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records * 2))
    labels = [{"text": text, "label": label} for text, label in (("Hot", "good"), ("Wet", "bad"))]
    Path("labels.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in labels))

    def shown(*arguments: str, code: int = 0, format: str = "chat", file: str = "chats") -> str:
        node = f"name:jsonl,train:{file}.jsonl,tokenizer:'bpe:300',format:{format},context:40"
        node += f",cache_dir:'{tmp_path / 'cache'}'"
        assert cli.main(["data", "show", f"data={{{node}}}", *arguments]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return shown


def by_hand(chat: list[tuple[str, str]]) -> str:
    """Return a conversation as it is shown without colours."""
    return "".join((SAID if role == "assistant" else ASKED).format(text) for role, text in chat)


def test_rows_of_packed_samples_are_shown_with_their_boundaries(show: Show) -> None:
    first, second = (by_hand(chat) for chat in CHATS)
    expected = (
        f"{LEGEND}train[0]: 80 tokens, 13 counted (16.2%), 2 samples, 1 of padding\n"
        f"── sample 1 of 2: 53 tokens, 9 counted (17.0%)\n{second}"
        f"── sample 2 of 2: 26 tokens, 4 counted (15.4%)\n{first}\n"
        "1 rows of 2 in train: 79 tokens, 13 counted (16.5%); 2 samples, 0 cut, 1 of padding\n"
        "all rows: 80 to 80 tokens, median 80\n"
    )
    assert show("data.context=80", "--count=1") == expected
    stream = show("data.context=80", "data.stream=true", "--index=1")
    assert "1 rows of a stream in train" in stream
    assert "train[1]: 80 tokens" in stream


def test_a_padded_row_is_one_sample_and_a_cut_one_is_told(show: Show) -> None:
    out = show("data.packing=false", "+data.validation=chats.jsonl", "--split=validation")
    cut = "validation[1]: 40 tokens, 6 counted (15.0%)\n"
    whole, begin = by_hand(CHATS[0]), by_hand(CHATS[1]).partition("ssistant\n⟦So.")[0]
    assert f"validation[0]: 26 tokens, 4 counted (15.4%)\n{whole}\n{cut}{begin}" in out
    assert out.count("── no end token: cut at 40 tokens, or continued in another row\n") == 1
    assert out.endswith(": 92 tokens, 14 counted (15.2%); 3 samples, 1 cut, 0 of padding\n")


def test_a_text_has_its_label(show: Show) -> None:
    out = show("data.packing=false", format="label", file="labels")
    assert "train[1]: 1 tokens, label bad\nWet\n" in out


def test_a_terminal_has_colours(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = show("data.packing=false")
    assert "\x1b[32mI, 🦙<|im_end|>\x1b[0m" in out
    assert "⟦" not in out


def test_a_tokenizer_is_trained_on_the_texts_of_files(
    show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("more.txt").write_text("abababababab cdcdcdcdcd " * 9)
    train = ["data", "tokenizer", "chats.jsonl", "more.*", "--size=280", "--out=own"]
    assert cli.main(train) == 0
    assert capsys.readouterr().out == "own: 280 tokens. Use it: data.tokenizer=own\n"
    assert len(load_tokenizer("own")("abababababab").input_ids) < 4
    assert "Who?" in show("data.tokenizer=own")
    assert cli.main(train) == 2
    assert "--out own: it is there, and not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--split=tset"], "--split tset: the data have no such split"),
        (["--index=9", "data.packing=false"], "train has 4 samples"),
        (["--count=0"], "show one or more"),
        (["-m"], "it shows the data of one recipe"),
        (["data.train=none.jsonl"], "no file has that name"),
        (["data={name: digits}"], "tokens are shown by the tokenizer among the artifacts"),
    ],
)
def test_what_cannot_be_shown_is_refused(show: Show, arguments: list[str], reason: str) -> None:
    assert reason in show(*arguments, code=2)
