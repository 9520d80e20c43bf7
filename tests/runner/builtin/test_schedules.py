"""C1, R2: schedules by name: their rates, the weights that they train, and their resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from accel.machine.errors import ConfigError
from runner.builtin import schedules
from runner.recipe import composition
from runner.recipe.batch_plan import RunLength
from runner.training import build
from runner.training.timed_schedule import TimedLR
from tests.runner import loops, plain_loops

N = plain_loops.STEPS
PEAK = 0.05


def length(steps: int = N) -> RunLength:
    run = RunLength(steps)
    run.steps_per_epoch, run.max_seconds = 1, 100.0
    return run


def adamw(model: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW((model or nn.Linear(1, 1)).parameters(), lr=PEAK)


def rates(scheduler: Any, steps: int = N) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def formula(factor: Callable[[int], float]) -> Callable[[Any], Any]:
    return lambda optimizer: torchs.LambdaLR(optimizer, factor)


def warmed(step: int) -> float:
    return min(1.0, (step + 1) / 8)


# By name and arguments: the same by torch, or by a plain formula of the step.
SAME: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "constant": ({"warmup": 8}, formula(warmed)),
    "cosine": ({}, lambda o: torchs.CosineAnnealingLR(o, N)),
    "linear": ({"final": 0.1}, lambda o: torchs.LinearLR(o, 1.0, 0.1, N)),
    "polynomial": ({"power": 3}, lambda o: torchs.PolynomialLR(o, N, 3)),
    "wsd": (
        {"warmup": "8 epochs", "cooldown": 0.25, "shape": "sqrt"},
        formula(lambda k: warmed(k) * (1 - math.sqrt(max(0, k - 18) / 6))),
    ),
    "inverse_sqrt": (
        {"warmup": 8, "cooldown": 6},
        formula(lambda k: min((k + 1) / 8, math.sqrt(8 / (k + 1))) * min(1, (N - k) / 6)),
    ),
    "step": ({"every": "6 epochs", "gamma": 0.5}, lambda o: torchs.StepLR(o, 6, 0.5)),
    "multistep": ({"milestones": [5, 0.5]}, lambda o: torchs.MultiStepLR(o, [5, 12])),
    "restarts": (
        {"period": 3, "factor": 2},
        lambda o: torchs.CosineAnnealingWarmRestarts(o, 3, 2),
    ),
    "one_cycle": ({}, lambda o: torchs.OneCycleLR(o, PEAK, total_steps=N)),
}
MEASURED = {**SAME, "plateau": ({"patience": 1}, lambda o: torchs.ReduceLROnPlateau(o, patience=1))}


def made(name: str, options: dict[str, Any]) -> Callable[[Any, int], Any]:
    return partial(getattr(schedules, name), **options)


@pytest.mark.parametrize("name", SAME)
def test_rates_are_those_of_torch_or_the_formula(name: str) -> None:
    options, same = SAME[name]
    found, expected = rates(made(name, options)(adamw(), length())), rates(same(adamw()))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)


def test_a_warm_up_precedes_what_falls_to_the_end() -> None:
    found = rates(schedules.cosine(adamw(), 12, warmup=4, final=0.1), 13)
    assert found[:4] == pytest.approx([PEAK * k / 4 for k in (1, 2, 3, 4)])
    falls = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(9)]
    assert found[4:] == pytest.approx([PEAK * factor for factor in falls])


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("cosine", {"warmup": "2 weeks"}, "scheduler.warmup='2 weeks'"),
        ("linear", {"warmup": -1}, "scheduler.warmup=-1"),
        ("wsd", {"cooldown": math.inf}, "scheduler.cooldown=inf"),
        ("step", {"every": "2 epochs"}, "scheduler.every='2 epochs'"),
        ("cosine", {"final": 2}, "scheduler.final=2"),
    ],
)
def test_what_no_run_has_is_refused(name: str, options: dict[str, Any], value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(name, options)(adamw(), RunLength(N))
    assert [problem.value for problem in caught.value.problems] == [value]


def test_a_schedule_by_time_is_where_the_clock_is_and_goes_on_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 0.0, 1.0, 50.0, 1000.0, 1000.0, 1000.0, 1050.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    first = TimedLR(schedules.linear(adamw(), length()), length())
    rates(first, 2)  # after 2 of 24 steps half of the 100 seconds have passed
    assert first.get_last_lr() == pytest.approx([PEAK / 2])
    then = TimedLR(schedules.linear(adamw(), length()), length())
    then.load_state_dict(first.state_dict())
    rates(then, 1)
    assert then.get_last_lr() == pytest.approx([PEAK / 4])
    with pytest.raises(ConfigError) as caught:
        TimedLR(torchs.OneCycleLR(adamw(), PEAK, total_steps=N), N)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("target", "attribute"), [("CosineAnnealingLR", "T_max"), ("OneCycleLR", "total_steps")]
)
def test_lengths_of_torchs_schedules_are_derived(
    target: str, attribute: str, hydra_session: None
) -> None:
    node = f"scheduler={{_target_: torch.optim.lr_scheduler.{target}}}"
    line = [node] + ["scheduler.max_lr=0.1"] * (target == "OneCycleLR")
    examined = composition.new_run(line, "config")
    assert examined.problems == []
    step = build.build_step(examined.recipe)
    scheduler = step.make_schedulers(length())["optimizer"]
    assert type(getattr(scheduler, attribute)) is int
    assert getattr(scheduler, attribute) == N


# -- trained -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_weights_are_those_of_a_plain_loop_and_a_killed_run_goes_on(
    name: str, tmp_path: Path
) -> None:
    options, same = MEASURED[name]
    given = {"make_scheduler": made(name, options), "make_optimizer": adamw}
    expected = plain_loops.plain(lambda model: [adamw(model)], same)
    for strategy in ("one", "ddp"):
        plain_loops.check_weights(expected, tmp_path / strategy, strategy, **given)


def timed(optimizer: Any, num_steps: int) -> Any:
    return TimedLR(schedules.linear(optimizer, num_steps), num_steps)


@pytest.mark.parametrize("make", [made("plateau", {}), timed], ids=["plateau", "time"])
def test_a_plateau_goes_on_in_a_longer_run_and_time_does_not(make: Any, tmp_path: Path) -> None:
    changes = {"trainer__max_time": 1000, "trainer__stop_after": 3}
    loops.run(tmp_path, loops.recipe_of(**changes), make_scheduler=make)
    longer = loops.recipe_of(trainer__max_time=1000, trainer__epochs=5)
    loop = loops.build(tmp_path, longer, resume_from=loops.newest(tmp_path), make_scheduler=make)
    if make is timed:
        with pytest.raises(ConfigError, match=r"TimedLR with resume: a schedule that follows time"):
            loop.run()
    else:
        assert loop.run()["stopped"] == "epochs"
