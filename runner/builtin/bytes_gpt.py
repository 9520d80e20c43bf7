"""A byte-level GPT on the source text of Python's standard library.

Shapes: B samples in the batch of one process, N samples of a data set, T bytes of context, D model
width, H heads, E = D / H, V = 256 byte values.
"""

from __future__ import annotations

import hashlib
import math
import random
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from accel.machine.errors import ConfigError
from runner.builtin.optimizers import check_ranges
from runner.data.datasets import Data
from runner.training.run import Callback
from runner.training.step import Objective

if TYPE_CHECKING:
    from runner.training.run import Run

NUM_BYTES = 256
CONTEXT = 128  # on a CPU more steps are worth more than longer windows
IGNORED = -100  # a target that is padding

# --- Data ---------------------------------------------------------------------------------------


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """A text cut into windows of (bytes, the byte after each): two int64 tensors [T].

    The last window is filled up with targets that do not count (`IGNORED`), so that each byte of
    the text but the first is a target exactly once.

    Args:
        text: [L] uint8, more than T bytes.
        context: T.
        random_start: whether each visit of a window starts it later by up to a window, drawn from
            Python's generator. No target is ignored then.
    """

    def __init__(self, text: Tensor, context: int, random_start: bool = False) -> None:
        self.text = text
        self.context = context
        self.random_start = random_start

    def __len__(self) -> int:
        return math.ceil((len(self.text) - 1) / self.context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        if self.random_start:
            latest = len(self.text) - self.context - 1
            start = min(start + random.randrange(self.context), latest)
        chunk = self.text[start : start + self.context + 1].long()
        missing = self.context - (len(chunk) - 1)
        return F.pad(chunk[:-1], (0, missing)), F.pad(chunk[1:], (0, missing), value=IGNORED)


def stdlib_bytes(
    context: int = CONTEXT,
    validation_bytes: int = 220_000,
    random_start: bool = True,
    path: str | None = None,
) -> Data:
    """Return the source text of the standard library's top-level modules, split by file.

    These are the ``*.py`` files right in the library's folder: about 4.7 MB. Packages below it
    (17 MB of tests; encodings, mostly tables) are skipped, and so is
    ``_sysconfigdata*.py``, which was generated on the machine. A sample is
    ``(bytes [T] int64, next bytes [T] int64)``.

    The split depends only on the names and sizes of the files: in the order of the SHA-256 of their
    names, files go to validation until it is large enough. Each part is in the order of names.

    Args:
        context: T, bytes per sample.
        validation_bytes: least size of the validation text; there is no test text.
        random_start: whether windows of the training text start at random places.
        path: folder of the ``*.py`` files; None: that of the running Python's library.

    Raises:
        ConfigError: if there is too little text for the split and the context.
    """
    folder = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
    train, validation = _read_split(folder, validation_bytes)
    if min(len(train), len(validation)) <= context + 1 or context < 1:
        raise ConfigError.of(
            f"{folder} gives {len(train)} bytes to train on and {len(validation)} to validate",
            f"each part must be longer than data.context={context}, and that at least 1",
            "Set data.path to a folder with more *.py files, or lower data.validation_bytes or "
            "data.context.",
        )
    return Data(ByteWindows(train, context, random_start), ByteWindows(validation, context))


def _read_split(folder: Path, validation_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the training and the validation text of the ``*.py`` files in `folder`: uint8."""
    texts = {
        file.name: file.read_bytes()
        for file in folder.glob("*.py")
        if not file.name.startswith("_sysconfigdata")
    }
    held_out: set[str] = set()
    size = 0
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if size >= validation_bytes:
            break
        held_out.add(name)
        size += len(texts[name])
    train, validation = bytearray(), bytearray()
    for name in sorted(texts):
        (validation if name in held_out else train).extend(texts[name])
    first, second = (
        torch.from_numpy(np.frombuffer(part, np.uint8)) for part in (train, validation)
    )
    return first, second


# --- Model --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return [B, T, D] of x [B, T, D] and the cosines and sines of `rotary_tables`."""
        # The number of heads is left to the view: under tensor parallelism a rank has some of them.
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            project(x).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(F.rms_norm(q, (self.head_dim,)), *rotation).to(v.dtype)
        k = rotate(F.rms_norm(k, (self.head_dim,)), *rotation).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers, from D to `hidden` and back, with a squared ReLU between them.

    Source: D. So et al., Primer, arXiv:2109.08668 (squared ReLU).
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, D] of x [B, T, D]."""
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream.

    The hidden size of the MLP is `expansion` × D.
    """

    def __init__(self, dim: int, num_heads: int, expansion: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = MLP(dim, expansion * dim)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return [B, T, D] of x [B, T, D] and the tables of the rotary positions."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class ByteGPT(nn.Module):
    """A decoder-only transformer over byte values, for contexts of any length; see `byte_gpt`."""

    # Modules that no strategy splits across devices.
    _no_split_modules = ("Block",)
    # The tensor-parallel plan of its matrices: sharded by heads, and by hidden units.
    _tp_plan = MappingProxyType(
        {
            "blocks.*.attention.q_proj": "colwise",
            "blocks.*.attention.k_proj": "colwise",
            "blocks.*.attention.v_proj": "colwise",
            "blocks.*.attention.o_proj": "rowwise",
            "blocks.*.mlp.up_proj": "colwise",
            "blocks.*.mlp.down_proj": "rowwise",
        }
    )

    def __init__(self, dim: int, num_layers: int, num_heads: int, expansion: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.embedding = nn.Embedding(NUM_BYTES, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, expansion) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, NUM_BYTES, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights; each block starts as the identity, and all bytes as equally likely."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        for module in self.modules():
            if isinstance(module, Attention):
                nn.init.zeros_(module.o_proj.weight)
            if isinstance(module, MLP):
                nn.init.zeros_(module.down_proj.weight)

    def forward(self, values: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits of the byte after each: [B, T, V] of values [B, T] int64.

        `position_ids` [B, T] are those of a part of the sequences; None: from 0.
        """
        start = 0 if position_ids is None else position_ids[:1, :1].flatten()
        rotation = rotary_tables(values.shape[1], self.head_dim, values.device, start)
        x = self.embedding(values)
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def rotary_tables(
    length: int,
    head_dim: int,
    device: torch.device,
    start: int | Tensor = 0,
    base: float = 10_000.0,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angle of each position and pair of dims: each [T, E / 2].

    `start` is the first position.

    Source: J. Su et al., RoFormer, arXiv:2104.09864.
    """
    pairs = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    positions = start + torch.arange(length, device=device, dtype=torch.float32)
    angles = positions.unsqueeze(1) * base ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [B, H, T, E] with each pair (i, i + E / 2) turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def byte_gpt(
    dim: int = 128, num_layers: int = 3, num_heads: int = 4, expansion: int = 4
) -> nn.Module:
    """Return a byte-level GPT: 0.66 million parameters by default.

    Args:
        dim: width of the residual stream.
        num_layers: number of blocks.
        num_heads: attention heads; `dim` is an even multiple of them.
        expansion: hidden size of the MLP over `dim`.

    Raises:
        ConfigError: if `dim` is no even multiple of `num_heads`, or a size is less than 1.
    """
    sizes = {"dim": dim, "num_layers": num_layers, "num_heads": num_heads, "expansion": expansion}
    check_ranges("model", **{name: (size, 1, math.inf) for name, size in sizes.items()})
    if dim % (2 * num_heads):
        raise ConfigError.of(
            f"model.dim={dim} with model.num_heads={num_heads}",
            "rotary positions want an even number of dims per head",
            f"Set model.dim to a multiple of {2 * num_heads}.",
        )
    return ByteGPT(dim, num_layers, num_heads, expansion)


# --- Objective ----------------------------------------------------------------------------------


class NextByte(Objective):
    """Cross-entropy of the next byte, weighted by bytes: samples are ``(bytes, next bytes)``."""

    monitor = "bits_per_byte"
    mode = "min"

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the nats of each sample, summed over its targets: [B]."""
        values, targets = batch
        logits = model(values).float()
        nats = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return nats.view(targets.shape).sum(dim=1)

    def weights(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return how many targets each sample has: [B]."""
        return (batch[1] != IGNORED).sum(dim=1)

    def summarize(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Return `loss` in nats per byte and `bits_per_byte`."""
        loss = super().summarize(values)["loss"]
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the likeliest byte after each: [B, T]."""
        return {"next_byte": model(batch[0]).argmax(dim=-1)}


# --- Generated text -----------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    num_bytes: int,
    temperature: float,
    seed: int,
    context: int = CONTEXT,
) -> bytes:
    """Return text that the model writes after `prompt`, without the prompt.

    Args:
        model: logits [B, T, V] of bytes [B, T].
        prompt: empty: a line break.
        num_bytes: how many are written.
        temperature: divides the logits; above 0.
        seed: of the draws, which are made on the CPU: alike on every device.
        context: most bytes that the model looks back on; it has learned no more than it trained on.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    values = list(prompt or b"\n")
    for _ in range(num_bytes):
        logits = model(torch.tensor([values[-context:]], device=device))[0, -1].float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        values.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train(training)
    return bytes(values[-num_bytes:])


class TextSample(Callback):
    """Shows text that the model writes at the end.

    Args:
        prompt: the text to continue.
        num_bytes: how many bytes it writes.
        temperature: 1 samples from the model's own distribution, less makes it bolder.
        seed: seed of the sampling.

    Raises:
        ConfigError: naming the numbers that are out of their range.
    """

    def __init__(
        self, prompt: str = "def ", num_bytes: int = 400, temperature: float = 0.8, seed: int = 0
    ) -> None:
        limits = {"num_bytes": (num_bytes, 1, math.inf), "temperature": (temperature, 0.01, 100)}
        check_ranges("callbacks.text_sample", **limits)
        self.prompt, self.num_bytes = prompt, num_bytes
        self.temperature, self.seed = temperature, seed

    def on_end(self, loop: Run) -> None:
        """Write the text with the best weights.

        Every rank computes it, with the same draws: a sharded model is gathered from all of them.
        """
        if not loop.complete:
            return
        context = getattr(loop.data.train, "context", CONTEXT)
        model = next(iter(loop.step.models.values()))
        prompt = self.prompt.encode()
        written = generate(model, prompt, self.num_bytes, self.temperature, self.seed, context)
        text = printable(written)
        loop.results["sample"] = text
        loop.display.text(f"text by the model, after {self.prompt!r}", text)


def printable(text: bytes) -> str:
    """Return bytes as text without terminal control codes: unprintable ones become "�"."""
    characters = text.decode(errors="replace").replace("\r\n", "\n")
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in characters
    )
