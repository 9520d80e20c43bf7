"""Rows of tokens: long samples are cut, short ones packed into rows without padding, or padded.

Shapes: B rows of a batch, T tokens of a row, S spans of a data set. A span is a sample, or what is
left of one that is too long: (its sample, its first token, its number of tokens).
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset, IterableDataset, Sampler

from accel.machine.errors import ConfigError
from runner.language.cache import append, load
from runner.language.readers import Record, Source
from runner.language.samples import IGNORED, Tokens

logger = logging.getLogger(__name__)

Encode = Callable[[str, Record], tuple[Tokens, Any]]
Row = dict[str, Tensor]
BUFFER = 1024  # records of a stream that are packed together
# Files of an entry with tokens: for all samples, one behind another; of each sample.
TOKENS, COUNTED, LENGTHS, LABELS = "tokens.int32", "counted.bool", "lengths.int64", "labels.json"
LARGEST = "largest.int64"  # of an entry with tokens: the largest of them
SPANS, SIZES = "spans.int64", "sizes.int64"  # files of an entry with rows: [S, 3], [R]
LEFT_OUT = "left_out.int64"  # of an entry with rows: how many spans hold nothing that counts
CLASSES = "classes.json"  # an artifact: the labels by class
TooLong = Literal["split", "cut", "drop"]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How the tokens of samples become rows.

    Args:
        context: T, the most tokens of a row.
        too_long: what becomes of a longer sample: "split" into spans of T tokens and a rest, "cut"
            to its first T, or "drop"ped.
        packing: whether a row holds several samples.
        pad_token_id: fills up what has no token.
    """

    context: int
    too_long: TooLong
    packing: bool
    pad_token_id: int

    def spans(self, lengths: Indices, chosen: Indices) -> Indices:
        """Return the spans [S, 3] of the samples `chosen`, of which all have `lengths`."""
        starts = (np.cumsum(lengths) - lengths)[chosen]
        lengths = lengths[chosen]
        if self.too_long == "drop":
            kept = lengths <= self.context
            return np.stack([chosen[kept], starts[kept], lengths[kept]], axis=1)
        if self.too_long == "cut":
            return np.stack([chosen, starts, np.minimum(lengths, self.context)], axis=1)
        parts = -(-lengths // self.context)
        of = np.repeat(np.arange(len(lengths)), parts)
        before = (np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)) * self.context
        sizes = np.minimum(lengths[of] - before, self.context)
        return np.stack([chosen[of], starts[of] + before, sizes], axis=1)

    def rows(self, lengths: Indices) -> list[list[int]]:
        """Return the spans of each row, by the lengths of all spans.

        Packing is best-fit decreasing: the longest span left goes to the fullest row that has room.
        Source: https://arxiv.org/abs/2404.10830 (Best-fit Packing)
        """
        if not self.packing:
            return [[index] for index in range(len(lengths))]
        rows: list[list[int]] = []
        open_rows: list[list[list[int]]] = [[] for _ in range(self.context + 1)]  # by room
        rooms = 0  # bit n is set: a row has room for n tokens
        for index in np.argsort(-lengths, kind="stable").tolist():
            length = int(lengths[index])
            if fitting := rooms >> length:
                room = length + (fitting & -fitting).bit_length() - 1
                row = open_rows[room].pop()
                if not open_rows[room]:
                    rooms ^= 1 << room
            else:
                room, row = self.context, []
                rows.append(row)
            row.append(index)
            if left := room - length:
                open_rows[left].append(row)
                rooms |= 1 << left
        return rows

    def row(self, tokens: NDArray[Any], counted: NDArray[Any], spans: Indices) -> dict[str, Tensor]:
        """Return a row: `input_ids`, `labels`, of a packed one also `position_ids`, each [T] int64.

        Args:
            tokens: of all samples.
            counted: for each of them whether the loss counts it.
            spans: those of the row.
        """
        places = np.concatenate([np.arange(start, start + size) for _, start, size in spans])
        positions = np.concatenate([np.arange(size) for *_, size in spans])
        ids = tokens[places].astype(np.int64)
        labels = np.where(counted[places] & (positions > 0), ids, IGNORED)
        if not self.packing:
            return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        fill = self.context - len(ids)
        filled = {
            "input_ids": np.pad(ids, (0, fill), constant_values=self.pad_token_id),
            "labels": np.pad(labels, (0, fill), constant_values=IGNORED),
            "position_ids": np.concatenate([positions, np.arange(fill)]),
        }
        return {name: torch.from_numpy(values) for name, values in filled.items()}


