"""Learning-rate schedules by name: factors of the peak rate, as functions of the step.

A schedule factory is called with the optimizer and the number of optimizer steps of the run; the
other arguments come from the recipe. A duration (`warmup`, `cooldown`, `every`, …) is a number of
optimizer steps, below 1 a fraction of the run, or a text such as "2 epochs".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from runner.builtin.optimizers import check_ranges
from runner.recipe.batch_plan import RunLength

Factor = Callable[[float], float]
Steps = float | str

# -- factories -----------------------------------------------------------------------------


def constant(optimizer: Optimizer, num_steps: int, warmup: Steps = 0) -> LambdaLR:
    """Return a linear warm-up, then the peak to the end.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        warmup: duration.
    """
    return _schedule(optimizer, num_steps, _to_the_end(1.0, _linear), warmup)


def cosine(optimizer: Optimizer, num_steps: int, warmup: Steps = 0, final: float = 0) -> LambdaLR:
    """Return a linear warm-up, then half a cosine from the peak down to `final` of it.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        warmup: duration.
        final: the last rate, as a fraction of the peak.

    Source: I. Loshchilov and F. Hutter, SGDR, arXiv:1608.03983.
    """
    return _schedule(optimizer, num_steps, _to_the_end(final, _cosine), warmup)


def linear(optimizer: Optimizer, num_steps: int, warmup: Steps = 0, final: float = 0) -> LambdaLR:
    """Return a linear warm-up, then a straight line from the peak down to `final` of it.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        warmup: duration.
        final: the last rate, as a fraction of the peak.
    """
    return _schedule(optimizer, num_steps, _to_the_end(final, _linear), warmup)


def polynomial(
    optimizer: Optimizer, num_steps: int, power: float = 2, warmup: Steps = 0, final: float = 0
) -> LambdaLR:
    """Return a linear warm-up, then a power of the remaining share, from the peak to `final` of it.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        power: exponent of the remaining share; 1 is `linear`.
        warmup: duration.
        final: the last rate, as a fraction of the peak.
    """
    check_ranges("scheduler", power=(power, 0, math.inf))
    body = _to_the_end(final, partial(_power, power=power))
    return _schedule(optimizer, num_steps, body, warmup)


def wsd(
    optimizer: Optimizer,
    num_steps: int,
    warmup: Steps = 0,
    cooldown: Steps = 0.2,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
    final: float = 0,
) -> LambdaLR:
    """Return warm-up, stable, decay: the peak, and a fall to `final` of it at the end.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        warmup: duration.
        cooldown: duration of the fall.
        shape: of the fall: a line, half a cosine, or 1 minus the root of the passed share.
        final: the last rate, as a fraction of the peak.

    Source: S. Hu et al., MiniCPM, arXiv:2404.06395; A. Hägele et al., Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations, arXiv:2405.18392.
    """
    run = _run(num_steps)
    begin = run - run.steps(cooldown, "scheduler.cooldown")
    falling = _to_the_end(final, SHAPES[shape])
    return _schedule(optimizer, run, lambda run, start: falling(run, begin), warmup)


def inverse_sqrt(
    optimizer: Optimizer, num_steps: int, warmup: Steps = 0.1, cooldown: Steps = 0
) -> LambdaLR:
    """Return a linear warm-up to the peak at step w, then the peak times sqrt(w / step).

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        warmup: duration.
        cooldown: duration at the end over which a line from 1 to 0 multiplies the rate.

    Source: A. Vaswani et al., Attention Is All You Need, arXiv:1706.03762.
    """

    return _schedule(
        optimizer, num_steps, lambda _, start: partial(_inverse_sqrt, peak=start), warmup, cooldown
    )


def step(
    optimizer: Optimizer,
    num_steps: int,
    every: Steps = 0.3,
    gamma: float = 0.1,
    warmup: Steps = 0,
    cooldown: Steps = 0,
) -> LambdaLR:
    """Return a rate that is multiplied by `gamma` after each `every`, counted from the start.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        every: duration between two changes.
        gamma: factor of each change.
        warmup: duration.
        cooldown: as of `inverse_sqrt`.
    """
    check_ranges("scheduler", gamma=(gamma, 0, 1))

    def body(run: RunLength, start: float) -> Factor:
        return partial(_steps, every=run.whole_steps(every, "scheduler.every"), gamma=gamma)

    return _schedule(optimizer, num_steps, body, warmup, cooldown)


def multistep(
    optimizer: Optimizer,
    num_steps: int,
    milestones: Sequence[Steps] = (0.5, 0.75),
    gamma: float = 0.1,
    warmup: Steps = 0,
    cooldown: Steps = 0,
) -> LambdaLR:
    """Return a rate that is multiplied by `gamma` at each milestone.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        milestones: durations from the start.
        gamma: factor at each.
        warmup: duration.
        cooldown: as of `inverse_sqrt`.
    """
    check_ranges("scheduler", gamma=(gamma, 0, 1))

    def body(run: RunLength, start: float) -> Factor:
        at = sorted(run.whole_steps(one, "scheduler.milestones") for one in milestones)
        return partial(_multistep, milestones=at, gamma=gamma)

    return _schedule(optimizer, num_steps, body, warmup, cooldown)


def restarts(
    optimizer: Optimizer,
    num_steps: int,
    period: Steps = 0.25,
    factor: float = 1.0,
    warmup: Steps = 0,
    final: float = 0,
) -> LambdaLR:
    """Return half cosines from the peak to `final` of it, each begun anew at the peak.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        period: duration of the first.
        factor: by which each is longer than the one before.
        warmup: duration of a linear warm-up before the first.
        final: the last rate of each, as a fraction of the peak.

    Source: I. Loshchilov and F. Hutter, SGDR, arXiv:1608.03983.
    """
    check_ranges("scheduler", final=(final, 0, 1), factor=(factor, 1, math.inf))

    def body(run: RunLength, start: float) -> Factor:
        first = run.whole_steps(period, "scheduler.period")
        return partial(_restarts, start=start, period=first, factor=factor, final=final)

    return _schedule(optimizer, num_steps, body, warmup)


def one_cycle(
    optimizer: Optimizer,
    num_steps: int,
    warmup: Steps = 0.3,
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    cycle_momentum: bool = True,
) -> OneCycleLR:
    """Return torch's one cycle over the run: up to the peak, then down, momentum the other way.

    Args:
        optimizer: whose rates are the peak.
        num_steps: optimizer steps of the run.
        warmup: duration of the rise.
        div_factor: peak over the first rate.
        final_div_factor: first over the last rate.
        cycle_momentum: whether momentum (or the first beta) falls to 0.85 and rises to 0.95 again.

    Source: L. Smith and N. Topin, Super-Convergence, arXiv:1708.07120.
    """
    rising = _run(num_steps).steps(warmup, "scheduler.warmup") / num_steps
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    factors: Any = {"div_factor": div_factor, "final_div_factor": final_div_factor}
    return OneCycleLR(
        optimizer, peaks, int(num_steps), None, None, rising, "cos", cycle_momentum, **factors
    )


def plateau(
    optimizer: Optimizer,
    num_steps: int,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    cooldown: int = 0,
    min_lr: float = 0.0,
) -> ReduceLROnPlateau:
    """Return torch's schedule that multiplies the rate when the monitored metric stops improving.

    Args:
        optimizer: whose rates are reduced.
        num_steps: optimizer steps of the run.
        factor: of the rate.
        patience: evaluations without an improvement that are accepted.
        threshold: relative change that counts as an improvement.
        cooldown: evaluations after a reduction that do not count.
        min_lr: lower bound of the rate.
    """
    bounds = {"patience": patience, "cooldown": cooldown, "min_lr": min_lr}
    check_ranges("scheduler", **{name: (value, 0, math.inf) for name, value in bounds.items()})
    options: Any = {"cooldown": cooldown, "min_lr": min_lr}
    mode = _run(num_steps).mode
    return ReduceLROnPlateau(optimizer, mode, factor, patience, threshold, **options)


# -- formulas ------------------------------------------------------------------------------


def _run(num_steps: int) -> RunLength:
    return num_steps if isinstance(num_steps, RunLength) else RunLength(num_steps)


def _schedule(
    optimizer: Optimizer,
    num_steps: int,
    body: Callable[[RunLength, float], Factor],
    warmup: Steps,
    cooldown: Steps = 0,
) -> LambdaLR:
    """Return the schedule of a body, which is made from the run and its steps of warm-up."""
    run = _run(num_steps)
    start = run.steps(warmup, "scheduler.warmup")
    # A partial, not a lambda: it pickles, and leaves nothing in the scheduler's state, so that a
    # resumed run follows the schedule of its recipe.
    end = run.steps(cooldown, "scheduler.cooldown")
    factor = partial(_factor, body=body(run, start), warmup=start, num_steps=int(run), cooldown=end)
    return LambdaLR(optimizer, factor)


def _factor(step: float, body: Factor, warmup: float, num_steps: int, cooldown: float) -> float:
    """Return the rate of update number `step` (from 0) as a fraction of the peak."""
    if step + 1 < warmup:
        return (step + 1) / warmup
    remaining = max(0.0, num_steps - step)
    return body(step) * (remaining / cooldown if remaining < cooldown else 1.0)


def _to_the_end(final: float, decay: Factor) -> Callable[[RunLength, float], Factor]:
    check_ranges("scheduler", final=(final, 0, 1))
    return lambda run, start: partial(_falling, start=start, end=int(run), final=final, decay=decay)


def _falling(step: float, start: float, end: float, final: float, decay: Factor) -> float:
    passed = (step - start) / max(1.0, end - start)
    return final + (1 - final) * decay(min(1.0, max(0.0, passed)))


def _cosine(passed: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * passed))


def _linear(passed: float) -> float:
    return 1 - passed


def _sqrt(passed: float) -> float:
    return 1 - math.sqrt(passed)


def _power(passed: float, power: float) -> float:
    return (1 - passed) ** power


SHAPES: dict[str, Factor] = {"linear": _linear, "cosine": _cosine, "sqrt": _sqrt}


def _inverse_sqrt(step: float, peak: float) -> float:
    return math.sqrt(max(1.0, peak) / max(step + 1, peak))


def _steps(step: float, every: int, gamma: float) -> float:
    return gamma ** (step // every)


def _multistep(step: float, milestones: Sequence[int], gamma: float) -> float:
    return gamma ** bisect_right(milestones, step)


def _restarts(step: float, start: float, period: float, factor: float, final: float) -> float:
    step = max(0.0, step - start)
    while step >= period:
        step, period = step - period, period * factor
    return _falling(step, 0, period, final, _cosine)
