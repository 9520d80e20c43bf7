"""What a cell is held against: the plain loop's losses, weights and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from tests.parity import float8, fp8_layers, reference
from tests.parity.cells import BACKENDS, Cell
from tests.parity.memory import Walk
from tests.parity.reference import Run
from tests.parity.task import Task, text

FLOORS = 5  # fp32: so many noise floors
MOST = 1e-5  # fp32: and no more than this
# Between XLA's kernels and torch's on a CPU gradients of one batch differ by 9e-7, and weights by
# 7e-7 after 50 updates of AdamW by equal gradients.
OWN_KERNELS = 1e-6
AUTOCAST = 1e-3
ENGINE_OWNED = 1e-2
# The unit roundoff of e4m3, in which forward passes multiply, is 2**-4: 16 times that of bf16,
# 2**-8, whose gate is AUTOCAST. That of e5m2, to which tensorwise recipes round the gradients of
# outputs, is 2**-3, 32 times; the gate stays at 16, as AdamW takes the size out of gradients, and
# their sums over tokens average roundings. A run in bf16 holds it, too: `fp8_layers` tells them
# apart.
FLOAT8 = 16 * AUTOCAST
# A weight of 1 cannot be closer to itself than one unit in its last place, nor a loss: a cut of the
# batch that happens to round the same way is no measure of noise.
UNIT = 2**-23
TWIN = "head.weight"  # the same tensor as the embedding: a state may name it once


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart.

    Args:
        loss: largest relative difference of a step's loss.
        weight: largest absolute difference of a final weight.
    """

    loss: float
    weight: float


@dataclass
class Verdict:
    """What became of a cell.

    Attributes:
        cell: the cell.
        reason: why it was not run; None if it was.
        difference: from the plain loop.
        gate: the largest difference allowed.
        layers: mistakes of the layers of a cell in fp8, on any process.
        from_fp32: of a cell in fp8, from the plain loop in fp32; its gate is `FLOAT8`.
        num_bytes: live storages on the fullest process, before and after the optimizer's step.
        share: of the replica's bytes, each at its fullest.
        seconds: that it took.
        types: of the prepared model and optimizer.
        failures: what is wrong; empty: green.
    """

    cell: Cell
    reason: str | None = None
    difference: Difference | None = None
    gate: Difference | None = None
    from_fp32: Difference | None = None
    layers: Sequence[str] = ()
    num_bytes: dict[str, int] = field(default_factory=dict)
    share: float | None = None
    seconds: float = 0.0
    types: Sequence[str] = ()
    failures: list[str] = field(default_factory=list)

    @property
    def green(self) -> bool:
        """Whether it ran and holds every gate."""
        return self.reason is None and not self.failures

    @property
    def caught(self) -> bool:
        """Whether losses or weights, or the layers of a cell in fp8, show a control's mistake.

        Neither a run that failed, nor NaN, nor bytes, nor a number of steps shows it.
        """
        found, gate = self.difference, self.gate
        if found is None or gate is None:
            return False
        return bool(self.layers) or found.loss > gate.loss or found.weight > gate.weight

    @property
    def caught_from_fp32(self) -> bool:
        """Whether a cell in fp8 is farther from fp32 than its format explains."""
        found = self.from_fp32
        return found is not None and max(dataclasses.astuple(found)) > FLOAT8


@cache
def plain(task: Task, num_chunks: int, device: str) -> Run:
    """Return what the plain loop leaves, each batch in one piece or cut into several."""
    text(task.context)
    walk = Walk()
    model = task.model().to(device)
    steps, counted = task.steps(device), walk.count if num_chunks == 1 else _uncounted
    return reference.train(
        model, steps, task.recipe, num_chunks, count=counted, own_loss=task.own_loss
    )


@cache
def plain_float8(task: Task, device: str) -> Run:
    """Return what the plain loop leaves whose layers torchao converted, under bf16 autocast."""
    text(task.context)
    walk = Walk()
    model = float8.convert(task.model().to(device))
    steps = task.steps(device)
    return reference.train(model, steps, task.recipe, autocast=torch.bfloat16, count=walk.count)


def _uncounted(step: int, moment: str) -> None:
    return None


def noise_floor(cell: Cell) -> Difference:
    """Return how far the plain loop is from itself if it sums in another order.

    Its batches are cut into as many pieces as the cell's processes and micro-batches make, and into
    two at least: one piece differs from itself by nothing, and no engine promises the same bits.
    Nor is it below one unit in the last place.
    """
    num_chunks = max(2, cell.world_size * cell.accumulation)
    whole = plain(cell.task, 1, cell.reference_device)
    found = compare(plain(cell.task, num_chunks, cell.reference_device), whole)
    return Difference(max(found.loss, UNIT), max(found.weight, UNIT))


def compare(found: Run, wanted: Run) -> Difference:
    """Return how far `found` is from `wanted` in the steps that both made.

    NaN where one of them is not a number. Both have a step, and weights of the same shapes.
    """
    both = min(len(found.losses), len(wanted.losses))
    losses = torch.tensor(found.losses[:both], dtype=torch.float64)
    expected = torch.tensor(wanted.losses[:both], dtype=torch.float64)
    pairs = [(tensor, wanted.weights[name]) for name, tensor in found.weights.items()]
    return Difference(
        ((losses - expected).abs() / expected).max().item(),
        torch.stack([(one - other).abs().max() for one, other in pairs]).max().item(),
    )


