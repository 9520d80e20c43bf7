"""C1, R5: what transformers loads of an export is the model of the run, under any strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import runner
from accel.checkpoint.load import read_model
from runner import cli
from runner.language.tokenizer import CHATML
from tests.runner import loops
from tests.runner.language import rows, texts, tiny_runs
from tests.runner.trained_runs import make_run

IDS = torch.arange(3, 13)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero3"])
def test_transformers_loads_the_model_of_the_run(engine: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = texts.save_tokenizer(tmp_path / "tokenizer")
    recipe = tiny_runs.recipe_of(tmp_path, tokenizer, engine)
    run_dir = tiny_runs.trained(tmp_path / "run", recipe, 2)
    assert cli.main(["export", str(run_dir), "--format", "hf"]) == 0
    out = run_dir / "export"
    exported, own = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert exported.dtype == torch.float32
    model, _ = runner.load(run_dir)
    assert torch.equal(logits(exported), logits(model))
    stored = read_model(loops.newest(run_dir), 0)
    assert stored.keys() == exported.state_dict().keys()
    assert all(torch.equal(value, stored[n]) for n, value in exported.state_dict().items())
    assert own.chat_template == CHATML
    assert exported.generation_config.eos_token_id == own.eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["all-linear", "q_proj lm_head", "q_proj embed_tokens"])
def test_adapters_are_exported_alone_or_merged(
    modules: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer, base = texts.save_tokenizer(tmp_path / "tokenizer"), tmp_path / "base"
    tied = modules != "all-linear"
    rows.tiny(config={**tiny_runs.LLAMA, "tie_word_embeddings": tied}).save_pretrained(base)
    lora = {**tiny_runs.LORA, "target_modules": modules.split() if tied else modules}
    monkeypatch.chdir(tmp_path)
    nodes = {"model": {"name": "hf_causal_lm", "path": "base"}, "peft": lora}
    recipe = tiny_runs.recipe_of(tmp_path, tokenizer, **nodes)
    run_dir = tiny_runs.trained(tmp_path / "run", recipe)
    expected = logits(runner.load(run_dir)[0])
    for flags, difference in (("--merge", 1e-6), (None, 0)):
        out = tmp_path / f"out{flags}"
        line = ["export", str(run_dir), "--format", "hf", "--out", str(out)]
        assert cli.main([*line, *([flags] if flags else [])]) == 0
        monkeypatch.chdir(out)  # the base is found from anywhere
        found = logits(AutoModelForCausalLM.from_pretrained(out))
        assert (found - expected).abs().max() <= difference * expected.abs().max()
        assert (out / "adapter_model.safetensors").exists() == (not flags)
        monkeypatch.chdir(tmp_path)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-3

    recipe = tiny_runs.recipe_of(tmp_path, tokenizer, peft=lora)
    capsys.readouterr()
    assert cli.main(["export", str(tiny_runs.trained(tmp_path / "new", recipe)), *line[2:4]]) == 2
    assert "their base was not read from files. Add --merge." in capsys.readouterr().err


@pytest.mark.slow
def test_a_classifier_is_exported_with_the_names_of_its_classes(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    tokenizer = texts.save_tokenizer(tmp_path / "tokenizer")
    records = [{"text": texts.words(9, i), "label": ["spam", "ham"][i % 2]} for i in range(16)]
    file = texts.write_jsonl(tmp_path / "labels.jsonl", records)
    data = {"name": "jsonl", "format": "label", "packing": False, "tokenizer": tokenizer}
    data |= {"train": file, "validation": file, "context": 32, "cache_dir": str(tmp_path / "c")}
    model = {"name": "hf_sequence_classification", "config": tiny_runs.CONFIG, "pad_token_id": 0}
    nodes = {"data": data, "model": model, "objective": {"name": "sequence_classification"}}
    run_dir = tiny_runs.trained(tmp_path / "run", tiny_runs.recipe_of(tmp_path, tokenizer, **nodes))
    assert cli.main(["export", str(run_dir), "--format", "hf"]) == 0
    exported = AutoModelForSequenceClassification.from_pretrained(run_dir / "export")
    assert exported.config.id2label == {0: "ham", 1: "spam"}
    assert exported.config.label2id == {"ham": 0, "spam": 1}


@pytest.mark.slow
def test_any_model_is_exported_as_safetensors_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "runs", checkpoints=2, best=0)
    line = ["export", str(run_dir), "--format"]
    for flags, message in (
        (["hf"], "--format hf: CNN is no model of transformers. Give --format safetensors."),
        (["safetensors", "--merge"], "--merge: the model has no adapters to merge. Leave it out."),
    ):
        assert cli.main([*line, *flags]) == 2
        assert message in capsys.readouterr().err
        assert not list(run_dir.glob("*export*")), "what is refused leaves nothing behind"
    out = tmp_path / "out"
    for checkpoint in ("best", "last"):
        (out / checkpoint).mkdir(parents=True)  # an empty folder is taken
        flags = ["safetensors", "--checkpoint", checkpoint, "--out", str(out / checkpoint)]
        assert cli.main([*line, *flags]) == 0
        found = load_file(out / checkpoint / "model.safetensors")
        number = {"best": 0, "last": 1}[checkpoint]
        stored = read_model(run_dir / "checkpoints" / f"checkpoint_{number}", 0)
        assert found.keys() == stored.keys()
        assert all(torch.equal(value, stored[name]) for name, value in found.items())
        assert os.listdir(out / checkpoint) == ["model.safetensors"]
    assert cli.main([*line, *flags]) == 2
    assert "it exists and is not empty: nothing is overwritten" in capsys.readouterr().err
