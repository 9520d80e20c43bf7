"""Ranks that compute parts of the same sequences get the gradients of one process (E1, E3, E5)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accel import Accelerator
from accel.config.deepspeed import DeepSpeedPlugin
from accel.config.fsdp import FullyShardedDataParallelPlugin
from accel.config.parallelism import ParallelismConfig
from accel.machine.errors import ConfigError, StateError
from accel.strategies import context_parallel
from accel.strategies.context_parallel import IGNORED, shift_labels
from tests.helpers import run_distributed

VOCABULARY, TOKENS, WIDTH, HEADS, CHANNELS = 32, 16, 16, 4, 4
Batch = dict[str, Tensor]


class Layer(nn.Module):
    """Attention of four heads, with as many heads of keys and values as `kv`."""

    def __init__(self, kv: int) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * CHANNELS)
        self.key_value = nn.Linear(WIDTH, 2 * kv * CHANNELS)
        self.out = nn.Linear(HEADS * CHANNELS, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        query, pair = (
            projected.unflatten(-1, (-1, CHANNELS)).transpose(1, 2)
            for projected in (self.query(hidden), self.key_value(hidden))
        )
        key, value = pair.chunk(2, dim=1)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return hidden + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers with learned positions; `attention_mask` [B, S] is of whole sequences."""

    def __init__(self, kv: int = HEADS, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = recomputes
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer(kv) for _ in range(2))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
        hidden = self.embedding(input_ids) + self.positions(position_ids)
        mask = None
        if attention_mask is not None:
            size = attention_mask.shape[1]
            causal = torch.ones(size, size, dtype=torch.bool).tril()
            mask = (causal & attention_mask.bool()[:, None]) | torch.eye(size, dtype=torch.bool)
            mask = mask[:, None]
        for layer in self.layers:
            if self.recomputes:
                hidden = checkpoint(layer, hidden, mask, use_reentrant=False)
            else:
                hidden = layer(hidden, mask)
        return hidden @ self.embedding.weight.T


def batch(padded: bool = False, size: int = TOKENS) -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, size), generator=generator)
    found = {"input_ids": ids, "labels": ids.clone()}
    if padded:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][0, :5] = 0
        found["labels"][0, :6] = IGNORED
    return found


def loss_of(model: nn.Module, given: Batch) -> Tensor:
    """Return the summed cross-entropy of the next tokens."""
    inputs = {name: value for name, value in given.items() if name != "labels"}
    output = model(**inputs)
    logits = getattr(output, "logits", output).flatten(0, 1).float()
    targets = shift_labels(given["labels"]).flatten()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def largest_difference(make: Callable[[], nn.Module], given: Batch, size: int, **sizes: int) -> Any:
    """Return how far loss and gradients are from those of one process, relatively."""
    own = make()
    loss = loss_of(own, given)
    loss.backward()
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=size, **sizes))
    model = accelerator.prepare(make())
    buffers = {name: value.clone() for name, value in given.items()}
    with accelerator.maybe_context_parallel(list(buffers.values()), [1] * len(buffers)):
        assert buffers["input_ids"].shape[1] == given["input_ids"].shape[1] // size
        part = loss_of(model, buffers)
        accelerator.backward(part * accelerator.parallel_dims.grad_size)
    assert all(value.equal(given[name]) for name, value in buffers.items())
    # Ranks that read the same samples have parts of one sum.
    copies = accelerator.parallel_dims.dp_size
    found = [abs(accelerator.reduce(part.detach(), "sum").item() / copies / loss.item() - 1)]
    for mine, whole in zip(model.parameters(), own.parameters(), strict=True):
        assert mine.grad is not None
        assert whole.grad is not None
        difference = mine.grad.full_tensor() / copies - whole.grad
        found.append(float(difference.norm() / whole.grad.norm()))
    accelerator.end_training()
    return max(found)


def compare(size: int, **sizes: int) -> dict[str, float]:
    kinds = itertools.product((HEADS, 1), (False, True), (False, True))
    return {
        f"{kv=} {padded=} {again=}": largest_difference(
            lambda kv=kv, again=again: Model(kv, again), batch(padded), size, **sizes
        )
        for kv, padded, again in kinds
    }


def test_gradients_are_those_of_one_process() -> None:
    for found in run_distributed(compare, 2, 2):
        assert max(found.values()) < 1e-6, found


@pytest.mark.slow
def test_beside_other_axes_and_on_more_ranks_than_heads_of_keys() -> None:
    for found in run_distributed(_compare_on_four, 4):
        assert max(found.values()) < 1e-6, found


def _compare_on_four() -> dict[str, float]:
    return compare(4) | {f"dp {k}": v for k, v in compare(2, dp_shard_size=2).items()}


# -- transformers --------------------------------------------------------------------------


def _llama(kernel: str = "sdpa", **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        use_cache=False,
        **options,
    )
    config._attn_implementation = kernel
    return LlamaForCausalLM(config)


