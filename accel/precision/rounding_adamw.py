"""AdamW for weights in bf16: moments in fp32, weights rounded stochastically.

A second moment in bf16, rounded to the nearest, rises but does not fall: with a decay rate of 0.999
a step takes 0.1 % of it, less than half a unit in its last place. So moments are kept in fp32, as
`torch.optim.AdamW` keeps them for weights in fp32.

Source: https://arxiv.org/abs/2010.06192
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

from accel.comm import rng
from accel.machine.errors import StateError
from accel.machine.memory import local
from accel.precision.bf16_weights import digest, shard_coordinates

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
FRACTION = 16  # bits of fp32 that bf16 has not


class RoundingAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose weights in bf16 are rounded up or down at random.

    The update is computed in fp32, with moments in fp32: 12 bytes a trained weight with its
    gradient, in place of 16 with weights in fp32. Parameters of other dtypes are stepped as by
    `torch.optim.AdamW`. Draws come from torch's generator. Shards of a weight draw differently,
    replicas of one alike if their generators are.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        amsgrad: whether the largest second moment so far is taken.
        maximize: whether the objective is maximized.
        fused: whether one kernel computes the update of a parameter; None: not.
    """

    bf16_stochastic_round = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, fused=fused
        )
        self._step_supports_amp_scaling = False  # a scaler's flags would reach no kernel

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: computes the loss again.

        Returns:
            The loss of `closure`; None without one.

        Raises:
            StateError: for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for parameter, _ in stepped:
            if parameter.grad.is_sparse:
                raise StateError(
                    f"a sparse gradient {list(parameter.shape)}: RoundingAdamW takes dense ones. "
                    "Build the embedding with sparse=False, or use torch.optim.SparseAdam for it."
                )
        draws = _Draws() if any(p.dtype == torch.bfloat16 for p, _ in stepped) else None
        for parameter, group in stepped:
            self._step_one(parameter, group, draws)
        return loss

    def _step_one(
        self, parameter: torch.Tensor, group: Mapping[str, Any], draws: _Draws | None
    ) -> None:
        weight, gradient = local(parameter), local(_as_placed(parameter))
        state = self._state_of(parameter, group)
        rounds = weight.dtype == torch.bfloat16
        updated = weight.float() if rounds else weight
        moments = {name: [local(state[name])] for name in MOMENTS if name in state}
        adamw(
            [updated],
            [gradient.to(updated.dtype)],
            moments["exp_avg"],
            moments["exp_avg_sq"],
            moments.get("max_exp_avg_sq", []),
            [state["step"]],
            foreach=False,
            fused=bool(group["fused"]) and not updated.is_meta,
            has_complex=updated.is_complex(),
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        if rounds and draws is not None:
            weight.copy_(rounded(updated, draws.bits(parameter, updated)))

    def _state_of(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter with its moments in fp32, zeros at first."""
        state: dict[str, Any] = self.state[parameter]
        rounds = parameter.dtype == torch.bfloat16
        if not state:
            on_device = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=on_device)
            for name in MOMENTS[: 3 if group["amsgrad"] else 2]:
                dtype = torch.float32 if rounds else parameter.dtype
                state[name] = torch.zeros_like(parameter, dtype=dtype)
        for name in MOMENTS if rounds else ():  # of a checkpoint that has them in bf16
            if name in state and state[name].dtype != torch.float32:
                state[name] = state[name].float()
        if group["fused"] and state["step"].device != parameter.device:
            state["step"] = state["step"].to(parameter.device, torch.float32)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; moments are not rounded to the dtype of the weights.

        Args:
            state_dict: of this optimizer, torchao's or `torch.optim.AdamW`.
        """
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            entry = state_dict["state"].get(key, {})
            if parameter.dtype == torch.bfloat16:
                for name in MOMENTS & entry.keys():
                    self.state[parameter][name] = entry[name].to(parameter.device, torch.float32)


class _Draws:
    """The random bits of a step: a generator for each set of shards, seeded by torch's own."""

    def __init__(self) -> None:
        self.seed = int(torch.randint(2**62, ()))
        self._generators: dict[tuple[torch.device, object], torch.Generator] = {}

    def bits(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return bits [...] in int32 from 0 to 2**16 - 1 in the shape of `like`."""
        if like.is_meta:
            return torch.zeros_like(like, dtype=torch.int32)
        place = shard_coordinates(parameter)
        key = like.device, place
        if key not in self._generators:
            made = torch.Generator(like.device)
            made.manual_seed(rng.mix_seeds(self.seed, digest(place)))
            self._generators[key] = made
        return torch.randint(
            0,
            1 << FRACTION,
            like.shape,
            dtype=torch.int32,
            device=like.device,
            generator=self._generators[key],
        )


def rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Return values [...] in bf16, rounded away from zero with the probability of their fraction.

    Args:
        values: [...] in fp32.
        bits: [...] in int32, uniform from 0 to 2**16 - 1; is overwritten.
    """
    carried = bits.add_(values.view(torch.int32)).bitwise_and_(-(1 << FRACTION))
    # The NaN of CUDA has all bits of its fraction, which carry into the sign.
    return carried.view(torch.float32).masked_fill_(values.isnan(), torch.nan).bfloat16()


def _as_placed(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter, sharded as that is."""
    gradient: Any = parameter.grad
    wanted = getattr(parameter, "placements", None)  # of a DTensor
    if wanted is not None and getattr(gradient, "placements", wanted) != wanted:
        gradient = gradient.redistribute(placements=wanted)
    placed: torch.Tensor = gradient
    return placed
