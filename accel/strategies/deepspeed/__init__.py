"""DeepSpeed: ZeRO shards optimizer state, gradients and parameters; the engine owns the step."""
