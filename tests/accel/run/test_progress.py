"""The progress bar of tqdm, on the main process only (E1)."""

from __future__ import annotations

import io

import pytest

from accel.machine import imports
from accel.machine.errors import ConfigError, MissingPackageError
from accel.run.progress import tqdm
from accel.state import PartialState
from tests.helpers import run_distributed


def shown(main_process_only: bool = True, **options: object) -> tuple[list[int], bool]:
    """Return what the bar passes on, and whether this process shows it."""
    PartialState(cpu=True)
    out = io.StringIO()
    bar = tqdm(range(3), main_process_only=main_process_only, file=out, **options)
    return list(bar), bool(out.getvalue())


def test_one_process_shows_it() -> None:
    assert shown() == ([0, 1, 2], True)
    assert shown(disable=True) == ([0, 1, 2], False)


def test_the_main_process_shows_it() -> None:
    assert run_distributed(shown, 2) == [([0, 1, 2], True), ([0, 1, 2], False)]
    assert run_distributed(shown, 2, False) == [([0, 1, 2], True)] * 2


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_in_the_place_of_the_iterable_is_refused(flag: bool) -> None:
    with pytest.raises(ConfigError, match=f"Give main_process_only={flag} by name"):
        tqdm(flag, range(2))


def test_it_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_available", lambda name: False)
    with pytest.raises(MissingPackageError, match="tqdm"):
        tqdm(range(3))
