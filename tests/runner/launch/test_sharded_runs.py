"""The byte GPT, as a person starts it, on four processes: hybrid shards, and shards of matrices.

Holds R1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner.launch import worker
from runner.recipe import composition, hydra_setup
from runner.recipe.schema import Recipe
from runner.runs import directory, sessions
from runner.runs.job import Job
from tests.helpers import WorkerError, about, run_distributed
from tests.runner import loops

STEPS = 6
TINY = (
    *("experiment=bytes_gpt", "callbacks=[]", "tracker.log_with=[]", f"trainer.max_steps={STEPS}"),
    *("model.dim=16", "model.num_layers=2", "model.num_heads=2", "model.expansion=2"),
    *("data.context=16", "data.validation_bytes=200", "data.random_start=false"),
    *("trainer.log_every=1", "trainer.eval_every=null", "trainer.max_time=null"),
)
TWO = ("distributed=multi_cpu", "distributed.num_processes=2", "fsdp=full_shard")
FOUR = ("distributed=multi_cpu", "distributed.num_processes=4")
INIT = "deepspeed.zero3_init_flag=true"
ENGINES = {
    "one": (1, ()),
    "two": (2, TWO),
    "drawn once": (2, (*TWO, "fsdp.cpu_ram_efficient_loading=true")),
    "hybrid": (4, (*FOUR, "fsdp=hybrid_shard", "fsdp.dp_replicate_size=2")),
    "shards": (2, (*TWO, "fsdp.state_dict_type=SHARDED_STATE_DICT")),
    "stages": (
        2,
        (*TWO, "fsdp.state_dict_type=SHARDED_STATE_DICT", "parallelism.pp_size=2"),
    ),
    "nodes": (4, (*FOUR, "fsdp=hybrid_shard")),  # there is one node, so there is one replica
    "parts": (
        2,
        (*("distributed=deepspeed", "distributed.num_processes=2", "deepspeed=zero3"), INIT),
    ),
    "sequences": (2, (*TWO[:2], "parallelism.cp_size=2")),
    "split": (4, (*FOUR, "fsdp=full_shard", "tensor_parallel=default")),
}


def write_text(folder: Path) -> Path:
    """Return a new folder with two small files, one for each split."""
    folder.mkdir()
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(97, 107, (1600,), generator=generator)
        (folder / f"text_{number}.py").write_bytes(bytes(words.tolist()))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.getbasetemp() / "sharded_text")


def composed(*overrides: str) -> Recipe:
    with hydra_setup.session():
        return composition.require(composition.new_run(list(overrides), "config"))


def trained(folder: Path, text: Path, name: str, *more: str, run_dir: Path | None = None) -> Path:
    """Train as the command line does, but in workers that are warm; return the run directory."""
    num_processes = ENGINES[name][0]
    overrides = (*TINY, f"data.path={text}", *ENGINES[name][1], *more)
    recipe = composed(*overrides)
    resume_from = None if run_dir is None else str(loops.newest(run_dir))
    run_dir = run_dir or directory.claim(folder, recipe.name)
    job = Job(run_dir, overrides, resume_from, cwd=str(folder)).save(recipe)
    assert run_distributed(worker.run, num_processes, job.place) == [0] * num_processes
    return run_dir


@pytest.fixture(scope="module")
def expected(text: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process."""
    losses = loops.losses(trained(tmp_path_factory.mktemp("one"), text, "one"))
    assert len(losses) == STEPS
    return losses


REPEATED = (
    ("sequences", "one"),
    ("two", "sequences"),
    ("shards", "one"),
    ("shards", "shards"),
    ("stages", "one"),
    ("shards", "stages"),
    ("split", "one"),
    ("nodes", "hybrid"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("hybrid", "split"), *REPEATED])
def test_a_sharded_run_has_the_losses_of_one_process_and_goes_on_under_another_engine(
    first: str, second: str, expected: list[float], text: Path, tmp_path: Path
) -> None:
    run_dir = trained(tmp_path, text, first, f"trainer.stop_after={STEPS // 2}")
    assert loops.losses(run_dir) == about(expected[: STEPS // 2], rel=1e-4)
    trained(tmp_path, text, second, run_dir=run_dir)
    assert loops.losses(run_dir) == about(expected, rel=1e-4)


@pytest.mark.slow
def test_a_run_on_parts_of_sequences_goes_on_with_the_same_bits(text: Path, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", text, "sequences")
    part = trained(tmp_path / "part", text, "sequences", f"trainer.stop_after={STEPS // 2}")
    trained(tmp_path / "part", text, "sequences", run_dir=part)
    names = ("model.safetensors", "optimizer.bin", "random_states_1.pkl")
    states = [
        [(loops.newest(run_dir) / name).read_bytes() for name in names] for run_dir in (whole, part)
    ]
    assert states[0] == states[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "split"])
def test_a_sharded_model_writes_a_sample(name: str, text: Path, tmp_path: Path) -> None:
    sample = ("callbacks=text", "callbacks.text_sample.num_bytes=5")
    summaries = [sessions.summary(trained(tmp_path, text, kind, *sample)) for kind in ("one", name)]
    assert summaries[0]["sample"] == summaries[1]["sample"]
    assert len(summaries[0]["sample"]) == 5


def test_values_for_a_layer_that_is_in_parts_are_not_lost_without_a_word(
    text: Path, tmp_path: Path
) -> None:
    with pytest.raises(WorkerError, match=r"normal_ on a parameter of shape .* under ZeRO-3"):
        trained(tmp_path, text, "parts")
