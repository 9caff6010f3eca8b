"""The order in which the sink of a GPU works. Its copies are tested on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

from inference_svc.taps.gpu.encoder import OUTPUT_BYTES, STAGED_BYTES
from inference_svc.taps.gpu.streamed_sink import StreamedSink, _Work
from svc_common.launcher import ROOT


class Sink(StreamedSink):
    """A sink that notes what it would do."""

    def __init__(self):
        self.done = []
        self._stream = SimpleNamespace(wait_stream=lambda stream: self.done.append(f"after {stream}"))
        self._followed = SimpleNamespace(
            finish=lambda capture: f"rest of {capture}", forget=lambda capture: self.done.append(f"forget {capture}")
        )

    def _start(self, block):
        self.done.append(f"start {block}")

    def _start_batch(self, batch, block=None):
        self.done.append(f"start {batch}")
        return True

    def _finish(self):
        self.done.append("wait")


def test_captures_that_end_together_are_waited_for_once_and_then_forgotten():
    sink = Sink()
    sink._do([_Work(["1", "2"], None, "model"), _Work([], "a", "model"), _Work([], "b", "model")])
    assert sink.done == [
        "after model", "start 1", "start 2", "start rest of a", "start rest of b", "wait", "forget a", "forget b",
    ]  # fmt: skip


def test_the_page_says_how_much_memory_the_buffers_take():
    """Each sink has two, one of which is larger if captures may keep features."""
    page = (ROOT / "docs/operations/sizing.md").read_text()
    plain, with_saes = 2 * STAGED_BYTES >> 20, STAGED_BYTES + OUTPUT_BYTES >> 20
    assert page.count(f"{plain} MiB for encoded rows, or {with_saes} MiB with `--sae-mib`") == 1
    assert page.count(f"{plain} MiB of buffers for encoded rows, or {with_saes} MiB with `--sae-mib`") == 1