@dataclass(frozen=True)
class Padding:
    """Joins rows into a batch: padded on the right, with an `attention_mask` [B, T] int64.

    Args:
        pad_token_id: fills up `input_ids`.
        length: T; 0: that of the longest row.
    """

    pad_token_id: int
    length: int = 0

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the batch; labels of classes stay one a row."""
        ids, labels = ([row[name] for row in rows] for name in ("input_ids", "labels"))
        masks = [torch.ones_like(row) for row in ids]
        return {
            "input_ids": self._joined(ids, self.pad_token_id),
            "attention_mask": self._joined(masks, 0),
            "labels": self._joined(labels, IGNORED) if labels[0].ndim else torch.stack(labels),
        }

    def _joined(self, rows: Sequence[Tensor], value: int) -> Tensor:
        length = self.length or max(map(len, rows))
        return torch.stack([pad(row, (0, length - len(row)), value=value) for row in rows])


# -- entries of the cache ------------------------------------------------------------------


def write_tokens(source: Source, encode: Encode, folder: Path) -> None:
    """Write the tokens of a source's records: `tokens`, `counted` [all tokens], `lengths` [N]."""
    logger.info("Tokenizing %s", source.key)
    labels, largest = [], 0
    with (
        (folder / TOKENS).open("wb") as tokens,
        (folder / COUNTED).open("wb") as counted,
        (folder / LENGTHS).open("wb") as lengths,
    ):
        for place, record in source.read():
            sample, label = encode(place, record)
            append(tokens, sample.input_ids)
            append(counted, sample.counted)
            append(lengths, [len(sample.input_ids)])
            labels.append(label)
            largest = max([largest, *sample.input_ids])
        logger.info("%s: %d samples, %d tokens", source.key, len(labels), tokens.tell() // 4)
    np.array([largest]).tofile(folder / LARGEST)
    (folder / LABELS).write_text(json.dumps(labels if labels[0] is not None else []))


def labels_of(tokens: Path) -> list[Any]:
    """Return the labels of an entry's samples, as they were read."""
    found: list[Any] = json.loads((tokens / LABELS).read_text())
    return found


def write_classes(classes: Sequence[Any], folder: Path) -> None:
    """Write the labels of all samples by class."""
    (folder / CLASSES).write_text(json.dumps(classes))


def write_rows(tokens: Path, layout: Layout, fraction: float, key: str, folder: Path) -> None:
    """Write the spans of all rows, in their order: `spans` [S · 3], and `sizes` [R], spans of each.

    Spans without a token that counts are left out, but for texts with a label.

    Args:
        tokens: the entry with the tokens.
        layout: of the rows.
        fraction: of samples that are left out; below 0: that alone are in the rows.
        key: the recipe's words for the samples.
        folder: where it is written.

    Raises:
        ConfigError: if no row is left, or there is nothing to learn in them.
    """
    lengths = load(tokens, LENGTHS)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).numpy()
    num_held_out = max(round(abs(fraction) * len(lengths)), int(fraction != 0))
    chosen = np.sort(order[:num_held_out] if fraction < 0 else order[num_held_out:])
    found, counted = layout.spans(lengths, chosen), load(tokens, COUNTED)
    spans = found if labels_of(tokens) else found[_counting(counted, found)]
    if not len(found):
        rule = f"none of {len(lengths)} samples is left with data.context={layout.context}"
        remedy = "Raise data.context, or set data.too_long=cut."
        raise ConfigError.of(key, rule, remedy)
    if not len(spans):
        rule = "none of its tokens counts in the loss: of conversations, the assistant's do"
        remedy = "Call the role assistant, or name the columns: data.columns.role=…"
        if counted.any():
            rule = f"none of the first {layout.context} tokens of a sample counts in the loss"
            remedy = "Raise data.context, or set data.too_long=split."
        raise ConfigError.of(key, rule, remedy)
    rows = layout.rows(spans[:, 2])
    np.array([len(found) - len(spans)]).tofile(folder / LEFT_OUT)
    spans[list(itertools.chain(*rows))].tofile(folder / SPANS)
    np.array([len(row) for row in rows]).tofile(folder / SIZES)
    kept, given = int(spans[:, 2].sum()), int(lengths[chosen].sum())
    logger.info("%s: %d rows of %d tokens of %d", key, len(rows), kept, given)


def _counting(counted: NDArray[Any], spans: Indices) -> NDArray[np.bool_]:
    """Return for each span whether a token counts; its first never does: nothing predicts it."""
    return np.array([counted[at + 1 : at + size].any() for _, at, size in spans], bool)


