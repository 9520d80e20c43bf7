"""`torch.compile` through the engine: what is compiled, and that nothing else changes (E1, E3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.config.training import TorchDynamoPlugin
from accel.machine.env import Environment
from accel.machine.errors import ConfigError
from accel.plan.arguments import Arguments
from accel.plan.plan import resolve
from accel.strategies.compile import compile_arguments, compile_model, repeated_blocks

EAGER = "eager"


class Block(torch.nn.Module):
    """A layer that a model repeats: [B, 4] to [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.linear(x))) + x


class Stack(torch.nn.Module):
    """Blocks between two layers: [B, 4] to [B, 1]."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(num_blocks)])
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Breaks(torch.nn.Module):
    """A model whose forward pass is no single graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the graphs that the backend `eager` compiles, in order."""
    from torch._dynamo.backends import registry

    sizes: list[int] = []

    def count(module: torch.fx.GraphModule, inputs: Any) -> Any:
        sizes.append(len(list(module.graph.nodes)))
        return module.forward

    registry.lookup_backend(EAGER)
    count._tags = ()  # type: ignore[attr-defined]
    monkeypatch.setitem(registry._COMPILER_FNS, EAGER, count)
    return sizes


def train(accelerator: Accelerator, model: Any, steps: int = 3) -> list[float]:
    """Return the losses of some steps of SGD on fixed batches."""
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(steps):
        batch = torch.randn(2, 4, generator=generator)
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of(plugin: TorchDynamoPlugin | None, mixed_precision: str = "no") -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, dynamo_plugin=plugin)
    losses = train(accelerator, accelerator.prepare(Stack()))
    accelerator.end_training()
    return losses


# -- what is compiled --------------------------------------------------------------------------


def test_the_whole_model_is_one_graph(graphs: list[int]) -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend=EAGER)
    inner = Stack()
    model = accelerator.prepare(inner)
    assert isinstance(model, torch._dynamo.OptimizedModule)
    train(accelerator, model)
    assert len(graphs) == 1
    assert accelerator.unwrap_model(model) is model
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is inner


def test_repeated_blocks_are_compiled_once_and_stay_where_they_are(graphs: list[int]) -> None:
    plugin = TorchDynamoPlugin(backend=EAGER, use_regional_compilation=True, fullgraph=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    inner = Stack(num_blocks=12)
    names = list(inner.state_dict())
    model = accelerator.prepare(inner)
    assert model is inner
    train(accelerator, model)
    assert len(graphs) == 1
    assert list(model.state_dict()) == names


def test_blocks_are_the_outermost_repeated_layers() -> None:
    model = Stack()
    assert repeated_blocks(model) == list(model.blocks)
    nested = torch.nn.Sequential(model, torch.nn.Linear(1, 1), Stack(1), torch.nn.Linear(1, 1))
    assert repeated_blocks(nested) == [nested[0], nested[2]]
    plain = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    assert repeated_blocks(plain) == []
    model._no_split_modules = ["LayerNorm"]
    assert repeated_blocks(model) == [block.norm for block in model.blocks]


def test_a_model_without_repeated_layers_is_compiled_whole(
    graphs: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    plugin = TorchDynamoPlugin(backend=EAGER, use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = accelerator.prepare(Stack(1))
    assert "Stack repeats no layer class" in caplog.text
    train(accelerator, model)
    assert len(graphs) == 1


def test_an_engine_within_the_model_has_its_blocks_compiled_in_place(graphs: list[int]) -> None:
    plugin = TorchDynamoPlugin(backend=EAGER)
    inside = compile_model(Stack(), plugin, hooks_inside=True)
    assert isinstance(inside, Stack)
    inside(torch.randn(2, 4))
    assert len(graphs) == 1
    whole = compile_model(Stack(1), plugin, hooks_inside=True)
    assert isinstance(whole, Stack)
    assert whole._compiled_call_impl is not None
    strict = TorchDynamoPlugin(backend=EAGER, fullgraph=True, use_regional_compilation=False)
    with pytest.raises(ConfigError, match="for a whole sharded model"):
        compile_model(Stack(), strict, hooks_inside=True)


def test_what_is_off_or_compiled_is_left_as_it_is(graphs: list[int]) -> None:
    model = Stack()
    assert compile_model(model, TorchDynamoPlugin()) is model
    compiled = torch.compile(model, backend=EAGER)
    assert compile_model(compiled, TorchDynamoPlugin(backend=EAGER)) is compiled
    disabled = TorchDynamoPlugin(backend=EAGER, disable=True)
    compile_model(model, disabled)(torch.randn(2, 4))
    assert graphs == []


def test_graph_breaks_are_errors_on_request() -> None:
    for fullgraph in (False, True):
        torch.compiler.reset()
        plugin = TorchDynamoPlugin(backend=EAGER, fullgraph=fullgraph)
        model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Breaks())
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                model(torch.randn(2, 4))
        else:
            assert model(torch.randn(2, 4)).shape == (2, 1)


def test_shapes_are_symbolic_on_request(graphs: list[int]) -> None:
    for dynamic, expected in ((False, 3), (True, 1)):
        torch.compiler.reset()
        graphs.clear()
        model = compile_model(Stack(), TorchDynamoPlugin(backend=EAGER, dynamic=dynamic))
        for size in (2, 3, 4):
            model(torch.randn(size, 4))
        assert len(graphs) == expected


# -- training is the same ----------------------------------------------------------------------


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("regional", [False, True])
def test_losses_are_those_of_eager_training(mixed_precision: str, regional: bool) -> None:
    plugin = TorchDynamoPlugin("aot_eager", use_regional_compilation=regional, fullgraph=True)
    expected = losses_of(None, mixed_precision)
    assert losses_of(plugin, mixed_precision) == pytest.approx(expected, rel=1e-6)


def test_the_forward_pass_of_a_compiled_model_is_in_mixed_precision() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend=EAGER)
    seen: list[torch.dtype] = []
    inner = torch.nn.Linear(4, 4)
    inner.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = accelerator.prepare(inner)
    assert model(torch.randn(2, 4)).dtype == torch.float32
    exact = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert exact is inner
    assert "forward" not in inner.__dict__


# -- states ------------------------------------------------------------------------------------


def saved_state(folder: Path, plugin: TorchDynamoPlugin | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = accelerator.prepare(Stack())
    train(accelerator, model)
    accelerator.save_state(str(folder))
    state = accelerator.get_state_dict(model)
    accelerator.end_training()
    return state


PLUGINS = {
    "eager": None,
    "whole": TorchDynamoPlugin(backend=EAGER),
    "blocks": TorchDynamoPlugin(backend=EAGER, use_regional_compilation=True),
}


@pytest.mark.parametrize(
    ("saver", "loader"), [("whole", "eager"), ("blocks", "whole"), ("eager", "blocks")]
)
def test_a_state_loads_whatever_is_compiled(saver: str, loader: str, tmp_path: Path) -> None:
    state = saved_state(tmp_path / "state", PLUGINS[saver])
    assert list(state) == list(Stack().state_dict())
    accelerator = Accelerator(cpu=True, dynamo_plugin=PLUGINS[loader])
    inner = Stack()
    model = accelerator.prepare(inner)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.load_state(str(tmp_path / "state"))
    assert optimizer.param_groups[0]["lr"] == 0.1
    for name, value in inner.state_dict().items():
        assert torch.equal(value, state[name])


# -- asking for it -----------------------------------------------------------------------------


def test_the_environment_is_the_default_of_what_is_not_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "BACKEND": "EAGER",
        "MODE": "default",
        "USE_FULLGRAPH": "true",
        "USE_DYNAMIC": "0",
        "USE_REGIONAL_COMPILATION": "1",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    environment = Environment.read()
    told = TorchDynamoPlugin("eager", "default", True, False, use_regional_compilation=True)
    assert resolve(Arguments(cpu=True), environment).dynamo == told
    chosen = resolve(Arguments(cpu=True, dynamo_backend="inductor"), environment).dynamo
    assert (chosen.backend, chosen.fullgraph) == ("inductor", True)
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=False)
    kept = resolve(Arguments(cpu=True, dynamo_plugin=plugin), environment).dynamo
    assert (kept.backend, kept.use_regional_compilation) == ("aot_eager", False)
    assert (kept.fullgraph, kept.dynamic) == (True, False)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "indctor")
    with pytest.raises(ConfigError, match=r"backend='indctor'.*'inductor'"):
        resolve(Arguments(cpu=True), Environment.read())
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "maybe")
    with pytest.raises(ConfigError, match="ACCELERATE_DYNAMO_USE_DYNAMIC='maybe'"):
        resolve(Arguments(cpu=True), Environment.read())


def test_a_backend_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TorchDynamoPlugin\.backend='fx2trt': it is one of"):
        Accelerator(cpu=True, dynamo_backend="fx2trt").prepare(Stack())
    arguments = compile_arguments(TorchDynamoPlugin(backend="inductor", mode="max-autotune"))
    assert arguments["mode"] == "max-autotune"
