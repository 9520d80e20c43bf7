"""Models larger than memory: a forward pass under a limit, and loading a sharded checkpoint.

Every figure comes from a process of its own, which prints what it measured; contestants take turns;
each run begins with the files out of the disk's cache (``--warm``: in it).

*Forward*: blocks of one linear layer, three times as large as the address space that the process
may still take once the libraries are imported. *Hand* maps each block's weights in turn and
computes; *read* maps the same bytes and reads them. *Load*: shards into a model in memory; *read*
reads the files into memory that is there. With the extra `compare`, Accelerate runs beside.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from accel.imports import is_available
from tests.helpers import python

WIDTH = 4096
BLOCK_BYTES = 4 * WIDTH * WIDTH
ROWS = 1  # of the input: one token
BUDGET = 1.3  # of reading the bytes, for a forward pass
LOAD_BUDGET = 1.1  # likewise, for loading
MEMORY_BUDGET = 1.1  # of one shard, beside the model
BASE = "read"  # the contestant that all are compared with
Run = Callable[[str], dict[str, float] | str]
SHARE = 3  # how many times the model is larger than what the process may take


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


def forward_read(folder: Path, num_blocks: int) -> float:
    """Read the bytes of every block, mapped."""
    return float(sum(w.max() for w in mapped_blocks(folder, num_blocks)))


def forward_hand(folder: Path, num_blocks: int) -> float:
    """Compute block by block."""
    rows = inputs()
    for weight in mapped_blocks(folder, num_blocks):
        rows = torch.tanh(torch.nn.functional.linear(rows, weight))
    return float(rows.double().abs().sum())


def forward_on(library: Any, folder: Path, num_blocks: int, offload: Path) -> float:
    """Dispatch a model to the disk, by `accel` or by the other package, and call it.

    Its first block stays in memory: the other package fails where nothing does.
    """
    with library.init_empty_weights():
        model = Blocks(num_blocks)
    device_map = {f"blocks.{number}": "disk" if number else "cpu" for number in range(num_blocks)}
    model = library.load_checkpoint_and_dispatch(
        model, str(folder), device_map=device_map, offload_folder=str(offload), force_hooks=True
    )
    with torch.no_grad():  # a graph would keep the weights
        rows = model(inputs())
    return float(rows.double().abs().sum())


def load_read(folder: Path, num_blocks: int) -> float:
    """Read the files into memory that is there, of the model's size; return the seconds."""
    model = made(num_blocks)
    parameters = iter(model.parameters())
    before = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            size = int.from_bytes(file.read(8), "little")
            file.seek(8 + size)
            for _ in range((path.stat().st_size - 8 - size) // BLOCK_BYTES):
                view = memoryview(next(parameters).detach().numpy().reshape(-1).view("uint8"))
                while view:
                    view = view[file.readinto(view) :]
    return time.perf_counter() - before


def load_on(library: Any, folder: Path, num_blocks: int) -> float:
    """Load the checkpoint into a model that has its memory; return the seconds."""
    model = made(num_blocks)
    before = time.perf_counter()
    library.load_checkpoint_in_model(model, str(folder))
    spent = time.perf_counter() - before
    check(model, folder)
    return spent


def made(num_blocks: int) -> Blocks:
    """Return a model whose memory is there, page by page."""
    with torch.device("meta"):
        model = Blocks(num_blocks)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def check(model: Blocks, folder: Path) -> None:
    """Raise if the last block is not that of the last shard."""
    name = f"blocks.{len(model.blocks) - 1}.weight"
    wanted = load_file(sorted(folder.glob("*.safetensors"))[-1])[name]
    if not torch.equal(model.state_dict()[name], wanted):
        raise RuntimeError(f"{name} was not loaded.")


def warm_up(library: Any) -> None:
    """Start threads, and import what loading imports, which is no part of the measurement."""
    torch.tanh(torch.nn.functional.linear(inputs(), torch.zeros(WIDTH, WIDTH)))
    made(1)
    if library is not None:
        with tempfile.TemporaryDirectory() as folder:
            layer = torch.nn.Linear(2, 2)
            save_file(layer.state_dict(), Path(folder) / "model.safetensors")
            library.load_checkpoint_in_model(layer, folder)


def child(arguments: argparse.Namespace) -> None:
    """Print what one contestant of one measurement needed, as JSON."""
    torch.set_num_threads(arguments.threads)
    folder, blocks = Path(arguments.folder), arguments.blocks
    kind, name = arguments.child.split("-")
    library = __import__(name) if name in ("accel", "accelerate") else None
    warm_up(library)
    baseline = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident memory so far
    if kind == "forward":
        limit(blocks * BLOCK_BYTES // SHARE)
        before = time.perf_counter()
        if library is not None:
            with tempfile.TemporaryDirectory() as offload:
                value = forward_on(library, folder, blocks, Path(offload))
        else:
            run = {"read": forward_read, "hand": forward_hand}[name]
            value = run(folder, blocks)
        seconds = time.perf_counter() - before
    else:
        value = 0.0
        seconds = load_read(folder, blocks) if library is None else load_on(library, folder, blocks)
    peak = status("VmHWM") - baseline
    print(json.dumps({"seconds": seconds, "peak": peak, "value": value}))


# -- the measurements ----------------------------------------------------------------------


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Have the system forget what it holds of files, so that they are read from the disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measured(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float] | str:
    """Return what one process measured, or the last line of its error."""
    if not arguments.warm:
        drop_from_cache(folder.iterdir())
    options = ("--blocks", str(arguments.blocks), "--threads", str(arguments.threads))
    answer = subprocess.run(
        python("-m", __spec__.name, "--child", name, "--folder", str(folder), *options),
        capture_output=True,
        text=True,
        # A thread's arena reserves address space, of which next to nothing becomes memory.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        timeout=600,
        check=False,
    )
    if answer.returncode:
        return (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def compare(title: str, names: list[str], run: Run, turns: int) -> dict[str, dict[str, float]]:
    """Measure contestants in turn, print a table and return the medians, with the ratio to BASE."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    for _ in range(turns):
        for name in names:
            answer = run(name)
            if isinstance(answer, str):
                errors[name] = answer
            else:
                found[name].append(answer)
    table = Table(title=title)
    for heading in ("contestant", "seconds", f"over {BASE}", "peak MiB", "value"):
        table.add_column(heading, justify="left" if heading == "contestant" else "right")
    result: dict[str, dict[str, float]] = {}
    for name in names:
        if name in errors:
            table.add_row(name, errors[name][:60], "", "", "")
            continue
        pairs = zip(found[name], found[BASE], strict=True)
        one = {key: statistics.median(each[key] for each in found[name]) for key in found[name][0]}
        one["ratio"] = statistics.median(
            each["seconds"] / other["seconds"] for each, other in pairs
        )
        result[name] = one
        peak = f"{one['peak'] / 2**20:.0f}"
        table.add_row(
            name, f"{one['seconds']:.2f}", f"{one['ratio']:.2f}", peak, f"{one['value']:.9g}"
        )
    Console().print(table)
    return result


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=32, help=f"of {BLOCK_BYTES >> 20} MiB each")
    parser.add_argument("--per-shard", type=int, default=4, help="blocks")
    parser.add_argument("--turns", type=int, default=3, help="of each contestant")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--warm", action="store_true", help="leave the files in the disk's cache")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    libraries = ["accel", *(["accelerate"] if is_available("accelerate") else [])]
    size, shard = arguments.blocks * BLOCK_BYTES, arguments.per_shard * BLOCK_BYTES
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, arguments.blocks, arguments.per_shard)
        forward = compare(
            f"Forward pass of {size >> 20} MiB in {size // SHARE >> 20} MiB",
            [BASE, "hand", *libraries],
            lambda name: measured(f"forward-{name}", folder, arguments),
            arguments.turns,
        )
        load = compare(
            f"Loading {size >> 20} MiB in shards of {shard >> 20} MiB",
            [BASE, *libraries],
            lambda name: measured(f"load-{name}", folder, arguments),
            arguments.turns,
        )
    ratio, loading = forward["accel"]["ratio"], load["accel"]["ratio"]
    beside = (load["accel"]["peak"] - size) / shard
    equal = forward["accel"]["value"] == forward["hand"]["value"]
    Console().print(
        f"Forward: {ratio:.2f} times reading (budget {BUDGET}), output as by hand: {equal}. "
        f"Loading: {loading:.2f} times reading (budget {LOAD_BUDGET}), {beside:.2f} shards beside "
        f"the model (budget {MEMORY_BUDGET})."
    )


if __name__ == "__main__":
    main()
