"""The state of data loaders in a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    RandomSampler,
)

from accel.checkpoint.dataloader_state import load_loader_state, loader_state
from accel.data.loaders import (
    PreparedLoader,
)
from accel.data.prepare import prepare_data_loader, skip_first_batches
from tests.accel.data.parts import values
from tests.accel.data.test_order import flat


@pytest.mark.parametrize("seedable", [False, True])
def test_a_saved_state_has_the_order_of_the_pass_under_way(seedable: bool) -> None:
    def make(seed: int) -> PreparedLoader:
        loader = DataLoader(
            range(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )
        return prepare_data_loader(loader, use_seedable_sampler=seedable)

    loader = make(1)
    values(loader)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            state = loader_state(loader)
    following = values(loader)
    resumed = make(2)
    load_loader_state(resumed, state)
    assert values(skip_first_batches(resumed, 2)) == seen[2:]
    assert values(resumed) == following


def test_a_state_of_an_earlier_version_is_loaded() -> None:
    generator = torch.Generator().manual_seed(8)
    wanted = list(RandomSampler(range(12), generator=torch.Generator().manual_seed(8)))
    old = {"epoch": 2, "samplers": [], "generators": [generator.get_state()]}
    loader = prepare_data_loader(
        DataLoader(range(12), batch_size=3, shuffle=True), num_processes=2, process_index=0
    )
    load_loader_state(loader, old)
    assert loader.epoch == 2
    assert flat(loader) == wanted[:3] + wanted[6:9]


def test_another_data_set_in_the_place_of_the_saved_one_is_told() -> None:
    state = loader_state(prepare_data_loader(DataLoader(range(12))))
    with pytest.warns(UserWarning, match="over 9 samples"):
        load_loader_state(prepare_data_loader(DataLoader(range(9))), state)
