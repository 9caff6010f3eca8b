"""The benchmark of shipping and the store: its pure functions, and small real runs."""

import json

import numpy as np

from bench.store import compare, latency, scale, search, small
from bench.store.__main__ import main
from bench.store.captures import Shape, differs, random_bytes
from bench.store.compare import CompareJob
from bench.store.latency import LatencyJob, quantile, summary
from bench.store.scale import ScaleJob, spread
from bench.store.search import SearchJob
from bench.store.small import SmallJob
from bench.store.ways import pieces
from inference_svc.shipping.framing import payload_bytes
from residuum.wire.selection import expected_rows

TINY = Shape(layers=3, hidden=16, positions=70)


def test_a_capture_has_the_same_blocks_as_a_workers():
    headers = list(TINY.headers())
    assert [len(header.positions) for header in headers] == [32, 32, 6]
    assert [position for header in headers for position in header.positions] == list(range(70))
    assert sum(map(payload_bytes, headers)) == TINY.num_bytes == 3 * 70 * 16 * 2
    assert TINY.num_rows == 3 * 70


def test_a_sealed_capture_expects_exactly_the_sent_rows():
    prompt = len(TINY.description("a").prompt_token_ids)
    (sequence,) = TINY.seal("a").sequences
    assert expected_rows(prompt, len(sequence.generated_token_ids)) == TINY.positions


def test_rows_are_compared_with_the_ring():
    ring = random_bytes(1 << 16)
    offsets = [0, 4096, 20480]
    values = np.empty((3, 70, 16), dtype=np.uint16)
    for offset, header in zip(offsets, TINY.headers(), strict=True):
        block = ring[offset : offset + payload_bytes(header)].view(np.uint16)
        values[:, list(header.positions)] = block.reshape(3, -1, 16)
    assert not differs(values, ring, offsets)
    values[2, 69, 15] ^= 1
    assert differs(values, ring, offsets)
    assert not np.array_equal(ring[:4096], ring[4096:8192])


def test_pieces_repeat_a_short_source():
    source = np.arange(10, dtype=np.uint8)
    found = list(pieces(source, 25, 4))
    assert np.concatenate(found).tolist() == [*range(10), *range(10), *range(5)]
    assert max(map(len, found)) == 4


