"""What a run says of its speed against a profiler's trace of the same steps of the bytes GPT."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.helpers import ROOT, python

STEPS = 50  # that are traced, between two log points
RECIPE = f"""experiment=bytes_gpt trainer.max_steps={3 * STEPS + 1} trainer.log_every={STEPS}
trainer.limit_eval_batches=1 ~callbacks.text_sample profile=trace profile.activities=[cpu]
profile.schedule_option={{wait:{STEPS},warmup:{STEPS},active:{STEPS},repeat:1}}""".split()
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def operations(name: str, shapes: Any) -> int:
    """Return the floating-point operations of a traced product of matrices, from its shapes."""
    if name in ("aten::mm", "aten::bmm"):
        return 2 * math.prod(shapes[0]) * shapes[1][-1]
    if name == ATTENTION:  # QK and PV
        return 2 * 2 * math.prod(shapes[0]) * shapes[1][2]
    # Five products; the first argument is the gradient of the output.
    return 5 * 2 * math.prod(shapes[1]) * shapes[2][2] if name == f"{ATTENTION}_backward" else 0


def traced(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return FLOP/s and the shares of the time by a trace."""
    steps, fetched, stepped = (
        sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith(name))
        for name in ("ProfilerStep", "enumerate(DataLoader)", "Optimizer.step")
    )
    total = steps[-1][1] - steps[0][0]
    computed = sum(step[0] - fetch[1] for fetch, step in zip(fetched, stepped, strict=True))
    counted = sum(operations(e["name"], e.get("args", {}).get("Input Dims")) for e in events)
    return {
        "flops_per_second": counted / total * 1e6,
        "time/data": sum(end - start for start, end in fetched) / total,
        "time/forward_backward": computed / total,
        "time/optimizer": sum(end - start for start, end in stepped) / total,
    }


def main() -> None:
    """Print each value as the run and as the trace has it, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        command = python("-m", "runner", *RECIPE, f"run_dir={folder}/run")
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (trace,) = Path(folder).glob("run/trace/*.json")
        found = traced([e for e in json.loads(trace.read_text())["traceEvents"] if "dur" in e])
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        (told,) = (one for one in map(json.loads, lines) if one["step"] == 3 * STEPS)
    for name, value in found.items():
        print(f"{name:22} run {told[name]:9.4g}  trace {value:9.4g}  {told[name] / value:.3f}")


if __name__ == "__main__":
    main()
