"""Operations on nested tensors, at every world size, one collective per dtype (E1, E3)."""

from __future__ import annotations

import functools
import pickle
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from accel.comm import ops
from accel.machine.errors import ConfigError
from accel.state import PartialState
from tests.helpers import run_distributed

WORLD_SIZES = [1, 2, 3]
Pair = namedtuple("Pair", ["first", "second"])


class Counting:
    """Stands in for a communicator and counts its collectives."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.calls = comm, []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.comm, name)
        return functools.partial(self.count, name) if callable(value) else value

    def count(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return getattr(self.comm, name)(*args, **kwargs)


class Encoding(UserDict[str, Any]):
    """A mapping that moves itself and knows no `non_blocking`."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: ops.send_to_device(value, device) for key, value in self.data.items()}
        return self


def as_lists(data: Any) -> Any:
    """Return nested data with lists for tensors, for sending back."""
    if isinstance(data, torch.Tensor):
        return data.tolist()
    if isinstance(data, (list, tuple)):
        return [as_lists(item) for item in data]
    return {key: as_lists(item) for key, item in data.items()}


# -- several processes -------------------------------------------------------------------------


def collect() -> dict[str, Any]:
    state = PartialState(cpu=True)
    rank, size = state.process_index, state.num_processes
    own = torch.full((2, 2), rank)
    nested = {"a": own, "b": [own + 0.5, (torch.tensor(rank), torch.zeros(0, 2))]}
    counting = Counting(state.comm)
    vars(state).update(comm=counting)
    gathered = ops.gather(nested)
    calls = list(counting.calls)
    counting.calls.clear()
    reduced = ops.reduce([own, own, own.float()], reduction="sum", scale=2.0)
    calls += counting.calls
    kept = ops.gather(Pair(own, UserDict(x=own)))
    result = {
        "calls": calls,
        "gathered": as_lists(gathered),
        "types": (type(gathered["b"][1]) is tuple, type(kept) is Pair, type(kept.second)),
        "reduced": as_lists(reduced),
        "mean": ops.reduce(own, "mean").tolist(),
        "by_default": ops.reduce(own).tolist(),
        "max": ops.reduce(own, "max").tolist(),
        "none": ops.reduce(own, "none").tolist(),
        "objects": ops.gather_object([rank, f"rank {rank}"]),
        "object": ops.gather_object({"rank": rank}),
        "sent": as_lists(ops.broadcast((own, own.float()), from_process=size - 1)),
    }
    values: list[Any] = [rank, {"of": rank}]
    answer = ops.broadcast_object_list(values, from_process=size - 1)
    result["sent_objects"], result["same_list"] = values, answer is values
    ops.wait_for_everyone()
    state.destroy_process_group()
    return result


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_collectives(size: int) -> None:
    for rank, result in enumerate(run_distributed(collect, size)):
        total, last, ranks = sum(range(size)), size - 1, range(size)
        rows = [[r, r] for r in ranks for _ in range(2)]
        assert result["gathered"]["a"] == rows
        assert result["gathered"]["b"][0] == [[a + 0.5, b + 0.5] for a, b in rows]
        assert result["gathered"]["b"][1][0] == (0 if size == 1 else list(ranks))
        assert result["gathered"]["b"][1][1] == []
        assert result["types"] == (True, True, UserDict)
        assert result["reduced"] == [[[2.0 * total] * 2] * 2] * 3
        assert result["mean"] == result["by_default"] == [[total / size] * 2] * 2
        assert result["max"] == [[last, last]] * 2
        assert result["none"] == [[rank, rank]] * 2
        assert result["objects"] == [item for r in ranks for item in (r, f"rank {r}")]
        by_rank = [{"rank": r} for r in ranks]
        assert result["object"] == (by_rank if size > 1 else by_rank[0])
        assert result["sent"] == [[[last, last]] * 2] * 2
        assert result["sent_objects"] == [last, {"of": last}]
        assert result["same_list"]
        # int64 and float32, however many tensors there are
        assert result["calls"] == ([] if size == 1 else ["all_gather"] * 2) + ["all_reduce"] * 2


