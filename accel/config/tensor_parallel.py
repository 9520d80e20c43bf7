"""The plugin of tensor parallelism.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel.config.checks import check_minimum, check_types
from accel.machine.errors import Problem, Problems, nearest

# Replicated parameters among sharded activations: each rank computes a part of their gradient.
SUMMED = "replicated_with_grad_allreduce"
# Names of styles in a plan, and the names that the plans of transformers' models have for some.
# Source: https://huggingface.co/docs/transformers/main/en/tensor_parallelism
STYLES = ("colwise", "rowwise", "colwise_rep", "rowwise_rep", SUMMED)
ALIASES = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "embedding_rowwise": "rowwise_rep",
}


@dataclass
class TorchTensorParallelPlugin:
    """How weights are sharded over the ranks of a tensor-parallel group.

    Args:
        tp_size: tensor-parallel size; consecutive ranks hold one replica of the model.
        torch_device_mesh: a `DeviceMesh` with an axis "tp" (and "dp" for data) instead of one that
            is built; its size of "tp" is `tp_size`.
        tp_plan: module name or pattern (``"layers.*.up"``) → colwise, rowwise, colwise_rep (output
            gathered), rowwise_rep (input replicated, as of embeddings),
            replicated_with_grad_allreduce (replicated, among sharded activations, as a gain of each
            head; it may name one parameter), the names that plans of transformers have for these,
            or torch's `ParallelStyle` (as for layouts along the sequence); None: the
            model's own ``tp_plan`` or ``_tp_plan``.

    Raises:
        ConfigError: naming every value that is wrong.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None
    tp_plan: Any = None

    def __post_init__(self) -> None:
        problems = Problems()
        check_types(self, problems)
        check_minimum(self, "tp_size", 1, problems)
        mesh = self.torch_device_mesh
        if mesh is not None:
            names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
            if "tp" not in names:
                problems.add(
                    f"TorchTensorParallelPlugin.torch_device_mesh with axes {names}",
                    "one of its axes is named 'tp'",
                    "Build it with mesh_dim_names=('dp', 'tp').",
                )
            elif self.tp_size == 1:
                self.tp_size = mesh["tp"].size()
            elif mesh["tp"].size() != self.tp_size:
                problems.add(
                    f"TorchTensorParallelPlugin.tp_size={self.tp_size}",
                    f"the axis 'tp' of torch_device_mesh has {mesh['tp'].size()}",
                    "Leave tp_size out.",
                )
        if self.tp_plan is not None:
            problems += plan_problems("TorchTensorParallelPlugin.tp_plan", self.tp_plan)
        problems.raise_if()


def plan_problems(where: str, plan: object) -> list[Problem]:
    """Return the problems of the form of a plan, which messages call `where`."""
    if not isinstance(plan, Mapping) or not plan:
        rule = "it maps names of modules to styles"
        return [Problem(f"{where}={plan!r}", rule, "Give {'layers.*.up': 'colwise', …}.")]
    return [
        Problem(
            f"{where}[{name!r}]={style!r}",
            f"a style is one of {', '.join(STYLES)}, or a ParallelStyle of torch",
            nearest(style, STYLES),
        )
        for name, style in plan.items()
        if isinstance(style, str) and ALIASES.get(style, style) not in STYLES
    ]
