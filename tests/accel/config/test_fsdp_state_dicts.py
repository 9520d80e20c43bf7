"""Fields of the FSDP plugin that read as torch's own objects (E1, E5)."""

from __future__ import annotations

import pickle
import warnings

import pytest
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from accel.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.machine.errors import ConfigError


def test_the_kind_of_state_dict_is_set() -> None:
    plugin = Plugin()
    plugin.set_state_dict_type()
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    full = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert plugin.optim_state_dict_config == full
    plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert plugin.saves_shards
    assert plugin.state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
    assert plugin.optim_state_dict_config == ShardedOptimStateDictConfig(offload_to_cpu=True)
    with pytest.raises(ConfigError, match="state_dict_type"):
        plugin.set_state_dict_type("SOME_STATE_DICT")
    assert plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    copied = pickle.loads(pickle.dumps(plugin))
    assert copied == plugin
    assert copied.saves_shards


@pytest.mark.parametrize("kind", list(StateDictType)[:1] + list(StateDictType)[2:])
def test_a_kind_reads_as_the_member_that_was_given(kind: StateDictType) -> None:
    for given in (kind, kind.name, kind.name.lower()):
        assert Plugin(state_dict_type=given).state_dict_type is kind


def test_a_config_of_state_dicts_warns_if_it_asks_for_something_else() -> None:
    Plugin(state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=True))
    with pytest.warns(FutureWarning, match="state_dict_config needs no argument"):
        plugin = Plugin(state_dict_config=FullStateDictConfig(offload_to_cpu=False))
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
