"""The objects that a run trains, by kind."""

from __future__ import annotations

from accel.strategies.base import Objects


def test_objects_are_kept_in_the_order_they_came() -> None:
    held = Objects(models=["a"], custom=["c"])
    held.extend(Objects(models=["b"], optimizers=["o"], schedulers=["s"], dataloaders=["d"]))
    assert held == Objects(["a", "b"], ["o"], ["s"], ["d"], ["c"])


def test_registered_objects_stay_when_the_prepared_ones_go() -> None:
    held = Objects(["a"], ["o"], ["s"], ["d"], ["c"])
    models = held.models
    held.clear_prepared()
    assert held == Objects(custom=["c"])
    assert held.models is models