def test_quantiles_are_times_that_were_measured():
    times = [float(number) for number in range(1, 101)]
    assert [quantile(times, at) for at in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert summary([0.002, 0.001, 0.004]) == {
        "count": 3, "min": 1.0, "p50": 2.0, "p90": 4.0, "p99": 4.0, "max": 4.0
    }  # fmt: skip


def test_ratios_are_taken_within_a_round():
    rates = {"residuum": [1.0, 4.0, 2.0], "Flight": [2.0, 4.0, 8.0], "stubs": [1.0, 1.0, 1.0]}
    assert compare.ratios(rates) == {"Flight": 0.5, "stubs": 2.0}


def test_slow_rates_keep_four_digits():
    assert compare.rate(123_456_789, 1.0) == 0.1235
    assert compare.rate(20_000, 0.5) == 4e-5


def test_without_flight_there_are_no_flight_bars():
    stubs = [{"stubs": 1.6, "stubs at both ends": 1.7}, {"stubs": 1.4, "stubs at both ends": 1.6}]
    ratios = {"ingest": {**stubs[0], "TCP": 0.3}, "read": {**stubs[1], "TCP": 0.3}}
    assert [(bar.name, bar.passed) for bar in compare.bars({"ratios": ratios})] == [
        ("ingest over stubs", True),
        ("read over stubs", False),
        ("ingest over stubs at both ends", True),
        ("read over stubs at both ends", True),
    ]
    ratios["ingest"]["Flight"] = 0.5
    assert [bar.passed for bar in compare.bars({"ratios": ratios})][:2] == [True, False]
    assert len(compare.bars({"ratios": ratios})) == 6


def test_each_store_has_the_same_number_of_shippers():
    job = ScaleJob(TINY, shippers=(8, 1, 2), stores=(1, 2, 4), shards=(4, 1))
    one = [(1, shards, shippers) for shards in (1, 4) for shippers in (1, 2, 8)]
    assert job.cases() == [*one, (2, 1, 2), (2, 1, 8), (4, 1, 8)]
    assert spread(["a", "b", "c"], 2) == [["a", "c"], ["b"]]


def test_the_best_case_counts():
    cases = [
        {"stores": 1, "shippers": 1, "median": 2.0, "gb_per_second": [2.0]},
        {"stores": 1, "shards": 4, "shippers": 1, "median": 3.0, "gb_per_second": [3.0]},
        {"stores": 2, "shards": 1, "shippers": 2, "median": 5.5, "gb_per_second": [5.5]},
    ]
    (bar,) = scale.bars({"cases": cases})
    assert bar.passed
    (printed,) = scale.show({"cases": cases})
    assert [line.split() for line in printed.splitlines()[1:]] == [
        ["1", "store", "2.00"],
        ["1", "store,", "4", "shards", "3.00"],
        ["2", "stores", "5.50"],
    ]


def test_all_ways_move_the_same_bytes(tmp_path, capsys):
    part = compare.measure(CompareJob(TINY, captures=3, rounds=2, ring_mib=1, max_gib=1), tmp_path)
    for direction in compare.DIRECTIONS:
        rates = part["gb_per_second"][direction]
        assert {"residuum", "stubs", "stubs at both ends", "TCP"} <= set(rates)
        assert all(len(found) == 2 for found in rates.values())
    assert len(compare.bars(part)) >= 2
    assert "residuum" in "\n".join(compare.show(part))


def test_latency_is_measured_on_the_stored_captures(tmp_path):
    job = LatencyJob(TINY, 3 * TINY.num_bytes / (1 << 30), reads=5, follows=2, ring_mib=1)
    part = latency.measure(job, tmp_path)
    assert part["parameters"]["captures"] == 3
    assert (part["read_ms"]["count"], part["first_row_ms"]["count"]) == (5, 2)
    assert 1 <= part["first_read_ms"]["count"] <= 2
    assert all(part[name]["min"] > 0 for name in ("read_ms", "first_read_ms", "first_row_ms"))
    assert "3 captures" in "\n".join(latency.show(part))


def test_the_first_read_of_each_capture_counts():
    reads = [("a", 9.0), ("b", 7.0), ("a", 2.0), ("known", 8.0), ("b", 1.0), ("c", 3.0)]
    assert sorted(latency._firsts(reads, "known")) == [3.0, 7.0, 9.0]


def test_small_captures_are_read_in_each_way(tmp_path):
    part = small.measure(
        SmallJob(Shape(layers=1, hidden=16, positions=33), captures=70, rounds=2, ring_mib=1), tmp_path
    )
    assert set(part["runs"]) == {"one by one", "activations([ids])", "rows(ids)", "one large capture"}
    assert all(len(runs) == 2 for runs in part["runs"].values())
    assert set(part["ratios"]) == {bar.name.split(",")[0] for bar in small.bars(part)}
    assert "captures/s" in "\n".join(small.show(part))


def test_searches_are_measured(tmp_path):
    shape = Shape(layers=2, hidden=64, positions=70)
    part = search.measure(SearchJob(shape, 20 * shape.num_bytes / (1 << 30), rounds=3), tmp_path)
    assert part["parameters"]["captures"] == 20
    scanned = 20 * 70 * 64 * 2 / 1e9
    assert [run["gb"] for run in part["runs"]["cosine"]] == [scanned] * 3
    assert "numpy alone" in "\n".join(search.show(part))
    (bar,) = search.bars(part)
    assert (bar.value, bar.limit, bar.at_most) == (part["gb_per_core_second"]["projection"], 2.0, False)


def test_scale_is_written_with_its_bars(tmp_path):
    file = tmp_path / "x.json"
    main(
        [
            *("--parts", "scale", "--layers", "3", "--hidden", "16", "--captures", "4", "--rounds", "1"),
            *("--shippers", "2", "--stores", "1", "--shards", "3", "--folder", str(tmp_path), "--output", str(file)),
        ]
    )
    result = json.loads(file.read_text())
    assert result["benchmark"] == "bench.store"
    (case,) = result["parts"]["scale"]["cases"]
    assert (case["stores"], case["shards"], case["shippers"], len(case["gb_per_second"])) == (1, 3, 2, 1)
    assert case["held_gb_per_second"] == [case["held_median"]]
    assert case["held_median"] > 0
    assert [bar["name"] for bar in result["parts"]["scale"]["bars"]] == ["best, GB/s committed"]
