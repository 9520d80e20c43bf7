"""A step of one's own: a generator and a discriminator, each with its optimizer, on the digits.

Shapes: B samples in the batch of one process, N samples of a data set, L latent values, P pixels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.lr_scheduler import LRScheduler

from runner.builtin.schedules import linear
from runner.data.batches import Window
from runner.training.step import Step, optimizer_step

if TYPE_CHECKING:
    from accel import Accelerator
    from runner.recipe.schema import Trainer


class Generator(nn.Module):
    """Makes images from noise, by two hidden layers: [B, L] to [B, 1, S, S] in [0, 1]."""

    def __init__(self, latent: int, width: int, image_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(latent, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, image_size**2),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, image_size, image_size)),
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Return images [B, 1, S, S] of noise [B, L]."""
        return self.layers(noise)


class Discriminator(nn.Module):
    """Tells real images from made ones: [B, 1, S, S] to logits [B], positive for real.

    It has two hidden layers of size `width`.
    """

    def __init__(self, width: int, image_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(image_size**2, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B] of images [B, 1, S, S]."""
        return self.layers(images).squeeze(1)


class GANStep(Step):
    """Adversarial training: one update of the discriminator, then one of the generator.

    The data set gives samples ``(image, …)``. States are compared by the Fréchet distance between
    the pixels of real and made images.

    Args:
        latent: noise values per image.
        width: size of the hidden layers of both models.
        image_size: pixels along one side of an image.
        lr_generator: peak learning rate of the generator; both fall linearly to zero.
        lr_discriminator: peak learning rate of the discriminator.
        beta1: decay rate of the first moment of both optimizers.
        beta2: decay rate of the second moment.
        smoothness: weight of the penalty on how much the discriminator's logit of a real image
            changes under a small perturbation.
        perturbation: its standard deviation, per pixel.

    Source: I. Goodfellow et al., Generative Adversarial Nets, arXiv:1406.2661 (the non-saturating
        loss); L. Mescheder et al., arXiv:1801.04406 (the penalty R1; here by finite differences,
        which needs no second derivative and so runs under every strategy).
    """

    monitor = "frechet"
    mode = "min"

    def __init__(
        self,
        latent: int = 16,
        width: int = 256,
        image_size: int = 8,
        lr_generator: float = 2e-3,
        lr_discriminator: float = 4e-3,
        beta1: float = 0.0,
        beta2: float = 0.99,
        smoothness: float = 100.0,
        perturbation: float = 0.1,
    ) -> None:
        self.latent = latent
        self.smoothness = smoothness
        self.perturbation = perturbation
        self.models = {
            "generator": Generator(latent, width, image_size),
            "discriminator": Discriminator(width, image_size),
        }
        rates = {"generator": lr_generator, "discriminator": lr_discriminator}
        self.optimizers = {
            name: torch.optim.Adam(model.parameters(), lr=rates[name], betas=(beta1, beta2))
            for name, model in self.models.items()
        }

    def make_schedulers(self, num_steps: int) -> Mapping[str, LRScheduler]:
        """Return a linear decay to zero for each optimizer."""
        return {name: linear(optimizer, num_steps) for name, optimizer in self.optimizers.items()}

    def train(
        self, accelerator: Accelerator, window: Window, trainer: Trainer
    ) -> Mapping[str, Tensor]:
        """Update the discriminator, then the generator, each on all micro-batches of the window.

        Returns:
            `discriminator_loss` and `generator_loss`, of which the first is `loss`, too, and the
            norms of the gradients where those are clipped.
        """
        given = accelerator, window, trainer
        values = self._update("discriminator", self._discriminator_losses, *given)
        values |= self._update("generator", self._generator_losses, *given)
        return {**values, "loss": values["discriminator_loss"]}

    def evaluate(self, batch: Sequence[Tensor]) -> Mapping[str, Tensor]:
        """Return as many made images as real ones, as vectors: each [B, P]."""
        real = batch[0]
        return {"real": real.flatten(1), "made": self.predict(batch)["image"].flatten(1)}

    def summarize(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the Fréchet distance of the values [N, P]."""
        real, made = values["real"].double().cpu(), values["made"].double().cpu()
        return {"frechet": frechet_distance(real, made)}

    def predict(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a made image for each real one: [B, 1, S, S].

        Its noise is a function of the real image's pixels, so that evaluations differ by the models
        alone, on any number of processes.
        """
        real = batch[0]
        noise = torch.stack([_noise_of(image, self.latent) for image in real.cpu()])
        return {"image": self.models["generator"](noise.to(real.device)).float()}

    def _update(
        self,
        name: str,
        losses: Callable[[Accelerator, Tensor], Tensor],
        accelerator: Accelerator,
        window: Window,
        trainer: Trainer,
    ) -> dict[str, Tensor]:
        """Return this process's shares of the loss and of what clipping measured, each []."""
        model, optimizer = self.models[name], self.optimizers[name]
        optimizer.zero_grad()  # of the other model's update, where an engine keeps its parameters
        values = optimizer_step(
            accelerator,
            window,
            trainer,
            model,
            optimizer,
            lambda _, batch: losses(accelerator, batch[0]),
        )
        return {f"{name}_{key}": value for key, value in values.items()}

    def _discriminator_losses(self, accelerator: Accelerator, real: Tensor) -> Tensor:
        """Return the discriminator's loss on each real image and a made one beside it: [B]."""
        with torch.no_grad():
            made = self.models["generator"](self._noise(accelerator, len(real)))
        near = real + self.perturbation * torch.randn_like(real)
        # One forward pass: DDP allows no second one before backward.
        logits = self.models["discriminator"](torch.cat((real, made.to(real.dtype), near)))
        on_real, on_made, on_near = logits.float().chunk(3)
        penalty = self.smoothness * (on_real - on_near).square()
        return F.softplus(-on_real) + F.softplus(on_made) + penalty

    def _generator_losses(self, accelerator: Accelerator, real: Tensor) -> Tensor:
        """Return the generator's loss on as many made images as there are real ones: [B]."""
        made = self.models["generator"](self._noise(accelerator, len(real)))
        return F.softplus(-self._judge(accelerator, made).float())

    def _judge(self, accelerator: Accelerator, images: Tensor) -> Tensor:
        """Return the discriminator's logits [B], with gradients to the images.

        Its own parameters get none, but under FSDP, which computes with what it has gathered.
        """
        discriminator = accelerator.unwrap_model(self.models["discriminator"])
        fixed = {name: value.detach() for name, value in discriminator.named_parameters()}
        return functional_call(discriminator, fixed, (images,))

    def _noise(self, accelerator: Accelerator, count: int) -> Tensor:
        """Return noise for `count` images of this process, [count, L], unlike that of the others.

        All processes draw the noise of all, so that it differs even where their generators agree.
        """
        dims = accelerator.parallel_dims
        shape = (dims.dp_size, count, self.latent)
        return torch.randn(shape, device=accelerator.device)[dims.dp_rank]


def _noise_of(image: Tensor, latent: int) -> Tensor:
    """Return noise [latent] that is a function of the pixels of `image`, on the CPU."""
    seed = zlib.crc32(image.contiguous().numpy().tobytes())
    return torch.randn(latent, generator=torch.Generator().manual_seed(seed))


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return the squared Fréchet distance between Gaussians with the moments of two samples.

    The samples are [N, P] and [M, P] float64.

    Source: M. Heusel et al., arXiv:1706.08500, eq. 6; here on pixels, without a network between.
    """
    means = (first.mean(dim=0) - second.mean(dim=0)).square().sum()
    covariances = [torch.cov(sample.T, correction=0) for sample in (first, second)]
    values, vectors = torch.linalg.eigh(covariances[0])
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # The trace of (C1 C2)^½ by a symmetric product that has the same eigenvalues.
    mixed = torch.linalg.eigvalsh(root @ covariances[1] @ root).clamp(min=0).sqrt().sum()
    return float(means + covariances[0].trace() + covariances[1].trace() - 2 * mixed)
