"""C1: keys of nodes, of a Ray cluster and of a job of Slurm are checked before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from accel.machine import env
from accel.machine.errors import ConfigError
from runner.recipe import machines, processes
from runner.recipe.machines import RayPlacement, Submit
from runner.recipe.schema import Distributed


def several(**fields: object) -> Distributed:
    given = {"device": "cpu", "num_processes": 2, "rdzv_endpoint": "127.0.0.1:29400", **fields}
    return Distributed(kind="multi_node", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), [(2, (2, 2)), ("3", (3, 3)), ("1:4", (1, 4))])
def test_numbers_of_nodes(text: object, expected: tuple[int, int]) -> None:
    assert machines.counts(several(nnodes=text)) == expected


def test_processes_are_counted_over_nodes() -> None:
    distributed = several(nnodes="1:4")
    assert processes.count(distributed) == 8
    assert processes.local_count(distributed) == 2
    assert processes.environment(distributed).local_world_size == 2


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("node0", "node0", 29400), ("10.0.0.1:1234", "10.0.0.1", 1234), ("[::1]:5", "::1", 5)],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    assert machines.endpoint(several(rdzv_endpoint=text)) == machines.Endpoint(host, port)


def test_an_address_of_this_machine_is_known() -> None:
    assert machines.Endpoint("127.0.0.1", 1).is_local()
    assert not machines.Endpoint("192.0.2.1", 1).is_local()
    with pytest.raises(ConfigError, match=r"is not known here"):
        machines.Endpoint("no-such-host.invalid", 1).is_local()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"nnodes": "4:1"}, "distributed.nnodes=4:1: it is a number of nodes"),
        ({"rdzv_endpoint": "a:b:c"}, "distributed.rdzv_endpoint=a:b:c: "),
        ({"node_rank": 1, "is_host": True}, "node 0 hosts the rendezvous"),
        ({"max_restarts": -1}, "max_restarts=-1"),
    ],
)
def test_mistakes_of_nodes(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        several(**fields)
    assert expected in str(raised.value)


def test_keys_of_nodes_want_several() -> None:
    with pytest.raises(ConfigError, match=r"Choose distributed=multi_node"):
        Distributed(kind="multi_cpu", nnodes=2)
    with pytest.raises(ConfigError, match=r"max_restarts=2 with distributed=none"):
        Distributed(max_restarts=2)
    with pytest.raises(ConfigError, match=r"rendezvous at an address .*rdzv_endpoint=node0:29400"):
        processes.count(several(rdzv_endpoint=None))


def test_restarts_are_a_launchers_own_under_one() -> None:
    with (
        env.patched(RANK=0, WORLD_SIZE=2, LOCAL_RANK=0),
        pytest.raises(ConfigError, match=r"the launcher has started"),
    ):
        processes.count(Distributed(kind="multi_cpu", max_restarts=1))


def test_everything_that_is_wrong_with_a_placement_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        RayPlacement(address="ray://head:10001", placement="EVERYWHERE", cpus=-1)
    text = str(raised.value)
    assert "placement='EVERYWHERE'" in text
    assert "STRICT_SPREAD" in text
    assert "cpus=-1" in text
    assert "distributed.ray.address=ray://head:10001" in text
    assert "ray job submit" in text


def test_keys_of_ray_without_ray_are_refused() -> None:
    with pytest.raises(ConfigError, match="Choose distributed=ray"):
        Distributed(kind="multi_cpu", ray=RayPlacement(cpus=2))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, None), ("04:00:00", 14400), ("1-00:00:30", 86430), ("2:00:00:00", 172800)],
)
def test_a_time_limit(text: str | None, seconds: int | None) -> None:
    assert Submit(time=text).seconds == seconds


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"time": 60}, "a number could be minutes or seconds"),
        ({"time": "4h"}, "HH:MM:SS"),
        ({"time": "00:03:00"}, "no time is left to train"),
        ({"signal_delay_s": 0}, "at least 1"),
        ({"extra": ["mail-type=FAIL"]}, "each is one option of sbatch"),
        ({"extra": ["--time=1"]}, "submit.time decides"),
        ({"setup": ["a\nb"]}, "each is one line"),
    ],
)
def test_wrong_values_of_a_job_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Submit(**values)
