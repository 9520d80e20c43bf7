"""What is trained: a small bytes GPT with a tied head, on the standard library's text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset

from runner.builtin.bytes_gpt import IGNORED, byte_gpt, stdlib_bytes
from tests.parity.reference import Recipe


@dataclass(frozen=True)
class Task:
    """A training run, whatever trains it.

    Args:
        num_steps: optimizer steps.
        batch_size: samples of an optimizer step, over all processes.
        context: bytes per sample.
        dim: width of the model.
        num_layers: blocks.
        ragged: whether samples have different numbers of targets that count.
        short: whether data end in the middle of a window, twice: the last step of each of two
            passes has half as many samples.
        recipe: how weights are updated.
        tied: whether the head is the embedding.
        own_loss: whether the model is given the targets, and returns the summed loss, computed in
            the format of its logits.
        llama: whether a Llama of transformers is trained, of the same sizes.
    """

    num_steps: int = 50
    batch_size: int = 8
    context: int = 32
    dim: int = 64
    num_layers: int = 2
    ragged: bool = False
    short: bool = False
    recipe: Recipe = field(default_factory=Recipe)
    tied: bool = True
    own_loss: bool = False
    llama: bool = False

    @property
    def num_passes(self) -> int:
        """How often the data are read."""
        return 2 if self.short else 1

    @property
    def num_samples(self) -> int:
        """Samples of the data set."""
        missing = self.batch_size // 2 if self.short else 0
        return self.num_steps // self.num_passes * self.batch_size - missing

    def model(self) -> torch.nn.Module:
        """Return the model: the same on every process, no weight zero, no gradient zero."""
        torch.manual_seed(0)
        if self.llama:
            return self._llama()
        model = byte_gpt(self.dim, self.num_layers, num_heads=4, expansion=4)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                std = 0.05 if "embedding" in name else 0.5 * parameter.shape[1] ** -0.5
                torch.nn.init.normal_(parameter, std=std)
        model.head.weight = model.embedding.weight
        if self.own_loss:
            model.forward = OwnLoss(model.forward)  # type: ignore[method-assign]
        if not self.tied:
            model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())
        return model

    def _llama(self) -> torch.nn.Module:
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=self.dim,
            intermediate_size=2 * self.dim,
            num_hidden_layers=self.num_layers,
            num_attention_heads=4,
            max_position_embeddings=self.context,
            initializer_range=0.05,
            tie_word_embeddings=self.tied,
        )
        model: torch.nn.Module = transformers.LlamaForCausalLM(config)
        return model

    def data(self) -> Dataset[tuple[torch.Tensor, torch.Tensor]]:
        """Return samples (bytes [T], targets [T]) spread over the text."""
        windows = text(self.context)
        stride = math.floor(len(windows) / self.num_samples)
        part = Subset(windows, [index * stride for index in range(self.num_samples)])
        return Ragged(part) if self.ragged else part

    def steps(self, device: str = "cpu") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the whole batch of each optimizer step: bytes [B, T] and targets [B, T]."""
        data = self.data()
        for _ in range(self.num_passes):
            for start in range(0, self.num_samples, self.batch_size):
                end = min(start + self.batch_size, self.num_samples)
                batch = [data[index] for index in range(start, end)]
                values, targets = (torch.stack(tensors) for tensors in zip(*batch, strict=True))
                yield values.to(device), targets.to(device)


class OwnLoss:
    """A forward pass that computes the loss, too, as transformers' models do.

    Args:
        forward: logits [B, T, V] of bytes [B, T], and their positions.
    """

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self.forward = forward

    def __call__(
        self,
        values: torch.Tensor,
        targets: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        flat = self.forward(values, position_ids).flatten(0, 1)
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Ragged(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of which only the first targets count: from one to all of them.

    Args:
        samples: (bytes [T], targets [T]).
    """

    def __init__(self, samples: Subset[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, targets = self.samples[index]
        length = 1 + index * 13 % len(targets)
        kept = torch.arange(len(targets)) < length
        return values, torch.where(kept, targets, IGNORED)


@cache
def text(context: int) -> Dataset[tuple[torch.Tensor, torch.Tensor]]:
    """Return the training text in windows of `context` bytes."""
    return stdlib_bytes(context, random_start=False).train
