"""R1, E2: a step and an evaluation see each sample once, on any number of processes."""

from __future__ import annotations

import itertools
import multiprocessing
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from accel.comm.ops import gather
from accel.config.training import GradientAccumulationPlugin
from accel.machine.errors import ConfigError
from accel.plan.dims import data_parallel
from accel.state import GradientState, PartialState
from runner.data.batches import EvalBatches, MicroBatch, OnDevice, TrainBatches, Window
from runner.data.datasets import Data
from runner.recipe.batch_plan import plan_batches
from runner.recipe.schema import DataLoader, Recipe, Trainer
from tests.helpers import run_distributed


class Numbers(Dataset):
    """The numbers below `length`; notes what was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.tensor([float(index), torch.rand(1).item()])


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return (torch.tensor([float(i), torch.rand(1).item()]) for i in range(self.length))


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


class Pretended:
    """An engine that is one of several processes."""

    def __init__(self, recipe: Recipe, count: int, rank: int) -> None:
        self.device = torch.device("cpu")
        self.num_processes, self.process_index = count, rank
        self.parallel_dims = data_parallel(count, rank)
        self.strategy = SimpleNamespace(wrap_loader=lambda loader: loader)
        self.plan = SimpleNamespace(
            device=self.device,
            parallel_dims=self.parallel_dims,
            dataloader=recipe.dataloader,
            rng_types=(),
        )


def recipe_of(steps: int | None = None, loader: dict | None = None, **fields) -> Recipe:
    plugin = GradientAccumulationPlugin(num_steps=steps)
    return Recipe(
        trainer=Trainer(accumulation=plugin, **fields), dataloader=DataLoader(**(loader or {}))
    )


def batches_of(dataset, recipe: Recipe, count: int = 1, rank: int = 0) -> TrainBatches:
    data = dataset if isinstance(dataset, Data) else Data(dataset)
    plan = plan_batches(recipe.trainer, count, data.num_train_samples)
    return TrainBatches(Pretended(recipe, count, rank), data, recipe, plan)


def real(window) -> list[list[float]]:
    """Return the samples of a window that are no padding."""
    found = []
    for micro in window.micro_batches:
        keep = slice(None) if micro.valid is None else micro.valid
        found += micro.batch[keep].tolist()
    return found


def steps_of(
    dataset, recipe: Recipe, count: int, epoch: int = 0, skip: int = 0
) -> list[list[list[float]]]:
    """Return the real samples of each step over all processes, sorted."""
    ranks = [
        list(batches_of(dataset, recipe, count, rank).epoch(epoch, skip)) for rank in range(count)
    ]
    found = []
    for windows in zip(*ranks, strict=True):
        assert len({len(window.micro_batches) for window in windows}) == 1
        samples = sorted(itertools.chain.from_iterable(map(real, windows)))
        assert {window.num_samples for window in windows} == {len(samples)}
        found.append(samples)
    return found


@settings(max_examples=60)
@given(st.data())
def test_a_step_sees_the_same_samples_on_any_number_of_processes(data) -> None:
    draw = data.draw
    total = 8 * draw(st.integers(1, 3))
    length = draw(st.integers(1, 90))
    streamed = draw(st.booleans())
    drop_last = draw(st.booleans()) and length >= total
    epoch, limit = draw(st.integers(0, 2)), draw(st.sampled_from([None, 1, 3, 0.5]))
    dataset = Sized(length) if streamed else Numbers(length)
    fields = {"global_batch_size": total, "drop_last": drop_last, "limit_train_batches": limit}
    wanted = steps_of(dataset, recipe_of(**fields), 1, epoch)
    count = draw(st.sampled_from([1, 2, 4, 8]))
    loader = {
        "split_batches": draw(st.booleans()),
        "dispatch_batches": draw(st.sampled_from([None, True, False])),
    }
    accumulation = draw(st.sampled_from([n for n in (1, 2, 3) if total // count % n == 0]))
    skip = draw(st.integers(0, len(wanted)))
    recipe = recipe_of(accumulation, loader, **fields)
    assert steps_of(dataset, recipe, count, epoch, skip) == wanted[skip:]
    whole = length // total * total if drop_last else length
    if limit is None:
        seen = sorted(int(sample[0]) for step in wanted for sample in step)
        assert len(seen) == whole
        assert len(set(seen)) == whole


def numbers(steps: list[list[list[float]]]) -> list[int]:
    return [int(sample[0]) for step in steps for sample in step]


def weighted(length: int, num_samples: int) -> Data:
    """Return numbers, of which a sampler chooses odd ones three times as often, and lengths."""
    sampler = WeightedRandomSampler([1.0, 3.0] * length, num_samples)
    lengths = [1 + index * 7 % 13 for index in range(2 * length)]
    return Data(Numbers(2 * length), sampler=sampler, lengths=lengths)


@settings(max_examples=40)
@given(st.data())
def test_samplers_lengths_and_tokens_give_the_same_steps_everywhere(data) -> None:
    draw = data.draw
    chosen = weighted(20, draw(st.integers(8, 90)))
    groups, tokens = draw(st.booleans()), draw(st.sampled_from([None, 6, 20, 50]))
    fields = {"global_batch_size": 8, "drop_last": draw(st.booleans())}
    epoch, count = draw(st.integers(0, 2)), draw(st.sampled_from([1, 2, 4]))
    loader = {"group_by_length": groups}
    wanted = steps_of(chosen, recipe_of(loader=loader, **fields), 1, epoch)
    loader["dispatch_batches"] = draw(st.booleans())
    recipe = recipe_of(loader=loader, micro_batch_tokens=tokens, micro_batch_size=2, **fields)
    skip = draw(st.integers(0, len(wanted)))
    assert steps_of(chosen, recipe, count, epoch, skip) == wanted[skip:]
    plain = steps_of(Data(chosen.train, sampler=chosen.sampler), recipe_of(**fields), 1, epoch)
    if not (groups and fields["drop_last"]):
        assert sorted(numbers(wanted)) == sorted(numbers(plain))
    for window in batches_of(chosen, recipe, count).epoch(epoch) if tokens else ():
        for micro in window.micro_batches:
            longest = max(chosen.lengths[int(index)] for index in micro.batch[:, 0])
            assert len(micro.batch) == 1 or longest * len(micro.batch) <= tokens


def test_steps_have_like_lengths_and_odd_numbers_three_times_as_often() -> None:
    data, sums = weighted(20, 4000), []
    for groups in (False, True):
        recipe = recipe_of(loader={"group_by_length": groups}, global_batch_size=8)
        steps = [numbers([step]) for step in steps_of(data, recipe, 1)]
        sums.append(sum(max(data.lengths[number] for number in step) for step in steps))
        assert 2850 < sum(number % 2 for step in steps for number in step) < 3150
    assert sums[1] < 0.7 * sums[0]


MISFIT = Data(Numbers(16), sampler=WeightedRandomSampler([1.0] * 9, 16))
SHARDED = Data(Numbers(16), sampler=DistributedSampler(range(16), 2, 0))


class Divided(Stream):
    """Divides itself by loader worker, as Hugging Face's streams do, and makes samples late."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.length, step))

    def make_sample(self, record: int) -> torch.Tensor:
        return torch.tensor([float(record), torch.rand(1).item()])


