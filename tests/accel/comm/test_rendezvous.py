"""The store at MASTER_ADDR:MASTER_PORT is hosted once and reached by all (E1)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from accel.comm.rendezvous import connect_store
from accel.machine.env import Environment

WAIT = timedelta(seconds=20)


def test_rank_0_hosts_the_store_and_others_connect() -> None:
    host = connect_store(Environment(rank=0, world_size=2, master_addr="localhost"), WAIT)
    here = Environment(rank=1, world_size=2, master_addr="localhost", master_port=host.port)
    host.set("key", "value")
    assert connect_store(here, WAIT, 2).get("key") == b"value"


def test_an_agent_that_hosts_the_store_is_connected_to() -> None:
    agent = connect_store(Environment(rank=0, master_addr="localhost"), WAIT)
    agent.set("key", "value")
    here = Environment(rank=0, master_addr="localhost", master_port=agent.port)
    assert connect_store(replace(here, agent_store=True), WAIT).get("key") == b"value"
