"""Where the time of a trace goes: the device's, or a gap in which it waits."""

import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.isolated.trace import NoKernelsError, main, merged, shared, timeline


def event(start, length, stream, cat="kernel"):
    return {"cat": cat, "ts": start, "dur": length, "args": {"stream": stream}}


MODEL, COPIES = 7, 29
EVENTS = [
    *(event(start, 10.0, MODEL) for start in (0.0, 10.0, 25.0)),
    event(1035.0, 10.0, MODEL, "gpu_memcpy"),
    event(500.0, 200.0, COPIES),
    event(600.0, 235.0, 30, "gpu_memset"),
    {"cat": "cpu_op", "ts": 0.0, "dur": 9e9},
    {"ph": "M"},
]


def test_the_streams_of_a_trace_are_told_apart():
    found = timeline(EVENTS)
    assert found.busy == 40.0
    assert found.gaps == ((20.0, 25.0), (35.0, 1035.0))
    assert found.long_gaps == [(35.0, 1035.0)]
    assert found.others == ((500.0, 835.0),)


def test_the_table_has_milliseconds(tmp_path, capsys):
    (tmp_path / "idle").mkdir()
    with gzip.open(tmp_path / "idle" / "rank0.json.gz", "wt") as file:
        json.dump({"traceEvents": [*EVENTS, event(1045.0, 960.0, MODEL)]}, file)
    main([str(tmp_path / "idle")])
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["idle/rank0", "1.0", "1.0", "1.0", "0.3", "0.3", "1"]


def test_a_trace_without_a_gpu_is_refused():
    with pytest.raises(NoKernelsError, match="a machine with a GPU"):
        timeline([{"cat": "cpu_op", "ts": 0.0, "dur": 1.0}])


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"has no traces. Make one with bench\.isolated --profile"):
        main([str(tmp_path)])


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda span: (span[0], span[0] + span[1])))


@given(SPANS, SPANS)
def test_spans_are_joined_and_compared_as_sets_of_points(one, other):
    def points(spans):
        return {point for start, end in spans for point in range(start, end)}

    mine, yours = merged(one), merged(other)
    assert all(before[1] < after[0] for before, after in pairwise(mine))
    assert points(mine) == points(one)
    assert sum(end - start for start, end in mine) == len(points(one))
    assert shared(mine, yours) == len(points(one) & points(other))
