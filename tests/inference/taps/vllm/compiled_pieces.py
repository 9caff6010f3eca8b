"""Compiles a small model with taps as vLLM does on a GPU: in pieces, split at attention. Runs in a separate process.

It prints what the taps saw, and how many different pieces were compiled. vLLM's platform for CPUs compiles a model as
a whole, so this goes past it.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from inference_svc.taps import op

LAYERS = 6
WIDTH = 16

_LIBRARY = torch.library.Library("residuum_tests", "FRAGMENT")
_LIBRARY.define("attention(Tensor hidden, Tensor(a!) out) -> ()")


def _attention(hidden: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(hidden.cumsum(0))


_LIBRARY.impl("attention", _attention, "CPU")
_LIBRARY._register_fake("attention", lambda hidden, out: None)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = torch.empty_like(hidden)
        torch.ops.residuum_tests.attention(hidden * self.norm, attended)
        hidden = hidden + torch.tanh(attended)
        op.call(hidden, None, self.number)
        return hidden


@support_torch_compile(dynamic_arg_dims={"hidden": 0})
class Model(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Recorder:
    """Adds the point's number to rows, so that the order of taps and layers shows in all later rows."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def tap(self, hidden: torch.Tensor, residual: torch.Tensor | None, point: int) -> None:
        assert residual is None
        self.seen.append((point, float(hidden.double().sum())))
        hidden.add_(point)


def run() -> dict[str, object]:
    """Return what the taps saw compiled and eager, and how many pieces were different."""
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="inductor"))
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.backend = "inductor"
    compilation.splitting_ops = ["residuum_tests::attention"]
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.compile_sizes = []
    PostGradPassManager.__call__ = lambda self, graph: None  # its passes name kernels for GPUs
    recorder = Recorder()
    op.install([recorder])
    with set_current_vllm_config(config), set_forward_context(None, config), torch.no_grad():
        model = Model(vllm_config=config)
        model(torch.ones(4, WIDTH))
        compiled, recorder.seen = recorder.seen, []
        hidden = torch.ones(4, WIDTH)
        for layer in model.layers:
            hidden = layer(hidden)
    return {
        "layers": LAYERS,
        "compiled": compiled,
        "eager": recorder.seen,
        "pieces": compilation_counter.num_piecewise_capturable_graphs_seen,
        "different": compilation_counter.num_compiled_artifacts_saved,
        "loaded": compilation_counter.num_compiled_artifacts_loaded,
    }


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(run())}\n")
