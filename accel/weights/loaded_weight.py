"""Offloaded weights while they are loaded: by one thread at a time, and whether they change."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import nn


class LoadLock:
    """Held by a thread while it loads or offloads weights of a model, not while the model computes.

    So a forward pass may wait for another thread that runs the model, as autograd's threads do.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[LoadLock], tuple[()]]:
        return LoadLock, ()  # copies of a model do not wait for one another

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class LoadedWeight:
    """One weight while it is loaded, to find out whether it was changed.

    torch counts changes of a parameter, but neither those of ``parameter.data`` in place nor those
    through a numpy view. Within a forward pass these are not found, as each pass would compare all
    weights with those on disk: they are lost unless the parameter is the offloaded weight itself,
    as where that lies in the memory of the same device.

    Args:
        tensor: what the module holds of it now.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.pointer = tensor.data_ptr()  # another one after `tensor.data = ...`
        # Of buffers, torch's batch_norm changes the data without counting.
        counts = isinstance(tensor, nn.Parameter) and not tensor.is_inference()
        self.version = tensor._version if counts else None

    def changed(
        self, held: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, by_contents: bool
    ) -> bool:
        """Return whether what a module holds now differs from the value that is offloaded.

        Args:
            held: by the module.
            weights: the weights map.
            name: of the weight there.
            by_contents: whether also to find what was written to `tensor.data`, which no version
                counts.
        """
        if held.is_meta:
            return False
        same = held is self.tensor and held.data_ptr() == self.pointer
        counted = same and self.version is not None and held._version != self.version
        if same and self.version is not None and not counted and not by_contents:
            return False
        offloaded = weights[name]
        if held.data_ptr() == offloaded.data_ptr():
            return False
        if counted or held is not self.tensor:
            return True
        return not torch.equal(content_of(held), content_of(offloaded.to(held.dtype)))


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, on the CPU."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
