"""The runner's own launcher on a Ray cluster, as Hydra's configuration knows it. Free of Ray.

Keys of `hydra.launcher` with ``hydra/launcher=ray``.

address: host:port of the cluster's head; local: a cluster on this machine, for this sweep alone;
    null: RAY_ADDRESS, else the cluster that runs on this machine.
num_cpus: CPUs of each job; null: processes × threads of its recipe.
num_gpus: GPUs of each job; null: one for each process, if the cluster has any and the recipe does
    not compute on the CPU.
resources: custom resources of each job, by name.
runtime_env: Ray's runtime environment of the jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from accel.machine.errors import MissingPackageError, Problem
from accel.machine.imports import is_available
from runner.recipe import nodes

RAY = nodes.RAY
MODULE, CLASS = "hydra_plugins.accel_runner", "RayLauncher"
NODE, GROUP = "hydra.launcher", "hydra/launcher"
DEFAULTS: dict[str, object] = {
    "address": None,
    "num_cpus": None,
    "num_gpus": None,
    "resources": {},
    "runtime_env": {},
}
# Mappings that take any key.
OPEN = ("resources", "runtime_env")


def store() -> None:
    """Make the launcher known to Hydra's configuration."""
    calls = {"_target_": f"{MODULE}.{CLASS}", "_recursive_": False}  # nothing below is a call
    node = OmegaConf.create({**calls, **DEFAULTS})
    for name in OPEN:
        OmegaConf.set_struct(node[name], False)
    ConfigStore.instance().store(group=GROUP, name=RAY, node=node, provider="runner")


def require() -> None:
    """Raise a MissingPackageError if Ray is not installed."""
    if not is_available("ray"):
        raise MissingPackageError("ray", f"{GROUP}={RAY}", extra="ray")


def problems_of(settings: Mapping[str, object]) -> list[Problem]:
    """Return the problems of values of `hydra.launcher`."""
    address = settings["address"]
    problems = nodes.client_address(None if address is None else str(address), f"{NODE}.address")
    for name in ("num_cpus", "num_gpus"):
        value = settings[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and float(str(value)) >= 0):
            rule = "it is a number, 0 or more; null: as the recipe needs"
            problems.append(Problem(f"{NODE}.{name}={value}", rule, f"Give {NODE}.{name}=1."))
    problems += [
        Problem(f"{NODE}.{name}={settings[name]}", "it is a mapping", f"Give {NODE}.{name}={{}}.")
        for name in OPEN
        if not isinstance(settings[name], Mapping)
    ]
    return problems
