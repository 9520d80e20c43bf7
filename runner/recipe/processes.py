"""How many processes a recipe asks for, and who has started them. Free of torch at import."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

from accel.config.parallelism import ParallelismConfig, one_of_each
from accel.machine import env
from accel.machine.env import Environment
from accel.machine.errors import ConfigError, MissingPackageError, Problem, Problems
from accel.machine.imports import is_available
from accel.plan.arguments import Arguments, choose, selected
from runner.recipe import machines
from runner.recipe.keys import of_the_recipe
from runner.recipe.schema import Distributed, Recipe

DEFAULT_CPU_PROCESSES = 2
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
INTERFACE = "GLOO_SOCKET_IFNAME"
_expected: ContextVar[int | None] = ContextVar("accelerators_expected", default=None)


@dataclass(frozen=True)
class Adopted:
    """This process's place in a group that torchrun, mpirun or srun has started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def adopted() -> Adopted | None:
    """Return this process's place among those that a launcher has started; None: it is alone.

    Raises:
        ConfigError: if a launcher has started several processes without saying how they meet.
    """
    here = Environment.read()
    if here.world_size > 1 and here.rank is not None:
        return Adopted(
            here.rank,
            here.local_rank or 0,
            here.world_size,
            here.local_world_size or here.world_size,
        )
    if here.unusable is not None:
        value, rule = here.unusable.value, here.unusable.rule
        remedy = f"{here.unusable.remedy} One task alone starts its own processes."
        raise ConfigError.of(value, rule, remedy)
    return None


def count(distributed: Distributed) -> int:
    """Return the number of processes of a run; of several nodes, as many as there may be.

    Raises:
        ConfigError: if the recipe contradicts itself, the machine or the launcher.
    """
    problems = Problems()
    number = _wanted(distributed, problems) * _num_nodes(distributed, problems)
    place = adopted()
    if place is not None:
        rule = f"the launcher has started {place.world_size} processes"
        if distributed.kind == machines.RAY:
            remedy = "Choose distributed=auto, or start the command without a launcher."
            problems.add("distributed=ray on processes of a launcher", rule, remedy)
        own = {"max_restarts": 0, "rdzv_endpoint": None, "num_processes": place.world_size}
        for name, value in own.items():
            given = getattr(distributed, name)
            if given not in (None, value):
                remedy = f"Leave distributed.{name} out: the launcher decides it."
                problems.add(f"distributed.{name}={given}", rule, remedy)
        number = place.world_size
    problems.raise_if()
    return number


def local_count(distributed: Distributed) -> int:
    """Return the number of processes that a run has on this machine; raises as `count`."""
    place = adopted()
    if place is not None:
        return place.local_world_size
    return count(distributed) // machines.counts(distributed)[1]


def _num_nodes(distributed: Distributed, problems: Problems) -> int:
    """Return the greatest number of nodes."""
    if distributed.kind != machines.KIND:
        return 1
    if adopted() is None and distributed.rdzv_endpoint is None:
        rule = "the nodes rendezvous at an address of the first one, which is not given"
        remedy = (
            f"Give distributed.rdzv_endpoint=node0:{machines.DEFAULT_PORT}, the same on each node."
        )
        problems.add("distributed=multi_node", rule, remedy)
    return machines.counts(distributed)[1]


def restarts_of_new_runs() -> Problems:
    """Return the problem of a launcher that, after a failure, would begin a new run once more."""
    problems, restarts = Problems(), env.read(MAX_RESTARTS) or "0"
    if restarts != "0" and adopted() is not None:
        problems.add(
            f"--max-restarts={restarts} of torchrun with a new run",
            "processes that it starts again would begin another run",
            "Add resume=auto (also for the first start), or leave --max-restarts out.",
        )
    return problems


def dp_size(recipe: Recipe, num_processes: int) -> int:
    """Return the data-parallel size of a recipe; a ConfigError if its strategy does not fit."""
    here, found = Environment(world_size=num_processes), Problems()
    with of_the_recipe():
        choice, sizes = selected(recipe.plugins, num_processes), parallelism(recipe, here)
        if sizes is not None:
            asked = {"strategy_plugins": list(recipe.plugins.values())}
            arguments = Arguments.of({**asked, "parallelism_config": sizes})
            choice = choose(arguments, here, device(recipe.distributed) or "cpu", found)
            found.raise_if()
        return choice.fitting_dims(here).dp_size


