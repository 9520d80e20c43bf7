"""Words of plugins and names of files, at the documented path."""

from __future__ import annotations

from accel.config import fsdp

FSDP_AUTO_WRAP_POLICY = [name.upper() for name in fsdp.WRAP_POLICIES]
FSDP_BACKWARD_PREFETCH = list(fsdp.PREFETCHES)
FSDP_SHARDING_STRATEGY = list(fsdp.STRATEGIES)
FSDP_STATE_DICT_TYPE = list(fsdp.STATE_TYPES)
FSDP_MODEL_NAME = "pytorch_model_fsdp"
MODEL_NAME = "pytorch_model"
OPTIMIZER_NAME = "optimizer"
RNG_STATE_NAME = "random_states"
SAFE_MODEL_NAME = "model"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
SCHEDULER_NAME = "scheduler"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
WEIGHTS_NAME = "pytorch_model.bin"
