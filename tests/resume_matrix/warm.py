"""Commands of the runner in forks of one process that has imported everything: no start-up.

The process that forks has one thread and has computed nothing, so a fork is as good as a start.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

STRACE = shutil.which("strace")
# Calls that change a file or a folder. A kill comes on entering one.
CHANGING = (
    *("open", "openat", "creat", "close", "fsync", "fdatasync", "truncate", "ftruncate"),
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "sendfile", "copy_file_range"),
    *("fallocate", "rename", "renameat", "renameat2", "mkdir", "mkdirat", "rmdir", "unlink"),
    *("unlinkat", "link", "linkat", "symlink", "symlinkat"),
)
TIMEOUT = 120.0


@dataclass(frozen=True)
class Answer:
    """How a command ended.

    Attributes:
        code: exit code; negative: the signal that ended it.
        output: standard output and error together.
    """

    code: int
    output: str


@dataclass(frozen=True)
class Call:
    """The `number`-th call of `name` that a command makes."""

    name: str
    number: int
    line: str


def import_everything() -> None:
    """Import what a run imports."""
    import safetensors.torch
    import sklearn.datasets
    import torch._dynamo
    import torch.utils.data

    import runner
    from runner import cli
    from runner.inference import session
    from runner.launch import launcher, start_run, worker
    from runner.recipe import composition
    from runner.training import build, loop

    warm = (build, cli, session, composition, launcher, loop, start_run, worker, runner)
    gc.collect()
    gc.freeze()  # the collector writes to what it looks at, which would be copied
    assert all((*warm, safetensors.torch, sklearn.datasets, torch._dynamo, torch.utils.data))


def begin(arguments: list[str], folder: Path, output: Path, gate: int | None = None) -> int:
    """Fork a process that runs a command in `folder`, and return its id.

    Args:
        arguments: of the runner's command line; or "load", a run directory and, if it has one,
            the checkpoint whose weights must be loaded.
        folder: the working directory.
        output: receives what it prints.
        gate: the file descriptor from which it reads one byte before it begins.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.chdir(folder)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        if gate is not None:
            os.read(gate, 1)
        code = _run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(arguments: list[str]) -> int:
    import torch
    from safetensors.torch import load_file

    import runner
    from accel.machine.errors import AccelError
    from runner import cli

    torch.set_num_threads(1)
    if arguments[0] != "load":
        return cli.main(arguments)
    try:
        model, _ = runner.load(arguments[1])
    except AccelError as error:
        print(error)
        return 1
    for path in arguments[2:]:
        expected, found = load_file(f"{path}/model.safetensors"), model.state_dict()
        if not expected or expected.keys() != found.keys():
            print(f"loaded {sorted(found)}, {path} holds {sorted(expected)}")
            return 3
        if not all(torch.equal(found[name], value) for name, value in expected.items()):
            print(f"the weights loaded are not those of {path}")
            return 3
    return 0


def end(child: int, output: Path) -> Answer:
    """Wait for a command."""
    deadline = time.monotonic() + TIMEOUT
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return Answer(os.waitstatus_to_exitcode(found[1]), output.read_text(errors="replace"))


def run(arguments: list[str], folder: Path) -> Answer:
    """Run a command in `folder` to its end."""
    output = folder.parent / f"{folder.name}.out"
    return end(begin(arguments, folder, output), output)


def cannot_trace() -> str | None:
    """Return why system calls cannot be traced here; None if they can."""
    if STRACE is None:
        return "strace is not installed"
    answer = subprocess.run(
        [STRACE, "-qq", "-e", "trace=none", "true"], capture_output=True, text=True, timeout=60
    )
    return None if answer.returncode == 0 else f"strace may not trace: {answer.stderr.strip()[:90]}"


def traced(arguments: list[str], folder: Path, *options: str) -> tuple[Answer, str]:
    """Run a command under strace, attached before it begins; return the trace, too."""
    assert STRACE is not None
    output, trace = (folder.parent / f"{folder.name}.{kind}" for kind in ("out", "trace"))
    read, write = os.pipe()
    child = begin(arguments, folder, output, read)
    calls = ",".join(f"?{name}" for name in CHANGING)  # not every machine has each
    command = [STRACE, "-qq", "-y", "-p", str(child), "-o", str(trace), "-e", f"trace={calls}"]
    tracer = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    status = Path(f"/proc/{child}/status")
    while "TracerPid:\t0" in status.read_text() and tracer.poll() is None:
        time.sleep(0.002)
    os.write(write, b"x")
    answer = end(child, output)
    tracer.wait(TIMEOUT)
    os.close(read)
    os.close(write)
    return answer, trace.read_text(errors="replace") if trace.exists() else ""


def changing_calls(trace: str, folder: Path) -> list[Call]:
    """Return the calls of a trace that change something below `folder`."""
    seen: dict[str, int] = {}
    found = []
    for line in trace.splitlines():
        match = re.match(r"(?:\d+ +)?(\w+)\(", line)
        if match is None:
            continue
        name = match[1]
        seen[name] = seen.get(name, 0) + 1
        reads = name in ("open", "openat") and not re.search(r"O_(CREAT|TRUNC|WRONLY|RDWR)", line)
        if str(folder) in line and name != "close" and not reads:
            found.append(Call(name, seen[name], line[:100]))
    return found


def killed_at(call: Call, arguments: list[str], folder: Path) -> tuple[Answer, str]:
    """Run a command that is killed on entering a system call; return the trace, too."""
    option = f"inject={call.name}:signal=KILL:when={call.number}"
    return traced(arguments, folder, "-e", option)
