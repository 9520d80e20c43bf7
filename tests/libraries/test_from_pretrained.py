"""E1, E4: transformers' `from_pretrained(device_map="auto")` over `accel`."""

from __future__ import annotations

import json
import os
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


ADAPT = """
import sys
from tests.libraries import alias
alias.install()
import copy, json, peft, torch, transformers
folder, place = sys.argv[1], json.loads(sys.argv[2])
tokens = torch.arange(24).reshape(2, 12) % 64
def logits(model):
    with torch.no_grad():
        return model(tokens).logits
def load(**options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
plan = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
expected = peft.get_peft_model(load(), plan).eval()
expected.save_pretrained(f"{folder}/adapter")
away = load(device_map=place, offload_folder=f"{folder}/off")
model = peft.PeftModel.from_pretrained(away, f"{folder}/adapter", offload_folder=f"{folder}/more")
model = model.eval()
same = [torch.equal(logits(model), logits(expected))]
model.merge_adapter(), expected.merge_adapter()
same.append(torch.equal(logits(model), logits(expected)))
model.unmerge_adapter(), expected.unmerge_adapter()
merged, plain = model.merge_and_unload(), expected.merge_and_unload()
same.append(torch.equal(logits(merged), logits(plain)))
merged.save_pretrained(f"{folder}/merged")
folder = f"{folder}/merged"
same.append(torch.equal(logits(load()), logits(plain)))
print(json.dumps({"same": same, "map": len(model.hf_device_map)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", [{"": "disk"}, {"": "cpu", "model.layers.1": "disk"}])
def test_an_adapter_is_loaded_over_an_offloaded_model_and_merged(
    tmp_path: Path, place: dict[str, str]
) -> None:
    reason = Cell("peft_lora", "", 1).reason_not_to_run()
    if reason is not None:
        pytest.skip(reason)
    answered(MAKE, str(tmp_path))
    # Peft writes a file of it under its own path below the working directory.
    here = {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        python("-c", ADAPT, str(tmp_path), json.dumps(place)),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, **here},
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1])["same"] == [True] * 4
