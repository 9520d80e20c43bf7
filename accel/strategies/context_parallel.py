"""Context parallelism: each rank of the cp axis computes a part of every sequence.

Everything but attention works on single tokens, or on their parts. Around each attention, ranks
exchange parts of sequences for heads (Ulysses): every rank then attends over whole sequences with
its share of the heads, through the kernel that the model chose, with any mask.

Shapes: B samples, S tokens of a sequence, R ranks of the cp axis, H heads, D channels of a head.

Source: https://arxiv.org/abs/2309.14509 (Ulysses),
https://docs.pytorch.org/tutorials/unstable/context_parallel.html (ring)
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from accel.machine.errors import ConfigError, StateError
from accel.machine.tree import iterate, recursively_apply

IGNORED = -100  # a label that no loss counts
POSITIONS = "position_ids"
Ring = Callable[..., AbstractContextManager[None]]


@dataclass
class _Sequences:
    """The tensors whose sequences are divided at present.

    Attributes:
        size: tokens of a sequence on this rank, S / R.
        whole: what each divided tensor was, by its id.
        num_exchanged: attentions that were computed over whole sequences.
    """

    rank: int
    size: int
    whole: dict[int, Tensor] = field(default_factory=dict)
    num_exchanged: int = 0

    def part(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a tensor along its sequence dim."""
        return tensor.narrow(dim, self.rank * self.size, self.size).contiguous()


_active: list[_Sequences] = []


