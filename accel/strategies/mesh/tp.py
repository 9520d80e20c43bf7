"""Tensor parallelism: neighbours by rank hold parts of matrices and see the same batches.

Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch
from torch.distributed.fsdp import fully_shard

from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.strategies.mesh.base import DTensorStrategy
from accel.strategies.mesh.device_mesh import TENSOR, check_given, data_axes
from accel.strategies.mesh.materialize import InitialWeights
from accel.strategies.mesh.tp_plan import split_matrices
from accel.strategies.mesh.units_by_dtype import split_by_dtype

if TYPE_CHECKING:
    from accel.comm.base import Communicator
    from accel.planning.plan import Plan
    from accel.precision.base import Precision


@final
class TensorParallelStrategy(DTensorStrategy):
    """Replicas of split matrices; each replica reads its own share of the data.

    Gradients are averaged over replicas by FSDP2 with shards of one process, which hold everything;
    what is trained in another dtype than what is around it is a unit of its own.
    """

    def __init__(
        self, plan: Plan, comm: Communicator, device: torch.device, precision: Precision
    ) -> None:
        given = plan.plugin("tensor_parallel")
        self.plugin = TorchTensorParallelPlugin() if given is None else given
        super().__init__(plan, comm, device, precision)
        if self.plugin.torch_device_mesh is not None and self._mesh is not None:
            check_given(self.plugin.torch_device_mesh, self._mesh)

    def sharded_names(self) -> tuple[str, ...]:
        """Return the names of sharded state, for the run header."""
        return ("the matrices of the plan",) if self.plugin.tp_size > 1 else ()

    def parallelize(self, model: torch.nn.Module) -> None:
        """Split the matrices of `model`, and average its gradients over replicas."""
        weights = InitialWeights(self.comm, self.device)
        weights.check(model)
        weights.settle(model)
        model.to(self.device)
        self.precision.wrap_forward(model)
        mesh = self._mesh
        assert mesh is not None
        if TENSOR in (mesh.mesh_dim_names or ()):
            split_matrices(model, mesh[TENSOR], self.plugin.tp_plan)
        if data_axes(mesh).size() > 1:
            for unit in (*split_by_dtype(model, [], set()), model):
                fully_shard(unit, mesh=data_axes(mesh), reshard_after_forward=False)
