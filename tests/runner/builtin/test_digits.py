"""Holds R1."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from accel.machine.errors import ConfigError
from runner.builtin.digits import Classification, RandomVariants, cnn, digits, warp


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


def test_the_split_depends_on_nothing_but_its_seed() -> None:
    first = tensors(digits(augment=False).test)
    torch.manual_seed(7)
    np.random.seed(7)
    assert torch.equal(first[0], tensors(digits().test)[0])
    assert not torch.equal(first[0], tensors(digits(split_seed=1).test)[0])


def test_augmentation_leaves_the_generators_of_the_run_alone() -> None:
    state, python_state = torch.get_rng_state(), random.getstate()
    digits()
    assert torch.equal(state, torch.get_rng_state())
    assert python_state == random.getstate()


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


def test_warped_images_stay_near_their_originals() -> None:
    images = tensors(digits(augment=False).train)[0][:200]
    warped = warp(images, torch.Generator().manual_seed(0))
    assert warped.shape == images.shape
    difference = (warped - images).abs().mean()
    strangers = (images.roll(1, dims=0) - images).abs().mean()
    assert 0.02 < float(difference) < 0.7 * float(strangers)


def test_a_warp_by_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ROTATION", "MAX_SHIFT_PIXELS", "MAX_ZOOM"):
        monkeypatch.setattr(f"runner.builtin.digits.{name}", 0.0)
    images = tensors(digits(augment=False).train)[0][:5]
    torch.testing.assert_close(warp(images, torch.Generator()), images)


def test_no_variant_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_variants=0"):
        digits(num_variants=0)


def test_the_model_computes_each_sample_by_itself() -> None:
    model = cnn(width=8, dropout=0.0)
    images = torch.rand(6, 1, 8, 8)
    logits = model(images)
    assert logits.shape == (6, 10)
    torch.testing.assert_close(logits[2:3], model(images[2:3]))


def test_dropout_acts_in_training_alone() -> None:
    model, images = cnn(dropout=0.5), torch.rand(2, 1, 8, 8)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


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


def test_label_smoothing_is_used() -> None:
    logits, labels = torch.tensor([[9.0, 0.0]]), torch.tensor([0])
    losses = Classification(label_smoothing=0.2).losses(torch.nn.Identity(), (logits, labels))
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.2)
    assert float(losses[0]) == pytest.approx(float(expected))


def test_a_short_training_learns() -> None:
    torch.manual_seed(0)
    data, model, objective = digits(augment=False), cnn(width=16), Classification()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    images, labels = tensors(data.train)
    for _ in range(4):
        for chosen in torch.randperm(len(labels)).split(64):
            objective.losses(model, (images[chosen], labels[chosen])).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        metrics = objective.summarize(objective.evaluate(model, tensors(data.test)))
    assert metrics["accuracy"] > 0.85
