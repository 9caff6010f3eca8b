import json
from pathlib import Path

import pytest

from bench.machine import ROOT, Machine
from bench.readme import BEGIN, END, README, RESULTS, NoMarksError, figures, main, spliced
from bench.suite.report import render
from tests.bench.test_suite import RESULT


def test_the_figures_in_the_readme_are_those_of_the_results():
    main(["--check"])


def test_every_committed_report_is_that_of_its_result():
    for file in RESULTS.glob("*/suite.json"):
        plots = [plot.name for plot in file.parent.glob("*.png")]
        assert file.with_name("report.md").read_text() == render(json.loads(file.read_text()), plots), file


def test_only_what_is_between_the_marks_is_replaced():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = spliced(page, "new")
    assert new == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert spliced(new, "new") == new


@pytest.mark.parametrize("page", ["", f"{BEGIN}", f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_marks_is_refused(page):
    with pytest.raises(NoMarksError):
        spliced(page, "new")


def test_figures_that_are_not_fresh_are_told(monkeypatch, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(README.read_text().replace(END, f"typed by hand\n{END}"))
    monkeypatch.setattr("bench.readme.README", page)
    with pytest.raises(SystemExit, match=r"run `python -m bench\.readme`"):
        main(["--check"])
    main([])
    assert page.read_text() == README.read_text()


def test_a_suite_has_its_table_with_what_could_not_run(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "suite.json").write_text(json.dumps(RESULT))
    text = figures(tmp_path)
    assert "| stock vLLM | 1.000 s |" in text
    assert "| **residuum** | 1.150 s | +15.0 % | 0.300 s | 1.00 × |" in text
    assert "| transformers | 4.500 s | +350.0 % | 0.900 s | 3.72 × |" in text
    assert "`bench.suite` at abcdef0" in text
    assert "2 cores of a CPU with vLLM 0.32.0 ([report](bench/results/cpu/report.md))" in " ".join(text.split())
    assert "nnsight" in text


def test_no_results_are_no_figures(tmp_path):
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
def test_results_lie_in_a_folder_for_the_kind_of_machine(gpu, count, kind):
    assert Machine("a", 2, 8.0, 0.0, gpu, count).kind == kind


def test_ci_checks_the_figures():
    assert "bench.readme --check" in Path(ROOT, ".ci", "run").read_text()
