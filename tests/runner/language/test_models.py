"""C1, E3, R1: models of transformers: cross-entropy in chunks, layouts of rows, and mistakes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F

from accel.config.training import GradientAccumulationPlugin
from accel.machine.errors import ConfigError
from runner.language import models
from runner.language.models import hf_causal_lm, hf_sequence_classification
from runner.language.objectives import CausalLM, SequenceClassification
from tests.helpers import run_distributed
from tests.runner.language import rows
from tests.runner.language.rows import LLAMA, VOCABULARY, batch_of, tiny
from tests.runner.language.tiny_runs import ENGINES

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CHANGES: list[dict[str, Any]] = [
    *({}, {"tie_word_embeddings": True}, {"model_type": "gemma2", "final_logit_softcapping": 1.0}),
    {"model_type": "granite", "logits_scaling": 2.0},
]


def nats(model: Any, batch: rows.Row) -> torch.Tensor:
    """Return the loss of each row by whole logits."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, batch["labels"][:, 1:], reduction="none").sum(dim=1)


@pytest.mark.parametrize("frozen", [False, True])  # as beside adapters
@pytest.mark.parametrize("changes", CHANGES)
def test_losses_in_chunks_are_those_of_whole_logits(
    changes: dict[str, Any], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, token_losses = [], models.token_losses
    monkeypatch.setattr(
        models,
        "token_losses",
        lambda logits, t: sizes.append(logits.numel()) or token_losses(logits, t),
    )
    model, batch = tiny(config={**LLAMA, **SPECIAL, **changes}), batch_of(rows.padded())
    model.get_output_embeddings().requires_grad_(not frozen)
    trained, factors = [w for w in model.parameters() if w.requires_grad], torch.rand(8)
    found = []
    for loss in (CausalLM().losses(model, batch)["loss"], nats(model, batch)):
        model.zero_grad()
        (loss * factors).sum().backward()
        found.append([loss.detach(), *(weight.grad.clone() for weight in trained)])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-6 * other.abs().max()
    assert model.changes_logits is ("logits_scaling" in changes)
    assert model.changes_logits or max(sizes) == 7 * VOCABULARY
    twice = 1 if frozen else 2  # the backward pass computes those of a trained embedding again
    assert model.changes_logits or sum(sizes) == twice * batch["labels"].numel() * VOCABULARY


def with_lora(model: Any) -> Any:
    """Return a model with adapters whose weights are all drawn, so that they matter from step 1."""
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("wrap", [lambda model: model, with_lora], ids=["whole", "lora"])
@pytest.mark.parametrize("layout", [rows.padded, rows.samples])
def test_packed_rows_train_as_others(
    layout: Any, wrap: Any, checkpointing: bool, tmp_path: Path
) -> None:
    expected = rows.train(str(tmp_path / "packed"), rows.packed, wrap(tiny()))
    accumulation = GradientAccumulationPlugin(num_steps=len(rows.LENGTHS))
    model = wrap(tiny(gradient_checkpointing=checkpointing))
    changes = {"trainer__accumulation": accumulation, "trainer__eval_batch_size": 1}
    found = rows.train(str(tmp_path / "other"), layout, model, **changes)
    assert found == pytest.approx(expected, rel=1e-6)
    assert 1 <= found[-2] == pytest.approx(torch.tensor(found[-1]).log().item(), rel=1e-6)


def test_kernels_of_one_row_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, model, batch = [], tiny(), batch_of(rows.packed())
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    expected = CausalLM().losses(model, batch)["loss"]
    monkeypatch.setattr(models, "ONE_ROW", "sdpa")
    torch.testing.assert_close(CausalLM().losses(model, batch)["loss"], expected)
    assert shapes[-1] == (1, batch["labels"].numel())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_train_as_one(engine: str, tmp_path: Path) -> None:
    expected = rows.train(str(tmp_path / "one"), rows.packed)
    train = functools.partial(rows.train, **ENGINES[engine])
    found = run_distributed(train, 2, str(tmp_path / "two"), rows.packed)
    assert found[0] == pytest.approx(expected, rel=1e-6)


def test_packed_rows_are_refused_where_the_model_mixes_samples() -> None:
    config = {name: LLAMA[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    model = tiny(config={**config, **SPECIAL, "model_type": "falcon", "num_attention_heads": 4})
    with pytest.raises(ConfigError, match=r"packed rows for Falcon.*Set data\.packing=false"):
        CausalLM().losses(model, batch_of(rows.packed()))
    assert model.training
    CausalLM().losses(model, batch_of(rows.padded()))


def test_a_folder_gives_the_weights_that_were_saved(tmp_path: Path) -> None:
    saved = tiny()
    saved.save_pretrained(tmp_path)
    model: Any = hf_causal_lm(path=str(tmp_path), attn_implementation="eager", dtype="bfloat16")
    assert (saved.base_path, model.base_path) == (None, tmp_path.resolve())
    assert model.config._attn_implementation == "eager"
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value.bfloat16())
    with pytest.raises(ConfigError, match=r"load_in_4bits=True.*Did you mean 'load_in_4bit'"):
        hf_causal_lm(path=str(tmp_path), quantization={"load_in_4bits": True})


def test_a_classifier_learns() -> None:
    torch.manual_seed(3)
    model = hf_sequence_classification(config={**LLAMA, **SPECIAL}, num_labels=3)
    objective, batch = SequenceClassification(), batch_of(rows.padded())
    batch["labels"] = torch.arange(len(rows.LENGTHS)) % 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        objective.losses(model, batch)["loss"].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert objective.summarize(objective.evaluate(model, batch))["accuracy"] == 1
    predicted = objective.predict(model, batch)
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    found = objective.metric_inputs(output, batch)
    torch.testing.assert_close(found, (predicted["probabilities"], predicted["prediction"]))


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({}, r"neither model\.path nor model\.config.*Give one of"),
    "both": ({"path": "x", "config": LLAMA}, r"model\.path and \.config.*Give one of"),
    "type": ({"config": {"model_type": "lama"}}, r"model_type=lama.*Did you mean 'llama'"),
    "kind": ({"config": {"model_type": "t5"}}, r"model_type=t5: .* causal lm of that type"),
    "encoder": ({"config": {"model_type": "bert"}}, r"model_type=bert .*is_decoder=true"),
    "field": ({"config": {**LLAMA, "hiden_size": 2}}, r"hiden_size=2.*Did you mean 'hidden_size'"),
    "value": ({"config": {**LLAMA, "hidden_size": "a"}}, r"Field 'hidden_size' expected int"),
    "dtype": ({"config": LLAMA, "dtype": "bf17"}, r"dtype='bf17'"),
    "path": ({"path": "/not/there"}, r"model\.path=/not/there: no folder .*save_pretrained"),
    "empty": ({"path": str(Path(__file__).parent)}, r"the folder has no model that transformers"),
    "new": ({"config": LLAMA, "quantization": {"load_in_4bit": True}}, r"Give model\.path"),
    "kernel": ({"config": LLAMA, "attn_implementation": "fast"}, r"implementation=fast: .*sdpa"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: str) -> None:
    arguments, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=message):
        hf_causal_lm(**arguments)


def test_the_missing_package_and_other_batches_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"objective=causal_lm: a batch maps input_ids"):
        CausalLM().weights((torch.zeros(1), torch.zeros(1)))  # type: ignore[arg-type]
    ids = torch.tensor([[1, VOCABULARY]])
    with pytest.raises(ConfigError, match=f"token {VOCABULARY} of the data: the model has"):
        CausalLM().losses(tiny(), {"input_ids": ids, "labels": ids})
    monkeypatch.setattr(models, "is_available", lambda package: False)
    with pytest.raises(ConfigError, match=r"pip install 'accel-runner\[hf\]'"):
        tiny()
