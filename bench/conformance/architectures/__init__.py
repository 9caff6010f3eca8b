"""The architectures: for each, the configuration of a tiny model with all of its special features.

All have four layers, head size 32 if they allow it (the smallest for vLLM's attention on a CPU), windows and chunks
shorter than the prompts, and eight query heads with four key heads, so that two ranks can share them.
"""

from bench.conformance.architectures.architecture import HIDDEN, LAYERS, MAX_LENGTH, VOCABULARY, Architecture
from bench.conformance.architectures.dense import DENSE
from bench.conformance.architectures.hybrid import HYBRIDS
from bench.conformance.architectures.parallel import PARALLEL
from bench.conformance.architectures.routed import ROUTED

ARCHITECTURES = {architecture.name: architecture for architecture in (*DENSE, *PARALLEL, *ROUTED, *HYBRIDS)}
"""All architectures by name, in the order of the runs."""

__all__ = ["ARCHITECTURES", "HIDDEN", "LAYERS", "MAX_LENGTH", "VOCABULARY", "Architecture"]
