"""Placeholders of Megatron's schedule and data sets become megatron-core's own (E1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")

from accel.machine.errors import ConfigError, StateError
from accel.utils import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from tests.accel.strategies.megatron.training import build_model, data, loss_of, started
from tests.helpers import run_distributed

pytestmark = pytest.mark.slow
ROWS, LENGTH = 60, 8


def check_schedule(folder: str) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    fields = {"lr_decay_style": "cosine", "min_lr": 0.1, "lr_decay_iters": 6}
    with started(fields) as accelerator:
        model = build_model("gpt2")
        groups = [{"params": list(model.parameters()), "weight_decay": 0.25}]
        optimizer = torch.optim.AdamW(groups, lr=1.0)
        dummy = MegatronLMDummyScheduler(optimizer, warmup_num_steps=2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, dummy)
        assert isinstance(scheduler.scheduler, OptimizerParamScheduler)
        rates = []
        for _ in range(7):
            rates += scheduler.get_last_lr()
            batch = {"input_ids": data()[0, 0], "labels": data()[0, 0]}
            for _ in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            if len(rates) == 3:
                accelerator.save_state(folder)
        waves = [0.1 + 0.45 * (1 + numpy.cos(numpy.pi * part / 4)) for part in range(5)]
        assert rates == pytest.approx([0, 0.5, *waves])
        (group,) = optimizer.engine.param_groups
        assert group["lr"] == pytest.approx(0.1)
        assert group["weight_decay"] == 0.25
        accelerator.load_state(folder)
        assert scheduler.get_last_lr() == pytest.approx([waves[1]])
        other = MegatronLMDummyScheduler(optimizer, 10, 0, lr_decay_style="linear")
        linear = accelerator.prepare_scheduler(other)
        linear.scheduler.step(4)
        assert linear.get_last_lr() == pytest.approx([0.1 + 0.6 * (waves[1] - 0.1)])
    with started({"train_iters": 4}) as accelerator:
        model = build_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        made = accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer))[2]
        assert made.scheduler.lr_decay_steps == 4
    with started({}) as accelerator:
        model = build_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        with pytest.raises(ConfigError, match="Give total_num_steps"):
            accelerator.prepare(model, optimizer, MegatronLMDummyScheduler(optimizer))


def test_the_schedule_is_that_of_megatron(tmp_path: Path) -> None:
    run_distributed(check_schedule, 1, str(tmp_path))


def test_a_placeholder_alone_is_refused() -> None:
    dummy = MegatronLMDummyScheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
    with pytest.raises(StateError, match="MegatronLMDummyScheduler is a placeholder"):
        dummy.step()
    with pytest.raises(StateError, match="MegatronLMDummyDataLoader is a placeholder"):
        list(MegatronLMDummyDataLoader(data_path="x"))


def write_tokens(path: Path) -> str:
    """Write documents of `ROWS` rows; each token is the number of its row. Return the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=numpy.int32)
    for row in range(ROWS):
        builder.add_document(torch.full((LENGTH,), row), [LENGTH])
    builder.finalize(f"{path}.idx")
    return str(path)


class Halves(torch.utils.data.Dataset[Any]):
    """As many samples as it was asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def provided(sizes: Any) -> list[Halves]:
    return [Halves(size) for size in sizes]


def read(prefix: str) -> list[list[int]]:
    """Return the rows that a rank reads of each part, and train on one batch."""
    arguments: dict[str, Any] = {"data_path": prefix, "splits_string": "50,30,20"}
    arguments |= {"seq_length": LENGTH, "micro_batch_size": 2, "random_seed": 5}
    with started({}) as accelerator:
        dummy = MegatronLMDummyDataLoader(**arguments)
        model = build_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, *loaders = accelerator.prepare(model, optimizer, dummy, dummy, dummy)
        plugin: Any = accelerator.state.megatron_lm_plugin
        assert (plugin.seq_length, plugin.megatron_dataset_flag) == (LENGTH, True)
        assert plugin.global_batch_size == 4 * accelerator.parallel_dims.dp_size
        assert next(accelerator.skip_first_batches(loaders[1], 2))["tokens"].shape == (2, LENGTH)
        batch = next(loaders[0])  # an endless iterator, as documented
        assert batch["tokens"].shape == (2, LENGTH)
        loss = model(**batch).loss
        accelerator.backward(loss)
        assert float(loss.detach()) > 0
        assert len([next(loaders[2]) for _ in range(40)]) == 40
        rows = [
            [row for one in loader for row in one["tokens"][:, 0].tolist()] for loader in loaders
        ]
    fields = {"train_iters": 3, "eval_iters": 2, "eval_interval": 3}
    provider = {"custom_megatron_datasets_provider_function": provided}
    with started({**fields, **provider}) as accelerator:
        parts = MegatronLMDummyDataLoader(**arguments)
        plugin = accelerator.state.megatron_lm_plugin
        batches = parts.build_train_valid_test_data_iterators(accelerator)
        # Optimizer steps of two micro-batches; an evaluation before the first step and after each.
        size = 4 * accelerator.parallel_dims.dp_size
        assert [len(one.dataset) for one in batches] == [3 * size, 4 * size, 2 * size]
        parts = MegatronLMDummyDataLoader(**arguments)
        plugin.custom_megatron_datasets_provider_function = None
        plugin.seq_length = plugin.micro_batch_size = None
        parts.set_megatron_data_args()
        assert (plugin.seq_length, plugin.micro_batch_size) == (LENGTH, 2)
        sets = parts.get_train_valid_test_datasets_provider(accelerator)([5, 4, 2])
        assert [len(one) >= size for one, size in zip(sets, (5, 4, 2), strict=True)] == [True] * 3
    return rows


def test_loaders_of_megatrons_data_sets_are_built(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    first, second = run_distributed(read, 2, prefix)
    parts = [sorted({*a, *b}) for a, b in zip(first, second, strict=True)]
    assert all(first[part] != second[part] for part in range(3))
    assert not set(parts[0]) & set(parts[1]) | set(parts[1]) & set(parts[2])
    assert len(parts[0]) > len(parts[1]) > len(parts[2])