@pytest.mark.parametrize("dataset", [Stream(37), Divided(37)])
def test_a_stream_is_read_alike_by_any_number_of_workers(dataset) -> None:
    def steps(**loader) -> list:
        fields = {"global_batch_size": 8, "micro_batch_size": 2, "eval_batch_size": 3}
        recipe = recipe_of(loader=loader, **fields)
        batches = batches_of(dataset, recipe)
        passes = [[real(w) for w in batches.epoch(epoch, skip)] for epoch, skip in ((0, 0), (1, 1))]
        return [*passes, evaluated(dataset, recipe)[0]]

    alone = steps()
    assert numbers(alone[0]) == list(range(37))
    assert numbers(alone[1]) == list(range(8, 37))
    for num_workers in (1, 2):
        assert steps(num_workers=num_workers) == alone


def test_skipping_reads_nothing_of_map_data() -> None:
    dataset = Numbers(40)
    batches = batches_of(dataset, recipe_of(global_batch_size=8))
    everything = [real(window) for window in batches.epoch(3)]
    dataset.read.clear()
    assert [real(window) for window in batches.epoch(3, skip_steps=4)] == everything[4:]
    assert len(dataset.read) == 8
    assert [real(window) for window in batches.epoch(3)] == everything
    assert list(batches.epoch(3, skip_steps=5)) == []


