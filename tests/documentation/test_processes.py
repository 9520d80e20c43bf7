"""E1: examples of the reference print on each process what their comments say."""

from __future__ import annotations

import pytest

from tests.documentation import processes as pages
from tests.documentation.player import Example, shown, shown_together

SIZES = (1, 2)


def lines(example: Example, processes: int) -> list[list[str]]:
    """Return what each process printed."""
    return [answer.lines for answer in shown(example, processes)]


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize(
    "example",
    [
        pages.LOCAL_MAIN_PROCESS_FIRST,
        pages.MAIN_PROCESS_FIRST,
        pages.STATE_LOCAL_MAIN_PROCESS_FIRST,
        pages.STATE_MAIN_PROCESS_FIRST,
    ],
)
def test_the_main_process_goes_first(example: Example, processes: int) -> None:
    answers, together = shown_together(example, processes)
    expected = [f"This will be printed by process {rank}" for rank in range(processes)]
    assert [answer.lines for answer in answers] == [[line] for line in expected]
    assert together[0] == expected[0]
    assert sorted(together) == expected


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize("example", [pages.WAIT_FOR_EVERYONE, pages.STATE_WAIT_FOR_EVERYONE])
def test_wait_for_everyone(example: Example, processes: int) -> None:
    _, together = shown_together(example, processes)
    assert together[-processes:] == ["Everyone is here"] * processes
    waiting = ["I'm waiting for the main process to finish its sleep..."] * (processes - 1)
    assert sorted(together[:-processes]) == [*waiting, "slept"]


EACH_SERVER = "This will be printed by process 0 only on each server."


@pytest.mark.parametrize("processes", SIZES)
def test_on_local_main_process(processes: int) -> None:
    expected = [[EACH_SERVER], *([[]] * (processes - 1))]
    assert lines(pages.ON_LOCAL_MAIN_PROCESS, processes) == expected
    assert lines(pages.STATE_ON_LOCAL_MAIN_PROCESS, processes) == expected


def test_on_the_local_main_process_of_each_of_two_servers() -> None:
    assert lines(pages.ON_LOCAL_MAIN_PROCESS_OF_TWO_SERVERS, 2) == [[EACH_SERVER]] * 2


@pytest.mark.parametrize(
    "example",
    [
        pages.ON_LOCAL_PROCESS,
        pages.ON_PROCESS,
        pages.STATE_ON_LOCAL_PROCESS,
        pages.STATE_ON_PROCESS,
    ],
)
def test_on_the_process_of_an_index(example: Example) -> None:
    assert lines(example, 3) == [[], [], ["Printed on process 2"]]
    assert lines(example, 2) == [[], []]


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize("example", [pages.ON_LAST_PROCESS, pages.STATE_ON_LAST_PROCESS])
def test_on_last_process(example: Example, processes: int) -> None:
    expected = [*([[]] * (processes - 1)), [f"Printed on process {processes - 1}"]]
    assert lines(example, processes) == expected


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize("example", [pages.ON_MAIN_PROCESS, pages.STATE_ON_MAIN_PROCESS])
def test_on_main_process(example: Example, processes: int) -> None:
    expected = [["This will be printed by process 0 only."], *([[]] * (processes - 1))]
    assert lines(example, processes) == expected


SHARES = {
    1: [["['A', 'B', 'C']", "['A', 'B', 'C']"]],
    2: [["['A', 'B']", "['A', 'B']"], ["['C']", "['C', 'C']"]],
}


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize(
    "example",
    [
        pages.SPLIT_BETWEEN_PROCESSES,
        pages.STATE_SPLIT_BETWEEN_PROCESSES,
        pages.ACCELERATOR_STATE_SPLIT_BETWEEN_PROCESSES,
    ],
)
def test_split_between_processes(example: Example, processes: int) -> None:
    assert lines(example, processes) == SHARES[processes]


@pytest.mark.parametrize(("processes", "length"), [(1, "5"), (2, "9")])
def test_gather_for_metrics(processes: int, length: str) -> None:
    assert lines(pages.GATHER_FOR_METRICS, processes) == [[length]] * processes


@pytest.mark.parametrize("processes", SIZES)
def test_pad_across_processes(processes: int) -> None:
    expected = [f"torch.Size([{processes}])"]
    assert lines(pages.PAD_ACROSS_PROCESSES, processes) == [expected] * processes


@pytest.mark.parametrize(("processes", "value"), [(1, "tensor([1])"), (2, "tensor([4, 6])")])
def test_reduce(processes: int, value: str) -> None:
    assert lines(pages.REDUCE, processes) == [[value]] * processes


@pytest.mark.parametrize("processes", SIZES)
@pytest.mark.parametrize("example", [pages.CHECK_TRIGGER, pages.CHECK_BREAKPOINT])
def test_one_process_stops_all(example: Example, processes: int) -> None:
    assert [answer.observed for answer in shown(example, processes)] == [2] * processes