class ContextParallel:
    """Divides sequences over the ranks of a mesh, and computes attention across them.

    Args:
        mesh: 1-D, the cp axis.
        ring: returns the context of another mechanism, from the mesh, buffers, their dims, and
            those that need not be restored; None: Ulysses.

    Attributes:
        may_lack_attention: whether this rank may compute none, as a stage of a pipeline.
    """

    def __init__(self, mesh: DeviceMesh, ring: Ring | None = None) -> None:
        self.mesh, self._ring, self.may_lack_attention = mesh, ring, False
        self.size, self.rank = mesh.size(), mesh.get_local_rank()

    @contextlib.contextmanager
    def divided(
        self,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        no_restore: Collection[Tensor] = (),
    ) -> Iterator[None]:
        """Divide `buffers` in place along their sequence dims, and exchange heads meanwhile.

        Raises:
            ConfigError: if there is no buffer, or a sequence cannot be divided evenly.
            StateError: if no attention was computed across the ranks.
        """
        found = self._sequences(buffers, dims)
        if self._ring is not None:
            with self._ring(self.mesh, buffers, dims, no_restore):
                yield
            return
        kept = {id(tensor) for tensor in no_restore}
        before = [None if id(tensor) in kept else tensor.data for tensor in buffers]
        for tensor, dim in zip(buffers, dims, strict=True):
            found.whole[id(tensor)] = tensor.data
            tensor.data = found.part(tensor.data, dim)
        try:
            with self._exchanging(found):
                yield
        finally:
            for tensor, whole in zip(buffers, before, strict=True):
                if whole is not None:
                    tensor.data = whole
        if not (found.num_exchanged or self.may_lack_attention):
            raise StateError(
                "Context parallelism: no attention was computed in the context by "
                "torch.nn.functional.scaled_dot_product_attention or a kernel of transformers, so "
                "that no token saw those of other ranks. Load the model with "
                "attn_implementation='sdpa', and run its forward pass inside the context."
            )

    @contextlib.contextmanager
    def micro_batches(self, batches: Sequence[Any]) -> Iterator[list[Any]]:
        """Give this rank's part of micro-batches: of their tensors [B, S, ...], by the first's S.

        A mapping is padded where S is no multiple of the ranks: labels with -100, else with zeros.
        Of a dataclass, the first field is the batch.

        Raises:
            ConfigError: under a ring, whose parts of a sequence are not in its order.
            StateError: if sequences are divided already.
        """
        if self._ring is not None:
            rule = "torch's ring divides sequences by itself, with the buffers that it is given"
            remedy = "Train in maybe_context_parallel(buffers=[…]), or leave cp_backend out."
            raise ConfigError.of("cp_backend='ring' with batches divided here", rule, remedy)
        if _active:
            rule = "it divides sequences by itself"
            remedy = "Call it outside of maybe_context_parallel."
            raise StateError.of("forward_backward with divided sequences", rule, remedy)
        buffers: list[Tensor] = []
        parts = [self._own(batch, buffers) for batch in batches]
        with self.divided(buffers, [1] * len(buffers), no_restore=buffers):
            yield parts

    def _own(self, batch: Any, buffers: list[Tensor]) -> Any:
        """Return a batch of tensors that are added to those to be divided."""
        if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            name = dataclasses.fields(batch)[0].name
            return dataclasses.replace(batch, **{name: self._own(getattr(batch, name), buffers)})
        size = next((tensor.shape[1] for tensor in iterate(batch) if tensor.ndim > 1), 0)
        if isinstance(batch, Mapping) and "input_ids" in batch:
            size = batch["input_ids"].shape[1]
            batch, size = self._padded(dict(batch), size)

        def own(tensor: Tensor) -> Tensor:
            if tensor.ndim and tensor.shape[1:2] != (size,):
                value = f"a tensor {tuple(tensor.shape)} beside sequences of {size} tokens"
                rule = "what belongs to whole samples, as a class, cannot be computed from a part"
                raise ConfigError.of(value, rule, "Leave cp_size out.")
            if tensor.ndim:
                tensor = tensor.detach().view_as(tensor)  # the caller's stays as it is
                buffers.append(tensor)
            return tensor

        return recursively_apply(own, batch)

    def loader(self, loader: Any) -> DividedLoader:
        """Return a loader of this rank's parts, each divided until the next one is asked for."""
        return DividedLoader(self, loader)

    def _padded(self, batch: dict[str, Any], size: int) -> tuple[dict[str, Any], int]:
        fill = -size % self.size
        if not fill:
            return batch, size
        if not {"attention_mask", POSITIONS} & set(batch):
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == size:
                padding = (0, 0) * (value.ndim - 2) + (0, fill)
                batch[name] = F.pad(value, padding, value=IGNORED if "labels" in name else 0)
        return batch, size + fill

    def _sequences(self, buffers: Sequence[Tensor], dims: Sequence[int]) -> _Sequences:
        where = f"maybe_context_parallel with cp_size={self.size}"
        lengths = {tensor.shape[dim] for tensor, dim in zip(buffers, dims, strict=True)}
        if len(lengths) != 1:
            rule = "buffers are the tensors of a step, of the same sequences"
            remedy = "Give those with a sequence dim: buffers=[…], buffer_seq_dims=[…]."
            raise ConfigError.of(f"{where}: sequences of {sorted(lengths)} tokens", rule, remedy)
        (length,) = lengths
        if length % self.size:
            rule = "each rank computes as many tokens"
            remedy = f"Pad to a multiple of {self.size}."
            raise ConfigError.of(f"{where}: sequences of {length} tokens", rule, remedy)
        return _Sequences(self.rank, length // self.size)

    # -- inputs of models ------------------------------------------------------------------

    def follow(self, model: torch.nn.Module) -> None:
        """Give forward passes of `model` on parts of sequences their positions and whole masks.

        The first module that takes `position_ids` gets them: an adapter's wrapper hands them on.

        Raises:
            ConfigError: for attention of transformers that is not exchanged, and for its models
                that count positions by themselves.
        """
        signatures = {module: inspect.signature(module.forward) for module in model.modules()}
        takes = (m for m in model.modules() if POSITIONS in signatures[m].parameters)
        target = next((m for m in takes if not isinstance(m, torch.nn.Embedding)), model)
        signature, named = signatures[target], signatures[target].parameters
        causal = any(getattr(module, "is_causal", False) for module in target.modules())
        config = getattr(target, "config", None)
        kernel = getattr(config, "_attn_implementation", None)
        if kernel == "eager":
            rule = "it computes attention in lines of the model, over this rank's part alone"
            remedy = "Load the model with attn_implementation='sdpa', or another model."
            raise ConfigError.of("attention 'eager' with several ranks of cp", rule, remedy)
        if kernel is not None and POSITIONS not in named:
            rule = "it counts positions from the first token that a rank computes"
            remedy = f"Train a model whose forward takes {POSITIONS}."
            raise ConfigError.of(f"{type(target).__name__} with several ranks of cp", rule, remedy)
        derives = any(_derives_positions(m, signatures[m]) for m in target.modules())

        def complete(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            bound = signature.bind_partial(*args, **kwargs)
            given, found = bound.arguments, _active[-1] if _active else None
            tokens = next((v for v in given.values() if isinstance(v, Tensor)), None)
            if found is None or tokens is None or tokens.shape[1:2] != (found.size,):
                return None
            positions, labels = given.get(POSITIONS), given.get("labels")
            if POSITIONS in named and positions is None:
                if derives:
                    value = (
                        f"{type(module).__name__} with several ranks of cp, {POSITIONS} not given"
                    )
                    rule = "it derives them from whole sequences"
                    raise ConfigError.of(value, rule, f"Give {POSITIONS} with the batch.")
                start = found.rank * found.size
                own = torch.arange(start, start + found.size, device=tokens.device)
                given[POSITIONS] = own.expand(tokens.shape[:2])
            if (window := _window(config)) is not None and window < found.size * self.size:
                value = f"attention over {window} of {found.size * self.size} tokens"
                rule = "context-parallel ranks see all tokens before theirs"
                raise ConfigError.of(value, rule, f"Give sequences of {window} tokens at most.")
            mask = self._whole(found, given.get("attention_mask"))
            if kernel is not None and "flash" not in kernel:
                packed = found.whole.get(id(positions)) if mask is None else None
                mask = _visible(packed, mask, causal)
            if mask is not None:
                given["attention_mask"] = mask
            if causal and kernel is not None and labels is not None and id(labels) in found.whole:
                given.setdefault("kwargs", {}).setdefault("shift_labels", shift_labels(labels))
            return bound.args, bound.kwargs

        target.register_forward_pre_hook(complete, with_kwargs=True)

    def _whole(self, found: _Sequences, mask: Any) -> Any:
        """Return a mask of padding [B, S] as it was before it was divided; others as they are."""
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] != found.size:
            return mask
        if id(mask) not in found.whole:
            rule = "it marks the padding of a part of a sequence, and attention sees all of it"
            remedy = "Name it in buffers, or give the mask of whole sequences."
            raise ConfigError.of(f"attention_mask {tuple(mask.shape)}", rule, remedy)
        return found.whole[id(mask)]

    # -- attention -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exchanging(self, found: _Sequences) -> Iterator[None]:
        """Let attention of torch, and other kernels of transformers, see whole sequences."""
        transformers = sys.modules.get("transformers.modeling_utils")
        kernels = getattr(transformers, "ALL_ATTENTION_FUNCTIONS", {})
        own = F.scaled_dot_product_attention

        def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._attend(found, own, (query, key, value), *args, **kwargs)

        with ExitStack() as stack:
            _active.append(found)
            stack.callback(_active.pop)
            stack.callback(setattr, F, own.__name__, own)
            F.scaled_dot_product_attention = attention
            for name in [n for n in kernels if n != "sdpa" and not n.startswith("paged")]:
                stack.callback(kernels.__setitem__, name, kernels[name])
                kernels[name] = self._kernel(found, kernels[name])
            yield

    def _kernel(self, found: _Sequences, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def attention(
            module: torch.nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            mask: Tensor | None = None,
            **kwargs: Any,
        ) -> tuple[Tensor, None]:
            if POSITIONS in kwargs:
                kwargs[POSITIONS] = found.whole.get(id(kwargs[POSITIONS]))

            def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
                return kernel(module, query, key, value, mask, **kwargs)[0].transpose(1, 2)

            mixed = self._attend(found, attend, (query, key, value), mask)
            return mixed.transpose(1, 2), None

        return attention

    def _attend(
        self,
        found: _Sequences,
        attend: Callable[..., Tensor],
        tensors: tuple[Tensor, ...],
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return attention [..., H, S / R, D] of queries, keys and values over whole sequences."""
        query, key, value = tensors
        if not query.shape[-2] == key.shape[-2] == found.size:
            return attend(*tensors, attn_mask, *args, **kwargs)
        if query.shape[-3] % self.size:
            rule = "each rank computes whole heads"
            remedy = "Choose a cp_size that divides the heads (a rank of tp has some of them)."
            value_ = f"cp_size={self.size} with {query.shape[-3]} attention heads"
            raise ConfigError.of(value_, rule, remedy)
        if attn_mask is not None and attn_mask.shape[-1] == found.size:
            rule = "it is of a part of the sequences, and attention sees all of them"
            remedy = "Compute it from whole sequences, or use is_causal=True."
            raise ConfigError.of(f"attn_mask {tuple(attn_mask.shape)}", rule, remedy)
        found.num_exchanged += 1
        if isinstance(query, FakeTensor):  # another stage of a pipeline, of which shapes are asked
            return attend(*tensors, None, *args, **kwargs)
        # Fewer heads of keys than ranks: each is repeated as often as needed.
        repeats = self.size // math.gcd(key.shape[-3], self.size)
        key, value = (t.repeat_interleave(repeats, dim=-3) for t in (key, value))
        query, key, value = self._heads([query, key, value])
        if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] > 1:
            attn_mask = attn_mask.chunk(self.size, dim=-3)[self.rank]
        mixed = attend(query, key, value, attn_mask, *args, **kwargs)
        return _AllToAll.apply(mixed, -2, -3, self.mesh.get_group())

    def _heads(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """Exchange parts of sequences of all heads for whole sequences of some; at once."""
        group = self.mesh.get_group()
        if len({(tensor.dtype, tensor.shape[-1]) for tensor in tensors}) > 1:
            return [_AllToAll.apply(tensor, -3, -2, group) for tensor in tensors]
        counts = [tensor.shape[-3] // self.size for tensor in tensors]
        parts = zip(*(tensor.chunk(self.size, dim=-3) for tensor in tensors), strict=True)
        joined = torch.cat([part for rank in parts for part in rank], dim=-3)
        return _AllToAll.apply(joined, -3, -2, group).split(counts, dim=-3)


class DividedLoader:
    """Gives this rank's part of each batch of another loader, whose attributes it has."""

    def __init__(self, ranks: ContextParallel, loader: Any) -> None:
        self._ranks, self._loader = ranks, loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            with self._ranks.micro_batches([batch]) as (part,):
                yield part

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _AllToAll(torch.autograd.Function):
    """Give each rank its part along one dim, and join the parts that are received along another."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, divide: int, join: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = join, divide, group
        return _all_to_all(tensor, divide, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, *ctx.back), None, None, None


def _all_to_all(tensor: Tensor, divide: int, join: int, group: dist.ProcessGroup) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), dim=divide))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=join)


def _window(config: Any) -> int | None:
    """Return how many tokens a layer of transformers sees at most; None: all."""
    if getattr(config, "use_sliding_window", True) is False:
        return None
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return min((size for size in sizes if size), default=None)


def _derives_positions(module: torch.nn.Module, signature: inspect.Signature) -> bool:
    """Return whether a module of transformers numbers tokens by their ids, or by their mask."""
    by_mask = isinstance(module, torch.nn.Embedding) and "attention_mask" in signature.parameters
    return by_mask or hasattr(module, "create_position_ids_from_inputs_embeds")


def _visible(positions: Tensor | None, padding: Any, causal: bool) -> Any:
    """Return which tokens see which [B, 1, S, S]; None where padding and packing divide nothing.

    Args:
        positions: [B, S]; a sample begins where they do not go on.
        padding: [B, S], 0 where a token is none; other masks are returned as they are.
        causal: whether tokens see those before them alone.
    """
    if padding is not None and not (isinstance(padding, Tensor) and padding.ndim == 2):
        return padding
    samples: Tensor | None = None
    if positions is not None:
        samples = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(dim=1)
        samples = samples if bool(samples.any()) else None
    like = samples if padding is None else padding
    if like is None:
        return None
    visible = like.new_ones(like.shape[1], like.shape[1], dtype=torch.bool)
    visible = (visible.tril() if causal else visible)[None]
    if padding is not None:  # a token without any to see would be no number
        itself = torch.eye(like.shape[1], dtype=torch.bool, device=like.device)
        visible = visible & (padding[:, None, :].bool() | itself)
    if samples is not None:
        visible = visible & (samples[:, :, None] == samples[:, None, :])
    return visible[:, None]


def shift_labels(labels: Tensor) -> Tensor:
    """Return the label of the token after each; -100 after the last token of a sequence.

    Args:
        labels: [B, S]; where it is this rank's part of sequences, the next may be on another rank.
    """
    found = _active[-1] if _active else None
    whole = None if found is None else found.whole.get(id(labels))
    shifted = F.pad((labels if whole is None else whole)[:, 1:], (0, 1), value=IGNORED)
    return shifted if found is None or whole is None else found.part(shifted, 1)