def _roberta() -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    return RobertaForMaskedLM(RobertaConfig(vocab_size=VOCABULARY, **sizes))


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": WIDTH, "decoder_attention_heads": HEADS, "decoder_layers": 1}
    return BartForCausalLM(BartConfig(vocab_size=VOCABULARY, **sizes))


def _compare_transformers() -> dict[str, float]:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    packed = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, -1)
    AttentionInterface.register("own", sdpa_attention_forward)
    cases = {
        "plain": (_llama, batch()),
        "another kernel": (lambda: _llama("own"), batch()),
        "padded": (_llama, batch(padded=True)),
        "packed": (_llama, {**batch(), "position_ids": packed.contiguous()}),
    }
    found = {name: largest_difference(*case, 2) for name, case in cases.items()}

    def own_loss(model: nn.Module, given: Batch) -> Tensor:
        return model(**given, num_items_in_batch=1).loss

    with pytest.raises(ConfigError, match="attn_implementation='sdpa'"):
        largest_difference(lambda: _llama("eager"), batch(), 2)
    Accelerator().end_training()
    with pytest.raises(ConfigError, match="attention over 8 of 16 tokens"):
        largest_difference(lambda: _llama(sliding_window=8), batch(), 2)
    Accelerator().end_training()
    for made, message in ((_roberta, "Give position_ids"), (_bart, "BartForCausalLM with several")):
        with pytest.raises(ConfigError, match=message):
            largest_difference(made, batch(), 2)
        Accelerator().end_training()
    with pytest.MonkeyPatch.context() as patch:  # labels that the model shifts itself
        patch.setitem(globals(), "loss_of", own_loss)
        found["own loss"] = largest_difference(_llama, batch(), 2)
    return found


@pytest.mark.slow
def test_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    for found in run_distributed(_compare_transformers, 2):
        assert max(found.values()) < 1e-6, found


# -- stages of a pipeline ------------------------------------------------------------------


def _stages_difference(schedule: str, given: Batch, recomputes: bool) -> float:
    """Return how far gradients of a window are from those of one process, relatively."""
    own = _llama().train()
    window = [given, {name: value.flip(0) for name, value in given.items()}] * 2
    for one in window:
        (loss_of(own, one) / 4).backward()
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(activation_checkpointing=recomputes),
        parallelism_config=ParallelismConfig(pp_size=2, cp_size=2, pp_schedule=schedule),
        gradient_accumulation_steps=4,
    )
    model = accelerator.prepare(_llama().train())
    losses = accelerator.forward_backward(
        model, window, lambda model, part: loss_of(model, part) * accelerator.parallel_dims.cp
    )
    expected, found = dict(own.named_parameters()), []
    for name, parameter in model.module.named_parameters():
        gradient, whole = parameter.grad.full_tensor(), expected[name].grad
        found.append(float((gradient - whole).norm() / whole.norm()))
    total = accelerator.reduce(torch.stack(losses).sum(), "mean").item()
    found.append(abs(total / sum(loss_of(own, one).item() for one in window) - 1))
    accelerator.end_training()
    return max(found)


def _compare_stages() -> dict[str, float]:
    packed = torch.cat([torch.arange(5), torch.arange(11)]).expand(2, -1).contiguous()
    cases = {
        "plain": ("1F1B", batch(), False),
        "padded": ("1F1B", batch(padded=True), False),
        "packed": ("GPipe", {**batch(), "position_ids": packed}, False),
        "recomputed": ("1F1B", batch(padded=True), True),
    }
    return {name: _stages_difference(*case) for name, case in cases.items()}


@pytest.mark.slow
def test_beside_stages_of_a_pipeline() -> None:
    pytest.importorskip("transformers")
    for found in run_distributed(_compare_stages, 4):
        assert max(found.values()) < 1e-6, found


# -- evaluation ----------------------------------------------------------------------------


def _evaluated(sizes: dict[str, int]) -> list[float]:
    """Return the losses of 7 samples, in batches of 2 on each data-parallel rank, as gathered."""
    samples = torch.randint(VOCABULARY, (7, TOKENS), generator=torch.Generator().manual_seed(2))
    accelerator = Accelerator(
        cpu=True, parallelism_config=ParallelismConfig(**sizes) if sizes else None
    )
    model, loader = accelerator.prepare(
        _llama(), torch.utils.data.DataLoader(samples, batch_size=2)
    )
    model.eval()
    found: list[float] = []
    with torch.no_grad():
        for ids in loader:
            logits = model(input_ids=ids).logits.transpose(1, 2)
            losses = F.cross_entropy(logits, shift_labels(ids), reduction="none").sum(dim=1)
            found += accelerator.gather_for_metrics(losses).tolist()
    accelerator.end_training()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["dp_shard_size", "pp_size"])
def test_every_sample_of_an_evaluation_counts_once(beside: str) -> None:
    pytest.importorskip("transformers")
    (expected,) = run_distributed(_evaluated, 1, {})
    assert len(expected) == 7
    for found in run_distributed(_evaluated, 4, {"cp_size": 2, beside: 2}):
        assert found == pytest.approx(expected, rel=1e-6)


