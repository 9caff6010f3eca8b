"""The verdicts of the conformance benchmark, for made-up rows and logs."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.conformance.__main__ import cases_of, parse, rest_of, setup_of
from bench.conformance.architectures import ARCHITECTURES
from bench.conformance.check import _told_when_ready, to_json
from bench.conformance.compare import _Answer
from bench.conformance.models import make_model
from bench.conformance.page import tables
from bench.conformance.reference import ALL_SITES
from bench.conformance.results import Bounds, Comparison, Outcome, Verdict, failure_of, sites_refused
from bench.conformance.workload import make_changed_request
from bench.readme import MODELS

EXPECTED = np.random.default_rng(0).standard_normal((3, 5, 16)).astype(np.float32)
ALL = np.ones((3, 5), dtype=bool)
BOUNDS = Bounds.of("float32")


def compare(got: np.ndarray, present: np.ndarray = ALL, state: str = "complete") -> Comparison:
    comparison = Comparison()
    comparison.states[state] += 1
    comparison.see_layers(EXPECTED)
    comparison.add(got, present, EXPECTED)
    return comparison


def test_equal_rows_have_no_fault() -> None:
    comparison = compare(EXPECTED)
    assert comparison.faults(BOUNDS) == []
    assert (comparison.rows, comparison.missing, comparison.max_error) == (15, 0, 0.0)


@pytest.mark.parametrize(
    ("got", "fault"),
    [
        (EXPECTED[::-1], "10 of 15 rows"),
        (np.roll(EXPECTED, 1, axis=1), "15 of 15 rows"),
        (EXPECTED * np.float32(1.001), "15 of 15 rows"),
        (np.where(np.arange(5)[None, :, None] == 2, np.nan, EXPECTED), "3 of 15 rows"),
    ],
    ids=["other layers", "other positions", "another length", "not numbers"],
)
def test_wrong_rows_have_a_fault(got: np.ndarray, fault: str) -> None:
    assert any(fault in found for found in compare(got.astype(np.float32)).faults(BOUNDS))


def test_rows_that_do_not_explain_the_log_probabilities_have_a_fault() -> None:
    comparison = compare(EXPECTED)
    comparison.see_logprobs(np.float32([-1.0, -2.0]), np.float32([-1.0, -2.5]))
    (fault,) = comparison.faults(BOUNDS)
    assert "differ by 0.5" in fault


def test_rows_that_are_wrong_as_the_model_is_are_told_apart() -> None:
    comparison = compare(EXPECTED[::-1])
    comparison.see_logprobs(np.float32([-1.0]), np.float32([-1.0]))
    assert "follow from the captured rows" in comparison.faults(BOUNDS)[-1]
    comparison.see_logprobs(np.float32([-1.0]), np.float32([np.nan]))
    assert "follow from the captured rows: they differ by nan" in comparison.faults(BOUNDS)[-1]


def test_a_short_part_is_compared_at_the_scale_of_the_stream_in_16_bits() -> None:
    stream = 100 * EXPECTED
    got = EXPECTED + np.float32(0.1) * stream[:, ::-1]
    comparison = Comparison()
    comparison.states["complete"] += 1
    comparison.see_layers(EXPECTED)
    comparison.add(got, ALL, EXPECTED, stream)
    assert 0.05 < comparison.max_error < 0.2
    assert compare(got).max_error > 5
    assert Bounds.of("bfloat16").of_stream
    assert Bounds.of("float32", 1e-2).of_stream, "TF32"
    assert not Bounds.of("float32").of_stream


def test_rows_with_other_bits_in_a_batch_are_counted_and_are_a_fault_in_the_batch_invariant_mode() -> None:
    together = EXPECTED.copy()
    together[1, 2, 3] = np.nextafter(together[1, 2, 3], np.float32(9))
    together[2, 4] = -0.0
    alone = together.copy()
    alone[1, 2, 3], alone[2, 4] = EXPECTED[1, 2, 3], 0.0
    comparison = compare(EXPECTED)
    points = ["q.0", "q.1", "q.2"]
    comparison.see_alone(EXPECTED[:, :3], EXPECTED[:, :3], points)
    strict = replace(BOUNDS, same_bits=True)
    assert comparison.faults(strict) == []
    comparison.see_alone(alone, together, points)
    assert (comparison.rows_alone, comparison.other_bits) == (24, 2)
    assert comparison.other_places == {"q.1": 1, "q.2": 1}
    comparison.see_alone(EXPECTED, EXPECTED[:, :4], points)
    assert comparison.faults(strict) == ["5 of 39 rows have other bits in a batch than alone"]
    assert comparison.faults(BOUNDS) == []


def test_absent_rows_count_as_missing_and_are_not_compared() -> None:
    present = ALL.copy()
    present[1, 2:4] = False
    comparison = compare(np.where(present[..., None], EXPECTED, np.nan), present)
    assert (comparison.rows, comparison.missing) == (13, 2)
    assert comparison.faults(BOUNDS) == ["2 rows are missing"]


def test_positions_without_rows_are_missing_whatever_the_manifest_says() -> None:
    comparison = compare(EXPECTED[:, :3], ALL[:, :3])
    assert comparison.missing == 6
    assert comparison.faults(BOUNDS) == ["6 rows are missing"]


def test_a_capture_that_is_not_complete_is_a_fault() -> None:
    assert compare(EXPECTED, state="incomplete").faults(BOUNDS) == ["captures ended as {'incomplete': 1}"]


def test_rows_of_a_part_that_a_layer_lacks_must_be_zero() -> None:
    nothing = np.zeros_like(EXPECTED)
    comparison = Comparison()
    comparison.states["complete"] += 1
    comparison.see_layers(EXPECTED)
    comparison.add(nothing, ALL, nothing)
    assert comparison.faults(BOUNDS) == []
    comparison.add(EXPECTED, ALL, nothing)
    assert comparison.faults(BOUNDS)


def test_layers_that_hardly_differ_are_a_fault() -> None:
    comparison = Comparison()
    comparison.states["complete"] += 1
    alike = np.broadcast_to(EXPECTED[:1], EXPECTED.shape)
    comparison.see_layers(alike)
    comparison.add(alike, ALL, alike)
    assert "differ by only 0, too little" in comparison.faults(BOUNDS)[0]


def test_a_refusal_is_distinguished_from_other_failures() -> None:
    refused = '{"event": "x", "exception": "Trace\\n  File\\nCannotTapError: T5 cannot be tapped: found none.\\n"}'
    assert failure_of(f'ValueError: noise\n{refused}\n{{"cause": "RuntimeError: engine failed"}}') == (
        Verdict.REFUSED,
        "CannotTapError: T5 cannot be tapped: found none.",
    )
    verdict, detail = failure_of(refused, expected="scales or merges")
    assert verdict is Verdict.WRONG
    assert "'scales or merges'" in detail
    assert failure_of(refused, expected="found none")[0] is Verdict.REFUSED
    assert failure_of("x\nMemoryError: no room\nRuntimeError: so it failed") == (
        Verdict.FAILED,
        "MemoryError: no room",
    )
    assert failure_of("killed") == (Verdict.FAILED, "its log contains no error")


def test_sites_that_are_refused_by_name_are_left_out_next() -> None:
    options = parse(["--architectures=gpt2", "--sites=resid_post,q,k,v,z"])
    (case,) = cases_of(options, setup_of(options))
    told = "CannotTapError: q, k and v cannot be captured: looked in X for modules of the attention, found none."
    rest = rest_of(case, Outcome("gpt2", Verdict.REFUSED, told))
    assert (rest.name, rest.setup.sites) == ("gpt2-rest", ("resid_post", "z"))
    again = rest_of(rest, Outcome("gpt2", Verdict.REFUSED, "CannotTapError: z cannot be captured: none."))
    assert (again.name, again.setup.sites) == ("gpt2-rest2", ("resid_post",)), "each has a folder of its own"
    assert rest_of(rest, Outcome("gpt2", Verdict.EXACT)) is None
    for detail in (told, "CannotTapError: T5 cannot be tapped: q and k cannot be captured", "SelfTestError: no rows"):
        assert rest_of(rest, Outcome("gpt2", Verdict.REFUSED, detail)) is None
    assert sites_refused("CannotTapError: resid_mid cannot be captured with more") == {"resid_mid"}


def test_the_model_runner_is_read_from_the_services_log() -> None:
    ready = {"event": "serving", "capturing_ranks": 2, "model_runner": "v2"}
    log = f'vLLM is loading\n3\n{{"event": "listening"}}\n{json.dumps(ready)}\n{{"event": "stopped"}}'
    assert _told_when_ready(log) == ready
    assert _told_when_ready("3\nValueError: {no JSON}") == {}
    assert to_json(Outcome("llama", Verdict.EXACT, model_runner="v2"))["model_runner"] == "v2"


def test_surplus_rows_are_a_fault() -> None:
    rows = np.random.default_rng(0).standard_normal((3, 13, 8)).astype(np.float32)
    comparison = Comparison()
    comparison.states["complete"] += 1
    comparison.see_layers(rows[:, :10])
    comparison.add(rows, np.ones((3, 13), dtype=bool), rows[:, :10])
    assert comparison.faults(Bounds.of("float32")) == ["9 rows came that were not requested"]


def test_the_command_line_defines_the_setup() -> None:
    engine_args = '--engine-args={"disable_custom_all_reduce": true}'
    sites = "--sites=resid_post,mlp_out"
    which = "--architectures=gpt2,opt"
    options = parse([which, "--layouts=1x1,2x3,1x1x2", "--compiled", "--dtype=bfloat16", sites, engine_args])
    cases = cases_of(options, setup_of(options))
    assert [case.name for case in cases] == ["gpt2", "gpt2-2x3", "gpt2-1x1x2", "opt", "opt-2x3", "opt-1x1x2"]
    with_replicas = '--engine-args={"disable_custom_all_reduce": true, "data_parallel_size": 2}'
    assert with_replicas in cases[2].setup.arguments()
    flags = cases[4].setup.arguments()
    assert engine_args in flags
    assert {"--dtype=bfloat16", "--capture-sites=resid_post,mlp_out"} <= set(flags)
    assert {"--tensor-parallel-size=2", "--pipeline-parallel-size=3"} <= set(flags)
    assert "--enforce-eager" not in flags
    assert setup_of(parse(["--changes"])).changes
    for bad in (
        ["--changes", "--quantization=awq"],
        ["--architectures", "gpt5"],
        ["--layouts", "2"],
        ["--layouts", "2x0"],
        ["--layouts", "1x1x1x1"],
    ):
        with pytest.raises(SystemExit):
            parse(bad)


def test_the_page_of_models_lists_the_sites_of_each_architecture() -> None:
    table = MODELS.read_text().partition("| architectures |")[2]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    told = {name: "refused" in row for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert told == {name: bool(architecture.refused) for name, architecture in ARCHITECTURES.items()}


def outcome(name: str, verdict: str = "exact", **more: object) -> dict[str, object]:
    exact = verdict != "refused"
    return {
        "name": name, "verdict": verdict, "detail": "", "layout": [1, 1] if exact else [0, 0], "rows": 100 * exact,
        "missing": 0, "max_error": 0.01 * exact, "model_runner": "v2" if exact else "",
    } | more  # fmt: skip


def test_the_matrix_has_the_ways_to_serve_most_models_on_one_device() -> None:
    machine = {"gpu": "NVIDIA H200"}
    origin = {"machine": machine, "versions": {"vllm": "0.32.0"}, "revision": {"commit": "0123456789"}}
    setup = {"dtype": "bfloat16", "eager": True, "sites": ["resid_post", "resid_pre", "attn_out", "mlp_out"]}
    models = [
        outcome("llama", other_experts=3),
        outcome("llama", layout=[2, 1], max_error=0.05),
        outcome("mixtral", "WRONG", missing=3),
        outcome("granite", "refused", detail="CannotTapError: merges"),
        outcome("granite", sites=["resid_post", "resid_pre"], site_layers={"resid_pre": [1]}),
        outcome("mamba", "refused", detail="by vLLM, without a GPU: x"),
        outcome("gemma3n", "refused", detail="CannotTapError: four streams"),
        outcome("gemma4", "FAILED", detail="no module named x", rows=0),
        outcome("mixtral", layout=[2, 1], sites=["resid_post"]),
        outcome("qwen3_moe", "refused", layout=[0, 0], detail="CannotTapError: merges"),
        outcome("qwen3_moe", layout=[2, 1], sites=["resid_post"]),
    ]
    text = tables([{**origin, "setup": setup, "architectures": models}])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    label = "H200, vLLM 0.32.0, bfloat16, runner V2"
    assert cells[0] == ["architecture", label]
    assert dict(cells[2:9]) == {
        "`llama`": "exact",
        "`mixtral`": "**not exact**",
        "`qwen3_moe`": "",
        "`granite`": "without `attn_out`, `mlp_out`; in some layers: `resid_pre`",
        "`mamba`": "needs a GPU",
        "`gemma3n`": "refused",
        "`gemma4`": "failed",
    }
    others = "`llama`, `mixtral`, `qwen3_moe` (without `resid_pre`, `attn_out`, `mlp_out`)"
    sites = "`resid_pre`, `attn_out`, `mlp_out`, `resid_post`"
    assert [f"{label}, eager", "0123456", sites, "3", "300", "3", "`mixtral`", "1.0e-02", "3"] in cells
    parallel = f"{label}, tensor parallel 2, eager"
    assert [parallel, "0123456", sites, others, "300", "0", "none", "5.0e-02", "0"] in cells
    assert "Quantised" not in text


def test_the_page_tells_replicas_and_expert_parallelism_apart() -> None:
    setup = {"dtype": "bfloat16", "eager": True, "sites": ["resid_post"]}
    origin = {"machine": {"gpu": None}, "versions": {"vllm": "0.32.0"}, "revision": {"commit": "0123456789"}}
    partial = outcome("lfm2", replicas=2, sites=["q"], site_layers={"q": [1]})
    replicas = {**origin, "setup": setup, "architectures": [outcome("llama", replicas=2), partial]}
    experts = {**origin, "setup": {**setup, "engine_args": {"enable_expert_parallel": True}}}
    text = tables([replicas, {**experts, "architectures": [outcome("mixtral", layout=[2, 1])]}])
    label = "CPU, vLLM 0.32.0, bfloat16, runner V2"
    assert (
        f"| {label}, data parallel 2, eager | 0123456 | `resid_post`, `q` | `llama`, `lfm2` (in some layers: `q`) |"
        in text
    )
    assert f"| {label}, tensor parallel 2, expert parallel, eager | 0123456 | `resid_post` | `mixtral` |" in text


def test_most_sites_are_named_by_those_that_are_left_out() -> None:
    origin = {"machine": {"gpu": None}, "versions": {"vllm": "0.32.0"}, "revision": {"commit": "0123456789"}}
    for sites, words in ((ALL_SITES, "all"), (ALL_SITES[1:], f"all but `{ALL_SITES[0]}`")):
        setup = {"dtype": "bfloat16", "eager": True, "sites": list(sites)}
        text = tables([{**origin, "setup": setup, "architectures": [outcome("llama", sites=list(sites))]}])
        assert f", eager | 0123456 | {words} | 1 |" in text


def test_quantised_weights_have_a_table_of_their_own() -> None:
    origin = {"machine": {"gpu": None}, "versions": {"vllm": "0.32.0"}, "revision": {"commit": "0123456789"}}
    models = [
        outcome("llama", quantization="int8"),
        outcome("llama", "WRONG", quantization="awq"),
        outcome("llama", "refused", quantization="fp8-static", detail="by vLLM, without a GPU: x"),
    ]
    setup = {"dtype": "bfloat16", "eager": True, "sites": ["resid_post"]}
    text = tables([{**origin, "setup": setup, "architectures": models}])
    assert "| int8, `llama` | CPU, vLLM 0.32.0, bfloat16, runner V2 | 100 | 0 | 1.0e-02 |" in text
    assert "| awq, `llama` | CPU, vLLM 0.32.0, bfloat16, runner V2 | 100 | 0 | **not exact:** 1.0e-02 |" in text
    assert "| fp8-static, `llama` | CPU, vLLM 0.32.0, bfloat16, runner V2 | needs a GPU |  |  |" in text
    assert "| `llama` |" not in text


def test_rows_alone_and_in_a_batch_have_a_table_of_their_own() -> None:
    origin = {"machine": {"gpu": None}, "versions": {"vllm": "0.32.0"}, "revision": {"commit": "0123456789"}}
    setup = {"dtype": "bfloat16", "eager": True, "sites": ["resid_post"], "alone": True}
    results = [
        {
            **origin,
            "setup": {**setup, "batch_invariant": invariant, "head_size": 128 if invariant else 0},
            "architectures": [
                outcome("llama", rows_alone=1000, other_bits=bits, sites=["resid_post"]),
                outcome("gemma2", rows_alone=500, other_bits=0, sites=["resid_post"]),
                outcome("mamba", "refused"),
            ],
        }
        for invariant, bits in ((False, 7), (True, 0))
    ]
    text = tables(results)
    label = "CPU, vLLM 0.32.0, bfloat16, runner V2 | 0123456"
    assert f"| {label} | no | 32 | `llama` (7), `gemma2` | `resid_post` | 1,500 | 7 |" in text
    assert f"| {label} | yes | 128 | `llama`, `gemma2` | `resid_post` | 1,500 | 0 |" in text
    assert "| `llama` |" not in text, "the run is no column of the matrix"


def test_the_head_size_is_that_of_the_models_that_are_made(tmp_path: Path) -> None:
    options = parse(["--architectures", "llama", "--head-size", "128", "--output", str(tmp_path / "x.json")])
    (case,) = cases_of(options, setup_of(options))
    assert case.setup.head_size == 128
    config = json.loads((make_model(case.architecture, tmp_path) / "config.json").read_text())
    assert config["head_dim"] == 128


def test_a_change_of_steering_after_the_last_row_is_a_fault() -> None:
    comparison = compare(EXPECTED)
    comparison.changed_rows = 7
    assert comparison.faults(BOUNDS) == []
    comparison.changed_rows = 0
    assert comparison.faults(BOUNDS) == ["the steering changed after the last row"]


def test_only_one_end_is_right_after_a_worker_was_killed() -> None:
    comparison = compare(EXPECTED)
    comparison.ends_killed = Counter({"incomplete: ENGINE_DIED": 6})
    assert comparison.faults(BOUNDS) == []
    comparison.ends_killed = Counter()
    assert comparison.faults(BOUNDS) == ["no request was running when the worker was killed"]
    for end in ("complete: ", "incomplete: SHUTDOWN", "open: "):
        comparison.ends_killed = Counter({"incomplete: ENGINE_DIED": 5, end: 1})
        (fault,) = comparison.faults(BOUNDS)
        assert f"'{end}': 1" in fault


def test_captures_of_killed_engines_have_a_table_of_their_own() -> None:
    origin = {"machine": {"gpu": None}, "versions": {"vllm": "0.32.0"}, "revision": {"commit": "0123456789"}}
    setup = {"dtype": "bfloat16", "eager": True, "sites": ["resid_post"]}
    ends = [{"incomplete: ENGINE_DIED": 6}, {"incomplete: ENGINE_DIED": 4, "complete: ": 1}, None]
    models = [outcome(name, ends_killed=end) for name, end in zip(("llama", "qwen2", "gemma2"), ends, strict=True)]
    text = tables([{**origin, "setup": setup, "architectures": models}])
    assert "| CPU, vLLM 0.32.0, bfloat16, runner V2 | 11 | `incomplete: ENGINE_DIED`, `complete: ` |" in text


def test_the_reference_changes_the_steering_at_the_announced_position() -> None:
    request = make_changed_request()
    (first, push), (later, other) = (*request.pushes.items(), *request.later.items())
    answer = _Answer(request, None, (), None, None, changed_at=3)
    rows = torch.zeros(5, len(push))
    changed = {place: change(rows).numpy() for place, change in answer.changes.items()}
    assert [bool(row.any()) for row in changed[first]] == [True] * 3 + [False] * 2
    np.testing.assert_array_equal(changed[later], np.stack([0 * other] * 3 + [other] * 2))
    assert not rows.any()


def test_the_mode_of_vllm_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, invariant in (("1", True), ("0", False)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        setup = setup_of(parse(["--alone"]))
        assert (setup.alone, setup.batch_invariant) == (True, invariant)
        assert setup.bounds(ARCHITECTURES["llama"]).same_bits == invariant
    with pytest.raises(SystemExit):
        parse(["--alone", "--quantization=int8"])


def test_only_the_sites_that_a_model_lacks_are_refused() -> None:
    granite, gemma3n = ARCHITECTURES["granite"], ARCHITECTURES["gemma3n"]
    assert granite.refusal(["resid_post", "attn_out"]) == granite.refused
    assert granite.refusal(["resid_post", "resid_pre"]) == ""
    assert gemma3n.refusal(["resid_post"]) == gemma3n.refused
    for architecture in ARCHITECTURES.values():
        assert architecture.refused or (architecture.attention and architecture.mlp), architecture.name


def test_the_page_lists_the_sites_of_each_architecture():
    def outcome(name, verdict, sites, **more):
        return {"name": name, "verdict": verdict, "sites": sites, "detail": "", "rows": 1, "missing": 0, **more}

    def result(*outcomes):
        shared = {"layout": (1, 1), "max_error": 0.0}
        return {
            "machine": {"gpu": ""},
            "versions": {"vllm": "0.32.0"},
            "revision": {"commit": "a" * 40, "changed": []},
            "setup": {"dtype": "float32", "eager": True, "sites": []},
            "architectures": [{**shared, **outcome} for outcome in outcomes],
        }

    page = tables(
        [
            result(
                outcome("llama", "exact", ["resid_post", "q"]),
                outcome("qwen2", "refused", ["resid_post", "q"]),
                outcome("qwen2", "exact", ["resid_post"]),
                outcome("gemma3n", "refused", ["resid_post"]),
            ),
            result(outcome("lfm2", "exact", ["z"], site_layers={"z": [1]}), outcome("opt", "WRONG", ["z"])),
        ]
    )
    lines = page.split("Sites of each architecture")[1].splitlines()
    heads = [cell.strip(" `") for cell in lines[2].split("|")]
    found = {}
    for line in lines[4:]:
        cells = [cell.strip(" `") for cell in line.split("|")]
        if len(cells) == len(heads):
            found[cells[1]] = {head: cell for head, cell in zip(heads[2:], cells[2:], strict=True) if cell}
    assert found == {
        "llama": {"resid_post": "yes", "q": "yes"}, "qwen2": {"resid_post": "yes"}, "lfm2": {"z": "some layers"}
    }  # fmt: skip
