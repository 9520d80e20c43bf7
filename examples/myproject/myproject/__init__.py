"""A model and a data set. The default objective is the cross-entropy of classes."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from runner import Data, register


@register.model("mlp")
def mlp(num_classes: int, width: int = 32) -> nn.Module:
    """Return a network with two hidden layers, from points [B, 2] to logits [B, num_classes]."""
    hidden = [nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, num_classes))


@register.data("spiral")
def spiral(num_points: int = 1500, num_arms: int = 3) -> Data:
    """Return points [2] on the arms of a spiral, each labelled with its arm."""
    generator = torch.Generator().manual_seed(0)
    arms = torch.arange(num_points) % num_arms
    radius = torch.rand(num_points, generator=generator)
    angle = 2 * math.pi * (arms / num_arms + 0.5 * radius)
    points = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1)
    parts = random_split(TensorDataset(points, arms), [0.8, 0.1, 0.1], generator=generator)
    return Data(*parts, facts={"num_classes": num_arms})
