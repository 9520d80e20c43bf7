"""Command line of ``runner export``. Free of torch until the run is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE


def main(arguments: Sequence[str]) -> int:
    """Write the model of a run to a folder, for use elsewhere.

    Raises:
        ConfigError: if the run, the folder or the model is refused.
        CheckpointError: if the checkpoint is missing or incomplete.
    """
    from runner.inference import export
    from runner.inference.load import described

    parser = CommandParser("export", "Write the model of a run to a folder, for use elsewhere.")
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="a run directory")
    what = "hf: for from_pretrained; safetensors: weights of any model"
    add("--format", choices=export.FORMATS, required=True, help=what)
    add("--merge", action="store_true", help="merge adapters into the base model")
    add("--out", type=Path, metavar="DIR", help="folder (default: RUN_DIR/export)")
    what = "best, last, or a checkpoint's name or path (default: best, else last)"
    add("--checkpoint", help=what)
    found = parser.parse_args(list(arguments))
    path, folder = export.export_run(
        found.run_dir, found.format, found.out, merge=found.merge, checkpoint=found.checkpoint
    )
    print(f"weights: {described(path, found.run_dir)}\nexported to {folder}")
    return DONE
