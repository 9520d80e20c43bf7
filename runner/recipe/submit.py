"""Where and how long Slurm runs a job that ``runner submit`` hands over. Free of torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from accel.config.checks import check_minimum
from accel.machine.errors import ConfigError, Problems

# Slurm sends a signal up to a minute earlier than it is asked to.
# Source: https://slurm.schedmd.com/sbatch.html#OPT_signal
SIGNAL_RESOLUTION = 60
# Options of sbatch that the script sets itself; the keys stand for them.
OWN_OPTIONS = {
    "nodes": "submit.nodes",
    "ntasks": "submit.tasks_per_node",
    "ntasks-per-node": "submit.tasks_per_node",
    "gpus-per-node": "submit.gpus_per_node",
    "cpus-per-task": "submit.cpus_per_task",
    "time": "submit.time",
    "signal": "submit.signal_delay_s",
    "requeue": "submit.requeue",
    "no-requeue": "submit.requeue",
    "array": "runner -m",
    "output": "run_dir",
    "chdir": "the working directory",
}
_TIME = re.compile(r"(?:(\d+)[-:])?(\d+):([0-5]?\d):([0-5]?\d)")


@dataclass
class Submit:
    """What `runner submit` asks Slurm for. It has no effect on a run that is started here.

    Args:
        partition: the partition; null: the cluster's default.
        account: the account that is charged; null: the user's default.
        qos: the quality of service.
        constraint: required features of the nodes.
        nodes: how many nodes.
        tasks_per_node: processes on each node; null: one per GPU, distributed.num_processes divided
            by nodes, or as `distributed` has it on one machine.
        gpus_per_node: GPUs of each node, one per process.
        cpus_per_task: CPU cores of each process.
        mem: memory of each node, e.g. 64G; null: the partition's default.
        time: time limit, "HH:MM:SS" or "D-HH:MM:SS"; null: the partition's.
        signal_delay_s: seconds before the limit at which the run saves its state and stops.
        requeue: whether the job is queued again after its time limit or a preemption.
        setup: lines of shell before the processes start, e.g. "module load cuda".
        extra: further options of sbatch, e.g. "--mail-type=FAIL".
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    time: Any = None
    signal_delay_s: int = 120
    requeue: bool = True
    setup: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task"):
            check_minimum(self, name, 1, problems)
        check_minimum(self, "signal_delay_s", 1, problems)
        try:
            seconds = self.seconds
        except ConfigError as error:
            problems += error.problems
            seconds = None
        least = self.signal_delay_s + SIGNAL_RESOLUTION
        if seconds is not None and seconds <= least:
            problems.add(
                f"submit.time={self.time} with submit.signal_delay_s={self.signal_delay_s}",
                f"the run is stopped so long before its limit, or up to {SIGNAL_RESOLUTION} s "
                "earlier: no time is left to train",
                f"Give more than {least} s, or a smaller submit.signal_delay_s.",
            )
        self._check_extra(problems)
        problems.raise_if()

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds; None: the partition's.

        Raises:
            ConfigError: if it has no such form.
        """
        if self.time is None:
            return None
        match = _TIME.fullmatch(self.time) if isinstance(self.time, str) else None
        if match is None:
            rule = 'it is "HH:MM:SS" or "D-HH:MM:SS": a number could be minutes or seconds'
            raise ConfigError.of(
                f"submit.time={self.time!r}", rule, "Give submit.time=04:00:00 for four hours."
            )
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def _check_extra(self, problems: Problems) -> None:
        for option in self.extra:
            name = option.removeprefix("--").partition("=")[0]
            if not re.fullmatch(r"--?[A-Za-z][^\n]*", option):
                remedy = "Give submit.extra=['--mail-type=FAIL']."
                problems.add(f"submit.extra: {option!r}", "each is one option of sbatch", remedy)
            elif option.startswith("--") and name in OWN_OPTIONS:
                rule = "the script sets that option itself"
                remedy = f"Leave it out; {OWN_OPTIONS[name]} decides."
                problems.add(f"submit.extra: {option!r}", rule, remedy)
        for line in self.setup:
            if "\n" in line:
                rule, remedy = "each is one line", "Give several."
                problems.add(f"submit.setup: {line!r}", rule, remedy)
