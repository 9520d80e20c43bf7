"""Texts that a language model generates: prompts, how tokens are chosen, and the callback."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.machine.errors import ConfigError
from runner.language.models import num_positions
from runner.language.samples import text_tokens
from runner.runs.directory import ARTIFACTS
from runner.training.evaluation import evaluation_mode
from runner.training.run import Callback

if TYPE_CHECKING:
    from runner.training.run import Run

TOKENIZER = "tokenizer"  # the artifact of a run
# A text, or the messages of a conversation that the model continues.
Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when a text ends.

    Args:
        max_new_tokens: length of a text in tokens, at most.
        temperature: logits are divided by it; 0: greedy, the likeliest token.
        top_p: the likeliest tokens whose probabilities add up to it are drawn from.
        seed: of the draws of all texts together.

    Raises:
        ConfigError: if a value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            value = f"max_new_tokens={self.max_new_tokens} temperature={self.temperature}"
            rule = "a text has at least 1 token, a temperature is at least 0, top_p in (0, 1]"
            raise ConfigError.of(f"{value} top_p={self.top_p}", rule, "Leave them out.")


def prompts_of(
    source: str, texts: Sequence[str] = (), file: str | Path | None = None, chat: bool = False
) -> list[Prompt]:
    """Return prompts that were given as texts, and those of a file.

    Args:
        source: names them in messages.
        texts: prompts.
        file: a prompt a line; of a .jsonl file: an object a line, with `prompt` or `messages`.
        chat: whether a text is what a user says, and the model replies by the chat template.

    Raises:
        ConfigError: if there are none, or a line has none.
    """
    found: list[Prompt] = list(texts)
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise ConfigError.of(f"{source} {file}", "there is no such file", "Correct the path.")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                found.append(
                    _of_line(f"{path}:{number}", line) if path.suffix == ".jsonl" else line
                )
    if not found:
        rule, remedy = "there is no prompt", "Give prompts, or a file with one a line."
        raise ConfigError.of(f"{source} {file or ''}".strip(), rule, remedy)
    if chat:
        return [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in found]
    return found


def _of_line(place: str, line: str) -> Prompt:
    try:
        record = json.loads(line)
        prompt: Prompt = record.get("messages") or record["prompt"]
    except (ValueError, AttributeError, KeyError):
        rule = "a line of prompts is a JSON object with prompt or messages"
        raise ConfigError.of(place, rule, 'Write {"prompt": "Once upon a time"}, say.') from None
    return prompt


def tokenizer_of(folder: Path | None) -> Any:
    """Return the tokenizer that is kept in a folder.

    Raises:
        ConfigError: if there is none.
    """
    if folder is None or not folder.is_dir():
        value = "the run's tokenizer" if folder is None else str(folder)
        rule = "the run keeps no tokenizer"
        remedy = "Train with data=text, jsonl, parquet or hf_dataset, which keep theirs."
        raise ConfigError.of(value, rule, remedy)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def tokenizer_folder(run_dir: Path) -> Path:
    """Return where a run keeps its tokenizer."""
    return run_dir / ARTIFACTS / TOKENIZER


def end_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that end a text: end of sequence, and of a reply by the chat template."""
    found = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        ids = tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        found += [i for i in ids if i in special][-1:]
    return list(dict.fromkeys(found))


