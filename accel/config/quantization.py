"""Quantization of a model's linear layers to 8 or 4 bits by bitsandbytes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from accel.config.checks import check_choice, check_minimum
from accel.machine.errors import Problems, unknown_choice

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass
class BnbQuantizationConfig:
    """How `load_and_quantize_model` quantizes a model.

    Args:
        load_in_8bit: whether linear layers are quantized to 8 bits (LLM.int8).
        llm_int8_threshold: of activations in 8-bit layers: columns with a larger value are computed
            in 16 bits; 0: none.
        load_in_4bit: whether linear layers are quantized to 4 bits (QLoRA).
        bnb_4bit_quant_type: format of 4-bit weights: "fp4", or "nf4" for weights of normal
            distribution.
        bnb_4bit_use_double_quant: whether scales of 4-bit weights are quantized, too.
        bnb_4bit_compute_dtype: of products with 4-bit weights: "fp32", "fp16", "bf16", or a dtype;
            afterwards the dtype.
        torch_dtype: of weights that are not quantized. None: `bnb_4bit_compute_dtype`, float16 with
            8 bits.
        skip_modules: modules that are not quantized, by full name or one part of it; None: those
            with tied weights, and the head or last layer.
        keep_in_fp32_modules: modules that are not quantized and stay in float32, named likewise.

    Source: https://arxiv.org/abs/2208.07339 (8 bits), https://arxiv.org/abs/2305.14314 (4 bits)
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        problems = Problems()
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(problems, name, "it is true or false", f"Give {name}=True.")
        if self.load_in_8bit and self.load_in_4bit:
            rule = "load_in_8bit and load_in_4bit can't be both True"
            problems.add("load_in_8bit=True, load_in_4bit=True", rule, "Drop one.")
        elif not self.load_in_8bit and not self.load_in_4bit:
            rule = "load_in_8bit and load_in_4bit can't be both False"
            problems.add("BnbQuantizationConfig()", rule, "Give load_in_4bit=True, say.")
        check_minimum(self, "llm_int8_threshold", 0, problems)
        check_choice(self, "bnb_4bit_quant_type", ("fp4", "nf4"), problems)
        self.skip_modules = self._names("skip_modules", problems)
        self.keep_in_fp32_modules = self._names("keep_in_fp32_modules", problems)
        self.bnb_4bit_compute_dtype = self._dtype("bnb_4bit_compute_dtype", problems)
        self.torch_dtype = self._dtype("torch_dtype", problems)
        problems.raise_if()
        if self.torch_dtype is None:
            dtype = "float16" if self.load_in_8bit else self.bnb_4bit_compute_dtype
            self.torch_dtype = _torch_dtype(dtype)

    def _refuse(self, problems: Problems, name: str, rule: str, remedy: str) -> None:
        value = f"BnbQuantizationConfig.{name}={getattr(self, name)!r}"
        problems.add(value, rule, remedy)

    def _names(self, name: str, problems: Problems) -> list[str] | None:
        value = getattr(self, name)
        if isinstance(value, (list, tuple, set)) and all(isinstance(one, str) for one in value):
            return list(value)
        if value is not None:
            self._refuse(problems, name, "it is a list of names", 'Give ["lm_head"], say.')
        return None

    def _dtype(self, name: str, problems: Problems) -> Any:
        """Return the dtype of torch that a field stands for; None for None."""
        value = getattr(self, name)
        found = None if value is None else _torch_dtype(value)
        if value is not None and (found is None or not found.is_floating_point):
            known = [*DTYPES, *DTYPES.values()]
            problems.append(unknown_choice(f"BnbQuantizationConfig.{name}", value, known))
            return None
        if value is None and name == "bnb_4bit_compute_dtype":
            self._refuse(problems, name, "it is a dtype", 'Give "bf16", say.')
        return found


def _torch_dtype(value: object) -> Any:
    """Return the dtype of a name, or a dtype itself; None for anything else."""
    torch = importlib.import_module("torch")
    if isinstance(value, str):
        value = getattr(torch, DTYPES.get(value, value).removeprefix("torch."), None)
    return value if isinstance(value, torch.dtype) else None
