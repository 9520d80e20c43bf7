"""What a search prints at its end."""

from __future__ import annotations

import io

import optuna
from rich.console import Console

from runner.sweep import study_report
from runner.training.optuna_study import JOB, trials_of


def study_with(*values: tuple[float, ...], directions: tuple[str, ...]) -> optuna.Study:
    study = optuna.create_study(directions=list(directions))
    for number, value in enumerate(values):
        trial = study.ask()
        trial.suggest_float("optimizer.lr", 0, 1)
        overrides = ["name=a b", f"++optimizer.lr={number}"]
        trial.set_user_attr(JOB, {"number": number, "sweep": "s", "overrides": overrides})
        study.tell(trial, list(value))
    return study


def shown(study: optuna.Study, *metrics: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=120)
    study_report.show(study, trials_of(study, "s"), metrics, "mine", console)
    return out.getvalue()


def test_the_best_trial_of_one_objective_with_its_command() -> None:
    study = study_with((3.0,), (1.0,), (2.0,), directions=("maximize",))
    text = shown(study, "validation/accuracy")
    assert "3 trials: 3 complete" in text
    assert "best trial 0: validation/accuracy 3" in text
    assert "python -m runner --config-name mine 'name=a b' optimizer.lr=0" in text
    assert "Importance" not in text  # of so few


def test_the_front_of_several_objectives() -> None:
    values = ((1.0, 5.0), (2.0, 4.0), (0.5, 6.0), (3.0, 9.0))
    study = study_with(*values, directions=("minimize", "maximize"))
    best = study_report.best_trials(trials_of(study, "s"), study)
    assert list(best) == [2, 3]  # 0.5 and 6 are better than 1 and 5, and than 2 and 4
    assert shown(study, "validation/loss", "seconds").count("Pareto-optimal") == len(best)


def test_equal_trials_are_both_in_the_front() -> None:
    study = study_with((1.0, 1.0), (1.0, 1.0), directions=("minimize", "minimize"))
    assert list(study_report.best_trials(trials_of(study, "s"), study)) == [0, 1]


def test_a_study_without_results_is_counted() -> None:
    study = optuna.create_study()
    assert shown(study, "best") == "0 trials: none\n"


def test_values_that_do_not_vary_have_no_importance() -> None:
    study = study_with(*((1.0,) for _ in range(6)), directions=("minimize",))
    assert "Importance" not in shown(study, "best")
