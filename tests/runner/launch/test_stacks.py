"""What a thread does, by its stack."""

from __future__ import annotations

import pytest

from runner.launch.stacks import BUSY, IN_TORCH, WAITING, Place, Stack
from tests.runner.launch.test_hangs import BACKWARD, GATHER, LINEAR, SITE, SLEEP

IMPORT = (
    Place("/home/me/train.py", 3, "main"),
    Place("<frozen importlib._bootstrap>", 1, "_find_and_load"),
    Place(f"{SITE}/torch/distributed/tensor/__init__.py", 1, "<module>"),
)
LOADER = (*SLEEP, Place(f"{SITE}/torch/utils/data/dataloader.py", 1, "_try_get_data"))


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        (SLEEP, BUSY),
        (IMPORT, BUSY),
        (LOADER, BUSY),
        (LINEAR, IN_TORCH),
        (BACKWARD, WAITING),
        (GATHER, WAITING),
    ],
)
def test_what_a_thread_does(places: tuple[Place, ...], kind: str) -> None:
    assert Stack(places, "").kind == kind


def test_a_stack_is_shown_with_the_users_own_lines() -> None:
    found: list[Stack] = []
    list(map(lambda _: found.append(Stack.of_main_thread()), [0]))
    (stack,) = found
    assert f'File "{__file__}"' in stack.text
    assert "_pytest" not in stack.text
    assert any("_pytest" in place.file for place in stack.places)
