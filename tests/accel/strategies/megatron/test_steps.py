"""Train steps of GPT, BERT and T5: one process trains as several do (R1, E1)."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from accel.machine.errors import ConfigError
from accel.utils import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    MegatronLMDummyDataLoader,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
)
from tests.accel.strategies.megatron.training import (
    LENGTH,
    TOKENS,
    build_model,
    data,
    started,
    train,
)
from tests.helpers import run_distributed

pytestmark = pytest.mark.slow
TP: dict[str, Any] = {"tp_degree": 2}
PP: dict[str, Any] = {"pp_degree": 2}


def built(kind: str) -> torch.nn.Module:
    import transformers

    if kind == "gpt2":
        return build_model("gpt2")
    torch.manual_seed(0)
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
        config = transformers.T5Config(
            vocab_size=TOKENS, dropout_rate=0.0, decoder_start_token_id=0, **sizes
        )
        return transformers.T5ForConditionalGeneration(config)
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.MegatronBertConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        **drops,
    )
    name = "MegatronBertForPreTraining" if kind == "bert" else "MegatronBertForMaskedLM"
    return getattr(transformers, name)(config)


def batch_of(kind: str, tokens: torch.Tensor, padded: bool = False) -> dict[str, torch.Tensor]:
    """Return a batch of a kind of model; all but GPT's have padding."""
    labels = tokens.clone()
    if kind == "gpt2":
        return {"input_ids": tokens, "labels": labels}
    labels[:, ::3] = -100
    mask = torch.ones_like(tokens)
    mask[::2, -4:] = 0
    batch = {"input_ids": tokens.flip(1), "attention_mask": mask, "labels": labels}
    if kind == "bert":
        order = tokens[:, 0] % 2
        return {**batch, "token_type_ids": (tokens > 9).long(), "next_sentence_label": order}
    return batch


def trained(
    kind: str,
    fields: dict[str, Any],
    data_rank: int | None = None,
    source: str | None = None,
    target: str | None = None,
) -> list[float]:
    with started(fields) as accelerator:
        torch.manual_seed(3)
        model = built(kind)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
        if source is not None:
            accelerator.load_state(source)
        build, steps = partial(batch_of, kind), data(1).expand(3, -1, -1, -1)
        losses, _ = train(accelerator, model, optimizer, steps, False, data_rank, build)
        if target is not None:
            accelerator.save_state(target)
        assert losses[-1] < losses[0]
        return losses


@pytest.mark.parametrize("kind", ["gpt2", "bert", "masked", "t5"])
def test_each_kind_trains_as_in_one_process(kind: str) -> None:
    expected = run_distributed(trained, 1, kind, {})[0]
    for fields in (TP, {"use_distributed_optimizer": True}):
        for found in run_distributed(trained, 2, kind, fields):
            assert found == pytest.approx(expected, rel=1e-5)
    wrong = run_distributed(trained, 2, kind, {}, 0)[0]
    assert wrong != pytest.approx(expected, rel=1e-4)


def test_bert_goes_on_over_stages(tmp_path: Any) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_distributed(trained, 1, "bert", {}, None, None, first)
    expected = run_distributed(trained, 1, "bert", {}, None, first)[0]
    for found in run_distributed(trained, 2, "bert", PP, None, first, second):
        assert found == pytest.approx(expected, rel=1e-5)
    run_distributed(trained, 2, "bert", TP, None, second)


class Weighted(GPTTrainStep):
    """The documented example: a loss of samples, weighted by tokens that they have."""

    def __init__(self, megatron_args: Any, **kwargs: Any) -> None:
        super().__init__(megatron_args)
        self.kwargs = kwargs

    def get_loss_func(self) -> Any:  # type: ignore[override]
        def loss_func(inputs: Any, loss_mask: Any, output_tensor: Any) -> Any:
            of_samples = (output_tensor * loss_mask).sum(1) / loss_mask.sum(1)
            weights = 1 + self.kwargs["alpha"] * (inputs == self.kwargs["token"]).sum(1)
            loss = (of_samples * weights).mean()
            return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}

        return loss_func

    def get_forward_step_func(self) -> Any:
        def forward_step(data_iterator: Any, model: Any) -> Any:
            tokens, labels, loss_mask, mask, positions = self.get_batch(data_iterator)
            output = model(tokens, positions, mask, labels=labels)
            return output, partial(self.loss_func, tokens, loss_mask)

        return forward_step


