"""Every file of `conf/` composes, and every field of every documented handler is reachable (C3)."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from accel.config import fp8, handlers, training
from accel.machine.enums import DDPCommunicationHookType, DynamoBackend
from accel.machine.env import Environment
from runner.recipe import accelerator_arguments, composition, keys, paths, serialization
from runner.recipe.factory import check_factories
from runner.recipe.schema import Recipe
from tests.helpers import SECONDS, python

CONF = paths.conf_folder()
# What a choice asks for besides.
ALONE = {
    "step=gan": ["model=null", "objective=null", "optimizer=null", "scheduler=null"],
    "callbacks=freeze": ["callbacks.freeze.names=head.*"],
    **{
        f"data={name}": ["data.tokenizer=gpt2", f"data.{'path' if name[0] == 'h' else 'train'}=x"]
        for name in ("text", "jsonl", "parquet", "hf_dataset")
    },
    "peft=qlora": ["model=hf_causal_lm", "model.path=base"],
    "deepspeed=config_file": ["deepspeed.hf_ds_config=ds.json"],
}


pytestmark = pytest.mark.usefixtures("hydra_session")


def choices() -> list[str]:
    files = sorted(CONF.glob("*/*.yaml"))
    return [f"{path.parent.name}={path.stem}" for path in files]


@pytest.mark.parametrize("choice", ["config", *choices()])
def test_every_file_composes_into_a_recipe(choice: str) -> None:
    overrides = [] if choice == "config" else [choice, *ALONE.get(choice, [])]
    examined = composition.new_run(overrides, "config")
    assert examined.problems == []
    assert check_factories(examined.recipe) == []


def test_defaults_live_in_the_schema_alone() -> None:
    """A group's default file changes nothing silently: what it sets is a key of the schema."""
    found = composition.require(composition.new_run([], "config"))
    assert found.precision == Recipe().precision
    assert found.distributed == Recipe().distributed


# -- fields of handlers, one of each type ----------------------------------------------------------


def wanted(module: Any, name: str) -> bool:
    """A filter of layers, by its dotted name."""
    return True


def traced(profiler: Any) -> None:
    """Stand for a user's function that a recipe names."""


# A value of each type that YAML has no word for, and of each other kind of handler.
GIVEN: dict[str, Any] = {
    "distributed.ddp.comm_hook=power_sgd": DDPCommunicationHookType.POWER_SGD,
    "distributed.ddp.comm_state_option={start_powerSGD_iter: 5}": {"start_powerSGD_iter": 5},
    "distributed.init.timeout=600": timedelta(minutes=10),
    "precision.autocast.cache_enabled=false": False,
    "precision.scaler.init_scale=1024": 1024.0,
    "profile.activities=[cpu]": ["cpu"],
    f"profile.on_trace_ready={__name__}.traced": traced,
    "dataloader.data_seed=3": 3,
    "trainer.accumulation.num_steps=2": 2,
    "checkpoint.project.total_limit=5": 5,
    "compile.backend=eager": DynamoBackend.EAGER,
    "compile.options={trace: true}": {"trace": True},
}
OF_FP8: dict[str, Any] = {
    f"precision.fp8_torchao.module_filter_func={__name__}.wanted": wanted,
    "precision.fp8_te.override_linear_precision=[true,false,true]": (True, False, True),
}


def test_every_documented_handler_is_a_node() -> None:
    documented = {
        kind
        for module in (handlers, training)
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    }
    nodes = [kind for key in keys.typed_keys() if (kind := keys.node_of(key)) is not None]
    assert {base for kind in nodes for base in kind.__mro__} >= documented


@pytest.mark.parametrize("of_fp8", OF_FP8)
def test_a_field_of_each_type_is_set_by_override(
    monkeypatch: pytest.MonkeyPatch, of_fp8: str
) -> None:
    monkeypatch.setenv("RUNNER_IMPORTS", __name__.partition(".")[0])
    given = {**GIVEN, of_fp8: OF_FP8[of_fp8]}
    precision = of_fp8.split(".")[1]
    overrides = [f"precision={precision}", "profile=trace", "compile=default", *given]
    found = composition.require(composition.new_run(overrides, "config"))
    for override, expected in given.items():
        node: Any = found
        for part in override.partition("=")[0].split("."):
            node = getattr(node, part)
        assert node == expected, override


def test_every_key_of_the_schema_is_a_key_of_the_composed_recipe() -> None:
    found = composition.require(composition.new_run([], "config"))
    plain = serialization.to_plain(found)
    missing = []
    for key in keys.typed_keys():
        node: Any = plain
        for part in key.split("."):
            if node is None:
                break
            if part not in node:
                missing.append(key)
                break
            node = node[part]
    assert missing == []


@dataclasses.dataclass
class OwnScaler(handlers.GradScalerKwargs):
    """A user's own handler, with a key of its own."""

    patience: int = 3


def test_a_node_is_a_trusted_subclass_of_the_documented_class(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUNNER_IMPORTS", __name__.partition(".")[0])
    own = f"precision.scaler._target_={__name__}.OwnScaler"
    words = ["precision=fp16", own, "precision.scaler.patience=4", "precision.scaler.init_scale=8"]
    found = composition.require(composition.new_run(words, "config"))
    assert found.precision.scaler == OwnScaler(patience=4, init_scale=8.0)
    recorded = serialization.parse_yaml(
        serialization.yaml_text(serialization.to_plain(found)), tmp_path
    )
    assert serialization.from_plain(recorded).precision.scaler == found.precision.scaler
    assert (
        accelerator_arguments.arguments(found, None, Environment())["kwargs_handlers"][3]
        is found.precision.scaler
    )

    te = ["precision=fp8_te", "precision.fp8_te._target_=accel.FP8RecipeKwargs"]
    older = composition.require(composition.new_run([*te, "precision.fp8_te.backend=TE"], "config"))
    assert isinstance(older.precision.fp8_te, fp8.FP8RecipeKwargs)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("precision.scaler._target_=accel.AutocastKwargs", "GradScalerKwargs or a subclass"),
        ("precision.scaler._target_=os.system", "the package 'os' is not trusted"),
        (f"precision.scaler._target_={__name__}.OwnScaler", "is not trusted"),
        ("precision.scaler.patience=3", "no such key"),
    ],
)
def test_another_class_is_refused(override: str, expected: str) -> None:
    (problem,) = composition.new_run(["precision=fp16", override], "config").problems
    assert expected in str(problem)


PROGRAM = """
import hydra
from hydra.utils import instantiate

@hydra.main(config_path={conf!r}, config_name="config", version_base="1.3")
def main(config):
    for node in (config.fsdp, config.precision.scaler, config.compile, config.profile):
        print(type(instantiate(node)).__name__)
    print(config.model.depth, config.trainer.epochs)

main()
"""


def test_another_hydra_program_composes_conf_and_instantiates_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(PROGRAM.format(conf=str(CONF)))
    words = ("fsdp=full_shard", "precision=fp16", "compile=eager", "profile=trace")
    ran = subprocess.run(
        python("other.py", *words, "model.depth=3"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ran.stdout.split() == [
        "FullyShardedDataParallelPlugin",
        *("GradScalerKwargs", "TorchDynamoPlugin", "ProfileKwargs", "3", "20"),
    ], ran.stderr
