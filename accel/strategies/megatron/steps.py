"""Train steps: batches, forward pass and loss of a kind of model, as Megatron's schedules ask.

Importable without megatron-core.

Source: https://huggingface.co/docs/accelerate/usage_guides/megatron_lm
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.nn import functional as F

from accel.comm.ops import send_to_device
from accel.machine.errors import ConfigError
from accel.state import AcceleratorState
from accel.strategies.context_parallel import IGNORED, shift_labels

Batches: TypeAlias = Iterator[Mapping[str, Any]]
Function: TypeAlias = Callable[..., Any]
KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def called(function: Function, *given: object, **named: object) -> Any:
    """Call a function with the last of `given` that it takes: documented versions take fewer.

    Args:
        function: to call.
        given: positional arguments.
        named: keyword arguments.
    """
    parameters = inspect.signature(function).parameters.values()
    count = sum(one.kind in KINDS and one.name not in named for one in parameters)
    return function(*given[max(0, len(given) - count) :], **named)


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return losses averaged over the data-parallel ranks of Megatron, detached: [n].

    Args:
        losses: n tensors of one element each.
    """
    from megatron.core import parallel_state

    found = torch.stack([loss.detach().float().reshape(()) for loss in losses])
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(found, group=group)
    return found / group.size()


class AbstractTrainStep(ABC):
    """Batches, forward pass and loss of a kind of model.

    A subclass is `MegatronLMPlugin.custom_train_step_class`: it is built with the run's
    `AcceleratorState`, the arguments of the model, and `custom_train_step_kwargs`.

    Args:
        name: of the step.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Function:
        """Return a function that takes an iterator of batches, and returns a tuple of tensors.

        Args:
            accelerator: whose device batches are moved to.
            megatron_dataset_flag: whether batches are those of Megatron's data sets; else they
                are those of models of transformers.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Function:
        """Return a function that takes an iterator of batches and the model of megatron-core.

        It returns the model's output, and a function that takes it, and returns the loss [] and
        losses to log by name.
        """

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Function:
        """Return the function of the loss.

        Args:
            accelerator: the run's `AcceleratorState`.
        """

    def _set_functions(self, accelerator: Any, *of_loss: object) -> None:
        plugin: Any = AcceleratorState().megatron_lm_plugin
        self.get_batch = plugin.custom_get_batch_function or called(
            self.get_batch_func, accelerator, plugin.megatron_dataset_flag
        )
        self.loss_func = plugin.custom_loss_function or called(
            self.get_loss_func, accelerator, *of_loss
        )


