"""R1: the digits are split, drawn and measured as functions of the seed."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from runner.builtin.digits import Classification, RandomVariants, digits


def tensors(part: object) -> tuple[Tensor, Tensor]:
    assert isinstance(part, TensorDataset)
    return part.tensors[0], part.tensors[1]


def test_the_split_is_fixed_and_stratified() -> None:
    data = digits(augment=False)
    parts = [tensors(part) for part in (data.train, data.validation, data.test)]
    assert [len(labels) for _, labels in parts] == [1257, 180, 360]
    for images, labels in parts:
        assert images.shape[1:] == (1, 8, 8)
        assert images.dtype == torch.float32
        assert labels.dtype == torch.int64
        assert 0.0 <= float(images.min()) < float(images.max()) <= 1.0
        shares = torch.bincount(labels, minlength=10) / len(labels)
        assert float((shares - 0.1).abs().max()) < 0.01
    # Every scan is in one part: together they are all there are.
    pixels = torch.cat([images for images, _ in parts]).sum(dtype=torch.float64) * 16
    assert int(pixels) == 561718


def test_a_visit_draws_a_variant_as_a_function_of_the_seed() -> None:
    train = digits(num_variants=8).train
    assert isinstance(train, RandomVariants)
    assert len(train) == 1257

    def visit(seed: int) -> Tensor:
        random.seed(seed)
        return train[3][0]

    assert torch.equal(visit(1), visit(1))
    assert len({tuple(visit(seed).flatten().tolist()) for seed in range(40)}) == 8
    original, label = digits(augment=False).train[3]
    assert torch.equal(train.variants[0, 3], original)
    assert train[3][1] == label


def test_the_objective_measures_each_sample() -> None:
    objective, model = Classification(), torch.nn.Identity()
    logits = torch.tensor([[4.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    labels = torch.tensor([0, 1, 1])
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(3), labels]
    torch.testing.assert_close(objective.losses(model, [logits, labels]), expected)
    metrics = objective.summarize(objective.evaluate(model, [logits, labels]))
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["loss"] == pytest.approx(float(expected.mean()))
    predicted = objective.predict(model, [logits, labels])
    assert predicted["prediction"].tolist() == [0, 1, 0]
    torch.testing.assert_close(predicted["probabilities"].sum(dim=1), torch.ones(3))
