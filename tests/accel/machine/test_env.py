"""The environment is read in one place, strictly (E1)."""

from __future__ import annotations

import os

import pytest

from accel.machine import env
from accel.machine.errors import ConfigError
from accel.utils import get_int_from_env, parse_choice_from_env, parse_flag_from_env, str_to_bool

NAME = "ACCEL_TEST_VARIABLE"


def test_integer() -> None:
    with env.patched(**{NAME: " 7 "}):
        assert env.integer(NAME) == 7
    with env.patched(**{NAME: ""}):
        assert env.integer(NAME, 3) == 3
    with env.patched(**{NAME: "7.5"}), pytest.raises(ConfigError, match="expected an integer"):
        env.integer(NAME)


# -- documented helpers ------------------------------------------------------------------------


def test_variables_are_patched_in_a_context() -> None:
    with env.patched(ACCEL_TEST_HAD="before", ACCEL_TEST_NEW=None):
        with env.patch_environment(accel_test_had=3, accel_test_new=True):
            assert (os.environ["ACCEL_TEST_HAD"], os.environ["ACCEL_TEST_NEW"]) == ("3", "True")
        assert os.environ["ACCEL_TEST_HAD"] == "before"
        assert "ACCEL_TEST_NEW" not in os.environ


def test_variables_are_cleared_in_a_context() -> None:
    before = dict(os.environ)

    def fail() -> None:
        with env.clear_environment():
            assert not os.environ
            os.environ["ACCEL_TEST_NEW"] = "1"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert dict(os.environ) == before


def set_variables() -> str:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"
    os.environ["ACCELERATE_USE_CPU"] = "new"
    os.environ[NAME] = "kept"
    return "done"


def test_a_functions_variables_are_purged() -> None:
    with env.patched(**{NAME: None, "ACCELERATE_USE_CPU": "1"}):
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
        assert env.purge_accelerate_environment(set_variables)() == "done"
        assert "ACCELERATE_MIXED_PRECISION" not in os.environ
        assert os.environ["ACCELERATE_USE_CPU"] == "1"
        assert os.environ[NAME] == "kept"  # of another prefix


def test_the_tests_of_a_class_and_of_derived_ones_are_purged() -> None:
    @env.purge_accelerate_environment
    class Base:
        def test_first(self) -> str:
            return set_variables()

        def prepare(self) -> str:
            return set_variables()

    class Derived(Base):
        def test_second(self) -> str:
            return set_variables()

    with env.patched(**{NAME: None, "ACCELERATE_MIXED_PRECISION": None, "ACCELERATE_USE_CPU": "1"}):
        for test in (Derived().test_first, Derived().test_second):
            assert test() == "done"
            assert "ACCELERATE_MIXED_PRECISION" not in os.environ
        Derived().prepare()
        assert os.environ.pop("ACCELERATE_MIXED_PRECISION") == "fp16"  # it is no test


@pytest.mark.parametrize(
    ("text", "number"), [("YES", 1), ("t", 1), ("1", 1), ("off", 0), ("False", 0), ("0", 0)]
)
def test_a_text_is_a_truth_value(text: str, number: int) -> None:
    assert str_to_bool(text) == number
    assert not isinstance(str_to_bool(text), bool)
    assert str_to_bool(text, to_bool=True) is bool(number)


def test_other_texts_are_no_truth_values() -> None:
    with pytest.raises(ValueError, match="'maybe': expected true or false"):
        str_to_bool("maybe")


def test_variables_are_read_with_a_default() -> None:
    with env.patched(**{NAME: None}):
        assert parse_flag_from_env(NAME) is False
        assert parse_flag_from_env(NAME, True) is True
        assert parse_choice_from_env(NAME) == "no"
        assert parse_choice_from_env(NAME, "bf16") == "bf16"
    with env.patched(**{NAME: "0"}):
        assert parse_flag_from_env(NAME, True) is False
        assert parse_choice_from_env(NAME, "bf16") == "0"
    with env.patched(**{NAME: "yes"}):
        assert parse_flag_from_env(NAME) is True
    with env.patched(**{NAME: "maybe"}), pytest.raises(ConfigError, match="expected true or false"):
        parse_flag_from_env(NAME)


def test_the_first_number_of_several_variables_is_taken() -> None:
    second = f"{NAME}_2"
    with env.patched(**{NAME: "-1", second: "5"}):
        assert get_int_from_env([NAME, second], 7) == 5
        assert get_int_from_env([NAME], 7) == 7
    with env.patched(**{NAME: "0", second: "5"}):
        assert get_int_from_env((NAME, second), 7) == 0
    with env.patched(**{NAME: "many"}), pytest.raises(ValueError, match="expected an integer"):
        get_int_from_env([NAME], 7)