class GPTTrainStep(AbstractTrainStep):
    """Batches, forward pass and loss of a decoder: Llama, Mistral and GPT-2.

    Batches of transformers have input_ids, labels (-100: none), and may have attention_mask and
    position_ids, which restart where a row holds several samples.

    Args:
        accelerator: the run's `AcceleratorState`.
        args: of the model: `sliding_window`, and fields of megatron-core's `TransformerConfig`.
    """

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__("GPTTrainStep")
        accelerator, self.args = _both(accelerator, args)
        self._set_functions(accelerator)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Function:
        """Return a function that gives tokens, labels, loss mask, attention mask and positions.

        Each is [B, T], but for the attention mask [B, 1, T, T]: true for what is hidden.

        Args:
            accelerator: whose device batches are moved to.
            megatron_dataset_flag: whether batches are those of Megatron's data sets.
        """
        keys = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

        def get_batch(data_iterator: Batches) -> tuple[torch.Tensor | None, ...]:
            batch = send_to_device(next(data_iterator), accelerator.device)
            if megatron_dataset_flag:
                return tuple(batch.get(name) for name in keys)
            check_names(batch, "input_ids", "labels", "attention_mask", "position_ids")
            labels = shift_labels(batch["labels"])
            mask, positions = attends(batch, self.args.sliding_window)
            return batch["input_ids"], labels.clamp(min=0), labels != IGNORED, mask, positions

        return get_batch

    def get_forward_step_func(self) -> Function:
        """Return the forward pass: a function of an iterator of batches and the model."""

        def forward_step(data_iterator: Batches, model: Function) -> tuple[Any, Function]:
            tokens, labels, loss_mask, mask, positions = self.get_batch(data_iterator)
            output = model(tokens, positions, mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Function:
        """Return a function of loss mask and losses of tokens [B, T]: their mean, also to log.

        Args:
            accelerator: not used.
        """
        return _mean_loss


class BertTrainStep(AbstractTrainStep):
    """Batches, forward pass and loss of an encoder: masked tokens, and the order of sentences.

    Batches of transformers have input_ids, labels (-100: none), and may have attention_mask,
    token_type_ids and next_sentence_label.

    Args:
        accelerator: the run's `AcceleratorState`.
        args: of the model: `pretraining_flag`, `bert_binary_head` and `num_labels`.
    """

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__("BertTrainStep")
        accelerator, self.args = _both(accelerator, args)
        self._set_functions(accelerator, self.args.pretraining_flag, self.args.num_labels)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Function:
        """Return a function that gives tokens, types, order, loss mask, labels and padding mask.

        Each is [B, T], but for the order of sentences [B]; None: the batch has none.

        Args:
            accelerator: whose device batches are moved to.
            megatron_dataset_flag: whether batches are those of Megatron's data sets.
        """
        keys = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")

        def get_batch(data_iterator: Batches) -> tuple[torch.Tensor | None, ...]:
            batch = send_to_device(next(data_iterator), accelerator.device)
            if megatron_dataset_flag:
                return tuple(batch[n] if n != "labels" else batch[n].clamp(min=0) for n in keys)
            further = "attention_mask", "token_type_ids", "next_sentence_label"
            check_names(batch, "input_ids", "labels", *further)
            tokens, labels = batch["input_ids"], batch["labels"]
            return (
                tokens,
                batch.get("token_type_ids", torch.zeros_like(tokens)),
                batch.get("next_sentence_label"),
                labels != IGNORED,
                labels.clamp(min=0),
                batch.get("attention_mask", torch.ones_like(tokens)),
            )

        return get_batch

    def get_forward_step_func(  # type: ignore[override]
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Function:
        """Return the forward pass: a function of an iterator of batches and the model.

        Args:
            pretraining_flag: whether the model predicts masked tokens; else it classifies.
            bert_binary_head: whether it has embeddings of token types, as one that predicts the
                order of sentences.
        """

        def forward_step(data_iterator: Batches, model: Function) -> tuple[Any, Function]:
            tokens, types, order, loss_mask, labels, padding = self.get_batch(data_iterator)
            given = {"tokentype_ids": types if bert_binary_head else None}
            if not pretraining_flag:
                return model(tokens, padding, **given), partial(self.loss_func, labels)
            output = model(tokens, padding, lm_labels=labels, **given)
            return output, partial(self.loss_func, loss_mask, order)

        return forward_step

    def get_loss_func(  # type: ignore[override]
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Function:
        """Return the function of the loss, which takes the model's output last.

        Args:
            accelerator: not used.
            pretraining_flag: whether it takes loss mask and order of sentences before; else the
                labels of a classification.
            num_labels: of the classification; 1: a regression.
        """

        def classified(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
            if num_labels == 1:
                loss = F.mse_loss(logits.float().flatten(), labels.float().flatten())
            else:
                loss = F.cross_entropy(logits.float().view(-1, num_labels), labels.flatten())
            return loss, {"loss": avg_losses_across_data_parallel_group([loss])[0]}

        def pretrained(
            loss_mask: torch.Tensor, order: torch.Tensor | None, output: tuple[Any, Any]
        ) -> tuple[torch.Tensor, Any]:
            loss, found = _mean_loss(loss_mask, output[0])
            if order is None or output[1] is None:
                return loss, found
            other = F.cross_entropy(output[1].float(), order.flatten())
            found["sop loss"] = avg_losses_across_data_parallel_group([other])[0]
            return loss + other, found

        return pretrained if pretraining_flag else classified


class T5TrainStep(AbstractTrainStep):
    """Batches, forward pass and loss of an encoder with a decoder.

    Batches of transformers have input_ids, labels (-100: none), and may have attention_mask and
    decoder_input_ids; without, these are the labels one place to the right.

    Args:
        accelerator: the run's `AcceleratorState`.
        args: of the model: `decoder_start_token_id` and `pad_token_id`.
    """

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__("T5TrainStep")
        accelerator, self.args = _both(accelerator, args)
        self._set_functions(accelerator)

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return which tokens are hidden from which: [B, 1, T, T].

        Args:
            attention_mask: [B, T], 0 for padding.
        """
        length = attention_mask.shape[1]
        return T5TrainStep.get_enc_dec_mask(attention_mask, length, attention_mask.device)

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """Return which tokens of a decoder are hidden from which, those after it: [1, 1, T, T].

        Args:
            seq_length: T.
            device: of the mask.
        """
        seen = torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool, device=device)
        return seen.triu(diagonal=1)

    @staticmethod
    def get_enc_dec_mask(
        attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device
    ) -> torch.Tensor:
        """Return which tokens of an encoder are hidden from those of a decoder: [B, 1, D, T].

        Args:
            attention_mask: [B, T], 0 for padding.
            dec_seq_length: D.
            device: of the mask.
        """
        padding = attention_mask.to(device)[:, None, None] == 0
        return padding.expand(-1, 1, dec_seq_length, -1)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Function:
        """Return a function that gives tokens of both, loss mask, labels and masks.

        The masks are those of the encoder, of the decoder, and of the encoder for the decoder.

        Args:
            accelerator: whose device batches are moved to.
            megatron_dataset_flag: whether batches are those of Megatron's data sets.
        """
        keys = ("text_enc", "text_dec", "loss_mask", "labels", "enc_mask")

        def get_batch(data_iterator: Batches) -> tuple[torch.Tensor, ...]:
            batch = send_to_device(next(data_iterator), accelerator.device)
            if megatron_dataset_flag:
                tokens, decoder, loss_mask, labels, mask = (batch[name] for name in keys)
            else:
                check_names(batch, "input_ids", "labels", "attention_mask", "decoder_input_ids")
                tokens, labels = batch["input_ids"], batch["labels"]
                decoder, loss_mask = batch.get("decoder_input_ids"), labels != IGNORED
                mask = batch.get("attention_mask", torch.ones_like(tokens))
            if decoder is None:
                decoder = labels.roll(1, dims=1)
                decoder[:, 0] = self.args.decoder_start_token_id
                decoder = decoder.masked_fill(decoder == IGNORED, self.args.pad_token_id)
            length, device = decoder.shape[1], tokens.device
            return (
                *(tokens, decoder, loss_mask, labels.clamp(min=0)),
                self.attn_mask_postprocess(mask),
                self.get_decoder_mask(length, device),
                self.get_enc_dec_mask(mask, length, device),
            )

        return get_batch

    def get_forward_step_func(self) -> Function:
        """Return the forward pass: a function of an iterator of batches and the model."""

        def forward_step(data_iterator: Batches, model: Function) -> tuple[Any, Function]:
            tokens, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            output = model(tokens, decoder, *masks, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Function:
        """Return a function of loss mask and losses of tokens [B, T]: their mean, also to log.

        Args:
            accelerator: not used.
        """
        return _mean_loss


def _both(accelerator: Any, args: Any) -> tuple[Any, Any]:
    """Return both arguments of a step; subclasses of older documented versions give one."""
    return (AcceleratorState(), accelerator) if args is None else (accelerator, args)


def _mean_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, Any]:
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum()
    return loss, {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}


def check_names(batch: Mapping[str, Any], *names: str) -> None:
    """Refuse a batch that lacks one of the first two names, or has others than are read.

    Args:
        batch: arguments of a model of transformers; None and False are as if not given.
        names: of those that are read.
    """
    given = {name for name, value in batch.items() if value is not None and value is not False}
    if missing := [name for name in names[:2] if name not in given]:
        rule, remedy = "batches are read by name", f"Give {'=…, '.join(missing)}=…."
        raise ConfigError.of(f"model(…) without {', '.join(missing)}", rule, remedy)
    if odd := sorted(given - {*names, "use_cache", "return_dict"}):
        value = f"model(…, {'=…, '.join(odd)}=…) under Megatron"
        rule = "it reads " + ", ".join(dict.fromkeys(names))
        raise ConfigError.of(value, rule, "Leave them out.")


def attends(
    batch: Mapping[str, Any], window: int | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return which tokens are hidden from which, [B, 1, T, T], and positions [B, T].

    A mask of None hides those after a token alone.

    Args:
        batch: with input_ids [B, T]; it may have attention_mask [B, T], 0 for padding, and
            position_ids [B, T], which begin at 0 for each sample of a row.
        window: tokens that a token sees, itself included; None: all before it.
    """
    tokens, padding = batch["input_ids"], batch.get("attention_mask")
    length = tokens.shape[1]
    along = torch.arange(length, device=tokens.device)
    positions = batch.get("position_ids")
    if padding is None and positions is None and (window is None or length <= window):
        return None, along.expand_as(tokens)
    distance = along[:, None] - along[None]
    seen = ((distance >= 0) & (distance < (window or length)))[None, None]
    if positions is not None:
        sample = (positions == 0).cumsum(dim=1)
        seen = seen & (sample[:, None, :, None] == sample[:, None, None])
    if padding is not None:
        seen = seen & padding[:, None, None].bool()
    # Padding at the left sees itself, since a softmax over nothing is not a number.
    hidden = ~(seen | (distance == 0)).expand(len(tokens), 1, length, length)
    return hidden, along.expand_as(tokens) if positions is None else positions