def twice(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
    loss = 2 * (losses * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": loss.detach(), "accuracy": torch.tensor(1.0)}


def first_two(data_iterator: Any) -> Any:
    tokens = next(data_iterator)["input_ids"][:2]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return tokens[:, :-1], tokens[:, 1:], torch.ones_like(tokens[:, 1:]), None, positions[:, :-1]


def own_loss(fields: dict[str, Any], later: dict[str, Any]) -> float:
    with started(fields) as accelerator:
        plugin: Any = accelerator.state.megatron_lm_plugin
        for name, value in later.items():  # as documented: before `prepare`
            setattr(plugin, name, value)
        given = built("gpt2")
        model = accelerator.prepare_model(given)
        with pytest.raises(ConfigError, match="Call the prepared model"):
            given.generate(torch.zeros(1, 2, dtype=torch.long), max_new_tokens=1)  # type: ignore
        dims, tokens = accelerator.parallel_dims, data()[0, 0]
        with pytest.raises(ConfigError, match="of labels alone"):
            model(input_ids=tokens, targets=tokens)
        batch = batch_of("gpt2", tokens.chunk(dims.dp_size)[dims.dp_rank])
        if "megatron_dataset_flag" in fields:
            positions = torch.arange(LENGTH).expand_as(tokens)
            mask = torch.ones_like(tokens)
            mask[:, -1] = 0
            batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": mask}
            batch["position_ids"] = positions
        if "custom_get_batch_function" in fields:
            batch["mine"] = tokens  # which may read any name
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach())


def test_a_step_of_ones_own_computes_the_loss() -> None:
    model, tokens = built("gpt2"), data()[0, 0]
    with torch.no_grad():
        logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    nats = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
    of_samples = nats.view(len(tokens), -1).mean(1)
    expected = float((of_samples * (1 + 0.5 * (tokens == 7).sum(1))).mean())
    own = {
        "custom_train_step_class": Weighted,
        "custom_train_step_kwargs": {"alpha": 0.5, "token": 7},
    }
    assert run_distributed(own_loss, 2, own, {}) == pytest.approx([expected] * 2)  # averaged
    fields: dict[str, Any] = {"megatron_dataset_flag": True}
    assert run_distributed(own_loss, 1, fields, own) == pytest.approx([expected])
    fields = {"custom_loss_function": twice, "custom_get_batch_function": first_two}
    halved = 2 * float(of_samples[:2].mean())
    assert run_distributed(own_loss, 1, fields, {}) == pytest.approx([halved])


META, HERE = (SimpleNamespace(device=torch.device(kind)) for kind in ("meta", "cpu"))


def check_functions(kind: str) -> None:
    """A step of `kind` reads both kinds of batches, calls the model, and computes the loss."""
    tokens = torch.arange(10).view(2, 5)
    labels = tokens.clone()
    labels[:, 0] = -100
    calls: list[Any] = []

    def model(*given: Any, **named: Any) -> Any:
        calls.append((given, named))
        losses = torch.ones(2, 5)
        return (losses, torch.tensor([[0.0, 0.0]] * 2)) if kind == "bert" else losses

    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    with started({}):
        if kind == "gpt2":
            args = SimpleNamespace(sliding_window=3)
            step: AbstractTrainStep = GPTTrainStep(HERE, args)
            found = step.get_batch_func(HERE, False)(iter([batch]))
            assert found[2].sum() == 8  # those of the next token, of which the last has none
            assert found[3][0, 0, 4].tolist() == [True, True, False, False, False]
            keys = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
            expected = 1.0
        elif kind == "bert":
            args = SimpleNamespace(pretraining_flag=True, num_labels=3, bert_binary_head=True)
            step = BertTrainStep(HERE, args)
            batch["next_sentence_label"] = torch.tensor([0, 1])
            found = step.get_batch_func(HERE, False)(iter([batch]))
            assert found[3].sum() == 8
            keys = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
            expected = 1 + math.log(2)
        else:
            args = SimpleNamespace(decoder_start_token_id=7, pad_token_id=8)
            step = T5TrainStep(HERE, args)
            batch["attention_mask"] = (tokens < 8).long()
            found = step.get_batch_func(HERE, False)(iter([batch]))
            assert found[1].tolist() == [[7, 8, 1, 2, 3], [7, 8, 6, 7, 8]]
            assert found[4][1, 0, 0].tolist() == [False] * 3 + [True] * 2
            keys = ("text_enc", "text_dec", "loss_mask", "labels", "enc_mask")
            expected = 1.0
        assert step.name == type(step).__name__
        odd = {"gpt2": "token_type_ids", "bert": "position_ids"}.get(kind, "decoder_attention_mask")
        with pytest.raises(ConfigError, match=f"{odd}=.* it reads input_ids, labels"):
            step.get_batch_func(HERE, False)(iter([{**batch, odd: tokens, "use_cache": True}]))
        kind_of = type(step)
        assert kind_of(META, args).get_batch(iter([batch]))[0].is_meta  # type: ignore
        assert step.get_batch_func(META, False)(iter([batch]))[0].is_meta
        given = {name: tokens + index for index, name in enumerate(keys)}
        read = step.get_batch_func(HERE, True)(iter([given]))
        assert [int(one[0, 0]) for one in read[: len(keys)] if one.dim() == 2][:3] == [0, 1, 2]
        flags = (True, True) if kind == "bert" else ()
        output, loss_func = step.get_forward_step_func(*flags)(iter([batch]), model)
        loss, logged = loss_func(output)
        assert len(calls) == 1
        assert float(loss) == pytest.approx(expected)
        assert float(sum(logged.values())) == pytest.approx(expected)
        if kind == "bert":
            assert calls[0][1]["tokentype_ids"].shape == tokens.shape
            check_classification(step, model, batch, calls)


def check_classification(step: Any, model: Any, batch: Any, calls: list[Any]) -> None:
    forward = step.get_forward_step_func(False, False)
    forward(iter([{**batch, "labels": torch.tensor([[0], [1]])}]), model)
    assert calls[-1][1] == {"tokentype_ids": None}
    classified = step.get_loss_func(HERE, False, 3)
    loss, _ = classified(torch.tensor([0, 2]), torch.zeros(2, 3))
    assert float(loss) == pytest.approx(math.log(3))
    loss, _ = step.get_loss_func(HERE, False, 1)(torch.tensor([0, 2]), torch.zeros(2, 1))
    assert float(loss) == 2


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_functions_of_a_step(kind: str) -> None:
    run_distributed(check_functions, 1, kind)


def test_masks_of_t5_hide_padding_and_what_comes_after() -> None:
    attention = torch.tensor([[1, 1, 0]])
    assert T5TrainStep.attn_mask_postprocess(attention).tolist() == [[[[False, False, True]] * 3]]
    causal = T5TrainStep.get_decoder_mask(3, torch.device("cpu"))
    assert causal[0, 0].tolist() == [[False, True, True], [False, False, True], [False] * 3]
    assert T5TrainStep.get_decoder_mask(2, torch.device("meta")).is_meta
    crossed = T5TrainStep.get_enc_dec_mask(attention, 2, torch.device("cpu"))
    assert crossed.tolist() == [[[[False, False, True]] * 2]]
    assert T5TrainStep.get_enc_dec_mask(attention, 2, torch.device("meta")).is_meta


class Empty(AbstractTrainStep):
    """A step without functions."""

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any: ...

    def get_forward_step_func(self) -> Any: ...

    def get_loss_func(self, accelerator: Any) -> Any: ...


def test_a_step_has_a_name_and_three_functions() -> None:
    assert Empty("mine").name == "mine"
    with pytest.raises(TypeError, match="abstract"):
        AbstractTrainStep("mine")  # type: ignore[abstract]


def averaged() -> tuple[int, list[float]]:
    with started({}) as accelerator:
        rank = accelerator.process_index
        losses = [torch.tensor(float(rank), requires_grad=True), torch.tensor([3.0])]
        found = avg_losses_across_data_parallel_group(losses)
        return found.requires_grad, found.tolist()


def test_losses_are_averaged_over_data_parallel_ranks() -> None:
    assert run_distributed(averaged, 2) == [(False, [0.5, 3.0])] * 2


def check_refusals() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("t5", PP, "encoder and decoder on each stage"),
        ("bert", {**TP, "sequence_parallelism": True}, "the norms of its heads"),
    ]
    for kind, fields, words in cases:
        with started(fields) as accelerator:
            with pytest.raises(ConfigError, match=words):
                accelerator.prepare(built(kind))
    with started(TP) as accelerator:
        model = built("gpt2")
        model.config.num_attention_heads = model.config.n_head = 3
        with pytest.raises(ConfigError, match="3 attention heads with tp_degree=2"):
            accelerator.prepare(model)
        model = built("masked")
        dummy = MegatronLMDummyDataLoader(data_path="x")
        with pytest.raises(ConfigError, match="the data sets of GPT here"):
            accelerator.prepare(model, dummy)
        groups = [{"params": [one]} for one in model.parameters()]
        with pytest.raises(ConfigError, match="Give one group, or two"):
            accelerator.prepare(model, torch.optim.AdamW(groups))


def test_what_cannot_be_built_is_refused() -> None:
    run_distributed(check_refusals, 2)
