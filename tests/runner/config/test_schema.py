"""The schema: what it refuses, how problems name their place, and the three forms of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.config.deepspeed import DeepSpeedPlugin
from accel.enums import DDPCommunicationHookType
from accel.errors import ConfigError
from runner.config import keys, serialization
from runner.config.schema import Recipe, Trainer
from runner.run_dir.job import Job


def problems(plain: dict[str, Any]) -> list[str]:
    _, found = serialization.examine(plain)
    return [str(problem) for problem in found]


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        ({"trainer": {"epochs": -1}}, "trainer.epochs=-1: it is at least 1"),
        ({"trainer": {"epochs": None}}, "trainer.epochs=null with trainer.max_steps=null"),
        ({"trainer": {"max_time": "soon"}}, "trainer.max_time='soon'"),
        ({"trainer": {"limit_eval_batches": 1.5}}, "trainer.limit_eval_batches=1.5"),
        ({"trainer": {"rng_types": ["trch"]}}, "Did you mean 'torch'?"),
        ({"trainer": {"accumulation": {"num_steps": 0}}}, "trainer.accumulation.num_steps=0"),
        ({"precision": {"mode": "bf61"}}, "precision.mode='bf61'"),
        ({"precision": {"mode": None}}, "precision.mode=null"),
        ({"precision": {"mode": "fp8"}}, "precision=fp8: this version does not offer it yet"),
        ({"distributed": {"kind": "multi_cup"}}, "Did you mean 'multi_cpu'?"),
        ({"distributed": {"ddp": {"comm_hook": "fp61"}}}, "distributed.ddp.comm_hook='fp61'"),
        ({"distributed": {"init": {"timeout": "x"}}}, "distributed.init.timeout='x'"),
        ({"dataloader": {"prefetch_factor": 2}}, "dataloader.prefetch_factor=2 with num_workers=0"),
        ({"checkpoint": {"mode": "best"}}, "checkpoint.mode='best'"),
        ({"checkpoint": {"project": {"total_limit": 0}}}, "checkpoint.project.total_limit=0"),
        ({"tracker": {"log_with": ["tensorbord"]}}, "Did you mean 'tensorboard'?"),
        ({"tracker": {"init_kwargs": {"wandb": {}}}}, "tracker.init_kwargs.wandb"),
        ({"fsdp": {"dp_replicate_size": 0}}, "fsdp.dp_replicate_size=0"),
        ({"deepspeed": {"zero_stage": 4}}, "deepspeed.zero_stage=4"),
        ({"tensor_parallel": {"tp_size": 0}}, "tensor_parallel.tp_size=0"),
        ({"compile": {"backend": "inductr"}}, "compile.backend='inductr'"),
        ({"fsdp": {}, "deepspeed": {}}, "fsdp= and deepspeed= are both on"),
        (
            {"deepspeed": {}, "tensor_parallel": {}},
            "Switch one off: tensor_parallel=null or deepspeed=null.",
        ),
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": ""}, "name=''"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"trainer": {"epoch": 3}}, "Did you mean 'trainer.epochs'?"),
        (
            {"optimzer": {"lr": 1}},
            "optimzer.lr=1: a recipe has no such key. Did you mean 'optimizer",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key(plain: dict[str, Any], expected: str) -> None:
    (only,) = problems(plain)
    assert expected in only


def test_everything_wrong_is_told_at_once() -> None:
    found = problems(
        {
            "trainer": {"epochs": -1, "log_every": 0, "accumulation": {"num_steps": 0}},
            "precision": {"mode": "bf61"},
            "seed": -1,
            "extra": 1,
        }
    )
    assert len(found) == 6


def test_a_recipe_with_problems_keeps_what_is_right() -> None:
    found, wrong = serialization.examine(
        {"seed": -1, "model": {"name": "x"}, "trainer": {"epochs": 3}}
    )
    assert len(wrong) == 1
    assert found.model == {"name": "x"}
    assert found.trainer.epochs == 3


def test_a_bare_no_in_yaml_is_no_precision() -> None:
    assert serialization.from_plain({"precision": {"mode": False}}).precision.mode == "no"


def test_what_deepspeeds_file_says_is_frozen(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}')
    Job(tmp_path).save(Recipe(deepspeed=DeepSpeedPlugin(hf_ds_config=str(file))))
    file.unlink()
    _, frozen = Job.load(tmp_path)
    assert frozen.deepspeed is not None
    assert frozen.deepspeed.stage == 1
    assert frozen.deepspeed.is_auto("gradient_clipping")


def test_a_distrusted_callable_is_not_imported() -> None:
    (only,) = problems({"profile": {"on_trace_ready": "antigravity.geohash"}})
    assert "profile.on_trace_ready=antigravity.geohash" in only


def test_plain_and_back_is_the_same_recipe() -> None:
    changed = serialization.from_plain(
        {
            "distributed": {
                "ddp": {"comm_hook": "fp16", "comm_state_option": {"a": [1, 2.5]}},
                "init": {"timeout": 600},
            },
            "model": {"name": "cnn", "nested": {"x": None, "y": ["no", True, 1e-5]}},
            "profile": {"schedule_option": {"wait": 1, "active": 1}},
            "trainer": {"max_time": "00:10:00"},
        }
    )
    plain = serialization.to_plain(changed)
    assert plain["distributed"]["ddp"]["comm_hook"] == "fp16"
    assert plain["distributed"]["init"]["timeout"] == 600.0
    assert serialization.from_plain(plain) == changed
    assert changed.distributed.ddp.comm_hook is DDPCommunicationHookType.FP16


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**31), 2**31),
    st.floats(allow_nan=False),
    st.sampled_from(["no", "on", "1e-5", "0x10", "null", "~", "1:30", "", " a: b", "é", "- x"]),
)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["width", "lr", "on", "betas"]),
    st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
)


@settings(max_examples=40)
@given(ARGUMENTS)
def test_yaml_and_back_is_the_same_recipe(arguments: dict[str, Any]) -> None:
    import tempfile

    changed = serialization.from_plain(
        {"model": {"name": "cnn", **arguments}, "precision": {"mode": "no"}}
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(serialization.yaml_text(serialization.to_plain(changed)))
        assert serialization.from_plain(serialization.read_yaml(path)) == changed


def test_a_frozen_recipe_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("trainer: {epochs: many}\n")
    with pytest.raises(ConfigError, match="not the recipe of a run"):
        serialization.read_yaml(path)


def test_a_job_is_read_as_it_was_saved(tmp_path: Path) -> None:
    frozen = serialization.from_plain(
        {"name": "x", "trainer": {"max_steps": 3}, "model": {"name": "cnn"}}
    )
    job = Job(tmp_path, ("trainer.max_steps=3",), resume_from="somewhere", cwd="/here")
    job.save(frozen)
    assert Job.load(tmp_path) == (job, frozen)
    assert (tmp_path / "overrides.yaml").read_text() == "- trainer.max_steps=3\n"


def test_a_resumed_job_keeps_the_recipe_before(tmp_path: Path) -> None:
    for epochs in (1, 2, 3):
        Job(tmp_path).save(Recipe(trainer=Trainer(epochs=epochs)))
    assert Job.load(tmp_path)[1].trainer.epochs == 3
    assert "epochs: 1" in (tmp_path / "config.0001.yaml").read_text()
    assert "epochs: 2" in (tmp_path / "config.0002.yaml").read_text()


def test_a_job_does_not_decide_what_is_trusted(tmp_path: Path) -> None:
    Job(tmp_path, imports=("evil",)).save(Recipe())
    with pytest.raises(ConfigError, match="'evil', which is not trusted here"):
        Job.load(tmp_path)


@pytest.mark.parametrize("content", [None, "{}", "[]", "{"])
def test_what_is_no_job_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "job.json").write_text(content)
    with pytest.raises(ConfigError, match="it is no run directory"):
        Job.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "free"),
    [
        ("model.width", True),
        ("callbacks.early_stopping.patience", True),
        ("distributed.ddp.comm_state_option.matrix_approximation_rank", True),
        ("tracker.init_kwargs.wandb", True),
        ("trainer.epochs", False),
        ("precision.foo", False),
        ("model", False),
        ("optimzer.lr", False),
    ],
)
def test_which_keys_are_open(key: str, free: bool) -> None:
    assert keys.is_free(key) is free


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimzer.lr", "'optimizer.lr'"),
        ("lr", "'optimizer.lr'"),
        ("epochs", "'trainer.epochs'"),
        ("distributed.dpp.bucket_cap", "'distributed.ddp.bucket_cap_mb'"),
        ("batch_size", "'trainer.global_batch_size'"),
        ("precision.foo", "The keys of precision: autocast, fp8, mode, scaler."),
        ("zzz", "The keys: callbacks, checkpoint"),
    ],
)
def test_the_key_that_was_meant(key: str, meant: str) -> None:
    assert meant in keys.suggestion(key, keys.known_keys({"optimizer": {"lr": 1}}))
