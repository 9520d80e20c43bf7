"""transformers' `from_pretrained(device_map="auto")` with `accel` in the other package's place."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, python
from tests.libraries.cells import Cell

MAKE = """
import json, sys, torch, transformers
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes)
model = transformers.LlamaForCausalLM(config).eval()
model.save_pretrained(sys.argv[1], max_shard_size="200KB")
with torch.no_grad():
    print(json.dumps(model(torch.arange(24).reshape(2, 12) % 64).logits.tolist()))
"""
SCRIPT = """
import json, sys
package, folder, limit = sys.argv[1:]
if package == "accel":
    from tests.libraries import alias
    alias.install()
import accelerate, torch, transformers
memory = {}
if limit != "none":
    memory = {"max_memory": {"cpu": int(limit)}, "offload_folder": f"{folder}/off"}
model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="auto", **memory)
tokens = torch.arange(24).reshape(2, 12) % 64
with torch.no_grad():
    logits = model(tokens).logits
    again = model.generate(tokens[:, :4], max_new_tokens=5, do_sample=False)
print(json.dumps({
    "package": accelerate.__name__ if package == "public" else accelerate.__spec__.name,
    "map": {name: str(place) for name, place in getattr(model, "hf_device_map", {}).items()},
    "logits": logits.tolist(), "tokens": again.tolist(),
}))
"""


def answered(script: str, *arguments: str) -> Any:
    answer = subprocess.run(
        python("-c", script, *arguments),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["none", "400000"])
def test_a_model_is_placed_and_computes_as_under_the_public_package(
    tmp_path: Path, limit: str
) -> None:
    reason = Cell("transformers_trainer", "", 1).reason_not_to_run()
    if reason is not None:
        pytest.skip(reason)
    wanted = answered(MAKE, str(tmp_path))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ours, public = (
        answered(SCRIPT, package, str(tmp_path), limit) for package in ("accel", "public")
    )
    assert (ours.pop("package"), public.pop("package")) == ("accel", "accelerate")
    assert ours == public
    assert ours["logits"] == wanted
    assert ("disk" in ours["map"].values()) == (limit != "none")
