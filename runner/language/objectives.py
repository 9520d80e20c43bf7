"""Objectives of language models: the next token, and the class of a sequence.

Shapes: B samples (rows) in the batch of one process, T tokens of a row, C classes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accel.machine.errors import ConfigError
from accel.precision.wrapping import own_module
from accel.strategies.context_parallel import shift_labels
from runner.language import generation
from runner.language.models import require_fit, token_losses
from runner.language.samples import IGNORED
from runner.training.step import Objective

# The tensors of a batch that a model gets.
INPUTS = ("input_ids", "attention_mask", "position_ids")
PREDICTIONS = ("loss", "text", "logits")
# Of what samples of a row do to each other without separation: this much is rounding.
ROUNDING = 0.01


class CausalLM(Objective):
    """Cross-entropy of the next token, weighted by the tokens that count.

    A batch maps `input_ids` and `labels` [B, T] (the token itself where it counts, -100 where not;
    not shifted), and `attention_mask` of padded or `position_ids` of packed rows. The model is one
    of `hf_causal_lm`, or one that returns logits [B, T, V].

    Args:
        predict: of `runner predict`: "loss" (of each sample, and its tokens), "text" (what the
            model writes after the prompt, beside what stands there), or "logits" [T, V].
        tokenizer: folder of the tokenizer, for "text".
        max_new_tokens: length of a text in tokens, at most.

    Raises:
        ConfigError: if there is no such prediction, or no tokenizer for it.
    """

    monitor = "loss"
    mode = "min"

    def __init__(
        self, predict: str = "loss", tokenizer: str | None = None, max_new_tokens: int = 64
    ) -> None:
        if predict not in PREDICTIONS:
            rule = f"it is one of {', '.join(PREDICTIONS)}"
            raise ConfigError.of(f"objective.predict={predict}", rule, "Choose one of them.")
        if predict == "text" and tokenizer is None:
            rule = "texts need the tokenizer"
            remedy = "Give objective.tokenizer=RUN_DIR/artifacts/tokenizer."
            raise ConfigError.of("objective.predict=text", rule, remedy)
        self._predict, self._folder, self._tokenizer = predict, tokenizer, None
        self._sampling = generation.Sampling(max_new_tokens)
        self._packs: bool | None = None
        self._fits = False

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the nats of each row, summed over its targets, and how many were the likeliest."""
        self._check(batch)
        if not self._fits:
            require_fit(model, int(batch["input_ids"].max()))
            self._fits = True
        # Within a schedule of pipeline stages, a loss calls the model once.
        if "position_ids" in batch and not self._packs and not getattr(model, "scheduled", False):
            self._packs = _separates(model, batch["input_ids"])
        nats, hits = _token_losses(model, batch, _targets(batch))
        return {"loss": nats.sum(dim=1), "token_accuracy": hits.sum(dim=1)}

    def weights(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return how many targets each row has: [B]."""
        self._check(batch)
        return (_targets(batch) != IGNORED).sum(dim=1)

    def summarize(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Return `loss` in nats per token, its `perplexity`, and `token_accuracy` in [0, 1]."""
        found = super().summarize(values)
        return {**found, "perplexity": float(torch.tensor(found["loss"]).exp())}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what is asked for; by default the mean loss of each row in nats per token [B]."""
        if self._predict == "text":
            return self._texts(model, batch)
        if self._predict == "logits":
            output = model(**_inputs(model, batch))
            return {"logits": getattr(output, "logits", output)}
        weights = self.weights(batch)
        return {"loss": self.losses(model, batch)["loss"] / weights.clamp(min=1), "tokens": weights}

    def _texts(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """Return for each row the prompt, what the model writes after it, and what stands there."""
        if "position_ids" in batch:
            rule = "a text is written for each sample, and packed rows hold several"
            raise ConfigError.of("objective.predict=text", rule, "Add data.packing=false.")
        generation.require_generate(own := own_module(model))
        if self._tokenizer is None:
            self._tokenizer = generation.tokenizer_of(Path(str(self._folder)))
        tokenizer: Any = self._tokenizer
        ends, counted = batch["attention_mask"].sum(dim=1), batch["labels"] != IGNORED
        # A sample in which no token counts is a prompt as a whole.
        starts = torch.where(counted.any(dim=1), counted.int().argmax(dim=1), ends)
        rows = list(zip(batch["input_ids"].tolist(), starts.tolist(), ends.tolist(), strict=True))
        prompts = [ids[:start] for ids, start, _ in rows]
        return {
            "prompt": tokenizer.batch_decode(prompts, skip_special_tokens=True),
            "text": list(generation.texts(model, tokenizer, prompts, self._sampling, own)),
            "target": tokenizer.batch_decode(
                [ids[start:end] for ids, start, end in rows], skip_special_tokens=True
            ),
        }

    @staticmethod
    def _check(batch: object) -> None:
        if not (isinstance(batch, Mapping) and {"input_ids", "labels"} <= set(batch)):
            rule = "a batch maps input_ids and labels to tensors [B, T]"
            remedy = "Choose data=text, jsonl, parquet or hf_dataset, or return such batches."
            raise ConfigError.of("objective=causal_lm", rule, remedy)


def _targets(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the token after each position, [B, T]; none after the last."""
    return shift_labels(batch["labels"])


def _inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    return {**inputs, "use_cache": False} if hasattr(own_module(model), "config") else inputs


def _token_losses(
    model: nn.Module, batch: Mapping[str, Tensor], targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the nats of each target, and whether it is the likeliest token: each [B, T]."""
    inputs = _inputs(model, batch)
    if getattr(own_module(model), "takes_targets", False):
        found = model(**inputs, targets=targets)
        return found["nats"], found["hits"]
    output = model(**inputs)
    values = token_losses(getattr(output, "logits", output), targets)
    return values[..., 0], values[..., 1]


@torch.no_grad()
def _separates(model: nn.Module, like: Tensor) -> bool:
    """Return whether a model keeps the samples of a packed row apart.

    The first of two samples is changed, and the second must not be affected; not more than by
    rounding, compared with a row in which positions do not restart. False: the model as it is now
    (with zero weights, say) does not look at other tokens at all, so that nothing is known.

    Raises:
        ConfigError: if it mixes them.
    """
    # An odd length, which no part of a divided sequence has.
    first, second = [0, 1, 1], [0, 1, 1, 0]
    rows = [first + second, first[::-1] + second] * 2
    positions = [[0, 1, 2, 0, 1, 2, 3]] * 2 + [list(range(7))] * 2
    ids = torch.tensor(rows, device=like.device)
    batch = {"input_ids": ids, "position_ids": torch.tensor(positions, device=like.device)}
    targets = torch.full_like(ids, IGNORED)
    targets[:, 3:] = 1
    training = model.training
    model.eval()
    nats, _ = _token_losses(model, batch, targets)
    model.train(training)
    packed, joined = (float((a - b).abs().max()) for a, b in nats.float().view(2, 2, -1))
    if packed > ROUNDING * joined:
        raise ConfigError.of(
            f"packed rows for {type(own_module(model)).__name__}",
            "the model lets a sample see those before it in its row, in spite of position_ids",
            "Set data.packing=false, or another model or model.attn_implementation.",
        )
    return joined > 0


class SequenceClassification(Objective):
    """Cross-entropy of the class of each sequence.

    A batch maps `input_ids` and `attention_mask` [B, T], and `labels` [B] int64. The model returns
    logits [B, C], as `hf_sequence_classification` does.
    """

    monitor = "accuracy"
    mode = "max"

    def losses(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the cross-entropy of each sample in nats, and whether the class is right: [B]."""
        logits, labels = self._logits(model, batch), batch["labels"]
        nats = F.cross_entropy(logits, labels, reduction="none")
        return {"loss": nats, "accuracy": (logits.argmax(dim=-1) == labels).float()}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the likeliest class [B] and the probability of each [B, C]."""
        probabilities = torch.softmax(self._logits(model, batch), dim=-1)
        return {"prediction": probabilities.argmax(dim=-1), "probabilities": probabilities}

    def metric_inputs(self, output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the probability of each class [B, C], and the labels [B]."""
        logits = getattr(output, "logits", output)
        return torch.softmax(logits.float(), dim=-1), batch["labels"]

    @staticmethod
    def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        output = model(**inputs)
        return getattr(output, "logits", output).float()
