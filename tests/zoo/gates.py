"""What a cell is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from tests.zoo.cells import STRATEGIES, Cell
from tests.zoo.models import MODELS
from tests.zoo.reference import Run, plain
from tests.zoo.workers import NUM_NEW_TOKENS

# fp32, as in the parity matrix: noise floors, and the most; a floor is never below a unit of 1.
FLOORS, MOST, UNIT = 5, 1e-5, 2**-23
# bf16: of the distance between the plain loop under autocast and the one in fp32, which is what the
# format costs; but no less than a quarter of its unit roundoff, which the sum over the few tokens
# of a step may hit or miss. Where weights are held in bf16, activations between layers are, too.
AUTOCAST, HELD, QUARTER = 2.0, 4.0, 2**-11
# How far below the largest logit one may be that was chosen, or from that of the plain model with
# the same weights: logits are about 1, matrix products of bf16 are good to a hundredth of that.
LOGITS = {"no": 1e-4, "bf16": 1e-1}


@dataclass(frozen=True)
class Difference:
    """How far two runs are apart.

    Args:
        loss: largest relative difference of a step's loss.
        weight: the norm of the difference of final weights, relative to how far training moved
            them; of those that it moved.
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
        answer: what was wrong with generated tokens, or with logits; empty: nothing.
        loaded: what was wrong with the files of `save_pretrained`; empty: nothing.
        failures: what else is wrong.
        seconds: that it took.
    """

    cell: Cell
    reason: str | None = None
    difference: Difference | None = None
    gate: Difference | None = None
    answer: str = ""
    loaded: str = ""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def green(self) -> bool:
        """Whether it ran and nothing is wrong."""
        return self.reason is None and not (self.failures or self.answer or self.loaded)


@cache
def _start(name: str) -> dict[str, torch.Tensor]:
    return MODELS[name].build().state_dict()


@cache
def _trained(name: str) -> set[str]:
    """Return the names of the weights that training moved."""
    wanted, start = plain(name).weights, _start(name)
    return {key for key, value in wanted.items() if not torch.equal(value, start[key])}


def compare(name: str, found: Run, wanted: Run) -> Difference:
    """Return how far `found` is from `wanted`, two runs of the model `name`."""
    losses, expected = (torch.tensor(run.losses, dtype=torch.float64) for run in (found, wanted))
    start, names = _start(name), _trained(name)
    apart, moved = (
        torch.stack([(found.weights[n] - base[n]).double().norm() for n in names]).norm()
        for base in (wanted.weights, start)
    )
    return Difference(((losses - expected).abs() / expected).max().item(), (apart / moved).item())


def gate_of(cell: Cell) -> Difference:
    """Return the largest differences that `cell` may show."""
    whole = plain(cell.model)
    if cell.precision == "no":
        floor = compare(cell.model, plain(cell.model, num_chunks=2), whole)
        bounds = (min(FLOORS * max(value, UNIT), MOST) for value in (floor.loss, floor.weight))
        return Difference(*bounds)
    times = HELD if STRATEGIES[cell.strategy].holds_bf16 else AUTOCAST
    cost = compare(cell.model, plain(cell.model, autocast=True), whole)
    return Difference(times * max(cost.loss, QUARTER), times * max(cost.weight, QUARTER))


def judge(cell: Cell, answers: Sequence[dict[str, Any]], seconds: float) -> Verdict:
    """Return the verdict on what the processes of `cell` answered, by rank."""
    wanted, first = plain(cell.model), answers[0]
    verdict = Verdict(cell, gate=gate_of(cell), seconds=seconds)
    missing = wanted.weights.keys() - first["weights"].keys()
    if missing:
        verdict.failures.append(f"weights are missing: {sorted(missing)[:3]}")
        return verdict
    losses = [sum(step) / len(step) for step in zip(*(a["losses"] for a in answers), strict=True)]
    if len(losses) != len(wanted.losses):
        verdict.failures.append(f"{len(losses)} of {len(wanted.losses)} steps")
        return verdict
    verdict.difference = compare(cell.model, Run(losses, first["weights"]), wanted)
    for name in ("loss", "weight"):
        value, most = getattr(verdict.difference, name), getattr(verdict.gate, name)
        if not value <= most:  # NaN is no parity either
            verdict.failures.append(f"{name} {value:.1e} > {most:.1e}")
    start = _start(cell.model)
    for key in start.keys() - _trained(cell.model):  # ZeRO holds frozen weights in bf16, too
        if not torch.allclose(first["weights"][key], start[key], rtol=2**-8, atol=0.0):
            verdict.failures.append(f"frozen {key} moved")
    every = torch.tensor([answer["losses"] for answer in answers])
    if cell.precision == "bf16" and torch.equal(every, every.bfloat16().float()):  # on each process
        verdict.failures.append("losses are rounded to bf16")
    verdict.answer = _answer_failure(cell, [answer["answer"] for answer in answers], first)
    verdict.loaded = _loaded_failure(first["loaded"])
    return verdict


def _loaded_failure(found: Any) -> str:
    if isinstance(found, str):
        return found
    return "" if found == 0.0 else f"loaded weights differ by {found:.1e}"


@torch.no_grad()
def _answer_failure(cell: Cell, found: Sequence[Any], first: dict[str, Any]) -> str:
    """Return what is wrong with the answers of all processes, by the plain model's own logits.

    Tokens are compared by how good the plain model finds each of them, not with its own choice: two
    logits that are equal but for rounding may be chosen either way.
    """
    failed = [answer for answer in found if isinstance(answer, str)]
    if failed:
        return failed[0]
    if not all(torch.equal(answer, found[0]) for answer in found):
        return "processes differ"
    entry, most = MODELS[cell.model], LOGITS[cell.precision]
    model: Any = entry.build().eval()
    model.load_state_dict(first["weights"])
    if entry.prompt is None:
        logits = model(**entry.batch(len(first["losses"]), 2)).logits
        apart = (logits - found[0]).abs().max().item()
        return "" if apart <= most else f"logits differ by {apart:.1e}"
    prompt, told = entry.prompt(), found[0]
    if model.config.is_encoder_decoder:
        start = 1
        logits = model(**prompt, decoder_input_ids=told).logits
    else:
        start = prompt["input_ids"].shape[1]
        logits = model(input_ids=told).logits
    if told.shape[1] != start + NUM_NEW_TOKENS:
        return f"{told.shape[1] - start} of {NUM_NEW_TOKENS} tokens"
    scores = logits[:, start - 1 : -1]
    chosen = scores.gather(2, told[:, start:, None]).squeeze(2)
    below = (scores.amax(2) - chosen).max().item()
    return "" if below <= most else f"a token {below:.1e} below the best"
