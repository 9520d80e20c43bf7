"""What ``from accel import Accelerator`` costs over ``import torch``, in fresh processes."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess

from rich.console import Console

from tests.helpers import python

BUDGET = 0.05
# Without garbage collection: torch's import makes a full one due, of all its objects, and it falls
# into whatever is imported next.
CODE = "import gc; gc.disable()\nimport torch\nfrom accel import Accelerator"
LINE = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)$")


def measure_once() -> tuple[float, float]:
    """Return the time that `import torch` took, and what the engine added to it, ms.

    Both come from the same process, so that its luck with the machine is the same for both.
    """
    # Compiled files, as an installed package has them.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    answer = subprocess.run(
        python("-X", "importtime", "-c", CODE),
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=True,
    )
    lines = [match for line in answer.stderr.splitlines() if (match := LINE.search(line))]
    names = [match[3] for match in lines]
    last = names.index("torch")
    return int(lines[last][2]) / 1e3, sum(int(match[1]) for match in lines[last + 1 :]) / 1e3


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="fresh processes")
    runs = parser.parse_args().runs
    measure_once()  # writes compiled files, fills the disk's cache
    found = [measure_once() for _ in range(runs)]
    torch_ms = statistics.median(base for base, _ in found)
    ours_ms = statistics.median(extra for _, extra in found)
    ratio = statistics.median(extra / base for base, extra in found)
    verdict = "within" if ratio <= BUDGET else "above"
    Console().print(
        f"import torch {torch_ms:.0f} ms; from accel import Accelerator adds {ours_ms:.0f} ms: "
        f"{ratio:.1%}, {verdict} the budget of {BUDGET:.0%} (median of {runs} processes)."
    )


if __name__ == "__main__":
    main()
