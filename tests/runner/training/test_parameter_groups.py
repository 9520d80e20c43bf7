"""C1, C2, R1, R2: parameter groups by name and depth, whatever makes the optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from accel.machine.errors import CheckpointError, ConfigError
from runner.builtin.optimizers import adamw
from runner.builtin.schedules import cosine
from runner.recipe import composition
from runner.training import build
from runner.training.metrics import learning_rates
from runner.training.parameter_groups import layers, regroup
from tests.runner import loops, plain_loops

GROUPS = [
    {"match": "3.*", "lr_scale": 0.5, "weight_decay": 0.3, "name": "head"},
    {"match": ["*.bias"], "lr": 0.03},
]
DECAY = 0.8


def made(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = adamw(model, lr=0.02, weight_decay=0.1)
    regroup(optimizer, model, **{"groups": GROUPS, "layer_decay": DECAY, **options})
    return optimizer


def by_hand(model: nn.Sequential) -> torch.optim.Optimizer:
    first, head = model[0], model[3]
    groups = [
        {"params": [first.weight], "lr": 0.02 * DECAY, "weight_decay": 0.1},
        {"params": [head.weight, head.bias], "lr": 0.02 * 0.5, "weight_decay": 0.3},
        {"params": [first.bias], "lr": 0.03 * DECAY, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups)


def test_groups_have_their_options_and_names() -> None:
    model = plain_loops.net()
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [
        ([names[p] for p in group["params"]], group["name"], group["lr"], group["weight_decay"])
        for group in made(model).param_groups
    ]
    assert found == [
        (["0.weight"], "layer1", 0.02 * DECAY, 0.1),
        (["3.weight"], "head_layer2", 0.02 * 0.5, 0.3),
        (["3.bias"], "head_layer2", 0.02 * 0.5, 0.3),
        (["0.bias"], "1_layer1", 0.03 * DECAY, 0.0),
    ]
    optimizer = made(model, layer_decay=1.0)
    rates = {"lr": 0.02, "lr_default": 0.02, "lr_head": 0.01, "lr_1": 0.03}
    assert learning_rates({"optimizer": optimizer}) == rates
    unnamed = {"a": by_hand(model), "b": torch.optim.SGD(model.parameters(), lr=1.0)}
    assert [*learning_rates(unnamed)] == ["lr", "lr_a", "lr_a_0", "lr_a_1", "lr_a_2", "lr_b"]


def test_layers_are_blocks_with_what_stands_before_and_after_them() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(3)]
    model = nn.ModuleDict({"in": nn.Linear(1, 2), "blocks": nn.ModuleList(blocks)})
    model["out"] = nn.Linear(2, 1)
    depths = layers(model)
    found = {name: depths[id(parameter)] for name, parameter in model.named_parameters()}
    assert {name: found[name] for name in ("in.bias", "blocks.2.1.bias", "out.weight")} == {
        "in.bias": 0,
        "blocks.2.1.bias": 3,
        "out.weight": 4,
    }


@pytest.mark.usefixtures("hydra_session")
def test_mistakes_are_refused_before_anything_starts() -> None:
    groups = "[{match: 'hed.*'}, {match: '*.bias', wieght_decay: 0}, {lr: 1}]"
    for factory in ("{name: adamw}", "{_target_: torch.optim.SGD, lr: 0.1}"):
        line = [f"optimizer={factory}", f"optimizer.groups={groups}", "optimizer.layer_decay=2"]
        with pytest.raises(ConfigError) as caught:
            build.check_steps([composition.new_run(line, "config")])
        assert [problem.value for problem in caught.value.problems] == [
            "optimizer.groups[0].match: hed.*",
            "optimizer.groups[1].wieght_decay=0",
            "optimizer.groups[2]={'lr': 1}",
            "optimizer.layer_decay=2",
        ]


# -- trained -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", plain_loops.STRATEGIES)
def test_weights_are_those_of_a_plain_loop_and_a_killed_run_goes_on(
    strategy: str, tmp_path: Path
) -> None:
    expected = plain_loops.plain(
        lambda model: [by_hand(model)], lambda o: CosineAnnealingLR(o, plain_loops.STEPS)
    )
    given = {"make_optimizer": made, "make_scheduler": cosine}
    plain_loops.check_weights(expected, tmp_path, strategy, **given)


def test_a_group_has_another_rate_after_a_resume_and_not_other_members(tmp_path: Path) -> None:
    recipe = loops.recipe_of(trainer__max_steps=4, trainer__stop_after=2)
    loops.run(tmp_path, recipe, make_optimizer=partial(made, layer_decay=1.0), make_scheduler=None)
    faster = [{**GROUPS[0], "lr_scale": 2.0}, GROUPS[1]]
    further = {"make_scheduler": None, "resume_from": loops.newest(tmp_path)}
    for groups in ([{**GROUPS[0], "match": "0.*"}, GROUPS[1]], GROUPS[:1]):
        other = partial(made, layer_decay=1.0, groups=groups)
        with pytest.raises((CheckpointError, ConfigError), match="group"):
            loops.run(tmp_path, loops.recipe_of(), make_optimizer=other, **further)
    make = partial(made, layer_decay=1.0, groups=faster)
    loops.run(tmp_path, loops.recipe_of(trainer__max_steps=4), make_optimizer=make, **further)
    rates = [(record["lr"], record["lr_head"]) for record in loops.records(tmp_path)]
    assert rates == [(0.02, 0.01)] * 2 + [(0.02, 0.04)] * 2
