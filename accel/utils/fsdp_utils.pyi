# Written by `python -m tests.stubs` from the table in `accel/_exports.py`.
# ruff: noqa
from accel.strategies.mesh.utilities import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accel.strategies.mesh.utilities import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accel.strategies.mesh.utilities import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from accel.strategies.mesh.utilities import fsdp2_prepare_model as fsdp2_prepare_model
from accel.strategies.mesh.utilities import (
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
)
from accel.strategies.mesh.utilities import (
    get_parameters_from_modules as get_parameters_from_modules,
)
from accel.strategies.mesh.utilities import load_fsdp_model as load_fsdp_model
from accel.strategies.mesh.utilities import load_fsdp_optimizer as load_fsdp_optimizer
from accel.strategies.mesh.utilities import save_fsdp_model as save_fsdp_model
from accel.strategies.mesh.utilities import save_fsdp_optimizer as save_fsdp_optimizer
from accel.weights.files import merge_weights as merge_weights

__all__: list[str]
merge_fsdp_weights = merge_weights
