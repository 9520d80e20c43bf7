"""Where processes run in a Ray cluster: `distributed.ray` of a recipe. Free of torch and Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accel.config.checks import check_choice
from accel.machine.errors import Problem, Problems

KIND = "ray"  # of `distributed`, and of `hydra/launcher`
LOCAL = "local"
# Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass
class RayPlacement:
    """A placement group of a Ray cluster, with a bundle for each process (distributed=ray).

    Args:
        address: host:port of the cluster's head; local: a cluster on this machine, for this run
            alone; None: RAY_ADDRESS, else the cluster that runs on this machine.
        placement: PACK (few nodes), SPREAD (many), STRICT_PACK (one) or STRICT_SPREAD (one each).
        cpus: CPUs of each process; also its intra-op threads, unless num_threads says otherwise.
        resources: custom resources of each process, by name.
        runtime_env: Ray's runtime environment of the processes.
    """

    address: str | None = None
    placement: Any = "PACK"
    cpus: float = 1.0
    resources: dict[str, Any] = field(default_factory=dict)
    runtime_env: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        check_choice(self, "placement", PLACEMENTS, problems)
        if self.cpus < 0:
            rule = "it is a number of CPUs, 0 or more"
            problems.add(f"RayPlacement.cpus={self.cpus}", rule, "Give distributed.ray.cpus=1.")
        problems += client_address(self.address, "distributed.ray.address")
        problems.raise_if()


def client_address(address: str | None, key: str) -> list[Problem]:
    """Return the problem of an address of Ray's client, whose processes outlive the command."""
    if not (address or "").startswith("ray://"):
        return []
    rule = "the command runs on a machine of the cluster, so that its end ends the processes"
    remedy = "Give the head's host:port, or start the command with `ray job submit`."
    return [Problem(f"{key}={address}", rule, remedy)]