def pad() -> dict[str, Any]:
    state = PartialState(cpu=True)
    rank = state.process_index
    own = torch.full((rank + 1, 2), rank + 1)
    counting = Counting(state.comm)
    vars(state).update(comm=counting)
    padded = ops.pad_across_processes({"x": own, "y": [own.t(), torch.tensor(5)]})
    calls = list(counting.calls)
    result = {
        "calls": calls,
        "x": padded["x"].tolist(),
        "y": padded["y"][0].tolist(),
        "scalar": padded["y"][1].tolist(),
        "first": ops.pad_across_processes(own, pad_index=-1, pad_first=True).tolist(),
        "last_dim": ops.pad_across_processes(own.t(), dim=-1).tolist(),
        "no_such_dim": ops.pad_across_processes(own[:1], dim=2).tolist(),
        "gathered": ops.gather(ops.pad_across_processes(own)).shape[0],
    }
    state.destroy_process_group()
    return result


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_padding(size: int) -> None:
    for rank, result in enumerate(run_distributed(pad, size)):
        own, lack = [[rank + 1] * 2] * (rank + 1), size - rank - 1
        assert result["x"] == own + [[0, 0]] * lack
        assert result["y"] == [[rank + 1] * (rank + 1)] * 2
        assert result["scalar"] == 5
        assert result["first"] == [[-1, -1]] * lack + own
        assert result["last_dim"] == [[rank + 1] * (rank + 1) + [0] * lack] * 2
        assert result["no_such_dim"] == [[rank + 1] * 2]
        assert result["gathered"] == size * size
        assert result["calls"] == ([] if size == 1 else ["all_reduce"])


def types(data: Any) -> Any:
    """Return the types in nested data, a tensor's dtype with it."""
    if isinstance(data, torch.Tensor):
        return str(data.dtype)
    if isinstance(data, Mapping):
        return type(data).__name__, {key: types(value) for key, value in data.items()}
    return type(data).__name__, [types(value) for value in data]


def odd_layouts() -> dict[str, Any]:
    state = PartialState(cpu=True)
    rank = state.process_index
    data = {
        "turned": (torch.arange(6).reshape(2, 3) + 10 * rank).t(),
        "every_second": (torch.arange(4) + 10 * rank)[::2],
        "scalar": torch.tensor(rank),
        "expanded": torch.tensor([rank]).expand(2),
    }
    last = state.num_processes - 1
    counting = Counting(state.comm)
    vars(state).update(comm=counting)
    found = {
        "gathered": as_lists(ops.gather(data)),
        "sent": as_lists(ops.broadcast(data, from_process=last)),
        "summed": as_lists(ops.reduce(data, "sum")),
        "padded": as_lists(ops.pad_across_processes(data)),
    }
    found["calls"] = counting.calls
    vars(state).update(comm=counting.comm)
    state.destroy_process_group()
    return found


def layouts(start: int) -> dict[str, Any]:
    """Return what `odd_layouts` begins with on the rank whose numbers start here."""
    rank = start // 10
    return {
        "turned": [[start + n, start + n + 3] for n in range(3)],
        "every_second": [start, start + 2],
        "scalar": rank,
        "expanded": [rank, rank],
    }


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_tensors_of_any_layout_travel_in_one_collective(size: int) -> None:
    every = [layouts(10 * rank) for rank in range(size)]
    for rank, found in enumerate(run_distributed(odd_layouts, size)):
        scalars = found["gathered"].pop("scalar")
        assert scalars == (0 if size == 1 else list(range(size)))
        for key, rows in found["gathered"].items():
            assert rows == [row for own in every for row in own[key]]
        assert found["sent"] == every[-1]
        total = sum(range(size))
        assert found["summed"]["turned"] == [
            [10 * total + size * n, 10 * total + size * (n + 3)] for n in range(3)
        ]
        assert found["summed"]["scalar"] == total
        assert found["padded"] == every[rank]
        kinds = ["all_gather", "broadcast", "all_reduce", "all_reduce"]
        assert found["calls"] == (["all_reduce"] if size == 1 else kinds)


# -- one process -------------------------------------------------------------------------------


def test_what_is_no_tensor_is_refused() -> None:
    PartialState(cpu=True)
    with pytest.raises(TypeError, match="str is not supported"):
        ops.reduce({"a": "text"})
    with pytest.raises(ConfigError, match="Did you mean 'mean'"):
        ops.reduce(torch.ones(1), "maen")


def test_send_to_device() -> None:
    meta = torch.device("meta")
    one = torch.ones(2)
    packed = pack_sequence([one])
    data = {"a": [one, "text"], "b": (one, 3), "c": Pair(one, None), "d": packed, "keep": one}
    moved = ops.send_to_device(data, meta, non_blocking=True, skip_keys="keep")
    assert moved["a"][0].device == moved["b"][0].device == moved["c"].first.device == meta
    assert isinstance(moved["c"], Pair)
    assert moved["d"].data.device == meta
    assert (moved["a"][1], moved["b"][1]) == ("text", 3)
    assert moved["keep"] is one
    assert data["a"][0] is one  # type: ignore[index]


