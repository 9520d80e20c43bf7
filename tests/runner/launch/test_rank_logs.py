"""The log of each rank: its last lines, and a crash in it (R8)."""

from __future__ import annotations

from pathlib import Path

from runner.launch import rank_logs, worker


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    assert rank_logs.tail(log) == []
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert rank_logs.tail(log, 2) == ["line 98", "line 99"]
    log.write_text("before\nFatal Python error: Aborted\n\nstack\nExtension modules: many\n")
    assert rank_logs.tail(log, 3) == ["Fatal Python error: Aborted", "", "stack"]


def _frame(file: str, line: int, name: str) -> str:
    return f'  File "{file}", line {line} in {name}'


def test_a_crash_is_told_with_the_users_frames_of_its_thread(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    others = [f"Thread 0x{n} (most recent call first):\n{_frame('t.py', n, 'f')}\n" for n in (1, 2)]
    mine, inner = _frame("/home/me/data.py", 3, "losses"), _frame(worker.__file__, 9, "run")
    head = "Fatal Python error: Aborted"
    report = [head, "", *others, "Current thread 0x3 (most recent call first):", inner, mine, inner]
    log.write_text("\n".join([*report, "", "Extension modules: many", ""]))
    assert rank_logs.crash(log) == [head, "Current thread 0x3 (most recent call first):", mine]
    assert rank_logs.tail(log, 1) == rank_logs.crash(log)
    log.write_text("\n".join([*report[:-3], inner, inner, "", mine]))
    assert rank_logs.crash(log)[2:] == [inner, inner]


def test_a_crash_of_an_earlier_process_is_not_told_again(tmp_path: Path) -> None:
    log = tmp_path / "rank_1.log"
    log.write_text("--- rank 1, process 2, …\nFatal Python error: Aborted\n\nstack\n")
    assert rank_logs.crash(log)
    with log.open("a") as file:
        file.write("--- rank 1, process 3, …\nthe last words\n")
    assert rank_logs.crash(log) == []
    assert rank_logs.tail(log)[-1] == "the last words"
    assert "stack" not in rank_logs.tail(log)
