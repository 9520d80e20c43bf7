"""Callbacks for text models: simple baselines, and samples of generated text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from accel.machine.errors import Problems
from runner.builtin.bytes_gpt import ByteWindows, bigram_bits_per_byte, generate, gzip_bits_per_byte
from runner.training.console import number
from runner.training.run import Callback

if TYPE_CHECKING:
    from runner.training.run import Run


class TextBaselines(Callback):
    """Shows the bits per byte of a bigram model and of gzip beside the model's."""

    def __init__(self) -> None:
        self.bits_per_byte: dict[str, float] = {}

    def on_start(self, loop: Run) -> None:
        """Measure the baselines on the validation data."""
        if not loop.accelerator.is_main_process:
            return
        self.bits_per_byte = {
            "bigram": bigram_bits_per_byte(loop.data),
            "gzip": gzip_bits_per_byte(loop.data),
        }
        loop.display.note(f"bits per byte to compare with: {self._line()}")

    def on_end(self, loop: Run) -> None:
        """Add them to the summary and to the final table."""
        if not self.bits_per_byte:
            return
        loop.results["baselines"] = dict(self.bits_per_byte)
        ours = "" if loop.state.best is None else f"model {number(loop.state.best)} · "
        loop.rows.append(("bits per byte", ours + self._line()))

    def _line(self) -> str:
        return " · ".join(f"{name} {number(value)}" for name, value in self.bits_per_byte.items())


class TextSample(Callback):
    """Shows text that the model writes at the end.

    Args:
        prompt: the text to continue.
        num_bytes: how many bytes it writes.
        temperature: 1 samples from the model's own distribution, less makes it bolder.
        seed: seed of the sampling.
    """

    def __init__(
        self,
        prompt: str = "def ",
        num_bytes: int = 400,
        temperature: float = 0.8,
        seed: int = 0,
    ) -> None:
        problems = Problems()
        if not prompt:
            rule, remedy = "the model continues at least one byte", "Give e.g. 'import '."
            problems.add("text_sample.prompt=''", rule, remedy)
        if num_bytes < 1:
            rule, remedy = "it is at least 1", "Take the callback out to write none."
            problems.add(f"text_sample.num_bytes={num_bytes}", rule, remedy)
        if temperature <= 0:
            rule, remedy = "it is above 0", "Give 0.1 for nearly the likeliest text."
            problems.add(f"text_sample.temperature={temperature}", rule, remedy)
        problems.raise_if()
        self.prompt = prompt
        self.num_bytes = num_bytes
        self.temperature = temperature
        self.seed = seed

    def on_end(self, loop: Run) -> None:
        """Write the text with the best weights.

        Every rank computes it, with the same draws: a sharded model is gathered from all of them.
        """
        if not loop.complete:
            return
        model = next(iter(loop.step.models.values()))
        generator = torch.Generator().manual_seed(self.seed)
        data = loop.data.train
        context = {"context": data.context} if isinstance(data, ByteWindows) else {}
        written = generate(
            model, self.prompt.encode(), self.num_bytes, self.temperature, generator, **context
        )
        text = printable(written)
        loop.results["sample"] = text
        loop.display.text(f"text by the model, after {self.prompt!r}", text)


def printable(text: bytes) -> str:
    """Return bytes as text without terminal control codes: unprintable ones become "�"."""
    characters = text.decode(errors="replace").replace("\r\n", "\n")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters
    )
