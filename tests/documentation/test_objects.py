"""E1: examples of the reference about handlers and profiling do what it says."""

from __future__ import annotations

from datetime import timedelta

import pytest

from accel.machine.errors import ConfigError
from tests.documentation import objects
from tests.documentation.player import shown


@pytest.mark.parametrize("processes", objects.PROFILE.sizes)
def test_profile(processes: int) -> None:
    main, *others = shown(objects.PROFILE, processes)
    (matmul,) = [line for line in main.lines if "aten::matmul" in line]
    assert matmul.split()[-1] == "2"  # calls
    assert all(other.lines == [] for other in others)


@pytest.mark.parametrize("processes", objects.PROFILE_WITH_HANDLER.sizes)
def test_profile_with_a_schedule_and_a_handler(processes: int) -> None:
    for answer in shown(objects.PROFILE_WITH_HANDLER, processes):
        tables = [line for line in answer.lines if "aten::matmul" in line]
        assert [table.split()[-1] for table in tables] == ["1"] * 3  # of 10 steps, 3 cycles of 3


@pytest.mark.parametrize("processes", objects.PROFILE_TO_FILE.sizes)
def test_profile_to_a_file(processes: int) -> None:
    for rank, answer in enumerate(shown(objects.PROFILE_TO_FILE, processes)):
        assert answer.files == [f"output_trace/profile_{rank}.json"]


def test_profile_kwargs() -> None:
    (answer,) = shown(objects.PROFILE_KWARGS, 1)
    assert answer.observed == {"activities": ["cpu", "cuda"]}


@pytest.mark.parametrize("processes", objects.DDP_KWARGS.sizes)
def test_ddp_kwargs(processes: int) -> None:
    for answer in shown(objects.DDP_KWARGS, processes):
        assert answer.observed == ({"find_unused_parameters": True}, True)


@pytest.mark.parametrize("processes", objects.AUTOCAST_KWARGS.sizes)
def test_autocast_kwargs(processes: int) -> None:
    for answer in shown(objects.AUTOCAST_KWARGS, processes):
        assert answer.lines == ["torch.bfloat16", "torch.float32"]


def test_grad_scaler_kwargs() -> None:
    (answer,) = shown(objects.GRAD_SCALER_KWARGS, 1)
    assert answer.observed == {"backoff_factor": 0.25}


@pytest.mark.parametrize("processes", objects.INIT_PROCESS_GROUP_KWARGS.sizes)
def test_init_process_group_kwargs(processes: int) -> None:
    for answer in shown(objects.INIT_PROCESS_GROUP_KWARGS, processes):
        assert answer.observed["timeout"] == timedelta(seconds=800)
        assert answer.lines == ["none" if processes == 1 else "gloo"]


def test_fp8_recipe_kwargs_are_taken_and_their_engine_refused() -> None:
    from accel import Accelerator
    from accel.utils import FP8RecipeKwargs

    kwargs = FP8RecipeKwargs(backend="te", fp8_format="HYBRID")
    with pytest.raises(ConfigError, match="TransformerEngine"):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[kwargs])
