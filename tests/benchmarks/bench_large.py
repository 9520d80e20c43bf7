"""Models larger than memory: a forward pass under a limit, and loading a sharded checkpoint.

Contestants take turns in one process, so that what else the machine does hits all alike; of the
ratios of each turn the median counts. Each run begins with the files out of the disk's cache (with
``--warm`` in it).

*Forward*: blocks of one linear layer, three times as large as the address space that the process
may still take once the libraries are imported. *Hand* maps each block's weights in turn and
computes; *read* maps the same bytes and reads them. Building the model and finding its weights is
timed apart (*setup*). *Load*: shards into a model in memory; *read* reads the files into the same
memory. With the extra `compare`, Accelerate runs beside, without the limit where it fails under it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from accel.machine.imports import is_available
from tests.helpers import python

WIDTH = 4096
BLOCK_BYTES = 4 * WIDTH * WIDTH
ROWS = 1  # of the input: one token
BUDGET = 1.3  # of reading the bytes, for a forward pass
LOAD_BUDGET = 1.1  # likewise, for loading
MEMORY_BUDGET = 1.1  # of one shard, beside the model
BASE = "read"  # the contestant that all are compared with
LIBRARIES = ("accel", "accelerate")
SHARE = 3  # how many times the model is larger than what the process may take


@dataclass(frozen=True)
class Timed:
    """What a run found: its output, and the seconds before what is measured."""

    value: float = 0.0
    setup: float = 0.0


Run = Callable[[], Timed]
Found = dict[str, list[dict[str, float]]]  # measurements of each turn, by contestant


class Blocks(torch.nn.Module):
    """`num_blocks` linear layers [WIDTH, WIDTH], each followed by tanh."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_blocks)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [n, WIDTH] of the last block."""
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        return rows