class Rows(Dataset[Row]):
    """The rows of an entry of the cache.

    Args:
        tokens: the entry with the tokens.
        rows: the entry with the spans of each row.
        layout: of the rows.
        classes: the labels by class; empty: samples have none.
    """

    def __init__(
        self, tokens: Path, rows: Path, layout: Layout, classes: Sequence[Any] = ()
    ) -> None:
        self.tokens, self.rows, self.layout = tokens, rows, layout
        self.classes = classes

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(load(self.rows, SIZES))

    @cached_property
    def _labels(self) -> list[int]:
        number = {label: index for index, label in enumerate(self.classes)}
        return [number[label] for label in labels_of(self.tokens)] if number else []

    def __getstate__(self) -> dict[str, Any]:
        # A loader worker maps the files itself.
        return {name: value for name, value in vars(self).items() if name[0] != "_"}

    def __len__(self) -> int:
        return len(load(self.rows, SIZES))

    def __getitem__(self, index: int) -> Row:
        end = self._ends[index]
        spans = load(self.rows, SPANS).reshape(-1, 3)
        mine = spans[end - load(self.rows, SIZES)[index] : end]
        row = self.layout.row(load(self.tokens, TOKENS), load(self.tokens, COUNTED), mine)
        if self._labels:
            row["labels"] = torch.tensor(self._labels[mine[0][0]])
        return row

    @property
    def left_out(self) -> int:
        """How many samples, or parts of split ones, hold no token that counts."""
        return int(load(self.rows, LEFT_OUT)[0])

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each row: [R]."""
        if self.layout.packing:
            return torch.full((len(self),), self.layout.context)
        return torch.from_numpy(load(self.rows, SPANS).reshape(-1, 3)[:, 2].copy())


# -- streams -------------------------------------------------------------------------------


class RowStream(IterableDataset[Any]):
    """Rows of sources that are tokenized as they are read; a buffer of records is packed at once.

    Sources without weights follow each other. With weights each has its share of any number of
    records; one that ends begins anew, until all have ended.
    """

    def __init__(
        self, sources: Sequence[Source], encoders: Sequence[Encode], layout: Layout
    ) -> None:
        self.sources, self.encoders, self.layout = sources, encoders, layout
        self._told = False

    def __iter__(self) -> Iterator[Any]:
        records = self.records()
        while buffer := list(itertools.islice(records, BUFFER)):
            yield from self._packed([self._encoded(record) for record in buffer])

    def records(self) -> Iterator[tuple[int, str, Record]]:
        """Yield (number of the source, place, record)."""
        weights = [source.node.get("weight", 0) for source in self.sources]
        if not all(weights):
            for number, source in enumerate(self.sources):
                yield from ((number, *found) for found in source.read())
            return
        shares = np.array(weights) / sum(weights)
        streams = [iter(source.read()) for source in self.sources]
        taken, ended = np.zeros(len(streams)), set()
        while True:
            number = int(np.argmax(shares * (taken.sum() + 1) - taken))
            if (found := next(streams[number], None)) is None:
                ended.add(number)
                if len(ended) == len(streams):
                    return
                streams[number] = iter(self.sources[number].read())
                continue
            taken[number] += 1
            yield number, *found

    def _encoded(self, record: tuple[int, str, Record]) -> Tokens:
        number, place, columns = record
        return self.encoders[number](place, columns)[0]

    def _packed(self, samples: Sequence[Tokens]) -> Iterator[Row]:
        lengths = np.array([len(sample.input_ids) for sample in samples])
        tokens = np.concatenate([sample.input_ids for sample in samples])
        counted = np.concatenate([sample.counted for sample in samples])
        found = self.layout.spans(lengths, np.arange(len(samples)))
        spans = found[_counting(counted, found)]
        if len(spans) < len(found) and not self._told:
            self._told = True
            logger.warning("Samples in which no token counts in the loss are left out.")
        for row in self.layout.rows(spans[:, 2]):
            yield self.layout.row(tokens, counted, spans[row])


class RecordStream(RowStream):
    """Records of sources: each makes one row, which a loader worker does for its own alone.

    One in which no token counts makes a row, too: workers that do not read it count on it.
    """

    def __iter__(self) -> Iterator[Any]:
        return self.records()

    def make_sample(self, record: tuple[int, str, Record]) -> Row:
        """Return the row of a record."""
        sample = self._encoded(record)
        span = np.array([[0, 0, min(len(sample.input_ids), self.layout.context)]])
        return self.layout.row(np.array(sample.input_ids), np.array(sample.counted), span)


# -- weights -------------------------------------------------------------------------------


class Mixture(Sampler[int]):
    """Yields the indices of an epoch of concatenated data sets, of which each has its share.

    An epoch has as many samples as all data sets together. A data set with more than its share
    gives other samples in each epoch; one with fewer repeats them.

    Args:
        sizes: samples of each data set.
        weights: shares of each, above 0.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float]) -> None:
        self.sizes = sizes
        ends = np.round(np.cumsum(weights) / np.sum(weights) * sum(sizes)).astype(int)
        self.counts = np.diff(ends, prepend=0).tolist()

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[int]:
        drawn, start = [], 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            passes = [start + torch.randperm(size) for _ in range(-(-count // size))]
            drawn.append(torch.cat([*passes, torch.empty(0, dtype=torch.int64)])[:count])
            start += size
        indices = torch.cat(drawn)
        return iter(indices[torch.randperm(len(indices))].tolist())
