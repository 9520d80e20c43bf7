"""Fill one device after the other with the parts of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from accel.logging import get_logger
from accel.weights.device_memory import ELSEWHERE, Place
from accel.weights.sizes import Part, get_max_layer_size, is_layer, own_parts
from accel.weights.tensors import Device

logger = get_logger(__name__)

Named = tuple[str, Part]


def lies_in(name: str, module: str) -> bool:
    """Return whether a weight or submodule is the module `module`, or within it."""
    return not module or name == module or name.startswith(f"{module}.")


@dataclass
class Filler:
    """Devices, filled in their order.

    Args:
        limits: bytes by device, in the order in which they are filled; the disk has none.
        sizes: bytes by full name of a module or tensor.
        ties: groups of names of tied weights.
        no_split: names of classes whose instances go to one device as a whole.
        fallback: whether a smaller module is tried where the next one does not fit an empty device.
        verbose: whether each decision is logged.
    """

    limits: Mapping[Place, int]
    sizes: Mapping[str, int]
    ties: Sequence[Sequence[str]]
    no_split: frozenset[str]
    fallback: bool = False
    verbose: bool = False
    placed: dict[str, Device] = field(default_factory=dict)
    used: dict[Place, int] = field(default_factory=dict)
    queue: list[Named] = field(default_factory=list)

    def fill(self, parts: Sequence[Named]) -> dict[str, Device]:
        """Return the device of each part, or of the parts that it is split into."""
        self.queue = list(parts)
        devices = [*self.limits, *(["disk"] if "disk" not in self.limits else [])]
        keep_room = self._with_room(devices)
        for device in devices:
            self.used[device] = 0
            while self.queue and self._place_next(device, device in keep_room):
                continue
        return self.placed

    def _with_room(self, devices: Sequence[Place]) -> list[Place]:
        """Return the devices that keep room for a layer that is loaded for its forward pass."""
        accelerators = [device for device in devices if device not in ELSEWHERE]
        if "mps" in accelerators:
            return ["mps"]
        return [accelerators[0], "cpu"] if accelerators else ["cpu"]

    def _room(self, device: Place, keep_room: bool) -> float:
        if device == "disk":
            return float("inf")
        kept = get_max_layer_size(self.queue[1:], self.sizes, self.no_split)[0] if keep_room else 0
        return self.limits[device] - kept - self.used[device]

    def _place_next(self, device: Place, keep_room: bool) -> bool:
        """Place or split the next part; return False if the device has no room for it."""
        name, part = self.queue[0]
        room = self._room(device, keep_room)
        partners = self._tied_to(name)
        size = self._size_with(name, partners)
        if size <= room:
            self._place([self.queue[0], *partners], size, device)
        elif partners and self.sizes.get(name, 0) <= room:
            return self._split_one(partners)
        elif not self._split(name, part):
            return self._fall_back(device, room)
        return True

    def _place(self, parts: Sequence[Named], size: int, device: Place) -> None:
        names = {name for name, _ in parts}
        self.queue = [one for one in self.queue if one[0] not in names]
        self.placed.update(dict.fromkeys((name for name, _ in parts), device))
        self.used[device] += size
        self._tell("Putting %s (size=%d) on %s.", sorted(names), size, device)

    def _tell(self, message: str, *values: object) -> None:
        if self.verbose:
            logger.warning(message, *values)

    # -- splitting -------------------------------------------------------------------------

    def _split(self, name: str, part: Part) -> bool:
        """Replace a part of the queue by its own parts; return False if it is a layer."""
        if is_layer(part, self.no_split) or not isinstance(part, nn.Module):
            return False
        self._tell("Splitting %s.", name)
        at = [known for known, _ in self.queue].index(name)
        self.queue[at : at + 1] = own_parts(part, name)
        return True

    def _split_one(self, parts: Sequence[Named]) -> bool:
        return any(self._split(name, part) for name, part in parts)

    # -- tied weights ----------------------------------------------------------------------

    def _tied_to(self, name: str) -> list[Named]:
        """Return the other parts of the queue that share a weight with the part `name`."""
        shared = [
            other
            for group in self.ties
            if any(lies_in(one, name) for one in group)
            for other in group
            if not lies_in(other, name)
        ]
        return [
            (other, part)
            for other, part in self.queue
            if other != name and any(lies_in(one, other) for one in shared)
        ]

    def _size_with(self, name: str, partners: Sequence[Named]) -> int:
        """Return the bytes of a part and its partners, weights that they share counted once.

        A table of sizes counts a tied weight under its first name only.
        """
        return self.sizes.get(name, 0) + sum(self.sizes.get(other, 0) for other, _ in partners)

    # -- fallback --------------------------------------------------------------------------

    def _fall_back(self, device: Place, room: float) -> bool:
        """Place the first smaller module, level by level, on a device that is still empty."""
        if not self.fallback or self.used[device] > 0:
            return False
        level = list(self.queue)
        while level:
            for name, part in level:
                if self.sizes.get(name, 0) <= room and not self._tied_to(name):
                    self._bring_to_front(name, part)
                    self._place([(name, part)], self.sizes.get(name, 0), device)
                    return True
            level = [
                child
                for name, part in level
                if isinstance(part, nn.Module) and not is_layer(part, self.no_split)
                for child in own_parts(part, name)
            ]
        return False

    def _bring_to_front(self, name: str, part: Part) -> None:
        """Split what a part lies in until it is in the queue itself."""
        while name not in (known for known, _ in self.queue):
            holder = next(one for one in self.queue if lies_in(name, one[0]))
            self._split(*holder)

    # -- buffers ---------------------------------------------------------------------------

    def check_buffers(self, buffer_sizes: Mapping[str, int]) -> None:
        """Warn if the buffers of offloaded modules, which stay, fit no accelerator's free memory.

        `buffer_sizes`: bytes of buffers by full name.
        """
        accelerators = [device for device in self.limits if device not in ELSEWHERE]
        total = sum(
            buffer_sizes.get(name, 0) for name, device in self.placed.items() if device in ELSEWHERE
        )
        free = max((self.limits[one] - self.used[one] for one in accelerators), default=total)
        if total > free:
            logger.warning(
                "Current model requires %d bytes of buffer for offloaded layers, which seems does "
                "not fit any accelerator's remaining memory. If you are experiencing a OOM later, "
                "please consider using offload_buffers=True.",
                total,
            )
