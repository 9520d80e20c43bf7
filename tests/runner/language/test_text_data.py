"""R1, R2, C1, E2: rows hold each token once; labels, weights, streams, what is refused."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.machine.errors import ConfigError
from runner.data.batches import TrainBatches
from runner.data.datasets import Data, num_samples
from runner.language.packing import IGNORED, Layout, Mixture
from runner.language.tokenizer import load_tokenizer
from runner.recipe.batch_plan import plan_batches
from runner.runs import directory
from runner.training import factory_results
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.data.test_batches import recipe_of
from tests.runner.language.rows import LLAMA, tiny
from tests.runner.language.texts import made, texts_of, words, write_jsonl

CHAT = [
    *({"role": "user", "content": "ba do"}, {"role": "assistant", "content": "ki lu"}),
    *({"role": "user", "content": "me no"}, {"role": "assistant", "content": "pe ra"}),
]


def rows(data: Any) -> list[dict[str, torch.Tensor]]:
    return [data[i] for i in range(len(data))] if num_samples(data) else list(data)


# -- rows ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(2, 16),
    st.sampled_from(["split", "cut", "drop"]),
    st.booleans(),
)
def test_each_token_is_in_one_row_once(lengths, context, too_long, packing) -> None:
    layout = Layout(context, too_long, packing, pad_token_id=7)
    starts = np.cumsum(lengths) - lengths
    spans = layout.spans(np.array(lengths), np.arange(len(lengths)))
    kept = [
        range(start, start + (length if too_long == "split" else min(length, context)))
        for start, length in zip(starts, lengths, strict=True)
        if too_long != "drop" or length <= context
    ]
    tokens, found, firsts = np.arange(sum(lengths)) + 1000, [], 0
    made_rows = layout.rows(spans[:, 2])
    for chosen in made_rows:
        row = {k: v.numpy() for k, v in layout.row(tokens, tokens > 0, spans[chosen]).items()}
        held = row["input_ids"] >= 1000
        found += (row["input_ids"][held] - 1000).tolist()
        firsts += len(chosen)
        counted = row["labels"] != IGNORED
        assert (row["labels"][counted] == row["input_ids"][counted]).all()
        assert counted.sum() == held.sum() - len(chosen)  # all but the first of each sample
        if packing:
            assert len(row["input_ids"]) == context == len(row["position_ids"])
            assert not (row["position_ids"] == 0)[counted].any()
            assert (row["input_ids"][~held] == 7).all()
        else:
            assert held.all()
            assert len(chosen) == 1
    assert sorted(found) == sorted(itertools.chain(*kept))
    if packing:  # at most one row of any two could hold both
        fill = sorted(sum(spans[row, 2]) for row in made_rows)
        assert all(a + b > context for a, b in itertools.pairwise(fill))


def test_packed_rows_hold_the_tokens_of_a_file(tmp_path: Path, tokenizer: str) -> None:
    path = texts_of(tmp_path / "train.jsonl", [3, 9, 30, 1, 14, 5, 22, 8])
    data = made(tmp_path, tokenizer=tokenizer, train=path, context=80)
    lines = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    wanted = [id for ids in load_tokenizer(tokenizer)(lines).input_ids for id in [*ids, 2]]
    found = torch.cat([row["input_ids"] for row in pickle.loads(pickle.dumps(rows(data.train)))])
    assert sorted(found[found != 0].tolist()) == sorted(wanted)
    ids = {"vocab_size": 300, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    assert data.facts == {**ids, "context": 80}
    assert data.lengths.tolist() == [80] * len(data.train)


def test_padded_rows_are_joined_with_a_mask(tmp_path: Path, tokenizer: str) -> None:
    path = texts_of(tmp_path / "train.jsonl", [3, 9, 4])
    data = made(tmp_path, tokenizer=tokenizer, train=path, packing=False, too_long="cut")
    batch = data.collate_fn(rows(data.train))
    lengths = data.lengths.tolist()
    assert batch["input_ids"].shape == (3, max(lengths))
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert ((batch["labels"] == IGNORED).sum(1) == max(lengths) - torch.tensor(lengths) + 1).all()
    assert {value.dtype for value in batch.values()} == {torch.int64}


def test_each_format_counts_what_it_says(tmp_path: Path, tokenizer: str) -> None:
    encode = load_tokenizer(tokenizer)

    def counted(format: str, record: dict[str, Any], **columns: str) -> str:
        path = write_jsonl(tmp_path / f"{format}.jsonl", [record])
        options = {"format": format, "columns": columns, "packing": False}
        row = made(tmp_path, tokenizer=tokenizer, train=path, **options).train[0]
        return encode.decode(row["labels"][row["labels"] != IGNORED])

    assert counted("text", {"body": "a ba do"}, text="body") == " ba do<|im_end|>"
    prompted = {"prompt": "ba do", "answer": " ki lu"}
    assert counted("prompt", prompted, completion="answer") == " ki lu<|im_end|>"
    templated = {"instruction": "ba", "input": "do", "output": "ki"}
    assert counted("prompt", templated, prompt="{instruction}\n{input}\n", completion="output") == (
        "ki<|im_end|>"
    )
    talk = [{"from": "human", "value": "ba"}, {"from": "gpt", "value": "do"}]
    names = {"messages": "talk", "role": "from", "content": "value"}
    assert counted("chat", {"talk": talk}, **names) == "do<|im_end|>"
    assert counted("chat", {"messages": CHAT}) == "ki lu<|im_end|>pe ra<|im_end|>"


def test_labels_of_texts_are_classes(tmp_path: Path, tokenizer: str) -> None:
    records = [{"text": words(9, i), "label": ["spam", "ham", "eggs"][i % 3]} for i in range(9)]
    train = write_jsonl(tmp_path / "train.jsonl", records)
    test = write_jsonl(tmp_path / "test.jsonl", records[:2])
    options = {"format": "label", "packing": False, "context": 16, "tokenizer": tokenizer}
    data = made(tmp_path, train=train, test=test, **options)
    assert data.facts["classes"] == ["eggs", "ham", "spam"]
    assert data.facts["num_classes"] == 3
    batch = data.collate_fn(rows(data.train)[:4])
    assert batch["labels"].tolist() == [2, 1, 0, 2]
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 16)
    assert [row["labels"].item() for row in rows(data.test)] == [2, 1]
    unknown = write_jsonl(tmp_path / "new.jsonl", [{"text": "ba", "label": "bacon"}])
    with pytest.raises(ConfigError, match=r"data.test=.*new.jsonl: .*'bacon'.*eggs, ham, spam"):
        made(tmp_path, train=train, test=unknown, **options)


# -- sources -------------------------------------------------------------------------------


@pytest.mark.slow  # datasets is imported
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, tokenizer: str) -> None:
    import datasets

    texts = [words(5 + n, n) for n in range(7)]
    (tmp_path / "folder").mkdir()
    plain = write_jsonl(tmp_path / "folder" / "train.jsonl", [{"text": text} for text in texts])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    (tmp_path / "paragraphs.txt").write_text("\n\n\n".join(texts) + "\n")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.md").write_text(text)
    columns = datasets.Dataset.from_dict({"text": texts})
    columns.to_parquet(tmp_path / "a.parquet")
    datasets.DatasetDict({"train": columns}).save_to_disk(tmp_path / "saved")
    names = (plain, *(f"{tmp_path}/{name}" for name in ("a.jsonl.gz", "a.parquet", "*.md")))
    cases: list[dict[str, Any]] = [
        *({"train": name} for name in names),
        {"train": f"{tmp_path}/lines.txt", "sample_by": "line"},
        {"train": f"{tmp_path}/paragraphs.txt", "sample_by": "paragraph"},
        {"train": "train", "path": f"{tmp_path}/saved"},
        {"train": [{"path": f"{tmp_path}/folder", "split": "train"}]},
    ]
    wanted = rows(made(tmp_path, tokenizer=tokenizer, **cases[0]).train)
    for case, stream in itertools.product(cases, (False, True)):
        found = rows(made(tmp_path, tokenizer=tokenizer, stream=stream, **case).train)
        for one, other in zip(found, wanted, strict=True):
            assert all(one[name].equal(other[name]) for name in other), case


def test_a_fraction_is_held_out_of_every_source(tmp_path: Path, tokenizer: str) -> None:
    paths = [texts_of(tmp_path / f"{n}.jsonl", [4] * (40 + 20 * n), n * 100) for n in (0, 1)]
    given = {"tokenizer": tokenizer, "train": paths, "packing": False}
    by_name = {"one": paths[0], "both": paths}
    data, whole = made(tmp_path, validation=0.1, **given), made(tmp_path, test=by_name, **given)
    parts = [
        Counter(str(row["input_ids"]) for row in rows(part))
        for part in (data.train, data.validation, whole.train)
    ]
    assert [part.total() for part in parts] == [90, 10, 100]
    assert parts[0] + parts[1] == parts[2]
    assert len(data.lengths) == 90
    assert whole.sizes() == {"train": 100, "test/one": 40, "test/both": 100}


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"stream": True}])
def test_samples_in_which_no_token_counts_are_left_out_and_told(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    chats = [{"messages": CHAT[:n]} for n in (2, 1, 4, 1)]
    given = {"tokenizer": tokenizer, "train": write_jsonl(tmp_path / "a.jsonl", chats), **options}
    found = rows(made(tmp_path, format="chat", context=256, **given).train)
    assert all((row["labels"] != IGNORED).any() for row in found)
    starts = sum(int((row["input_ids"] == 1).sum()) for row in found)
    assert starts == 6, "messages of two of the conversations"
    assert len(caplog.messages) == 1
    count = "" if "stream" in options else ": 2 samples are left out: none of their tokens"
    assert count in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_lacks_tokens_or_positions_is_refused_before_the_first_step(
    tmp_path: Path, tokenizer: str, stream: bool
) -> None:
    path = texts_of(tmp_path / "a.jsonl", [9] * 9)
    options = {"tokenizer": tokenizer, "stream": stream, "validation": path}
    text = made(tmp_path, train=texts_of(tmp_path / "b.jsonl", [1]), **options)
    data = Data(loops.Points(40), loops.Points(13), check_model=text.check_model)
    gpt2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 300}
    data.check_model(tiny(config={**gpt2, "n_positions": 64}))
    short, small = tiny(config={**gpt2, "n_positions": 32}), tiny(config={**LLAMA})
    with pytest.raises(ConfigError, match=r"data.context=64: the model has 32 positions"):
        loops.build(tmp_path, loops.recipe_of(), model=short, data=data)
    with pytest.raises(ConfigError, match=r"token \d+ of the data: the model has 97 tokens"):
        loops.build(tmp_path, loops.recipe_of(), model=small, data=data)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 9)), min_size=1, max_size=4))
def test_each_source_has_its_share_of_an_epoch(pairs) -> None:
    sizes, weights = zip(*pairs, strict=True)
    found = list(Mixture(sizes, weights))
    assert len(found) == sum(sizes) == len(Mixture(sizes, weights))
    ends = np.cumsum(sizes)
    for number, (size, weight) in enumerate(pairs):
        drawn = Counter(i for i in found if ends[number] - size <= i < ends[number])
        assert abs(drawn.total() - weight / sum(weights) * sum(sizes)) <= 1
        assert not drawn or len(drawn) == min(size, drawn.total())
        assert not drawn or max(drawn.values()) - min(drawn.values()) <= 1


def test_a_weighted_stream_has_its_shares_at_every_length(tmp_path: Path, tokenizer: str) -> None:
    first, second = (texts_of(tmp_path / f"{n}.jsonl", [4] * 30, n * 100) for n in (1, 2))
    train = [{"path": first, "weight": 1}, {"path": second, "weight": 3}]
    data = made(tmp_path, tokenizer=tokenizer, train=train, stream=True)
    numbers = [number for number, *_ in data.train.records()]
    for length in range(1, len(numbers)):
        assert abs(numbers[:length].count(1) - 0.75 * length) < 1
    assert numbers.count(1) > 60  # it began anew, until the other had ended, too


# -- steps of a run ------------------------------------------------------------------------

PADDED = {"packing": False, "too_long": "cut"}
STREAM = {"stream": True}
CASES: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    *(({}, {}, None), ({}, {"num_workers": 2}, None), (PADDED, {"group_by_length": True}, None)),
    *((PADDED, {"num_workers": 1}, 120), (STREAM, {}, None)),
    (PADDED | STREAM, {"num_workers": 2}, None),
]


def steps_of(folder: Path, given: dict, loader: dict, tokens: int | None, skip: int) -> list:
    """Return the texts of each optimizer step that this process sees after `skip` of them."""
    from accel.accelerator import Accelerator

    if not multiprocessing.current_process().name.startswith("MainProcess"):
        multiprocessing.set_start_method("fork", force=True)  # a worker of the pool would spawn
    recipe = recipe_of(None, loader, global_batch_size=8, micro_batch_tokens=tokens)
    accelerator = Accelerator(cpu=True, dataloader_config=recipe.dataloader)
    data = made(folder, **given)
    plan = plan_batches(recipe.trainer, accelerator.num_processes, data.num_train_samples)
    windows = TrainBatches(accelerator, data, recipe, plan).epoch(1, skip)
    return [list(itertools.chain.from_iterable(map(texts, w.micro_batches))) for w in windows]


def texts(micro: Any) -> list[str]:
    """Return the tokens of the real samples of a micro-batch; padding tokens are left out."""
    keep = slice(None) if micro.valid is None else micro.valid
    return [str([i for i in row if i]) for row in micro.batch["input_ids"][keep].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "loader", "tokens"), CASES)
def test_a_run_that_resumes_on_two_processes_sees_the_samples_of_one(
    tmp_path: Path, tokenizer: str, options: dict, loader: dict, tokens: int | None
) -> None:
    train = [
        {"path": texts_of(tmp_path / f"{n}", [2 + i % 7 for i in range(37)], n * 100), "weight": n}
        for n in (1, 2)
    ]
    given = {"tokenizer": tokenizer, "train": train, "sample_by": "line", **options}
    ordering = {name: loader[name] for name in ("group_by_length",) if name in loader}
    alone = steps_of(tmp_path, given, ordering, None, 0)
    ranks = run_distributed(steps_of, 2, tmp_path, given, loader, tokens, 1)
    assert len(alone) > 2
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(s) for s in alone[1:]]


# -- artifacts -----------------------------------------------------------------------------


def test_a_run_keeps_its_tokenizer(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = texts_of(tmp_path / "a.jsonl", [4] * 4)
    data = made(tmp_path, tokenizer=tokenizer, train=path)
    (tmp_path / "words.txt").write_text("ba do")
    run = tmp_path / "run"
    (run / "artifacts" / ".tokenizer.partial-0").mkdir(parents=True)  # of a killed one
    artifacts = {**data.artifacts, "words": tmp_path / "words.txt"}
    directory.keep_artifacts(run, artifacts)
    (tmp_path / "words.txt").write_text("other")
    directory.keep_artifacts(run, artifacts)
    assert caplog.messages == []
    other = made(tmp_path, tokenizer="bpe:280", train=path).artifacts
    directory.keep_artifacts(run, other)
    assert "differs from" in caplog.text
    assert sorted(path.name for path in (run / "artifacts").iterdir()) == ["tokenizer", "words"]
    assert (run / "artifacts" / "words").read_text() == "ba do"
    kept = load_tokenizer(str(run / "artifacts" / "tokenizer"))
    assert kept("ba do").input_ids == load_tokenizer(tokenizer)("ba do").input_ids
    lacking = Data(data.train, artifacts={"tokenizer": str(tmp_path / "no")})
    with pytest.raises(ConfigError, match=r"artifacts\['tokenizer'\]=.*no: there is no such file"):
        factory_results.check("data", "data.name=mine", lacking)


# -- mistakes ------------------------------------------------------------------------------

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"train": "{}/texst.jsonl"}, r"data.train=.*texst.jsonl: no file.*'texts.jsonl'"),
    ({"columns": {"text": "txt"}}, r"texts.jsonl:1: data.columns.text=txt: .*mean 'text'"),
    ({"columns": {"text": "{text}{none}"}}, r"texts.jsonl:1: .*: the column 'none' is null"),
    ({"columns": {"prompt": "text"}}, "columns.prompt=text: data.format=text reads the columns"),
    ({"columns": {"text": "number"}}, "does not read a int there. The columns are text, number"),
    ({"format": "chat"}, "no column 'messages'"),
    ({"train": "{}/bad.jsonl"}, r"bad.jsonl:2: each line is one JSON object.*Expecting"),
    ({"train": "{}/array.jsonl"}, r"array.jsonl:1: .*a list.*jq"),
    ({"train": "{}/empty.jsonl"}, r"data.train=.*empty.jsonl: it has no samples"),
    ({"train": "{}/latin.txt"}, "latin.txt: text files are in UTF-8"),
    ({"train": "tset", "path": "{}/saved"}, "data.train=tset of .*saved"),
    ({"context": 4096}, "data.context=4096: .* at most 512 positions. Set data.context=512"),
    ({"context": 8, "too_long": "drop"}, "none of 3 samples is left with data.context=8"),
    ({"validation": 1.5}, "data.validation=1.5: a fraction"),
    ({"format": "label"}, "data.packing=true with data.format=label"),
    ({"train": [{"path": "{}/texts.jsonl", "wieght": 2}]}, "data.train: wieght: .*'weight'"),
    ({"train": ["{}/texts.jsonl", {"path": "{}/texts.jsonl", "weight": 1}]}, "or none has"),
    ({"train": [{"path": "{}/texts.jsonl", "format": "label"}]}, "has labels, or none has"),
    ({"tokenizer": "{}/nothing"}, "tokenizer="),
    ({"format": "chat", "train": "{}/user.jsonl"}, "none of its tokens counts in the loss"),
    ({"format": "chat", "train": "{}/chat.jsonl", "context": 8}, "none of the first 8 tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_refused(tmp_path: Path, tokenizer: str, arguments, message) -> None:
    import datasets

    write_jsonl(
        tmp_path / "texts.jsonl",
        [{"text": words(8, n), "number": n, "none": None} for n in range(3)],
    )
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "array.jsonl").write_text('[{"text": "a"}]\n')
    (tmp_path / "empty.jsonl").write_text("\n\n")
    write_jsonl(tmp_path / "user.jsonl", [{"messages": CHAT[:1]}])
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": CHAT[2:]}])
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    if "saved" in str(arguments):
        saved = datasets.Dataset.from_dict({"text": ["a"]})
        datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "saved")
    limited = load_tokenizer(tokenizer)
    limited.model_max_length = 512
    limited.save_pretrained(tmp_path / "limited")
    given = {"tokenizer": f"{tmp_path}/limited", "train": f"{tmp_path}/texts.jsonl", **arguments}
    filled = json.loads(json.dumps(given).replace("{}/", f"{tmp_path}/"))
    with pytest.raises(ConfigError, match=message) as refused:
        made(tmp_path, **filled)
    assert all(problem.rule and problem.remedy for problem in refused.value.problems)
