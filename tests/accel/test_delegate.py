"""Methods of a facade that are those of an object it owns."""

from __future__ import annotations

import inspect

import pytest

from accel._delegate import connect, delegate


class Engine:
    """Is owned."""

    def start(self, speed: int, *, loud: bool = False) -> str:
        """Start it."""
        return f"{speed} {loud}"


class Fast(Engine):
    """Overrides the method."""

    def start(self, speed: int, *, loud: bool = False) -> str:
        return "fast " + super().start(speed, loud=loud)


class Broken(Engine):
    """Calls another with a wrong argument."""

    def start(self, speed: int, *, loud: bool = False) -> str:
        return Engine().start(speed, sped=1)  # type: ignore[call-arg]


class Car:
    """Is the facade."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    start = delegate("engine", Engine.start)


class LoudCar(Car):
    """Overrides what it delegates."""

    def start(self, speed: int, *, loud: bool = False) -> str:
        return super().start(speed, loud=True)


def test_the_call_is_that_of_the_owned_object() -> None:
    assert Car(Engine()).start(3, loud=True) == "3 True"
    assert Car(Fast()).start(3) == "fast 3 False"


def test_name_signature_and_docstring_are_those_of_the_method() -> None:
    assert (Car.start.__name__, Car.start.__doc__) == ("start", "Start it.")
    assert inspect.signature(Car.start) == inspect.signature(Engine.start)


def test_the_owned_object_calls_the_methods_that_a_subclass_of_the_facade_overrides() -> None:
    car = LoudCar(Engine())
    connect(car, Car, per_step=("start",))
    assert car.engine.start(3) == "3 True"
    assert car.start(3) == "3 True"


def test_the_facade_holds_the_methods_of_each_step_themselves() -> None:
    car = Car(Engine())
    connect(car, Car, per_step=("start",))
    assert car.start == car.engine.start


def test_wrong_arguments_name_the_facades_method() -> None:
    for car in (Car(Engine()), Car(Fast())):
        with pytest.raises(TypeError, match=r"^Car\.start\(\) got an unexpected .*'sped'"):
            car.start(3, sped=1)  # type: ignore[call-arg]


def test_an_error_within_the_method_stays() -> None:
    with pytest.raises(TypeError, match=r"^Engine\.start\(\) got an unexpected"):
        Car(Broken()).start(3)