def inputs() -> torch.Tensor:
    """Return the rows [ROWS, WIDTH] that every contestant computes with."""
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def write(folder: Path, num_blocks: int, per_shard: int) -> None:
    """Write random weights shard by shard, and the index."""
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for first in range(0, num_blocks, per_shard):
        name = f"model-{first:05d}.safetensors"
        numbers = range(first, min(first + per_shard, num_blocks))
        scale = WIDTH**-0.5
        shard = {
            f"blocks.{i}.weight": torch.randn(WIDTH, WIDTH, generator=generator) * scale
            for i in numbers
        }
        save_file(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": num_blocks * BLOCK_BYTES}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# -- in a process of its own ---------------------------------------------------------------


def status(name: str) -> int:
    """Return a line of this process's status (Linux), bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}.")


def limit(num_bytes: int) -> None:
    """Let this process take so many bytes more of address space, threads and heap included."""
    most = status("VmSize") + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def mapped_blocks(folder: Path, num_blocks: int) -> Iterator[torch.Tensor]:
    """Yield each block's weights, mapped from their file and unmapped by who drops them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    for number in range(num_blocks):
        name = f"blocks.{number}.weight"
        with open(folder / index[name], "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            start = 8 + size + json.loads(file.read(size))[name]["data_offsets"][0]
            begin = start - start % mmap.ALLOCATIONGRANULARITY
            memory = mmap.mmap(
                file.fileno(), start - begin + BLOCK_BYTES, access=mmap.ACCESS_COPY, offset=begin
            )
        flat = torch.frombuffer(memory, dtype=torch.float32, offset=start - begin, count=WIDTH**2)
        yield flat.reshape(WIDTH, WIDTH)


def forward_read(folder: Path, num_blocks: int) -> Timed:
    """Read the bytes of every block, mapped."""
    value = float(sum(w.max() for w in mapped_blocks(folder, num_blocks)))
    return Timed(value=value)


def forward_hand(folder: Path, num_blocks: int) -> Timed:
    """Compute block by block."""
    rows = inputs()
    for weight in mapped_blocks(folder, num_blocks):
        rows = torch.tanh(torch.nn.functional.linear(rows, weight))
    return Timed(value=float(rows.double().abs().sum()))


def forward_on(library: Any, folder: Path, num_blocks: int) -> Timed:
    """Dispatch a model to the disk, by `accel` or by the other package, and call it.

    With the other package the first block stays in memory: it fails where nothing does.
    """
    before = time.perf_counter()
    with tempfile.TemporaryDirectory() as offload:
        with library.init_empty_weights():
            model = Blocks(num_blocks)
        device_map = {f"blocks.{number}": "disk" for number in range(num_blocks)}
        if library.__name__ != "accel":
            device_map["blocks.0"] = "cpu"
        model = library.load_checkpoint_and_dispatch(
            model, str(folder), device_map=device_map, offload_folder=offload, force_hooks=True
        )
        setup = time.perf_counter() - before
        with torch.no_grad():  # a graph would keep the weights
            rows = model(inputs())
        return Timed(value=float(rows.double().abs().sum()), setup=setup)


def load_read(folder: Path, model: Blocks) -> Timed:
    """Read the files into the memory of a model."""
    parameters = iter(model.parameters())
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            size = int.from_bytes(file.read(8), "little")
            file.seek(8 + size)
            for _ in range((path.stat().st_size - 8 - size) // BLOCK_BYTES):
                view = memoryview(next(parameters).detach().numpy().reshape(-1).view("uint8"))
                while view:
                    view = view[file.readinto(view) :]
    return Timed()


def load_on(library: Any, folder: Path, model: Blocks) -> Timed:
    """Load the checkpoint into a model that has its memory."""
    library.load_checkpoint_in_model(model, str(folder))
    return Timed()


def made(num_blocks: int) -> Blocks:
    """Return a model whose memory is there, page by page."""
    with torch.device("meta"):
        model = Blocks(num_blocks)
    model.to_empty(device="cpu")
    clear(model)
    return model


def clear(model: Blocks) -> None:
    """Set all weights of a model to 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def check(model: Blocks, folder: Path) -> None:
    """Raise if the last block is not that of the last shard."""
    name = f"blocks.{len(model.blocks) - 1}.weight"
    wanted = load_file(sorted(folder.glob("*.safetensors"))[-1])[name]
    if not torch.equal(model.state_dict()[name], wanted):
        raise RuntimeError(f"{name} was not loaded.")


def child(arguments: argparse.Namespace) -> None:
    """Print what the contestants of one measurement needed in each turn, as JSON."""
    torch.set_num_threads(arguments.threads)
    kind, _, name = arguments.child.partition("-")
    library = importlib.import_module(name)
    runs = {"forward": forward_runs, "load": load_runs}[kind](arguments, library)
    files = list(Path(arguments.folder).iterdir())
    found: dict[str, list[dict[str, float]]] = {each: [] for each in runs}
    for turn in range(arguments.turns + 1):
        names = list(runs) if turn % 2 else list(runs)[::-1]
        for each in names:
            if not arguments.warm:
                drop_from_cache(files)
            one = measured(runs[each])
            found[each] += [one] if turn else []  # the first warms up
    print(json.dumps(found))


def forward_runs(arguments: argparse.Namespace, library: Any) -> dict[str, Run]:
    """Return the contestants of the forward pass, under the limit from here on."""
    place = (Path(arguments.folder), arguments.blocks)
    with tempfile.TemporaryDirectory() as folder:  # imports, and the threads of torch
        write(Path(folder), 2, 1)
        forward_on(library, Path(folder), 2)
    if not arguments.unlimited:
        limit(arguments.blocks * BLOCK_BYTES // SHARE)
    return {
        BASE: lambda: forward_read(*place),
        "hand": lambda: forward_hand(*place),
        library.__name__: lambda: forward_on(library, *place),
    }


def load_runs(arguments: argparse.Namespace, library: Any) -> dict[str, Run]:
    """Return the contestants of loading, which share one model."""
    folder, model = Path(arguments.folder), made(arguments.blocks)
    load_on(library, folder, model)
    check(model, folder)
    return {
        BASE: lambda: load_read(folder, model),
        library.__name__: lambda: load_on(library, folder, model),
    }


def measured(run: Run) -> dict[str, float]:
    """Return what one run needed: seconds but for its setup, and bytes at the peak."""
    baseline = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident memory so far
    before = time.perf_counter()
    timed = run()
    seconds = time.perf_counter() - before - timed.setup
    peak = status("VmHWM") - baseline
    return {"seconds": seconds, "setup": timed.setup, "peak": peak, "value": timed.value}


# -- the measurements ----------------------------------------------------------------------


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Have the system forget what it holds of files, so that they are read from the disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_child(name: str, arguments: argparse.Namespace, *flags: str) -> Found | str:
    """Return what one process measured, or the last line of its error."""
    options = ("--blocks", str(arguments.blocks), "--threads", str(arguments.threads))
    options += ("--turns", str(arguments.turns), "--folder", arguments.folder, *flags)
    options += ("--warm",) if arguments.warm else ()
    answer = subprocess.run(
        python("-m", "tests.benchmarks.bench_large", "--child", name, *options),
        capture_output=True,
        text=True,
        # A thread's arena reserves address space, of which next to nothing becomes memory.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        timeout=900,
        check=False,
    )
    if answer.returncode:
        return (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    found: Found = json.loads(answer.stdout.splitlines()[-1])
    return found


def show(title: str, kind: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure each library, print a table and return medians, with the ratio to BASE."""
    table = Table(title=title)
    for heading in ("contestant", "seconds", f"over {BASE}", "setup", "peak MiB", "value"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    result: dict[str, dict[str, float]] = {}
    for library in filter(is_available, LIBRARIES):
        found = in_child(f"{kind}-{library}", arguments)
        suffix = ""
        if isinstance(found, str) and kind == "forward" and library != "accel":
            table.add_row(library, f"fails: {found[:40]}", *[""] * 4)
            found, suffix = in_child(f"{kind}-{library}", arguments, "--unlimited"), ", no limit"
        if isinstance(found, str):
            raise RuntimeError(f"{kind}-{library}: {found}")
        for name, turns in found.items():
            if name in result:  # read and hand, measured beside the first library
                continue
            one = medians(turns, found[BASE])
            result[name] = one
            table.add_row(
                f"{name}{suffix if name == library else ''}",
                f"{one['seconds']:.3f}",
                f"{one['ratio']:.2f}",
                f"{one['setup']:.3f}",
                f"{one['peak'] / 2**20:.0f}",
                f"{one['value']:.9g}",
            )
    Console().print(table)
    return result


def medians(turns: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of a contestant's turns, and of its ratios to BASE in the same turn."""
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(turns, base, strict=True)]
    one = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    return {**one, "ratio": statistics.median(ratios), "peak": max(t["peak"] for t in turns)}


def main(given: list[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=32, help=f"of {BLOCK_BYTES >> 20} MiB each")
    parser.add_argument("--per-shard", type=int, default=4, help="blocks")
    parser.add_argument("--turns", type=int, default=7, help="of each contestant")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--warm", action="store_true", help="leave the files in the disk's cache")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--unlimited", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.child:
        child(arguments)
        return
    size, shard = arguments.blocks * BLOCK_BYTES, arguments.per_shard * BLOCK_BYTES
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = folder
        write(Path(folder), arguments.blocks, arguments.per_shard)
        forward = show(
            f"Forward pass of {size >> 20} MiB in {size // SHARE >> 20} MiB", "forward", arguments
        )
        load = show(f"Loading {size >> 20} MiB in shards of {shard >> 20} MiB", "load", arguments)
    equal = forward["accel"]["value"] == forward["hand"]["value"]
    Console().print(
        f"Forward: {forward['accel']['ratio']:.2f} times reading (budget {BUDGET}), output as by "
        f"hand: {equal}. Loading: {load['accel']['ratio']:.2f} times reading (budget "
        f"{LOAD_BUDGET}), {load['accel']['peak'] / shard:.2f} shards beside the model (budget "
        f"{MEMORY_BUDGET})."
    )


if __name__ == "__main__":
    main()
