"""Documented functions on models and optimizers that FSDP2 shards.

They are meant for libraries that prepare a model by themselves, as trainers do; a script calls
`Accelerator.prepare`, `save_state` and `load_state`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from accel.checkpoint import directory, sharded
from accel.checkpoint.optimizer_state import ParameterNames
from accel.checkpoint.serialization import load_plain, save_plain
from accel.comm.base import Communicator, together
from accel.machine import env
from accel.machine.errors import ConfigError
from accel.precision import amp
from accel.precision.wrapping import is_peft_model, own_module
from accel.strategies.mesh.parameters import ParameterRemap
from accel.strategies.mesh.units import ignored_modules, parameters_of

if TYPE_CHECKING:
    from accel.accelerator import Accelerator
    from accel.config.fsdp import FullyShardedDataParallelPlugin

FSDP_MODEL_NAME = "pytorch_model_fsdp"
OPTIMIZER_NAME = "optimizer"
Folder = str | PathLike[str]


# -- environment ---------------------------------------------------------------------------


def enable_fsdp_ram_efficient_loading() -> None:
    """Let models of transformers read their weights on rank 0 only, by environment variables."""
    _set_ram_efficient_loading(True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Let models of transformers read their weights on every rank, by environment variables."""
    _set_ram_efficient_loading(False)


def _set_ram_efficient_loading(on: bool) -> None:
    env.set_values({"ACCELERATE_USE_FSDP": True, "FSDP_CPU_RAM_EFFICIENT_LOADING": on})


# -- preparing -----------------------------------------------------------------------------


