"""Run a script with another package in accel's place, its text unchanged.

python -m tests.comparison.aliased accelerate examples/scripts/local_sgd.py --cpu
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

import torch

MODULES = ("", ".utils", ".local_sgd")  # that scripts import from


def main() -> None:
    """Run the script of the command line as the main program."""
    package, *sys.argv = sys.argv[1:]
    if package == "accel":
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    for name in MODULES:
        sys.modules[f"accel{name}"] = importlib.import_module(f"{package}{name}")
    keep_wrapped_models()
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


def keep_wrapped_models() -> None:
    """Let no model that is wrapped from now on be freed.

    Freed after `end_training` of version 1.15, a wrapper sometimes waits for ever: it ends gloo's
    threads while it holds the interpreter's lock, which one of them needs to drop a tensor.
    """
    wrapper = torch.nn.parallel.DistributedDataParallel
    kept: list[torch.nn.Module] = []
    before = wrapper.__init__

    def keep(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        kept.append(self)
        before(self, *args, **kwargs)

    wrapper.__init__ = keep  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