def texts(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Iterable[Prompt | list[int]],
    sampling: Sampling,
    own: torch.nn.Module | None = None,
    synced: bool = False,
) -> Iterator[str]:
    """Yield what a model in eval mode generates for each prompt; every rank calls it.

    Prompts are taken one at a time, so that none is padded and a text does not depend on others.
    The global random generators are used, and seeded.

    Args:
        model: prepared or not; it is called as in training, whatever is wrapped around it.
        tokenizer: of transformers.
        prompts: texts, conversations, or token ids.
        sampling: how tokens are chosen.
        own: the module inside `model`, which has `generate`; None: `model`.
        synced: whether ranks that have ended their text go on until all have.
    """
    from transformers import GenerationConfig

    ends = end_tokens(tokenizer)
    chosen: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        chosen["do_sample"] = True
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else tokenizer.pad_token_id,
        use_cache=getattr(model, "keeps_cache", True),  # stages of a model keep none
        **chosen,
    )
    generating = _calling(model, model if own is None else own)
    device = next(model.parameters()).device  # `own` may be a plan without memory
    torch.manual_seed(sampling.seed)
    for prompt in prompts:
        ids = torch.tensor([_ids(tokenizer, prompt)], device=device)
        with torch.no_grad():
            found = generating.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                synced_gpus=synced,
            )
        yield tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def require_prompts(
    model: torch.nn.Module, tokenizer: Any, prompts: Iterable[Prompt], sampling: Sampling
) -> None:
    """Raise a ConfigError if a model cannot generate, or not from one of the prompts."""
    require_generate(model)
    most, more = num_positions(model), sampling.max_new_tokens
    for prompt in prompts:
        if (length := len(_ids(tokenizer, prompt))) + more > most:
            value = f"a prompt of {length} tokens with max_new_tokens={more}"
            rule = f"the model has {most} positions for both"
            raise ConfigError.of(value, rule, "Lower max_new_tokens, or give shorter prompts.")


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        ids = text_tokens(tokenizer, prompt).input_ids[:-1]  # as in training, without the end
        if not ids:
            rule = "a text continues at least one token"
            raise ConfigError.of(f"the prompt {prompt!r}", rule, "Give a text.")
        return ids
    if isinstance(prompt[0], int):
        return list(prompt)
    if not tokenizer.chat_template:
        rule = "the tokenizer has no chat template"
        raise ConfigError.of("a prompt of messages", rule, "Give texts, without chat.")
    found: list[int] = tokenizer.apply_chat_template(
        list(prompt), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    return found


def _calling(model: torch.nn.Module, own: torch.nn.Module) -> Any:
    """Return a copy of transformers' own model, without copies of weights, that calls `model`.

    What gathers weights or changes the precision sits around it. An adapter's wrapper is taken off:
    it would hand `generate` on to what lies inside.
    """
    adapted: Any = own
    inside = adapted.get_base_model() if hasattr(own, "get_base_model") else own
    call = {"__call__": lambda self, **given: model(**given)}
    generating: Any = object.__new__(type(type(inside).__name__, (type(inside),), call))
    vars(generating).update(vars(inside))
    return generating


def shown(prompts: Sequence[Prompt], generated: Sequence[str]) -> str:
    """Return prompts and what was generated for them as one text that a terminal can show."""
    asked = (p if isinstance(p, str) else str(p[-1].get("content")) for p in prompts)
    text = "\n\n".join(f"> {a}\n{one}" for a, one in zip(asked, generated, strict=True))
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


class Generate(Callback):
    """Shows what the model generates for fixed prompts, with the weights of each evaluation.

    On the console, in trackers and in the report. List it after callbacks that average weights, to
    see texts of the averages.

    Args:
        prompts: texts.
        file: further prompts: one a line; of a .jsonl file: objects with `prompt` or `messages`.
        chat: whether a text is what a user says, and the model replies by the chat template.
        max_new_tokens: length of a text in tokens, at most.
        temperature: logits are divided by it; 0: greedy, the likeliest token.
        top_p: the likeliest tokens whose probabilities add up to it are drawn from.
        seed: of the draws, the same at each evaluation.

    Raises:
        ConfigError: if there are no prompts, or a value is out of range.
    """

    def __init__(
        self,
        prompts: Sequence[str] = (),
        file: str | None = None,
        chat: bool = False,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.prompts = prompts_of("callbacks.generate", prompts, file, chat)
        self.sampling = Sampling(max_new_tokens, temperature, top_p, seed)

    def on_setup(self, loop: Run) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: if the run has none, or no validation data, or a model cannot generate
                from the prompts.
        """
        loop.require_validation("callbacks.generate")
        self.tokenizer = tokenizer_of(loop.data.artifacts.get(TOKENIZER))
        for model in loop.step.models.values():
            require_prompts(model, self.tokenizer, self.prompts, self.sampling)

    def on_evaluation_start(self, loop: Run, split: str) -> None:
        """Generate with the weights that are about to be measured."""
        engine, synced = loop.accelerator, loop.accelerator.num_processes > 1
        for name, model in loop.step.models.items():
            own, generated = engine.unwrap_model(model), []
            with evaluation_mode(loop.step):
                for text in texts(model, self.tokenizer, self.prompts, self.sampling, own, synced):
                    generated.append(text)
                    loop.stop_flag.progress.batch()
            title = "generated" if split == "validation" else f"generated_{split}"
            title = title if len(loop.step.models) == 1 else f"{title}_{name}"
            body = shown(self.prompts, generated)
            loop.display.text(f"{title} at step {loop.state.step}", body)
            loop.log_media(title, body)


def require_generate(model: torch.nn.Module) -> None:
    """Raise a ConfigError if a model has not transformers' `generate`."""
    if not hasattr(model, "generate"):
        rule = "texts are generated by models of transformers"
        raise ConfigError.of(type(model).__name__, rule, "Choose model=hf_causal_lm.")
