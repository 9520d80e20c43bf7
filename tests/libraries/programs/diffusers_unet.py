"""diffusers: the usual loop of unconditional image generation, with a tiny UNet and its average."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

from tests.libraries.programs import tiny


def network() -> UNet2DModel:
    """Return a UNet of two levels for images of 8 × 8."""
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
    )


class Run:
    """What the loop trains, as the library's example sets it up."""

    def __init__(self, options: Mapping[str, Any], folder: Path) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=options.get("gradient_accumulation_steps", 1),
            mixed_precision=options.get("mixed_precision", "no"),
            project_config=ProjectConfiguration(project_dir=str(folder)),
        )
        set_seed(51)
        model = network()
        self.average = EMAModel(
            model.parameters(), decay=0.99, model_cls=UNet2DModel, model_config=model.config
        )
        self.noise = DDPMScheduler(num_train_timesteps=50)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        draws = torch.Generator().manual_seed(6)
        images = [{"input": torch.rand(1, 8, 8, generator=draws)} for _ in range(26)]
        loader = DataLoader(images, batch_size=4)
        schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=14)
        self.accelerator.register_save_state_pre_hook(self.save_models)
        self.accelerator.register_load_state_pre_hook(self.load_models)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )
        self.losses: list[float] = []
        self.step = 0

    def save_models(self, models: list, weights: list, folder: str) -> None:
        """Save the average and the model in the library's format instead of the package's."""
        if self.accelerator.is_main_process:
            self.average.save_pretrained(str(Path(folder) / "unet_ema"))
            for model in models:
                self.accelerator.unwrap_model(model).save_pretrained(str(Path(folder) / "unet"))
                weights.pop()

    def load_models(self, models: list, folder: str) -> None:
        """Load what `save_models` saved."""
        loaded = EMAModel.from_pretrained(str(Path(folder) / "unet_ema"), UNet2DModel)
        self.average.load_state_dict(loaded.state_dict())
        while models:
            saved = UNet2DModel.from_pretrained(str(Path(folder) / "unet"))
            model = self.accelerator.unwrap_model(models.pop())
            model.register_to_config(**saved.config)
            model.load_state_dict(saved.state_dict())

    def train(self, folder: Path, first_epoch: int = 0) -> None:
        """Train to the second epoch's end, with a checkpoint at the end of the first."""
        for epoch in range(first_epoch, 2):
            self.model.train()
            for batch in self.loader:
                clean = batch["input"]
                noise = torch.randn(clean.shape)
                times = torch.randint(0, 50, (len(clean),)).long()
                noisy = self.noise.add_noise(clean, noise, times)
                with self.accelerator.accumulate(self.model):
                    loss = F.mse_loss(self.model(noisy, times).sample.float(), noise)
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:
                    self.average.step(self.model.parameters())
                    self.step += 1
                self.losses.append(float(self.accelerator.gather(loss.detach()).mean()))
            if epoch == 0:
                self.accelerator.save_state(str(folder / "checkpoint"))
        self.accelerator.wait_for_everyone()


def run(options: Mapping[str, Any], folder: Path) -> dict[str, list]:
    """Train, sample images from the average; then train the second epoch from the checkpoint."""
    first = Run(options, folder)
    first.train(folder)
    result: dict[str, list] = {"loss": first.losses, "steps": [float(first.step)]}
    result["learning_rate"] = [float(rate) for rate in first.schedule.get_last_lr()]
    model = first.accelerator.unwrap_model(first.model)
    result["weights"] = [tiny.digest(model)]
    first.average.copy_to(model.parameters())
    pipeline = DDPMPipeline(unet=model, scheduler=first.noise)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        generator=torch.Generator().manual_seed(0), num_inference_steps=3, output_type="np"
    ).images
    result["images"] = images.astype(float).ravel().tolist()
    if first.accelerator.is_main_process:
        pipeline.save_pretrained(str(folder / "pipeline"))
    first.accelerator.free_memory()
    second = Run(options, folder)
    second.accelerator.load_state(str(folder / "checkpoint"))
    second.train(folder, first_epoch=1)
    result["resumed loss"] = second.losses
    result["resumed weights"] = [tiny.digest(second.accelerator.unwrap_model(second.model))]
    result["files"] = [name for name in tiny.files(folder) if not name.startswith("checkpoint")]
    second.accelerator.end_training()
    return result