def test_copies_may_overlap_with_computation() -> None:
    class Moved:
        def to(self, device: str, non_blocking: bool = False) -> tuple[str, bool]:
            return device, non_blocking

    assert ops.send_to_device([Moved()], "meta", non_blocking=True) == [("meta", True)]
    assert ops.send_to_device([Moved()], "meta") == [("meta", False)]


def test_what_moves_itself_is_asked_to() -> None:
    encoding = Encoding(x=torch.ones(1))
    assert ops.send_to_device(encoding, "meta") is encoding
    assert encoding["x"].device.type == "meta"
    skipped = ops.send_to_device(
        Encoding(x=torch.ones(1), y=torch.ones(1)), "meta", skip_keys=["x"]
    )
    assert isinstance(skipped, Encoding)
    assert [skipped[key].device.type for key in "xy"] == ["cpu", "meta"]


def test_slices_and_sizes() -> None:
    data = {"text": "abc", "x": [torch.arange(6).reshape(3, 2)]}
    assert ops.slice_tensors(data, slice(1, 3))["x"][0].tolist() == [[2, 3], [4, 5]]
    assert ops.slice_tensors(data, slice(0, 1), process_index=0, num_processes=2)["text"] == "abc"
    assert ops.find_batch_size(data) == 3
    assert ops.find_batch_size([torch.tensor(1), torch.ones(4)]) == 4
    with pytest.raises(TypeError, match="no tensor"):
        ops.find_batch_size({"a": "text"})


def test_concatenate() -> None:
    parts = [
        OrderedDict(a=torch.full((1, 2), n), b=Pair(torch.full((1,), n), [torch.ones(n, 1)]))
        for n in (1, 2)
    ]
    joined = ops.concatenate(parts)
    assert isinstance(joined, OrderedDict)
    assert joined["a"].tolist() == [[1, 1], [2, 2]]
    assert joined["b"].first.tolist() == [1, 2]
    assert joined["b"].second[0].shape == (3, 1)
    assert ops.concatenate([torch.ones(2, 1), torch.ones(2, 3)], dim=1).shape == (2, 4)
    with pytest.raises(TypeError, match="joins tensors, not str"):
        ops.concatenate(["a", "b"])


def test_conversion_to_fp32() -> None:
    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int32)
    converted = ops.convert_to_fp32({"a": half, "b": [half.half()], "c": whole, "d": "text"})
    assert converted["a"].dtype == converted["b"][0].dtype == torch.float32
    assert converted["c"] is whole
    assert converted["d"] == "text"
    assert ops.convert_to_fp32(half).dtype == torch.float32
    assert ops.convert_to_fp32(converted["a"]) is converted["a"]


def forward(tensor: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Forward."""
    return {"logits": tensor.bfloat16() * scale}


def test_outputs_of_a_function_in_fp32() -> None:
    wrapped = ops.convert_outputs_to_fp32(forward)
    assert wrapped(torch.ones(1), scale=2.0)["logits"].dtype == torch.float32
    assert (wrapped.__name__, wrapped.__doc__) == ("forward", "Forward.")
    assert pickle.loads(pickle.dumps(wrapped))(torch.ones(1))["logits"].dtype == torch.float32


@pytest.mark.gpu
def test_tensors_go_to_the_device() -> None:
    moved = ops.send_to_device({"x": torch.ones(2).pin_memory()}, "cuda", non_blocking=True)
    assert moved["x"].device.type == "cuda"
    assert moved["x"].tolist() == [1.0, 1.0]


def test_tensors_become_lists_of_numbers() -> None:
    data = {"a": [torch.tensor([[1, 2], [3, 4]]), "text"], "b": (torch.tensor(0.5), None)}
    assert ops.listify(data) == {"a": [[[1, 2], [3, 4]], "text"], "b": (0.5, None)}
    assert ops.listify(torch.ones(2, dtype=torch.bfloat16)) == [1.0, 1.0]


@pytest.mark.parametrize("empty", [[], ()])
def test_nothing_to_join_is_refused(empty: Any) -> None:
    with pytest.raises(ConfigError, match=r"nothing to join\. Give at least one"):
        ops.concatenate(empty)
