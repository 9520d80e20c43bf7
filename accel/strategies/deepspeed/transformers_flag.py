"""transformers asks one object whether models are built in shards: it is given the run's.

It keeps that object weakly, and imports nothing of ours.

Source: https://huggingface.co/docs/transformers/main_classes/deepspeed
"""

from __future__ import annotations

import weakref
from typing import Any, final

from accel import env
from accel.config.deepspeed_json import HfDeepSpeedConfig
from accel.imports import is_available, require

_TOLD: weakref.WeakSet[Recognition] = weakref.WeakSet()  # those of several Accelerators


@final
class Recognition:
    """Lets transformers build models in shards, from now on until `withdraw`.

    Args:
        config: DeepSpeed's, complete enough for `deepspeed.zero.Init`.
        local_rank: of this process; `deepspeed.zero.Init` wants it in the environment, which has it
            only where there was a launcher.
    """

    def __init__(self, config: dict[str, Any], local_rank: int) -> None:
        self.told = HfDeepSpeedConfig(config)
        self._module = require("transformers.integrations.deepspeed", "deepspeed_plugin")
        self._module.set_hf_deepspeed_config(self.told)
        self._alone = env.read("LOCAL_RANK") is None
        if self._alone:
            env.set_values({"LOCAL_RANK": local_rank})
        _TOLD.add(self)

    def withdraw(self) -> None:
        """Let transformers build whole models again, unless it was told of another object since."""
        if self._alone:
            env.set_values({"LOCAL_RANK": None})
            self._alone = False
        enabled = self._module.is_deepspeed_zero3_enabled()
        if enabled and self._module.deepspeed_config() is self.told.config:
            self._module.unset_hf_deepspeed_config()


def withdraw_all() -> None:
    """Let transformers build whole models again: the process group is left by all."""
    for told in list(_TOLD):
        told.withdraw()


def is_possible() -> bool:
    """Return whether there is somebody to be told."""
    return is_available("transformers")
