"""What is imported before a fork (S1)."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import torch

from runner.recipe.registry import register
from runner.sweep import preload


def test_every_name_is_one_of_a_module() -> None:
    names = [*preload.RUN, *(name for names in preload.OF_FACTORIES.values() for name in names)]
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


def test_factories_are_those_of_the_registry() -> None:
    known = {register.data.built_in(name) for name in register.data.names()}
    assert preload.OF_FACTORIES.keys() <= known


def test_forks_draw_other_numbers() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        before = drawn()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        assert drawn() == before
        preload.forget_random_state()
        assert all(one != other for one, other in zip(before, drawn(), strict=True))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
