"""R1, E3, E5: the zoo of models in a reduced form; ``python -m tests.zoo`` runs all of it."""

from __future__ import annotations

import pytest
import torch

from accel.machine.imports import is_available
from tests.zoo.cells import STRATEGIES, Cell, matrix, reason_not_to_run
from tests.zoo.gates import judge
from tests.zoo.models import MODELS
from tests.zoo.reference import plain
from tests.zoo.running import line, run

pytestmark = pytest.mark.skipif(
    not (is_available("transformers") and is_available("peft")),
    reason="transformers or peft is not installed",
)
FAST = [Cell("lora", "fsdp"), Cell("t5", "zero1", "bf16")]
SLOW = [
    Cell("bert", "fsdp", "bf16"),
    *(Cell("bert", strategy, "bf16") for strategy in ("zero1", "zero3")),
    *(Cell("t5", "fsdp", precision) for precision in ("no", "bf16")),
    *(Cell("lora", strategy, "bf16") for strategy in ("fsdp", "zero3")),
    Cell("gpt2", "fsdp", "bf16"),
    Cell("gpt2", "zero3"),
    Cell("mixtral", "tp", "bf16"),
    Cell("unfrozen", "fsdp", "bf16"),
    Cell("vit", "ddp", "bf16"),
]


@pytest.mark.parametrize(
    "cell",
    [*FAST, *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW)],
    ids=lambda cell: cell.name.replace(" ", "-"),
)
def test_a_model_trains_generates_and_is_saved_as_in_a_plain_loop(cell: Cell) -> None:
    verdict = run(cell)
    assert verdict.green, line(verdict)


def test_every_cell_runs_or_has_a_reason() -> None:
    cells = list(matrix())
    assert len(cells) == len(set(cells)) == len(MODELS) * len(STRATEGIES) * 2
    missing = {(cell.model, cell.strategy) for cell in cells if reason_not_to_run(cell)}
    assert {strategy for _, strategy in missing} == {"tp"}
    assert {model for model, _ in missing} == {m for m in MODELS if not MODELS[m].has_tp_plan}


def answered(cell: Cell) -> dict[str, object]:
    """Return what a process would answer whose run is the plain loop's."""
    wanted = plain(cell.model)
    logits = MODELS[cell.model].build()
    logits.load_state_dict(wanted.weights)
    with torch.no_grad():
        answer = logits.eval()(**MODELS[cell.model].batch(len(wanted.losses), 2)).logits
    weights = {name: value.clone() for name, value in wanted.weights.items()}
    return {"losses": list(wanted.losses), "weights": weights, "answer": answer, "loaded": 0.0}


def test_each_thing_that_can_be_wrong_is_told() -> None:
    cell = Cell("vit", "ddp")
    assert judge(cell, [answered(cell), answered(cell)], 0.0).green
    told = {
        "loss": {"losses": [2 * loss for loss in plain("vit").losses]},
        "weight": {"weights": {k: v + 0.01 for k, v in plain("vit").weights.items()}},
        "weights are missing": {"weights": {}},
        "of 6 steps": {"losses": plain("vit").losses[:2]},
        "logits differ": {"answer": torch.zeros(2, 5)},
        "RuntimeError: no": {"answer": "RuntimeError: no"},
        "loaded weights differ": {"loaded": 0.1},
    }
    for wrong, change in told.items():
        verdict = judge(cell, [{**answered(cell), **change}] * 2, 0.0)
        assert not verdict.green
        assert wrong in line(verdict)
    twins = [answered(cell), {**answered(cell), "answer": torch.ones(2, 5)}]
    assert judge(cell, twins, 0.0).answer == "processes differ"


def test_a_loss_that_is_rounded_to_bf16_is_told() -> None:
    cell = Cell("vit", "fsdp", "bf16")
    losses = torch.tensor(plain("vit").losses).bfloat16().float().tolist()
    verdict = judge(cell, [{**answered(cell), "losses": losses}] * 2, 0.0)
    assert "losses are rounded to bf16" in verdict.failures
