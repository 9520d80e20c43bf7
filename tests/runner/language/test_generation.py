"""R1: texts are the same under each strategy, and training does not notice that they are made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import runner
from accel.config.tensor_parallel import TorchTensorParallelPlugin
from accel.machine.errors import ConfigError
from runner import cli
from runner.language.generation import Generate, Sampling, end_tokens, prompts_of, shown, texts
from tests.helpers import run_distributed
from tests.runner import loops
from tests.runner.language import tiny_runs
from tests.runner.training import test_strategies as engines

PROMPTS = ("the cat", "a dog ran far")
ENGINES: dict[str, dict[str, Any]] = {
    **{name: engines.ENGINES[name] for name in ("ddp", "fsdp", "zero3")},
    "tp": {"tensor_parallel": TorchTensorParallelPlugin(tp_size=2)},
}


def train(folder: str, engine: str, temperature: float = 0.0, generates: bool = True) -> Any:
    """Train some steps; return the texts by step, and the weights at the end."""
    run_dir = Path(folder)
    recipe = loops.recipe_of(
        trainer__max_steps=4,
        trainer__epochs=None,
        trainer__eval_every=2,
        trainer__eval_first=True,
        **ENGINES[engine],
    )
    torch.manual_seed(3)
    generate = Generate(PROMPTS, max_new_tokens=10, temperature=temperature)
    loops.run(
        run_dir,
        recipe,
        data=tiny_runs.data(run_dir / "tokenizer"),
        model=tiny_runs.model(dropout=0.2),
        objective=tiny_runs.NextToken(),
        callbacks={"generate": generate} if generates else {},
    )
    loops.forget()
    written = sorted(run_dir.glob("media/*/generated.txt"))
    return {path.parent.name: path.read_text() for path in written}, loops.weights(run_dir)


def on(num_processes: int, function: Callable[..., Any], *args: Any) -> Any:
    if num_processes == 1:
        return function(*args)
    return run_distributed(function, num_processes, *args)[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_texts_are_those_of_one_process_and_training_does_not_notice(
    engine: str, tmp_path: Path
) -> None:
    whole, _ = train(str(tmp_path / "one"), "ddp")
    found, weights = on(2, train, str(tmp_path / engine), engine)
    assert whole["0"] == found["0"], "from the same weights"
    assert set(found) == {"0", "2", "4"}
    assert found["0"].startswith("> the cat\n")
    _, plain = on(2, train, str(tmp_path / "plain"), engine, 0.0, False)
    assert all(torch.equal(plain[name], value) for name, value in weights.items())


def test_sampled_texts_follow_the_seed_alone() -> None:
    torch.manual_seed(1)
    model, tokenizer = tiny_runs.model().eval(), tiny_runs.tokenizer()

    def drawn(*prompts: str, **settings: Any) -> list[str]:
        return list(texts(model, tokenizer, prompts, Sampling(max_new_tokens=20, **settings)))

    greedy = drawn(*PROMPTS)
    assert greedy == drawn(*PROMPTS, seed=9)
    assert greedy[1:] == drawn(PROMPTS[1]), "a text does not depend on the others"
    warm = drawn(*PROMPTS, temperature=1.5)
    torch.rand(3)
    assert warm == drawn(*PROMPTS, temperature=1.5)
    assert warm != drawn(*PROMPTS, temperature=1.5, seed=1)
    assert drawn(*PROMPTS, temperature=1.5, top_p=1e-6) == greedy


def test_a_text_ends_with_the_end_of_a_reply() -> None:
    own = tiny_runs.tokenizer()
    assert end_tokens(own) == [0]
    own.eos_token = "<user>"  # the template ends a reply with another token
    assert end_tokens(own) == [1, 0]
    assert end_tokens(tiny_runs.tokenizer(None)) == [0]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "the cat"}]
    lines = tmp_path / "prompts.txt"
    lines.write_text("the cat\n\na dog\n")
    assert prompts_of("prompts", ["on"], lines) == ["on", "the cat", "a dog"]
    assert prompts_of("prompts", (), lines, chat=True)[0] == chat
    records = tmp_path / "prompts.jsonl"
    records.write_text("\n".join(map(json.dumps, ({"prompt": "a"}, {"messages": chat}))))
    found = prompts_of("prompts", (), records)
    assert found == ["a", chat]
    assert shown(found, ["b", "c"]) == "> a\nb\n\n> the cat\nc"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n", "empty.txt: there is no prompt. Give prompts, or a file"),
        ("no.jsonl", '{"text": "a"}', "no.jsonl:1: a line of prompts is a JSON object with"),
        ("text.jsonl", "a", "text.jsonl:1: a line of prompts is a JSON object with"),
        ("missing.txt", None, "missing.txt: there is no such file"),
    ],
)
def test_a_file_without_prompts_is_refused(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Generate(file=str(tmp_path / name))
    with pytest.raises(ConfigError, match="there is no prompt"):
        Generate()
    with pytest.raises(ConfigError, match="a text has at least 1 token"):
        Generate(["a"], temperature=-1)


@pytest.mark.parametrize(
    ("folder", "model", "message"),
    [
        (None, None, "the run keeps no tokenizer"),
        ("tokenizer", None, "Sequential: texts are generated by models of transformers"),
    ],
)
def test_a_run_that_cannot_generate_is_refused_before_its_first_step(
    folder: str | None, model: Any, message: str, tmp_path: Path
) -> None:
    data = tiny_runs.data(folder and tmp_path / folder)
    with pytest.raises(ConfigError, match=message):
        loops.build(tmp_path, loops.recipe_of(), data=data, callbacks={"it": Generate(["a"])})


@pytest.mark.slow
def test_the_command_prints_what_the_best_weights_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    recipe = loops.recipe_of(trainer__max_steps=1, trainer__epochs=None)
    loops.run(
        run_dir,
        recipe,
        data=tiny_runs.data(None),
        model=tiny_runs.model(),
        objective=tiny_runs.NextToken(),
    )
    line = ["generate", str(run_dir), *PROMPTS, "--max-new-tokens", "5"]
    tiny_runs.finish(run_dir, recipe)
    capsys.readouterr()
    assert cli.main(line) == 0
    printed = capsys.readouterr().out
    model, _ = runner.load(run_dir)
    expected = list(texts(model, tiny_runs.tokenizer(), PROMPTS, Sampling(5)))
    assert printed.endswith(f"{shown(PROMPTS, expected)}\n\n")
    assert cli.main([*line, "--chat"]) == 0
    assert shown(PROMPTS, expected) not in capsys.readouterr().out
    shutil.rmtree(run_dir / "artifacts")
    assert cli.main(line) == 2
    assert "artifacts/tokenizer: the run keeps no tokenizer" in capsys.readouterr().err
