"""E1: under the import alias, each module of `accelerate` is accel's own."""

from __future__ import annotations

import subprocess

from tests.helpers import ROOT, python

SCRIPT = """
import sys
from tests.libraries import alias
alias.install()
alias.install()
import accelerate, accelerate.utils.dataclasses, importlib.metadata, importlib.util
from accelerate.state import PartialState
import accel.state, accel.utils.dataclasses
assert accelerate is accel and PartialState is accel.state.PartialState
assert accelerate.utils.dataclasses is accel.utils.dataclasses
assert accel.utils.dataclasses.__spec__.name == "accel.utils.dataclasses"
assert importlib.metadata.version("accelerate") == accel.__version__
assert importlib.util.find_spec("accelerate") is not None
try:
    import accelerate.not_there
except ModuleNotFoundError as error:
    assert "accel has no accel.not_there" in str(error), error
else:
    raise AssertionError("a module that is not there was imported")
files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
assert not [file for file in files if "/accelerate/" in file]
print("well")
"""


def test_every_module_is_accels_own() -> None:
    answer = subprocess.run(
        python("-c", SCRIPT), capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert answer.stdout.strip() == "well", answer.stderr
