"""Which outputs have the batch as dim 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch._subclasses import FakeTensorMode

from accel.machine.errors import ConfigError
from accel.weights.pipeline import BatchOutputs

Tensors = Sequence[torch.Tensor]
X, PAIR = torch.ones(2, 3), torch.ones(2)


def told(inputs: Tensors, run: Callable[[Tensors], Tensors]) -> BatchOutputs:
    return BatchOutputs(run, inputs, run(inputs), 2)


def test_what_grows_with_the_batch_is_one() -> None:
    found = told([X], lambda t: [t[0] + 1, PAIR, t[0].mean(), t[0].reshape(-1)])
    assert found.batched((0,)) == (True, False, False, False)
    # Growing along another dim, too, it is not cut into samples.
    assert told([X], lambda t: [t[0] @ t[0].T]).batched((0,)) == (False,)
    assert told([X], lambda t: [t[0].T @ t[0]]).batched((0,)) == (False,)


def test_the_inputs_of_a_call_tell_which_are_batches() -> None:
    found = told([X, PAIR, torch.ones(3)], lambda t: [t[0] * 2, t[1] + 1])
    large = torch.ones(6, 3)
    assert found.batches_of([large, torch.ones(6), torch.ones(3)], 6) == (0, 1)
    assert found.batches_of([large, PAIR, torch.ones(3)], 6) == (0,)
    assert found.batches_of([X, PAIR, torch.ones(3)], 2) == (0, 1)
    assert found.batched((0, 1)) == (True, True)
    assert found.batched((0,)) == (True, False)
    assert found.problems((0,)) == []


def test_only_all_or_the_first_of_many_inputs_are_tried() -> None:
    many = told([X, *[PAIR] * 4], lambda t: [t[0]])
    assert many.problems((0,)) == many.problems((0, 1, 2, 3, 4)) == []
    assert "an output [2, 3]" in str(many.problems((0, 2))[0])


def test_inputs_that_cannot_grow_alone_are_tried_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(tensors: Tensors) -> Tensors:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return [tensors[0] * tensors[1].reshape(-1, 1)]

    found = told([X, PAIR], run)
    assert found.problems((0, 1)) == []
    assert found.problems((0,))
    assert caplog.messages == []


def test_a_model_that_takes_one_size_alone_cannot_be_told() -> None:
    assert told([X], lambda t: [t[0].reshape(6)]).batched((0,)) == (False,)
    with pytest.raises(ConfigError, match=r"an output \[2, 3\] with micro-batches of 2: .*larger"):
        told([X], lambda t: [t[0].reshape(2, 3)])
    found = told([X, PAIR], lambda t: [t[0] + t[1].reshape(2, 1).sum()])
    assert found.problems((0,)) == []
    assert found.batches_of([X, PAIR], 2) == (0,)
    assert found.problems((0, 1))
