"""Variables ``ACCELERATE_*`` whose names are misspelt: nothing reads them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from accel.config.parallelism import SWITCH
from accel.machine import env
from accel.machine.errors import Problem, closest, did_you_mean
from accel.plan.fp8 import LAUNCHED
from accel.strategies.table import plugins

PREFIX = "ACCELERATE_"
# Read by other programs, and near to ours.
OTHERS = tuple(
    PREFIX + name
    for name in (
        *("USE_XPU", "USE_TPU", "USE_SAGEMAKER", "USE_IPEX", "USE_MPS_DEVICE"),
        *("DOWNCAST_BF16", "DISABLE_RICH", "BYPASS_DEVICE_MAP", "CONFIG_DS_FIELDS"),
    )
)
SIMILARITY = 0.8  # other programs may use the prefix: only what is near is told of


def known_variables() -> set[str]:
    """Return the variables that the engine and the plugins of strategies read."""
    names = {*env.NAMES, SWITCH, *LAUNCHED.values()}
    for plugin in plugins():
        names |= {plugin.switch, *plugin.launch_variables.values()}
    return {name for name in names if name.startswith(PREFIX)}


def notes(variables: Mapping[str, str]) -> list[str]:
    """Return a note for each variable whose name is nearly that of one that is read.

    Args:
        variables: of the environment.
    """
    given = [name for name in variables if name.startswith(PREFIX)]
    if not given:
        return []
    known = known_variables()
    short = [name.removeprefix(PREFIX) for name in known]
    found = []
    for name in sorted({*given} - known - {*OTHERS}):
        near = closest(name.removeprefix(PREFIX), short, cutoff=SIMILARITY)
        if near is not None:
            value = f"{name}={variables[name]!r} (environment)"
            found.append(str(Problem(value, "nothing reads it", did_you_mean(PREFIX + near))))
    return found
