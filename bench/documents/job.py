"""The task of the process of another way, and the interface of the ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from bench.capture.workload import Mode, Runner, Workload
from bench.isolated.configuration import Peer as PeerName
from bench.peers.child import PeerJob
from bench.service.load import Load


class Way(str, Enum):
    """Other systems that write the rows of documents to files."""

    LOOP = "transformers loop"
    """A loop over batches with forward hooks."""
    SAELENS = "SAELens"
    """CacheActivationsRunner of SAELens around the same transformers model, once for each layer."""
    LENS = "vllm-lens"
    """vllm-lens, a plugin for vLLM."""


@dataclass(frozen=True)
class DocumentsJob:
    """The task of a process, which it gets as JSON."""

    way: Way
    model: str
    vocab_size: int
    documents: int
    prefill: int
    """Tokens of each document."""
    layers: tuple[int, ...]
    rounds: int
    folder: str
    """A folder for the files that it writes and for its sockets."""
    batch: int
    """Documents in a batch of transformers."""
    concurrency: int
    """Documents that vLLM runs at once. Twice as many are sent."""
    max_num_batched_tokens: int
    eager: bool
    reference: str = ""
    """A safetensors file with the rows of the last round's first document by layer, from residuum. Empty: the models
    differ in their random weights, so no rows are compared."""
    engine_args: dict[str, Any] = field(default_factory=dict)

    def prompts(self, number: int) -> list[list[int]]:
        """Return the documents of a round: the first ones of those that residuum has."""
        return load_of(number, self.documents, self.prefill, self.vocab_size).prompts()

    def peer(self) -> PeerJob:
        """Return the task for the helpers of `bench.peers`."""
        workload = Workload(
            self.model, batch_size=self.concurrency, prefill=self.prefill, decode=1, eager=self.eager,
            max_num_batched_tokens=self.max_num_batched_tokens, kv_cache_gib=0.0, layers=self.layers,
            engine_args=self.engine_args,
        )  # fmt: skip
        return PeerJob(PeerName.VLLM_LENS, Mode.CUSTOM, 0, Runner.DEFAULT, workload, self.folder)


@dataclass(frozen=True)
class Written:
    """The files of a round, as `DocumentsWay.read` finds them."""

    rows: int
    """The number of rows at each layer."""
    row_bytes: int
    """The bytes of the rows of all layers."""
    token_ids: Sequence[Sequence[int]]
    """The tokens of each document."""
    sample: dict[int, Any]
    """By layer, the rows of the first document; tensors [positions, width]."""


class DocumentsWay(Protocol):
    """A way to write the rows of documents to files."""

    async def extract(self, prompts: Sequence[Sequence[int]], folder: Path) -> None:
        """Write the rows of all tokens at the job's layers to an empty folder. Returns when the files are written."""

    def read(self, folder: Path) -> Written:
        """Read what the files of a round have."""

    def shutdown(self) -> None:
        """Stop its processes."""


def load_of(number: int, documents: int, prefill: int, vocab_size: int, streams: int = 1) -> Load:
    """Return the documents of a round, as a load of the engine alone. Round -1 is a warm-up."""
    return Load(f"round{number}", streams, documents, prefill, 1, vocab_size)
