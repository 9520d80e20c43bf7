"""A trained model spread over devices, memory and disk: ``--device-map`` of eval and predict.

Free of torch until a model is loaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accel.checkpoint import directory
from accel.machine.errors import ConfigError

if TYPE_CHECKING:
    import torch

WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Placement:
    """Where the weights of a model that is larger than a device are to lie.

    Attributes:
        device_map: how devices are filled, a word of `accel.load_checkpoint_and_dispatch`.
        max_memory: text such as "2GB" by device, its number or "cpu"; empty: what is free.
        folder: gets the weights on disk that cannot be read from the checkpoint; None outside of
            `in_folder`.
    """

    device_map: str
    max_memory: Mapping[int | str, str] = field(default_factory=dict)
    folder: Path | None = None

    @contextmanager
    def in_folder(self) -> Iterator[Placement]:
        """Give a placement whose folder is there within the context."""
        with tempfile.TemporaryDirectory(prefix="runner-weights-") as folder:
            yield Placement(self.device_map, self.max_memory, Path(folder))

    def load(self, model: torch.nn.Module, checkpoint: Path, index: int) -> None:
        """Load the `index`-th model of a checkpoint and hook it to run from where its weights lie.

        Weights of a safetensors file are read where they lie; those of a sharded state are written
        into the folder first, by way of memory.

        Args:
            model: on the meta device but for its buffers.
            checkpoint: a state of the run.
            index: number of the model.

        Raises:
            CheckpointError: if the weights do not fit, or hold values that are no tensors.
            ConfigError: if no device has room for a part of the model that stays together.
        """
        from accel import load_checkpoint_and_dispatch

        assert self.folder is not None
        load_checkpoint_and_dispatch(
            model,
            _exported(checkpoint, index, self.folder / f"model_{index}"),
            device_map=self.device_map,
            max_memory=self._memory(),
            no_split_module_classes=getattr(model, "_no_split_modules", None) or None,
            offload_folder=self.folder / f"offloaded_{index}",
            force_hooks=True,
            strict=True,
        )

    def _memory(self) -> dict[int | str, float | str] | None:
        """Return the limits, with what is free of memory where only accelerators have one."""
        if not self.max_memory:
            return None
        from accel.utils import get_max_memory

        return {"cpu": get_max_memory()["cpu"], **self.max_memory}


def _exported(checkpoint: Path, index: int, folder: Path) -> Path:
    """Return where the weights of a model lie as safetensors; written to `folder` if need be."""
    from accel.checkpoint import export
    from accel.checkpoint.load import read_model
    from accel.checkpoint.serialization import holds_tensors_alone

    if holds_tensors_alone(checkpoint, index):
        return checkpoint / directory.model_name(index)
    export.export_model(read_model(checkpoint, index), folder)
    return folder


def parse_limits(limits: Sequence[str]) -> dict[int | str, str]:
    """Return the text by device of limits such as "0=20GB" and "cpu=4GB".

    Raises:
        ConfigError: naming those that are no such limit.
    """
    from accel.utils import convert_file_size_to_int

    found: dict[int | str, str] = {}
    for limit in limits:
        device, _, size = limit.partition("=")
        size = "0GB" if size == "0" else size  # nothing is nothing in every unit
        try:
            convert_file_size_to_int(size)
            known = device in ("cpu", "mps") or device.isdecimal()
        except ConfigError:
            known = False
        if not known:
            rule = "a limit is DEVICE=SIZE; a device is the number of an accelerator, or cpu, and "
            rule += "a size has a unit (MB, GB, GiB)"
            raise ConfigError.of(f"--max-memory {limit}", rule, "Give --max-memory cpu=4GB, say.")
        place: int | str = int(device) if device.isdecimal() else device
        if place in found:
            rule = (
                f"--max-memory {device}={found[place]} was given, too, and a device has one limit"
            )
            raise ConfigError.of(f"--max-memory {limit}", rule, "Leave one of them out.")
        found[place] = size
    return found
