"""Forward-pre-hooks of torch that compute a weight before hooks of a dispatch load its parts."""

from __future__ import annotations

from torch import nn

from accel.machine.errors import ConfigError

_EARLY = {f"torch.nn.utils.{one}" for one in ("weight_norm", "spectral_norm", "prune")}


def check_reparametrized(module: nn.Module, name: str) -> None:
    """Refuse to offload a module whose weight is computed before its forward pass begins.

    Args:
        module: whose weights are to be offloaded.
        name: of the module, in the model.

    Raises:
        ConfigError: with the hook that computes the weight.
    """
    kinds = [type(hook) for hook in module._forward_pre_hooks.values()]
    early = [kind for kind in kinds if _EARLY & {base.__module__ for base in kind.__mro__}]
    if early:
        kind = early[0]
        raise ConfigError.of(
            f"{name or type(module).__name__} has {kind.__module__}.{kind.__name__}",
            "it computes the weight before offloaded weights are loaded",
            "Keep the module on a device; or use torch.nn.utils.parametrizations, call "
            "prune.remove(module, name), or name the class of a module around it in "
            "preload_module_classes.",
        )
