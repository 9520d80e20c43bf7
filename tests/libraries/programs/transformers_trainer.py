"""`transformers.Trainer`: classification with evaluation, prediction, checkpoints and resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from tests.libraries.programs import tiny

# What all trainers are given: a log entry a step, an evaluation an epoch.
ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "seed": 17,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
}


def accuracy(answers: EvalPrediction) -> dict[str, float]:
    """Return the share of right answers, and how many there were."""
    right = numpy.argmax(answers.predictions, axis=-1) == answers.label_ids
    return {"accuracy": float(right.mean()), "num_samples": float(len(right))}


def arguments(folder: Path, options: Mapping[str, Any]) -> TrainingArguments:
    """Return the training's arguments: two epochs, a checkpoint after six steps."""
    given = {**ARGUMENTS, "num_train_epochs": 2, "save_steps": 6, **options}
    return TrainingArguments(output_dir=str(folder), **given)


def trainer(folder: Path, options: Mapping[str, Any], model: torch.nn.Module) -> Trainer:
    """Return a trainer of `model`; the training set does not divide into batches."""
    options = dict(options)
    rows = tiny.Sequences(53, seed=3)
    train = tiny.Stream(rows) if options.pop("stream", False) else rows
    return Trainer(
        model=model,
        args=arguments(folder, options),
        data_collator=tiny.pad,
        train_dataset=train,
        eval_dataset=tiny.Sequences(19, seed=4),
        compute_metrics=accuracy,
    )


def history(trained: Trainer) -> dict[str, list[float]]:
    """Return each number that the trainer logged, in order; not its times."""
    found: dict[str, list[float]] = {}
    for entry in trained.state.log_history:
        for name, value in entry.items():
            if not name.endswith(("_runtime", "_per_second")):
                found.setdefault(name, []).append(float(value))
    return found


def numbers(trained: Trainer, folder: Path) -> dict[str, list]:
    """Return what the two packages are compared by."""
    result: dict[str, list] = dict(history(trained))
    answers = trained.predict(tiny.Sequences(11, seed=5))
    result["predictions"] = numpy.asarray(answers.predictions, dtype=float).ravel().tolist()
    result["predicted"] = [float(len(answers.label_ids))]
    result["weights"] = [tiny.digest(trained.accelerator.unwrap_model(trained.model))]
    trained.save_model(str(folder / "final"))
    trained.accelerator.wait_for_everyone()
    result["files"] = tiny.files(folder)
    return result


def run(options: Mapping[str, Any], folder: Path) -> dict[str, list]:
    """Train; with `resume`, train again from the checkpoint and return both histories."""
    options = dict(options)
    resume = options.pop("resume", False)
    set_seed(11)
    first = trainer(folder, options, tiny.classifier())
    first.train()
    result = numbers(first, folder)
    if resume:
        set_seed(12)  # the checkpoint decides, not this
        again = trainer(folder, options, tiny.classifier())
        again.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
        result |= {f"resumed {name}": row for name, row in numbers(again, folder).items()}
    return result