def gate_of(cell: Cell) -> Difference:
    """Return the largest differences that `cell` may show."""
    if cell.precision == "no" and BACKENDS[cell.backend].own_kernels:
        return Difference(OWN_KERNELS, MOST)
    if cell.precision == "no":
        floor = noise_floor(cell)
        return Difference(min(FLOORS * floor.loss, MOST), min(FLOORS * floor.weight, MOST))
    if cell.precision == "fp8":  # one process does the plain loop's operations in their order
        same = (cell.backend, cell.device) == ("single", "cpu")
        bound = 0.0 if same else FLOAT8
        return Difference(bound, bound)
    owned = cell.precision == "bf16" and BACKENDS[cell.backend].owns_bf16
    bound = ENGINE_OWNED if owned else AUTOCAST
    return Difference(bound, bound)


def judge(cell: Cell, answers: Sequence[dict[str, Any]], seconds: float) -> Verdict:
    """Return the verdict on what the processes of `cell` answered, by rank."""
    is_float8 = cell.precision == "fp8"
    exact = plain(cell.task, 1, cell.reference_device)
    wanted = plain_float8(cell.task, cell.device) if is_float8 else exact
    runs: list[Run] = [answer["run"] for answer in answers]
    verdict = Verdict(cell, gate=gate_of(cell), seconds=seconds, types=answers[0]["types"])
    states = [
        {name: tensor for name, tensor in run.weights.items() if name in wanted.weights}
        for run in runs
        if run.weights
    ]
    verdict.failures += incomparable(runs, states, wanted)
    if verdict.failures:
        return verdict
    losses = added_losses(answers)
    if len(losses) != len(wanted.losses):
        verdict.failures.append(f"{len(losses)} of {len(wanted.losses)} steps")
    found = [compare(Run(losses, state), wanted) for state in states]
    verdict.difference = Difference(
        found[0].loss, torch.tensor([difference.weight for difference in found]).max().item()
    )
    for name in ("loss", "weight"):
        value, most = getattr(verdict.difference, name), getattr(verdict.gate, name)
        if not value <= most:  # NaN is no parity either
            verdict.failures.append(f"{name} {value:.1e} > {most:.1e}")
    if is_float8:
        told = [told for answer in answers for told in fp8_layers.mistakes(answer["layers"])]
        verdict.layers = list(dict.fromkeys(told))
        verdict.failures += verdict.layers
        verdict.from_fp32 = compare(Run(losses, states[0]), exact)
        for value in dataclasses.astuple(verdict.from_fp32):
            if not value <= FLOAT8:
                verdict.failures.append(f"{value:.1e} from fp32 > {FLOAT8:.1e}")
    if any(run.rounded and all(run.rounded) for run in runs):
        verdict.failures.append("the model's own losses are rounded to bf16")
    _weigh(verdict, runs, wanted)
    return verdict


def incomparable(
    runs: Sequence[Run], states: Sequence[dict[str, torch.Tensor]], wanted: Run
) -> list[str]:
    """Return why `runs`, which left `states`, cannot be compared with `wanted`; empty: they can."""
    lengths = [len(run.losses) for run in runs]
    if min(lengths) == 0 or len(set(lengths)) > 1:
        return [f"steps by rank: {lengths}"]
    names = set(wanted.weights) - {TWIN}
    if not states or any(names - set(state) for state in states):
        return ["weights are missing"]
    shapes = {
        f"{name} has shape {list(tensor.shape)}, not {list(wanted.weights[name].shape)}": None
        for state in states
        for name, tensor in state.items()
        if tensor.shape != wanted.weights[name].shape
    }
    return list(shapes)


def added_losses(answers: Sequence[dict[str, Any]]) -> list[float]:
    """Return the loss of each step from the shares of the replicas of the data."""
    by_replica = {answer["replica"][0]: answer["run"].losses for answer in answers}
    return [sum(shares) for shares in zip(*by_replica.values(), strict=True)]


def _weigh(verdict: Verdict, runs: Sequence[Run], wanted: Run) -> None:
    """Note the bytes of the fullest process, and hold sharded backends to their share."""
    moments = {moment for run in runs for moment in run.num_bytes}
    for moment in sorted(moments):
        verdict.num_bytes[moment] = max(run.num_bytes[moment] for run in runs)
    if "after" not in verdict.num_bytes:
        return
    verdict.share = fullest(verdict.num_bytes) / fullest(wanted.num_bytes)
    most = allowed_share(verdict.cell)
    if most is not None and verdict.share > most:
        verdict.failures.append(f"holds {verdict.share:.2f} of a replica > {most:.2f}")


def fullest(num_bytes: dict[str, int]) -> int:
    """Return the larger of the bytes before and after a step: some engines drop gradients in it."""
    return max(num_bytes["before"], num_bytes["after"])


def allowed_share(cell: Cell) -> float | None:
    """Return how much of a replica a process may hold after a step; None: as much as it wants."""
    most = BACKENDS[cell.backend].max_share
    return None if most is None or cell.world_size == 1 else most * 4 / cell.world_size
