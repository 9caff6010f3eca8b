"""The memory bound of a store is the sum in docs/operations/bounds.md; `tests/hostile` compares it with a store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from residuum.v1 import store_pb2
from store_svc.captures.capture_names import CaptureName
from store_svc.memory_bound import _QUEUE, memory_bound
from store_svc.settings import StoreSettings
from store_svc.writing.append import AppendStream
from store_svc.writing.early_rows import ArrivedOpens
from store_svc.writing.write_queue import Append, WorkQueue
from svc_common.security.tokens_file import ANYBODY

ROOT = Path(__file__).resolve().parents[3]
UNITS = {"MiB": 1 << 20, "KiB": 1 << 10}
DEFAULTS = {"max_streams": 256, "max_writers": 128, "max_open_mib": 1024, "max_captures": 1_000_000}


def documented(limits: dict[str, int]) -> float:
    """Add up the lines of the document, in bytes."""
    text = (ROOT / "docs/operations/bounds.md").read_text()
    (block,) = re.findall(r"a store's own memory.*?```text\n(.*?)```", text, re.DOTALL)
    counts = {name.replace("_", "-"): value for name, value in limits.items()}
    counts["all calls"] = limits["max_streams"] + limits["max_writers"] + 32  # "32 short calls", in the table above it
    assert "`max-streams` reads and waits, `max-writers` streams of writers, 32 short calls" in text
    total = 0.0
    for line in block.splitlines():
        term = re.split(r" {3,}", line.removeprefix("+").strip())[0]
        amount, unit, count = re.fullmatch(r"(?:([\d.]+) (MiB|KiB))?(?: × )?(.*)", term).groups()
        total += float(amount or 1) * UNITS[unit or "MiB"] * (counts[count] if count else 1)
    return total


@pytest.mark.parametrize(
    "limits",
    [DEFAULTS, {**DEFAULTS, "max_streams": 1}, {**DEFAULTS, "max_writers": 1}, {**DEFAULTS, "max_captures": 1}],
    ids=["defaults", "one stream", "one writer", "one capture"],
)
def test_the_sum_is_the_documented_one(limits: dict[str, int]) -> None:
    assert memory_bound(**limits) == documented(limits)


def test_a_store_computes_its_bound_from_its_settings() -> None:
    bound = StoreSettings(path=Path("captures")).memory_bound_bytes
    assert bound == memory_bound(**DEFAULTS)
    assert f"{bound / 2**30:.1f} GiB at the defaults" in (ROOT / "docs/operations/sizing.md").read_text()


def test_the_sum_holds_the_chunks_of_a_full_queue() -> None:
    """While the writer writes a transaction, which LMDB copies, the queue fills again."""
    queue = WorkQueue(num_shards=64)
    stream, content = AppendStream(queue, ANYBODY, ArrivedOpens(lambda _: False)), store_pb2.RowLoss()

    def fill() -> None:
        while queue.waiting().num_bytes < queue._max_bytes:
            queue.append(Append(stream, 1, CaptureName("", "a"), content, size=1 << 20))

    fill()
    work = queue.take(0)
    fill()
    assert work
    assert queue.waiting().num_bytes + 2 * sum(item.size for item in work.appends) == _QUEUE
