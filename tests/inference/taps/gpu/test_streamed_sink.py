"""The order in which the sink of a GPU works. Its copies are tested on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

from inference_svc.taps.gpu.streamed_sink import StreamedSink, _Work


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
