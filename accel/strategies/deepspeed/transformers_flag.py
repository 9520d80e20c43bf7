"""The object that transformers asks whether it partitions models while it builds them.

transformers keeps one such object in a process, by a weak reference.

Source: https://huggingface.co/docs/transformers/main_classes/deepspeed
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import final

from accel.config.deepspeed_json import Config
from accel.machine import env
from accel.machine.imports import is_available, require


@final
class ActiveConfig:
    """Answer transformers for the plugin that is active at the time of the question.

    Args:
        is_enabled: a bound method: whether models are partitioned while they are built.
        make_config: a bound method: DeepSpeed's configuration, complete enough for
            `deepspeed.zero.Init`, which transformers calls next.
        local_rank: of this process.
    """

    def __init__(
        self, is_enabled: Callable[[], bool], make_config: Callable[[], Config], local_rank: int
    ) -> None:
        # Weak: the strategy owns this object, which ends with it.
        self._is_enabled = weakref.WeakMethod(is_enabled)
        self._make_config = weakref.WeakMethod(make_config)
        self._local_rank = local_rank

    def is_zero3(self) -> bool:
        """Return whether models are partitioned while they are built."""
        is_enabled = self._is_enabled()
        return is_enabled is not None and is_enabled()

    @property
    def config(self) -> Config | None:
        """DeepSpeed's configuration; None: there is no strategy any more."""
        make_config = self._make_config()
        if make_config is None:
            return None
        if env.read("LOCAL_RANK") is None:  # a single process has no launcher
            env.set_values({"LOCAL_RANK": self._local_rank})
            weakref.finalize(self, env.set_values, {"LOCAL_RANK": None})
        return make_config()


def register(config: ActiveConfig, has_stage_3: bool) -> None:
    """Let transformers ask `config` from now on.

    Without stage 3, transformers, which takes seconds to import, asks only where it is imported.
    """
    if "transformers" in sys.modules or (has_stage_3 and is_available("transformers")):
        module = require("transformers.integrations.deepspeed", "deepspeed_plugin")
        module.set_hf_deepspeed_config(config)
