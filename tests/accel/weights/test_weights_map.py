"""Another value of an offloaded weight is kept in memory, where the weights map can hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from accel.machine.errors import StateError
from accel.weights.folder import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    in_memory,
    offload_state_dict,
    write_weight,
)


class ReadOnly(Mapping[str, torch.Tensor]):
    """A mapping of one weight that takes no other value."""

    def __getitem__(self, key: str) -> torch.Tensor:
        return torch.zeros(2)

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_a_value_of_the_same_kind_is_copied_to_where_the_present_one_lies() -> None:
    present = torch.zeros(2)
    weights = {"layer.a": present}
    write_weight(PrefixedDataset(weights, "layer."), "a", torch.ones(2), tied=False)
    assert weights["layer.a"] is present
    assert present.tolist() == [1.0, 1.0]


def test_a_value_of_another_kind_takes_its_place_and_shares_no_memory() -> None:
    weights = {"a": torch.zeros(2)}
    value = torch.ones(3)
    write_weight(weights, "a", value, tied=False)
    value.zero_()
    assert weights["a"].tolist() == [1.0, 1.0, 1.0]


def test_files_keep_what_they_have(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a": torch.zeros(2)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert not in_memory(loader, "a")
    write_weight(loader, "a", torch.ones(2), tied=False)
    assert in_memory(loader, "a")
    assert loader["a"].tolist() == [1.0, 1.0]
    assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [0.0, 0.0]


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(StateError, match="'a' is tied to others"):
        write_weight({"a": torch.zeros(2)}, "a", torch.ones(2), tied=True)
    with pytest.raises(StateError, match="ReadOnly, which it is read from, keeps no other value"):
        write_weight(ReadOnly(), "a", torch.ones(2), tied=False)
