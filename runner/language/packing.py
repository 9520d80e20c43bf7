"""Rows of tokens: long samples are cut, short ones packed into rows without padding, or padded.

Shapes: B rows of a batch, T tokens of a row, S spans of a data set. A span is a sample, or what is
left of one that is too long: (its sample, its first token, its number of tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

IGNORED = -100  # label of a token that does not count
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