# -- what it costs -------------------------------------------------------------------------


def _costs() -> tuple[int, int, float]:
    """Return all-to-alls of forward and backward pass, and bytes kept for the backward pass."""
    counts, exchange = [0], context_parallel._all_to_all
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))

    def counted(*args: Any) -> Tensor:
        counts[0] += 1
        return exchange(*args)

    def kept(given: Batch, model: nn.Module) -> tuple[int, Tensor]:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = loss_of(model, given)
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(storages.values()), loss

    given = {name: value.repeat(16, 1) for name, value in batch().items()}
    whole, _ = kept(given, Model())
    own, model = Model(), None
    model = accelerator.prepare(own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "_all_to_all", counted)
        with accelerator.maybe_context_parallel(list(given.values()), [1, 1]):
            size, loss = kept(given, model)
            forward = counts[0]
            accelerator.backward(loss)
    accelerator.end_training()
    return forward, counts[0] - forward, size / whole


def test_two_exchanges_of_each_attention_and_half_of_the_activations() -> None:
    for forward, backward, share in run_distributed(_costs, 2):
        assert (forward, backward) == (4, 4)  # two layers
        assert share < 0.6


# -- a recipe's batches, and what is refused -----------------------------------------------


def _trained(make: Callable[[], Accelerator]) -> dict[str, Tensor]:
    """Return the weights after a step on batches of 15 tokens, through `forward_backward`."""
    accelerator = make()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    scale = accelerator.parallel_dims.grad_size / 100
    accelerator.forward_backward(
        model, [batch(size=15)], lambda model, part: loss_of(model, part) * scale
    )
    optimizer.step()
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return {name: value.clone() for name, value in state.items()}


def _uneven() -> float:
    plain, model = batch(size=15), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (loss_of(model, plain) / 100).backward()
    optimizer.step()
    found = _trained(lambda: Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2)))
    return max(float((found[n] - v).abs().max()) for n, v in model.state_dict().items())


def test_a_micro_batch_of_odd_length_is_padded() -> None:
    assert max(run_distributed(_uneven, 2)) < 1e-7


def _under_deepspeed(stage: int) -> float:
    sizes, model = ParallelismConfig(sp_size=2), Model()
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=1e9),
        parallelism_config=sizes,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader([{k: v[0] for k, v in batch().items()}] * 4, batch_size=2)
    own, given = Model(), next(iter(loader))
    steps = torch.optim.SGD(own.parameters(), lr=0.1)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    for part in accelerator.deepspeed_ulysses_dl_adapter(prepared, model):
        assert part["input_ids"].shape == (2, TOKENS // 2)
        accelerator.backward(loss_of(model, part) * accelerator.parallel_dims.grad_size / 100)
        optimizer.step()
        optimizer.zero_grad()
        (loss_of(own, given) / 100).backward()
        steps.step()
        steps.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return max(float((state[n] - v).abs().max()) for n, v in own.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sequences_under_deepspeed(stage: int) -> None:
    assert max(run_distributed(_under_deepspeed, 2, stage)) < 1e-6


def _refusals() -> Iterator[str]:
    config = ParallelismConfig(cp_size=2)
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = accelerator.prepare(Model())
    for given, call, error in (
        (batch(size=15), lambda given: None, ConfigError),
        (batch(), lambda given: None, StateError),
        (batch(), lambda given: model(**given, attention_mask=torch.ones(2, 8)), ConfigError),
        (batch(), lambda given: accelerator.forward_backward(model, [given], loss_of), StateError),
    ):
        ids = given["input_ids"]
        with (
            pytest.raises(error) as caught,
            accelerator.maybe_context_parallel([ids], [1]),
        ):
            call({"input_ids": ids})
        yield str(caught.value)
    of_samples = {"input_ids": batch()["input_ids"], "classes": torch.zeros(2)}
    with pytest.raises(ConfigError) as caught:
        accelerator.forward_backward(model, [of_samples], lambda model, part: torch.zeros(()))
    yield str(caught.value)
    accelerator.end_training()
    for fields, options in (({"cp_backend": "ring"}, {}), ({}, {"dynamo_backend": "eager"})):
        with pytest.raises(ConfigError) as caught:
            Accelerator(
                cpu=True, parallelism_config=ParallelismConfig(cp_size=2, **fields), **options
            )
        yield str(caught.value)


def _refused() -> list[str]:
    return list(_refusals())


def test_what_it_cannot_do_is_refused() -> None:
    expected = (
        *("15 tokens.*Pad to a multiple of 2", "no attention was computed", "padding of a part"),
        *("forward_backward with divided sequences", "belongs to whole samples"),
        *("cp_backend='ring'.*on a CPU", "torch.compile"),
    )
    for found in run_distributed(_refused, 2):
        for text, pattern in zip(found, expected, strict=True):
            with pytest.raises(AssertionError, match=pattern):
                raise AssertionError(text)
