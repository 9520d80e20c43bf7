"""Whether each batch can be cut into a piece per process."""

from __future__ import annotations

from accel.machine.errors import Problem


def split_problems(batch_size: int, num_processes: int) -> list[Problem]:
    """Return what is wrong with cutting batches of `batch_size` into `num_processes` pieces."""
    if batch_size % num_processes == 0:
        return []
    below = batch_size - batch_size % num_processes
    sizes = [str(size) for size in (below, below + num_processes) if size > 0]
    return [
        Problem(
            f"split_batches=True with batch_size={batch_size} on {num_processes} processes",
            "the batch size divides by the number of processes",
            f"The nearest batch size: {' or '.join(sizes)}.",
        )
    ]


def unknown_size(name: str) -> Problem:
    """Return what is wrong with cutting the batches of a batch sampler of class `name`."""
    return Problem(
        f"batch sampler {name} without `batch_size`",
        "to split batches is to know the size of a full one",
        "Give the sampler an attribute `batch_size`, or set split_batches=False.",
    )
