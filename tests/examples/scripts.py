"""The scripts of `examples/scripts/`: how tests run them, and what their metrics have to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ACCURACY_AND_LOSS = ("accuracy", "loss")


@dataclass(frozen=True)
class Script:
    """A script, and two ways to run it.

    Args:
        name: of the file, without ``.py``.
        small: arguments of a run that takes about a second; the full run has none.
        best: what metrics of the full run reach: at least, and for a loss at most.
        small_best: the same of the small run.
        alike: metrics that do not depend on the number of processes.
        drifting: those of them that a full run's many steps drive apart.
        steady: further arguments with which nothing but the seed decides what a small run prints.
    """

    name: str
    small: tuple[str, ...]
    best: Mapping[str, float]
    small_best: Mapping[str, float]
    alike: tuple[str, ...] = ACCURACY_AND_LOSS
    drifting: tuple[str, ...] = ()
    steady: tuple[str, ...] = ()

    def shortcomings(self, metrics: Mapping[str, float], small: bool = False) -> list[str]:
        """Return the metrics that are worse than they have to be, with the bound."""
        return [
            f"{name}={metrics[name]}, not {bound}"
            for name, bound in (self.small_best if small else self.best).items()
            if (metrics[name] > bound if "loss" in name else metrics[name] < bound)
        ]


SCRIPTS = (
    Script(
        "text_classification",
        ("--epochs", "1", "--lr", "2e-3"),
        best={"accuracy": 0.85, "loss": 0.45},
        small_best={"accuracy": 0.5, "loss": 1.1},  # 0.4 and 1.3 without training
    ),
    Script(
        "causal_language_model",
        ("--epochs", "1", "--limit", "400"),
        best={"loss": 2.8},
        small_best={"loss": 4.2},  # 5.5 without training
        alike=("loss", "perplexity"),
    ),
    Script(
        "lora",
        ("--epochs", "1", "--limit", "300"),
        best={"loss": 3.0},
        small_best={"loss": 5.4},
        alike=("loss", "loss_before", "trainable"),
        drifting=("loss",),  # by 0.01 in 126 steps, not in 8
    ),
    Script(
        "cross_validation",
        ("--epochs", "3", "--num_folds", "2"),
        best={"accuracy": 0.94, "test_accuracy": 0.94, "test_f1": 0.94, "test_loss": 0.25},
        small_best={"accuracy": 0.85, "test_accuracy": 0.85, "test_f1": 0.85, "test_loss": 0.7},
        alike=("accuracy", "test_accuracy", "test_f1", "test_loss"),
    ),
    Script(  # each process stops by the losses of its own batches
        "early_stopping",
        ("--patience", "10"),
        best={"accuracy": 0.94, "stopped": True},
        small_best={"accuracy": 0.85, "stopped": True},
        alike=(),
    ),
    Script(
        "experiment_tracking",
        ("--epochs", "3"),
        best={"accuracy": 0.94, "loss": 0.25},
        small_best={"accuracy": 0.88, "loss": 0.5},
    ),
    Script(  # between two averages, each process trains on its own batches
        "local_sgd",
        ("--epochs", "3", "--local_sgd_steps", "4"),
        best={"accuracy": 0.92, "loss": 0.35},
        small_best={"accuracy": 0.8, "loss": 0.7},
        alike=(),
    ),
    Script(
        "profiling",
        ("--epochs", "2"),
        best={"accuracy": 0.75, "loss": 0.6, "convolutions": 3},
        small_best={"accuracy": 0.6, "loss": 1.0, "convolutions": 3},
        alike=("accuracy", "loss", "convolutions"),
    ),
    Script(
        "schedule_free",
        ("--epochs", "3"),
        best={"accuracy": 0.95, "loss": 0.2},
        small_best={"accuracy": 0.92, "loss": 0.3},
    ),
    Script(  # the batch that fits is each process's own
        "executable_batch_size",
        ("--epochs", "3", "--width", "256", "--memory_mb", "75"),
        best={"accuracy": 0.4, "batch_size": 32},
        small_best={"accuracy": 0.2, "batch_size": 32},
        alike=(),
        steady=("--batch_size", "64"),  # how much of the heap is free decides which larger one fits
    ),
    Script(
        "automatic_gradient_accumulation",
        ("--epochs", "4", "--holds", "20"),
        best={"accuracy": 0.8, "loss": 0.6},
        small_best={"accuracy": 0.6, "loss": 1.5},
    ),
)