def fsdp2_prepare_model(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Shard a model in place, as `Accelerator.prepare` does, and return it.

    Args:
        accelerator: of a run under FSDP.
        model: not sharded yet; one that is stays as it is.

    Raises:
        ConfigError: if FSDP is off.
    """
    if not accelerator.is_fsdp2:
        remedy = "Give Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())."
        raise ConfigError.of("fsdp2_prepare_model", "FSDP is off", remedy)
    return accelerator.prepare_model(model)


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[int, torch.Tensor]
) -> None:
    """Let an optimizer step other parameters, such as the shards of its own; its state is sharded.

    Args:
        optimizer: prepared or not; changed in place.
        mapping: from the `data_ptr` of each of its parameters to the one that replaces it.

    Raises:
        KeyError: if a parameter is not in `mapping`: it would not be trained any more. Nothing is
            changed then.
    """
    remap = ParameterRemap()
    remap.record_unsharded((p, mapping[p.data_ptr()]) for p in amp.parameters_of(optimizer))
    remap.remap(optimizer)


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None,
    model: torch.nn.Module,
    device: torch.device | None = None,
) -> set[torch.nn.Parameter]:
    """Return the parameters of modules that are not sharded.

    Args:
        modules: modules of the model, or a regular expression of names; None: none.
        model: not sharded yet.
        device: where the modules are moved; None: they stay.

    Raises:
        ConfigError: for entries that match no module of the model.
    """
    found = ignored_modules(model, modules)
    for module in found if device is not None else ():
        module.to(device)
    return set(parameters_of(found))


# -- state dicts ---------------------------------------------------------------------------


def fsdp2_load_full_state_dict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    full_sd: Mapping[str, torch.Tensor],
    cpu_offload: bool = False,
) -> None:
    """Load the full state dict of rank 0 into a sharded model, in place. Every rank calls this.

    Parameters on the meta device are replaced, so that optimizers have to be built afterwards;
    others keep their identity.

    Args:
        accelerator: of a run under FSDP.
        model: sharded.
        full_sd: full tensors by parameter name; read on rank 0 only.
        cpu_offload: whether parameters that were on the meta device rest in the host's memory.

    Raises:
        RuntimeError: of torch, for names and shapes that differ from the model's.
    """
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload
    )
    set_model_state_dict(own_module(model), dict(full_sd), options=options)


def _adapter(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trained weights in the state dict of a model of peft; of any other, all."""
    own = own_module(model)
    if not is_peft_model(own):
        return dict(state)
    trained = {name for name, parameter in own.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if name in trained}


def _file(folder: Folder, name: str, index: int) -> Path:
    return Path(folder) / directory.numbered(name, ".bin", index)


def _save(comm: Communicator, state: object, path: Path, what: str) -> None:
    """Write on rank 0; every rank calls this, and waits until it is written."""
    with together(comm, f"saving {path.name}"):
        if comm.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_plain(state, path, what)


def _save_shards(comm: Communicator, state: dict[str, Any], folder: Path) -> None:
    """Write on every rank, in place of what the folder held before."""
    with together(comm, f"saving {folder.name}"):
        if comm.rank == 0 and folder.is_dir():
            shutil.rmtree(folder)
    with together(comm, f"saving {folder.name}"):
        sharded.write(state, folder)


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: torch.nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Write the weights of a sharded model. Every rank calls this.

    Args:
        fsdp_plugin: of the run; its `state_dict_type` says whether they are full or sharded.
        accelerator: of the run.
        model: prepared.
        output_dir: folder of the file ``pytorch_model_fsdp.bin``, or of the folder
            ``pytorch_model_fsdp_0`` of shards.
        model_index: number of the model: that of a further one is in the name.
        adapter_only: whether only the trained weights of a model of peft are saved; of other models
            all are, either way.
    """
    comm, io, what = accelerator.comm, accelerator.strategy.state, f"model {model_index}"
    in_shards = fsdp_plugin.saves_shards
    state = io.sharded_model_state(model) if in_shards else io.model_state(model)
    state = _adapter(model, state) if adapter_only else state
    if in_shards:
        folder = Path(output_dir) / directory.sharded_model_name(model_index)
        _save_shards(comm, sharded.nested_model(state, what), folder)
    else:
        _save(comm, state, _file(output_dir, FSDP_MODEL_NAME, model_index), what)


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    model: torch.nn.Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Load what `save_fsdp_model` wrote, without running code. Every rank calls this.

    Args:
        fsdp_plugin: of the run; its `state_dict_type` says whether they are full or sharded.
        accelerator: of the run.
        model: prepared.
        input_dir: folder of the file, or of the folder of shards.
        model_index: number of the model.
        adapter_only: whether only the trained weights of a model of peft are there; the others
            stay as they are.

    Raises:
        CheckpointError: if the file is missing or broken.
    """
    io = accelerator.strategy.state
    if fsdp_plugin.saves_shards:
        shards = Path(input_dir) / directory.sharded_model_name(model_index)
        state = sharded.read_model_folder(shards, io.allocate_weights(model) or sharded.empty)
    else:
        state = load_plain(_file(input_dir, FSDP_MODEL_NAME, model_index))
    if adapter_only and is_peft_model(own_module(model)):
        state = {**io.sharded_model_state(model), **state}
    io.load_model_state(model, state)


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    output_dir: Folder,
    optimizer_index: int = 0,
) -> None:
    """Write the state of an optimizer of a sharded model. Every rank calls this.

    Args:
        fsdp_plugin: of the run; its `state_dict_type` says whether it is full or sharded.
        accelerator: of the run.
        optimizer: prepared.
        model: whose parameters it steps; they name its state.
        output_dir: folder of the file ``optimizer.bin``, or of the folder ``optimizer_0`` of
            shards.
        optimizer_index: number of the optimizer: that of a further one is in the name.
    """
    comm, io = accelerator.comm, accelerator.strategy.state
    names, what = ParameterNames([own_module(model)]), f"optimizer {optimizer_index}"
    if fsdp_plugin.saves_shards:
        state = sharded.nested_optimizer(io.sharded_optimizer_state(optimizer, names), what)
        _save_shards(
            comm, state, Path(output_dir) / directory.sharded_optimizer_name(optimizer_index)
        )
    else:
        path = _file(output_dir, OPTIMIZER_NAME, optimizer_index)
        _save(comm, io.optimizer_state(optimizer, names), path, what)


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Accelerator,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Load what `save_fsdp_optimizer` wrote, without running code. Every rank calls this.

    Args:
        fsdp_plugin: of the run; its `state_dict_type` says whether it is full or sharded.
        accelerator: of the run.
        optimizer: prepared.
        model: whose parameters it steps.
        input_dir: folder of the file, or of the folder of shards.
        optimizer_index: number of the optimizer.
        adapter_only: whether only the weights of adapters are trained; the state names its
            parameters, so that it makes no difference.

    Raises:
        CheckpointError: if the file is missing or broken.
    """
    io, names = accelerator.strategy.state, ParameterNames([own_module(model)])
    if fsdp_plugin.saves_shards:
        shards = Path(input_dir) / directory.sharded_optimizer_name(optimizer_index)
        allocate = io.allocate_state(optimizer, names) or sharded.empty
        state = sharded.read_optimizer_folder(shards, 0, allocate)
    else:
        state = load_plain(_file(input_dir, OPTIMIZER_NAME, optimizer_index))
    io.load_optimizer_state(optimizer, state, names)
