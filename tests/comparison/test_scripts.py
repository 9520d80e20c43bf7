"""E1: the scripts of `examples/scripts/` have the same metrics with the documented package.

Needs the extra `compare`, which nothing else does: ``pip install -e .[compare]``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comparison.running import PACKAGES, result
from tests.examples.scripts import SCRIPTS, Script
from tests.tiers import one_in

pytest.importorskip(PACKAGES[1], reason="the extra `compare` installs it")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # four starts a script

ROUNDING = 1e-3
# Metrics that differ, and why.
ORDER = "a seedable sampler gives each loader, and each epoch, a permutation of its own"
TAKEN = "the batch that fits is found in the memory that the package itself has left"
DIFFERENT = {"experiment_tracking": ORDER, "executable_batch_size": TAKEN}


@pytest.mark.parametrize("script", one_in(9, SCRIPTS, lambda script: script.name))
def test_the_packages_agree(script: Script, tmp_path: Path) -> None:
    found = result(script, tmp_path, small=True)
    for metrics in found.metrics.values():
        assert script.shortcomings(metrics, small=True) == []
    if script.name not in DIFFERENT:
        assert found.different(ROUNDING) == []
