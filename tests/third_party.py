"""A strategy of another package, complete: written to a folder that is put on ``sys.path``."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from accel.strategies import table

PLUGIN = """
from dataclasses import dataclass

from accel.config.checks import check_choice
from accel.machine.errors import ConfigError


@dataclass
class AveragingPlugin:
    '''How gradients are averaged over the processes.

    Args:
        order: small (parameters first that have few elements) or large.
        factor: what the average is multiplied by.
        replicas: on how many processes the model is; 0: on all.
    '''

    order: str = "small"
    factor: float = 1.0
    replicas: int = 0

    def __post_init__(self):
        problems = []
        check_choice(self, "order", ("small", "large"), problems)
        ConfigError.raise_if(problems)
"""
SPEC = """
from accel.machine.errors import Problem
from accel.plan.dims import ParallelDims
from accel.strategies.spec import PluginSpec, StrategySpec
from averaging.plugin import AveragingPlugin


def dims(plugins, environment, sizes):
    replicas = plugins["averaging"].replicas
    return ParallelDims(dp_replicate=replicas or environment.world_size)


def problems(request):
    factor = request.plugins["averaging"].factor
    rule = "a factor of 0 leaves no gradients"
    return [] if factor else [Problem("AveragingPlugin.factor=0", rule, "Give factor=1.")]


SPEC = StrategySpec(
    name="averaging",
    place="averaging.strategy:AveragingStrategy",
    plugins=(
        PluginSpec("averaging", AveragingPlugin, switch="USE_AVERAGING", prefixes=("AVERAGING_",)),
    ),
    packages=("averaging",),
    dims=dims,
    problems=problems,
)
"""
STRATEGY = """
import torch

from accel.state import GradientState
from accel.strategies.base import Strategy


class AveragingStrategy(Strategy):
    '''Every process holds the model; `backward` averages the gradients where a step follows.'''

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.plugin = self.plan.plugin("averaging")
        self.parameters = []

    def wrap_model(self, model, place=True, evaluation=False):
        model = super().wrap_model(model, place, evaluation)
        with torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                value.copy_(self.comm.broadcast(value))
        large = self.plugin.order == "large"
        found = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters += sorted(found, key=torch.Tensor.numel, reverse=large)
        return model

    def backward(self, loss, **kwargs):
        loss.backward(**kwargs)
        if not GradientState().sync_gradients:
            return
        scale = self.plugin.factor / self.plan.world_size
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(self.comm.all_reduce(parameter.grad, scale=scale))
"""
FILES = {
    "averaging/__init__.py": "",
    "averaging/plugin.py": PLUGIN,
    "averaging/spec.py": SPEC,
    "averaging/strategy.py": STRATEGY,
    "averaging-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: averaging\nVersion: 1.0\n",
    "averaging-1.0.dist-info/entry_points.txt": "[accel.strategies]\nany = averaging.spec:SPEC\n",
}


def write_package(folder: Path) -> Path:
    """Write the distribution `averaging` as an installer would, and return the folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Have the distribution `averaging` in `folder` on ``sys.path`` inside the context."""
    sys.path.append(str(folder))
    table.specs.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        table.specs.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "averaging"]:
            del sys.modules[name]
