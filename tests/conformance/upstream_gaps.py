"""Why `accel` lacks some of the documented names of the upstream release."""

from __future__ import annotations

BY_ENGINE = "`prepare` reads it from the objects"
BY_PREPARE = "`prepare` builds the object with its engine; it is documented as internal"
# Beginning of a documented name, member (``Name.member``) or parameter (``Name(parameter)``) → why.
REASONS: dict[str, str] = {
    "utils.MegatronLMPlugin.set_": BY_ENGINE,
    "utils.DeepSpeedPlugin.select(_from_accelerator_state)": "a private flag of the other package",
    "utils.deepspeed.DeepSpeedOptimizerWrapper(optimizer)": BY_PREPARE,
    "data_loader.DataLoaderDispatcher.adjust_state_dict_for_prefetch": (
        "a state dict is that of the batch in hand, so nothing is to be adjusted"
    ),
    "data_loader.DataLoaderShard.adjust_state_dict_for_prefetch": (
        "a state dict is that of the batch in hand, so nothing is to be adjusted"
    ),
    "Accelerator.init_trackers(": "named parameters, which take what is documented",
    "Accelerator.log(": "named parameters, which take what is documented",
}