def parallelism(recipe: Recipe, here: Environment) -> ParallelismConfig | None:
    """Return the sizes of all axes; those of data that the recipe leaves open as plugins say."""
    choice = selected(recipe.plugins, here.world_size)
    dims = choice.spec.dims(choice.plugins, here, one_of_each())
    return recipe.parallelism.config(dims.dp_replicate, dims.dp_shard * dims.tp)


def environment(distributed: Distributed) -> Environment:
    """Return what the first process of a run will find in its environment.

    Raises:
        ConfigError: if the recipe contradicts itself, the machine or the launcher.
    """
    number = count(distributed)
    if number == 1:
        return Environment()
    return Environment(
        rank=0,
        local_rank=0,
        world_size=number,
        local_world_size=local_count(distributed),
        master_addr="localhost",
        master_port=0,
    )


def device(distributed: Distributed) -> str | None:
    """Return the kind of device of a run; None: the machine's accelerator, else the CPU."""
    if distributed.kind == "multi_cpu":
        return "cpu"
    return None if distributed.device == "auto" else distributed.device


def _wanted(distributed: Distributed, problems: Problems) -> int:
    number = distributed.num_processes
    kind = distributed.kind
    if kind in ("auto", machines.KIND):
        on_cpu = distributed.device == "cpu" or num_accelerators() == 0
        kind = "multi_cpu" if on_cpu else "multi_gpu"
    if kind == machines.RAY:
        return _in_ray(distributed, problems)
    if kind == "multi_gpu":
        return _on_accelerators(distributed, problems)
    if kind == "multi_cpu":
        if distributed.device not in ("auto", "cpu") and distributed.kind != machines.KIND:
            problems.append(
                _contradiction(distributed, "computes on the CPU", "distributed=multi_gpu")
            )
        return DEFAULT_CPU_PROCESSES if number is None else number
    if number not in (None, 1):
        problems.add(
            f"distributed.num_processes={number} with distributed=none",
            "distributed=none is one process",
            "Say where the processes run: distributed=multi_cpu or distributed=multi_gpu.",
        )
    return 1


def _in_ray(distributed: Distributed, problems: Problems) -> int:
    if not is_available("ray"):
        raise MissingPackageError("ray", "distributed=ray", extra="ray")
    if distributed.num_processes is None:
        rule = "a cluster may have any number of nodes and GPUs, and other users"
        problems.add("distributed=ray", rule, "Give distributed.num_processes=4.")
    return distributed.num_processes or 1


def _on_accelerators(distributed: Distributed, problems: Problems) -> int:
    if distributed.device == "cpu":
        problems.append(_contradiction(distributed, "computes on GPUs", "distributed=multi_cpu"))
        return 1
    present, place = num_accelerators(), adopted()
    number = present if distributed.num_processes is None else distributed.num_processes
    here = number if place is None else place.local_world_size
    if present == 0:
        problems.add(
            "distributed=multi_gpu",
            "torch finds no GPU on this machine",
            "Use distributed=multi_cpu for several processes on the CPU, or distributed=none.",
        )
    elif here > present:
        problems.add(
            f"distributed.num_processes={number}",
            f"each process has a GPU of its own, and this machine has {present}",
            f"Set distributed.num_processes={present} or leave it out.",
        )
    return max(1, number)


@contextlib.contextmanager
def accelerators_expected(number: int) -> Iterator[None]:
    """Let the context check a recipe for a machine with so many GPUs, not for this one."""
    token = _expected.set(number)
    try:
        yield
    finally:
        _expected.reset(token)


def lacks_expected_accelerators() -> bool:
    """Return whether a recipe is checked for a machine with GPUs on one without."""
    import torch

    return bool(_expected.get()) and not torch.accelerator.is_available()


def num_accelerators() -> int:
    """Return how many GPUs (or alike) torch finds here, without touching them."""
    import torch

    expected = _expected.get()
    if expected is not None:
        return expected
    if not torch.accelerator.is_available():
        return 0
    return int(torch.accelerator.device_count())


def _contradiction(distributed: Distributed, rule: str, other: str) -> Problem:
    return Problem(
        f"distributed.device={distributed.device} with distributed={distributed.kind}",
        f"distributed={distributed.kind} {rule}",
        f"Leave distributed.device out, or use {other}.",
    )
