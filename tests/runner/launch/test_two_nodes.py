"""R9: two nodes: on this machine's loopback, and in two network namespaces that a link joins."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.runs import sessions
from runner.runs.json_files import read_json
from tests import nodes
from tests.helpers import about, python, ran
from tests.nodes import Nodes, Site
from tests.signals.cells import RECIPE
from tests.signals.oracle import State

WAITS = ("objective.wait=training", "objective.folder=.")
MISSING = nodes.missing()
Start = Callable[[], Nodes]


@pytest.fixture(
    params=[
        pytest.param(False, id="loopback"),
        pytest.param(
            True,
            id="namespaces",
            marks=[pytest.mark.netns, pytest.mark.skipif(bool(MISSING), reason=MISSING)],
        ),
    ]
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if not request.param:
        yield nodes.loopback()
        return
    with nodes.two_namespaces() as found:
        yield found


@pytest.fixture
def two(site: Site, tmp_path: Path) -> Iterator[Nodes]:
    started = Nodes(site, tmp_path)
    yield started
    started.kill()


def losses(run_dir: Path) -> list[float]:
    """Return the training losses of a run, step by step; each step is logged once."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: row["loss"] for row in rows if row["split"] == "train"}
    assert list(found) == list(range(1, 7))
    return list(found.values())


def first_cause(two: Nodes) -> dict[str, Any]:
    """Return why the first session of the run failed."""
    found: dict[str, Any] = read_json(sessions.of_run(two.run_dir)[0] / sessions.ENDED)["cause"]
    return found


def one_node(folder: Path, num_processes: int) -> list[float]:
    """Return the training losses of the same run on one node."""
    folder.mkdir()
    line = python(
        *("-m", "runner", *RECIPE, "trainer.epochs=null", "trainer.max_steps=6"),
        *("distributed=multi_cpu", f"distributed.num_processes={num_processes}"),
    )
    ran(line, folder, OMP_NUM_THREADS="1").check_returncode()
    (run_dir,) = folder.glob("runs/*/*")
    return losses(run_dir)


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_with_the_stacks_of_all_nodes(tmp_path: Path) -> None:
    two = Nodes(nodes.loopback(), tmp_path)
    hangs = ("objective.ending=hang", "trainer.hang_timeout=8", "trainer.max_steps=4")
    hangs += ("distributed.max_restarts=1",)
    try:
        commands = [two.start(node, *hangs) for node in (0, 1)]
        assert [command.code() for command in commands] == [0, 0], two.outputs()
        assert "rank 1 failed first: it hangs: no progress for" in commands[0].printed()
        assert "it hangs" in first_cause(two)["message"]
        for rank in (0, 1):
            stack = (two.run_dir / "logs" / f"rank_{rank}.log").read_text()
            assert "no progress for" in stack
            assert 'File "' in stack
        assert two.left() == []
    finally:
        two.kill()


@pytest.mark.slow
def test_a_killed_node_comes_back(two: Nodes) -> None:
    restarting = (*WAITS, "distributed.max_restarts=1")
    first, second = two.start(0, *restarting), two.start(1, *restarting)
    two.reached(0, 1)
    second.process.kill()
    back = two.start(1, *restarting)
    (two.folder / "go").touch()
    assert (first.code(), back.code()) == (0, 0), two.outputs()
    assert two.left() == []
    printed = first.printed()
    assert "is lost: its connection" in printed
    told = "session 0001 failed; restart 1 of 1 goes on from checkpoints/checkpoint_"
    assert told in printed
    assert first_cause(two)["rank"] == 1
    assert losses(two.run_dir) == about(one_node(two.folder / "one", 2))


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_the_nodes_that_are_left(two: Nodes) -> None:
    elastic = (*WAITS, "distributed.max_restarts=1", "distributed.nnodes='1:2'")
    elastic += ("distributed.node_timeout=6",)
    first, second = two.start(0, *elastic), two.start(1, *elastic)
    two.reached(0, 1)
    if two.site.cut:
        subprocess.run(two.site.cut, check=True)
        assert second.code() == 1
        assert "is lost: its connection broke" in second.printed()
    else:
        second.process.kill()
    (two.folder / "go").touch()
    assert first.code() == 0, two.outputs()
    assert two.left() == []
    printed = first.printed()
    assert ("its connection broke" if two.site.cut else "its connection") in printed
    assert "2 processes" in printed
    assert losses(two.run_dir) == about(one_node(two.folder / "one", 1))


@pytest.mark.slow
def test_sigterm_while_nodes_are_awaited_saves_nothing_and_says_so(two: Nodes) -> None:
    first = two.start(0)
    assert nodes.wait_until(lambda: "1 of 2 nodes at" in first.printed()), two.outputs()
    first.process.send_signal(signal.SIGTERM)
    assert first.code() == 143, two.outputs()
    assert "SIGTERM came before training began: nothing is saved." in first.printed()
    second = two.start(0, "distributed.nnodes=3", "trainer.global_batch_size=6")
    third = two.start(1, "distributed.nnodes=3", "trainer.global_batch_size=6")
    assert nodes.wait_until(lambda: "joined; waiting" in third.printed()), two.outputs()
    third.process.send_signal(signal.SIGTERM)
    assert third.code() == 143, two.outputs()
    second.process.send_signal(signal.SIGINT)
    assert second.code() == 130, two.outputs()
    assert two.left() == []


@pytest.mark.slow
def test_sigterm_on_one_node_stops_both_with_the_state_saved(two: Nodes) -> None:
    first = two.start(0, *WAITS)
    other = two.start(1, *WAITS, "optimizer.lr=0.5")
    assert other.code() == 2
    assert "optimizer.lr=0.5: the first node has optimizer.lr=0.1" in other.printed()
    second = two.start(1, *WAITS)
    two.reached(0, 1)
    second.process.send_signal(signal.SIGTERM)
    (two.folder / "go").touch()
    assert (first.code(), second.code()) == (75, 75), two.outputs()
    assert two.left() == []
    assert State.read(two.run_dir).saved is not None


@pytest.mark.slow
@pytest.mark.parametrize("struck", [0, 1])
def test_without_restarts_a_killed_node_ends_the_run(
    struck: int, site: Site, tmp_path: Path
) -> None:
    two = Nodes(site, tmp_path)
    try:
        commands = [two.start(node, *WAITS) for node in (0, 1)]
        two.reached(0, 1)
        commands[struck].process.kill()
        other = commands[1 - struck]
        assert other.code() == 1, two.outputs()
        assert "is lost: its connection" in other.printed()
        assert two.left() == []
    finally:
        two.kill()
