"""Runs of a recipe under Megatron: the losses of other strategies, same bits after a kill (R2)."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.helpers import ROOT, python, ran, write_file
from tests.runner.language import texts
from tests.runner.loops import losses, records, weights

pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: megatron)")
pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
pytestmark = pytest.mark.slow

CONFIG = {
    **{"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4},
    **{"n_positions": 32, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.1},
}
LINE = (
    *("model=hf_causal_lm", "objective=causal_lm", "data=jsonl", "data.tokenizer=bpe"),
    *("data.train=train.jsonl", "data.validation=validation.jsonl", "data.context=32"),
    *("data.packing=false", "data.cache_dir=cache", "tracker.log_with=[]"),
    *("trainer.epochs=null", "trainer.max_steps=6", "trainer.global_batch_size=4"),
    *("trainer.log_every=1", "trainer.eval_every=3", "trainer.clip_grad_norm=1.0"),
    "checkpoint.every_steps=2",
    *(f"+model.config.{name}={value}" for name, value in CONFIG.items()),
)
NO_DROPOUT = [f"model.config.{name}=0" for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")]
TWO = ("distributed=multi_cpu", "distributed.num_processes=2")
MEGATRON = (*TWO, "megatron=default")
# Ends rank 0 by SIGKILL once, after a step, where the working directory has a file `kill`.
KILL = """
import os, signal
from pathlib import Path
from runner.training.run import Callback

if os.environ.get("WITH_MEGATRON"):
    from tests.accel.strategies.megatron.cuda_is_cpu import cuda_is_cpu
    CONTEXT = cuda_is_cpu()
    CONTEXT.__enter__()

class Kill(Callback):
    def on_step(self, loop):
        if loop.state.step == 3 and Path("kill").exists():
            Path("kill").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED = ("--import", "kill", "callbacks.kill._target_=kill.Kill")


def answer_of(folder: Path, *overrides: str) -> CompletedProcess[str]:
    if not (folder / "kill.py").exists():
        write_file(folder / "kill.py", KILL)
        texts.save_tokenizer(folder / "bpe")
        for seed, name in ((0, "train"), (99, "validation")):
            texts.texts_of(folder / f"{name}.jsonl", [9, 5, 7, 3] * 6, seed)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if any(override.startswith("megatron=") for override in overrides):
        environment["WITH_MEGATRON"] = "1"
    line = python("-m", "runner", *LINE, *KILLED, *overrides)
    return ran(line, folder, 300, **environment)


def run(folder: Path, *overrides: str, fails: bool = False) -> Path:
    answer = answer_of(folder, *overrides)
    assert (answer.returncode != 0) == fails, answer.stdout + answer.stderr
    return max(folder.glob("runs/*/*"), key=lambda path: path.stat().st_mtime)


def test_a_killed_run_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    """Dropout included: its draws are a function of seed and step."""
    straight = run(tmp_path / "straight", *MEGATRON)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "kill").touch()
    run(tmp_path / "cut", *MEGATRON, fails=True)
    resumed = run(tmp_path / "cut", *MEGATRON, "resume=auto")
    assert (resumed / "sessions" / "0002").exists()
    assert losses(resumed) == losses(straight)
    saved = weights(resumed)
    assert all(torch.equal(value, saved[name]) for name, value in weights(straight).items())


@pytest.mark.parametrize("option", ["default", "pipeline"])
def test_a_run_goes_on_under_other_strategies(tmp_path: Path, option: str) -> None:
    (tmp_path / "kill").touch()
    killed = run(tmp_path, *TWO, f"megatron={option}", *NO_DROPOUT, fails=True)
    other = (*TWO, "fsdp=full_shard", "megatron=null", f"resume={killed}")
    resumed = run(tmp_path, *other, *NO_DROPOUT)
    whole = run(tmp_path / "whole", "distributed=none", *NO_DROPOUT)
    assert (resumed / "sessions" / "0002").exists()
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    for name in ("loss", "token_accuracy"):
        found, wanted = ([r[name] for r in records(one, "validation")] for one in (resumed, whole))
        assert found == pytest.approx(wanted, rel=1e-5)


def test_packed_rows_train_and_texts_are_generated(tmp_path: Path) -> None:
    shown = ("callbacks=generate", "callbacks.generate.prompts=[a]", "data.packing=true")
    line = (*NO_DROPOUT, *shown, "callbacks.generate.max_new_tokens=4")
    found = run(tmp_path / "pp", *TWO, "megatron=pipeline", *line)
    expected = run(tmp_path / "one", "distributed=none", *line)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    shown_texts = [
        [path.read_text() for path in sorted(one.glob("media/*/generated*"))]
        for one in (found, expected)
    ]
    assert shown_texts[0] == shown_texts[1] != []


@pytest.mark.parametrize(
    ("name", "words"),
    [("ema", "hides the weights"), ("[optimizer_monitor,histograms]", "hides gradients")],
)
def test_callbacks_that_see_nothing_are_refused(tmp_path: Path, name: str, words: str) -> None:
    answer = answer_of(tmp_path, *MEGATRON, f"callbacks={name}")
    assert answer.returncode == 2
    assert words in answer.stderr


def test_a_machine_without_gpus_is_refused_before_anything_starts(tmp_path: Path) -> None:
    write_file(tmp_path / "kill.py", KILL)
    line = python("-m", "runner", *LINE, *KILLED, *MEGATRON)
    answer = ran(line, tmp_path, 300, PYTHONPATH=str(ROOT))
    assert answer.returncode == 2
    assert "megatron-core computes on CUDA GPUs" in answer.stdout + answer.stderr
    assert not (tmp_path / "runs").exists()
