"""Command line of ``runner generate``. Free of torch until the run is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.cli.arguments import CommandParser
from runner.exit_codes import DONE


def main(arguments: Sequence[str]) -> int:
    """Print what the model of a run generates for prompts.

    Raises:
        ConfigError: if the run, its model or an option is refused.
        CheckpointError: if the checkpoint is missing or incomplete.
    """
    parser = CommandParser("generate", "Generate text with the model of a run.")
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="a run directory")
    add("prompts", metavar="PROMPT", nargs="*", help="a text that the model continues")
    what = "prompts, one a line; of a .jsonl file: objects with `prompt` or `messages`"
    add("--file", help=what)
    what = "a prompt is what a user says, and the model replies by the chat template"
    add("--chat", action="store_true", help=what)
    add("--max-new-tokens", type=int, default=64, metavar="N", help="at most (default: 64)")
    what = "logits are divided by it; 0: greedy, the likeliest token (default)"
    add("--temperature", type=float, default=0.0, metavar="T", help=what)
    what = "draw from the likeliest tokens with this probability together (default: 1)"
    add("--top-p", type=float, default=1.0, metavar="P", help=what)
    add("--seed", type=int, default=0, help="of the draws (default: 0)")
    what = "best, last, or a checkpoint's name or path (default: best, else last)"
    add("--checkpoint", help=what)
    found = parser.parse_intermixed_args(list(arguments))

    from runner.inference.session import Request, opened
    from runner.language import generation
    from runner.runs import directory

    prompts = generation.prompts_of("prompts", found.prompts, found.file, found.chat)
    given = (found.max_new_tokens, found.temperature, found.top_p, found.seed)
    sampling = generation.Sampling(*given)
    run_dir = directory.existing(found.run_dir)
    tokenizer = generation.tokenizer_of(generation.tokenizer_folder(run_dir))
    with opened(Request(run_dir, checkpoint=found.checkpoint), with_data=False) as session:
        for model in session.step.models.values():
            own = session.accelerator.unwrap_model(model)
            generation.require_prompts(own, tokenizer, prompts, sampling)
            for prompt, text in zip(
                prompts,
                generation.texts(model, tokenizer, prompts, sampling, own),
                strict=True,
            ):
                print(generation.shown([prompt], [text]), end="\n\n", flush=True)
    return DONE
