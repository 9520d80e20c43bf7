"""Sizes of the parallel axes of a run, as the documentation names them.

Source: https://huggingface.co/docs/accelerate/concept_guides/nd_parallel
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from accel.config.checks import check_choice, check_minimum, check_types
from accel.machine import env
from accel.machine.errors import Problem, Problems

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Axes as the documentation names them, outermost first: the field of each is ``<axis>_size``.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
# Over heads, by one all-to-all before and one after each attention; or around a ring, by torch.
ULYSSES, RING = "ulysses", "ring"
# Stages that each rank has, by schedule of `torch.distributed.pipelining`.
STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
}
V_SHAPED = ("ZBVZeroBubble",)  # its first rank has the first stage and the last
DEFAULTS = {
    **{f"{axis}_size": 1 for axis in AXES},
    "cp_backend": "torch",
    "sp_backend": "deepspeed",
}
# Axes that a built mesh joins into one, by the name of that.
JOINED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}
# Documented environment variables, without their prefix: the field that each one fills.
PREFIX = "PARALLELISM_CONFIG_"
SWITCH = "ACCELERATE_USE_PARALLELISM_CONFIG"
VARIABLES = {
    **{f"{axis.upper()}_SIZE": f"{axis}_size" for axis in AXES},
    "CP_BACKEND": "cp_backend",
    "SP_BACKEND": "sp_backend",
}


@dataclass
class ParallelismConfig:
    """How many processes compute along each parallel axis; their product is the world size.

    An argument that is not given takes the environment variable ``PARALLELISM_CONFIG_…``, else 1
    or the only backend.

    A size above 1 switches what it names on where nothing else does: `dp_shard_size` FSDP2 with its
    defaults (so does `cp_size`, whose ranks shard the model, too), `tp_size` tensor parallelism by
    the model's own plan.

    Args:
        dp_replicate_size: replicas of the (sharded) model, each of which reads other samples.
        dp_shard_size: processes that shard one replica, each of which reads other samples.
        tp_size: processes that compute parts of the same matrices.
        cp_size: processes that compute parts of the same sequences.
        cp_backend: of context parallelism: "ulysses", also named "torch" (exchanges heads; exact
            with any attention), or "ring" (torch's ring attention, on GPUs).
        sp_size: the same as `cp_size`, under DeepSpeed.
        sp_backend: of sequence parallelism: deepspeed.
        tp_handler: settings of tensor parallelism; not built yet.
        cp_handler: settings of context parallelism; not built yet.
        sp_handler: settings of sequence parallelism; not built yet.
        pp_size: processes that hold stages of the model; a step's micro-batches go through them.
        pp_schedule: order of their forward and backward passes, as torch names it: GPipe, 1F1B,
            or with two stages on each process Interleaved1F1B, InterleavedZeroBubble,
            ZBVZeroBubble.
        pp_split: names of the modules that stages but the first begin with; or a function of the
            model and the number of stages, which returns a list of the names of modules for each.
            None: at the model's repeated blocks, the largest stage as small as can be.

    Raises:
        ConfigError: naming every size below 1 and every unknown backend.

    Example:
        >>> config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=4)
        >>> accelerator = Accelerator(parallelism_config=config)
    """

    dp_replicate_size: int = None  # type: ignore[assignment]  # never None once it is built
    dp_shard_size: int = None  # type: ignore[assignment]
    tp_size: int = None  # type: ignore[assignment]
    cp_size: int = None  # type: ignore[assignment]
    cp_backend: str = None  # type: ignore[assignment]
    sp_size: int = None  # type: ignore[assignment]
    sp_backend: str = None  # type: ignore[assignment]
    tp_handler: object = None
    cp_handler: object = None
    sp_handler: object = None
    pp_size: int = None  # type: ignore[assignment]
    pp_schedule: str = "1F1B"
    pp_split: Any = None

    def __post_init__(self) -> None:
        problems = Problems()
        lacks = any(getattr(self, field) is None for field in DEFAULTS)
        given = fields_of(env.prefixed(PREFIX), problems) if lacks else {}
        for field, default in DEFAULTS.items():
            if getattr(self, field) is None:
                setattr(self, field, given.get(field, default))
        check_types(self, problems)
        for axis in AXES:
            check_minimum(self, f"{axis}_size", 1, problems)
        check_choice(self, "cp_backend", ("torch", ULYSSES, RING), problems)
        check_choice(self, "sp_backend", ("deepspeed",), problems)
        check_choice(self, "pp_schedule", tuple(STAGES_PER_RANK), problems)
        if self.pp_size == 1 and (self.pp_split is not None or self.pp_schedule != "1F1B"):
            value = f"pp_schedule={self.pp_schedule!r}, pp_split={self.pp_split!r} with pp_size=1"
            problems.add(value, "one stage has no schedule", "Give pp_size=2 or more.")
        if not problems and self.cp_enabled and self.sp_enabled:
            value = f"ParallelismConfig(cp_size={self.cp_size}, sp_size={self.sp_size})"
            rule = "both are ranks that compute parts of the same sequences"
            problems.add(value, rule, "Give one of them.")
        for axis in ("tp", "cp", "sp"):
            if (handler := getattr(self, f"{axis}_handler")) is not None:
                value = f"ParallelismConfig.{axis}_handler={handler!r}"
                problems.add_not_built(value, "Leave it out.")
        problems.raise_if()

    def size(self, axis: str) -> int:
        """Return the number of processes along an axis.

        Args:
            axis: pp, dp_replicate, dp_shard, cp, sp or tp.
        """
        return int(getattr(self, f"{axis}_size"))

    def to_json(self) -> dict[str, object]:
        """Return the fields by name, as plain values."""
        return asdict(self)

    # -- sizes ---------------------------------------------------------------------------------

    @property
    def total_size(self) -> int:
        """The number of processes."""
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def data_parallel_size(self) -> int:
        """The number of processes that read different samples."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes that compute the same samples together."""
        return self.total_size // self.data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas of the model."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether several processes shard a replica."""
        return self.dp_shard_size > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether several processes compute parts of the same matrices."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether several processes compute parts of the same sequences."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequence parallelism is on."""
        return self.sp_size > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is cut into pipeline stages."""
        return self.pp_size > 1

    # -- axes of the mesh ----------------------------------------------------------------------

    def _on(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self.size(axis) > 1]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes of a size above 1, outermost first."""
        return self._on(*AXES)

    @property
    def dp_dim_names(self) -> list[str]:
        """Those of them along which processes read different samples."""
        return self._on("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Those of them along which processes compute the same samples."""
        return self._on("pp", "cp", "sp", "tp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Those of them over which FSDP2 shards parameters."""
        return self._on("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Those of them over which losses are averaged."""
        return self._on("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of the mesh that FSDP2 works on: of replicas, if any, and of shards."""
        return [*self._on("dp_replicate"), "dp_shard"]

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return a mesh of the axes of a size above 1; None where there is none.

        It also answers to the joined axes "dp", "dp_shard_cp" and "dp_cp", if any of their axes are
        in it.

        Every rank calls this, inside the process group of all.

        Args:
            device_type: kind of device, as of `torch.device.type`.
        """
        from torch.distributed.device_mesh import init_device_mesh

        axes = self.active_mesh_dims
        if not axes:
            return None
        sizes = tuple(self.size(axis) for axis in axes)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=tuple(axes))
        join_axes(mesh)
        return mesh


def sequence_problems(sizes: ParallelismConfig, device_type: str, compiles: bool) -> list[Problem]:
    """Return what ranks that compute parts of sequences cannot do on a device."""
    value, problems = f"ParallelismConfig(cp_size={sizes.cp_size})", []
    if sizes.cp_backend == RING and device_type == "cpu":
        rule = "torch has ring attention for kernels of GPUs alone"
        value = f"ParallelismConfig(cp_backend={RING!r}) on a CPU"
        problems.append(Problem(value, rule, f"Use cp_backend={ULYSSES!r}."))
    if compiles:
        rule = "a compiled graph would hold attention over this rank's part alone"
        problems.append(Problem(f"{value} with torch.compile", rule, "Switch compilation off."))
    return problems


def one_of_each() -> ParallelismConfig:
    """Return the sizes of a run that requests none, whatever the environment says."""
    return ParallelismConfig(**DEFAULTS)  # type: ignore[arg-type]


def join_axes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Let `mesh` answer to the joined axes that it has parts of; return their meshes, 1-D."""
    names = mesh.mesh_dim_names or ()
    parts = {joined: tuple(a for a in axes if a in names) for joined, axes in JOINED.items()}
    return [mesh[axes]._flatten(joined) for joined, axes in parts.items() if axes]


def fields_of(variables: Mapping[str, str], problems: Problems) -> dict[str, int | str]:
    """Return the fields that environment variables give; add a problem for each invalid one."""
    fields: dict[str, int | str] = {}
    for name, field in VARIABLES.items():
        text = variables.get(f"{PREFIX}{name}", "").strip()
        if text and field.endswith("_size") and not text.isdigit():
            value = f"{PREFIX}{name}={text!r} (environment)"
            problems.add(value, "expected a number, at least 1", "Correct it.")
        elif text:
            fields[field] = int(text) if field.endswith("_size") else text
    return fields