def test_over_fitting_sees_the_same_batches_in_every_epoch() -> None:
    batches = batches_of(Numbers(40), recipe_of(global_batch_size=8, overfit_batches=2))
    epochs = [[real(window) for window in batches.epoch(epoch)] for epoch in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(epochs[0]) == 2
    plain = batches_of(Numbers(40), recipe_of(global_batch_size=8))
    assert epochs[0] == [real(window) for window in plain.epoch(0)][:2]


@pytest.mark.parametrize(
    ("dataset", "loader", "fields", "message"),
    [
        (Numbers(17), {"even_batches": False}, {}, r"with several proc.*drop_last=true"),
        (Stream(16), {"even_batches": False}, {}, r"even_batches=false with a stream"),
        (Stream(16), {}, {"limit_train_batches": 0.5}, r"limit_train_batches=0.5.*unknown length"),
        (Stream(16), {"num_workers": 1, "persistent_workers": True}, {}, r"not learn the epoch"),
        (Stream(16), {"num_workers": 1, "dispatch_batches": False}, {}, r"known in the worker"),
        (Stream(16), {"group_by_length": True}, {}, r"group_by_length=true with a stream"),
        (Data(Numbers(16)), {}, {"micro_batch_tokens": 9}, r"=9 with 0 lengths.*each of 16"),
        (MISFIT, {}, {}, r"with 9 weights: it has a weight for each of 16 training samples"),
        (SHARDED, {}, {}, r"sampler=DistributedSampler.*the runner divides"),
    ],
)
def test_what_the_data_cannot_give_is_refused(dataset, loader, fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        batches_of(dataset, recipe_of(loader=loader, global_batch_size=8, **fields), 2)


# -- evaluation ----------------------------------------------------------------------------------


def evaluated(dataset, recipe: Recipe, **kwargs) -> tuple[list[float], EvalBatches]:
    state = PartialState(cpu=True)
    accelerator = Pretended(recipe, state.num_processes, state.process_index)
    batches = EvalBatches(accelerator, dataset, recipe, **kwargs)
    gradients, found = GradientState(), []
    for batch in batches:
        values = gather(batch)
        if gradients.end_of_dataloader and gradients.remainder > 0:
            values = values[: gradients.remainder]
        found += values.tolist()
    return found, batches


def test_an_evaluation_sees_every_sample_alike_each_time() -> None:
    recipe = recipe_of(global_batch_size=4, loader={"num_workers": 1})
    first, batches = evaluated(Numbers(21), recipe)
    assert [int(sample[0]) for sample in first] == list(range(21))
    assert (batches.num_samples, batches.num_batches) == (21, 3)
    again = [sample for batch in batches for sample in batch.tolist()]
    assert again == first
    assert evaluated(Numbers(21), recipe_of(global_batch_size=4))[0] == first


def test_no_split_draws_what_another_draws() -> None:
    recipe = recipe_of(global_batch_size=4)
    by_split = [evaluated(Numbers(8), recipe, split=split)[0] for split in ("validation", "test")]
    training = batches_of(Numbers(8), recipe).epoch(0)
    by_split.append([sample for window in training for sample in real(window)])
    draws = [{sample[-1] for sample in found} for found in by_split]
    assert len(set().union(*draws)) == 24


@pytest.mark.parametrize(
    ("limit", "samples"), [(None, 21), (2, 16), (0.5, 8), (1.0, 21), (9, 21), (0.01, 8)]
)
def test_limits_of_an_evaluation(limit, samples: int) -> None:
    dataset = Numbers(21)
    recipe = recipe_of(global_batch_size=4, limit_eval_batches=limit)
    found, batches = evaluated(dataset, recipe)
    assert len(found) == batches.num_samples == samples


def test_an_evaluation_of_a_stream_of_unknown_length() -> None:
    found, batches = evaluated(Stream(21), recipe_of(global_batch_size=4))
    assert (len(found), batches.num_samples, batches.num_batches) == (21, None, None)
    recipe = recipe_of(global_batch_size=4, limit_eval_batches=2)
    found, batches = evaluated(Stream(21), recipe)
    assert len(found) == 16
    with pytest.raises(ConfigError, match="limit_eval_batches"):
        evaluated(Stream(21), recipe_of(limit_eval_batches=0.5))


# -- on real processes ---------------------------------------------------------------------------


def real_steps(kind: str, loader: dict, steps: int, skip: int) -> list:
    from accel.accelerator import Accelerator

    if not multiprocessing.current_process().name.startswith("MainProcess"):
        multiprocessing.set_start_method("fork", force=True)  # a worker of the pool would spawn
    tokens = 20 if kind == "weighted" else None
    recipe = recipe_of(steps, loader, global_batch_size=8, micro_batch_tokens=tokens)
    accelerator = Accelerator(cpu=True, dataloader_config=recipe.dataloader)
    data = {"map": Data(Numbers(37)), "weighted": weighted(20, 37)}.get(kind) or Data(Stream(37))
    plan = plan_batches(recipe.trainer, accelerator.num_processes, data.num_train_samples)
    batches = TrainBatches(accelerator, data, recipe, plan)
    return [
        [(window.num_samples, len(window.micro_batches), real(window)) for window in windows]
        for windows in (batches.epoch(0), batches.epoch(1, skip))
    ]


CASES = [
    ("map", {}, 1, 0),
    ("map", {"num_workers": 1, "persistent_workers": True}, 2, 2),
    ("map", {"split_batches": True}, 4, 1),
    ("map", {"dispatch_batches": True}, 1, 3),
    ("map", {"use_seedable_sampler": False}, 1, 1),
    ("weighted", {"num_workers": 3, "group_by_length": True}, 2, 2),
    ("weighted", {"dispatch_batches": True}, 1, 1),
    ("stream", {}, 2, 2),
    ("stream", {"num_workers": 3}, 2, 1),
    ("stream", {"dispatch_batches": False, "split_batches": True}, 1, 1),
]


@pytest.mark.parametrize(("kind", "loader", "steps", "skip"), CASES)
def test_two_processes_make_the_steps_of_one(kind, loader, steps: int, skip: int) -> None:
    ordering = ("use_seedable_sampler", "group_by_length")
    alone = real_steps(kind, {key: loader[key] for key in ordering if key in loader}, 1, skip)
    ranks = run_distributed(real_steps, 2, kind, loader, steps, skip)
    for epoch, wanted in enumerate(alone):
        one, other = ranks[0][epoch], ranks[1][epoch]
        assert len(one) == len(other) == len(wanted)
        for mine, theirs, (count, _, samples) in zip(one, other, wanted, strict=True):
            assert mine[0] == theirs[0] == count
            assert mine[1] == theirs[1]
            assert sorted(mine[2] + theirs[2]) == sorted(samples)


def real_evaluation(loader: dict, length: int, streamed: bool) -> list[float]:
    dataset = Stream(length) if streamed else Numbers(length)
    return evaluated(dataset, recipe_of(global_batch_size=4, loader=loader))[0]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "loader", [{}, {"split_batches": True}, {"dispatch_batches": True}, {"even_batches": False}]
)
def test_two_processes_evaluate_each_sample_once(loader: dict, streamed: bool) -> None:
    for length in (1, 16, 21):
        alone = real_evaluation({}, length, streamed)
        assert run_distributed(real_evaluation, 2, loader, length, streamed) == [alone, alone]


META = torch.device("meta")


def micro_batches(count: int = 3) -> list[MicroBatch]:
    valid = torch.tensor([True, False])
    return [MicroBatch([torch.full((2,), float(i)), "name"], valid) for i in range(count)]


def test_reading_moves_one_micro_batch() -> None:
    on_host = micro_batches()
    window = Window(OnDevice(on_host, META), 6)
    first = window.micro_batches[0]
    assert first.batch[0].is_meta
    assert first.batch[1] == "name"
    assert first.valid is not None
    assert first.valid.is_meta
    assert [micro.batch[0].device.type for micro in window.on_host] == ["cpu"] * 3
    assert all(micro.batch[0].is_meta for micro in window.micro_batches)
    assert len(window.micro_batches) == 3
