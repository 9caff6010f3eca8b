"""Rows of other experts are explained at near ties only, and no wrong row is. The models are real ones of transformers.

A second run of the same model, whose router is pushed to other experts, stands for vLLM.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from bench.conformance.architectures import ARCHITECTURES
from bench.conformance.models import make_model
from bench.conformance.reference import Reference
from bench.conformance.results import Bounds, Comparison, errors_of
from bench.conformance.routing import Routing
from bench.conformance.workload import make_requests

BOUNDS = Bounds.of("bfloat16")
TOKENS = make_requests()[-1].prompt[:32]
ROUTERS = ["mixtral", "deepseek_v3", "phimoe"]
"""One choice of experts, a choice of groups before it, and a threshold for their weights."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads of torch wait for each other if tests run in several processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=ROUTERS)
def model(request, tmp_path_factory):
    architecture = ARCHITECTURES[request.param]
    return architecture, make_model(architecture, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def reference(model):
    return Reference(*model)


def pushed(reference, least_gap):
    """Return the rows if a router chooses otherwise for one position: the narrowest tie that changes its row clearly.

    Args:
        reference: The model.
        least_gap: The least gap of the tie.
    """
    own = Routing()
    expected = reference.rows(TOKENS, routing=own)
    options = [
        (gap, place, position, row)
        for place, decision in own.decisions.items()
        for position in range(len(TOKENS))
        for gap, row in decision.alternatives(position, max_gap=1.0)
        if gap >= least_gap
    ]
    for gap, (layer, number), position, row in sorted(options, key=lambda option: option[:3]):
        routing = Routing()
        routing.force(layer, position, {(layer, number): row})
        rows = reference.rows(TOKENS, routing=routing)
        if errors_of(rows["resid_post"], expected["resid_post"]).max() > 2 * BOUNDS.max_error:
            return rows, gap
    raise AssertionError("no expert changes a row clearly")


def compared(reference, got):
    """Return the comparison of rows, and how many differ if other experts are not considered."""
    comparison = Comparison()
    comparison.states["complete"] += 1
    expected = comparison.explain(partial(reference.rows, TOKENS, None), got, BOUNDS)
    comparison.see_layers(expected["resid_post"])
    for site, rows in got.items():
        there = ~np.isnan(rows).all(axis=(1, 2))  # some layers may have no neurons
        present = np.ones(rows[there].shape[:2], dtype=bool)
        comparison.add(rows[there], present, expected[site][there], expected["resid_pre"][there])
    return comparison


def test_near_ties_explain_all_rows_in_16_bits(model, reference):
    """Transformers itself sends rows to other experts in 16 bits."""
    comparison = compared(reference, Reference(*model, torch.bfloat16).rows(TOKENS))
    assert comparison.faults(BOUNDS) == []
    assert comparison.explained.rows > 0


def test_an_expert_at_a_near_tie_explains_a_row(reference):
    got, gap = pushed(reference, 0.0)
    assert gap < 0.05
    assert compared(reference, got).faults(BOUNDS) == []


@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3"], indirect=True)
def test_an_expert_far_from_a_tie_does_not(reference):
    """PhiMoE computes the same row if its second expert is chosen first, so there a near tie may explain it."""
    got, _ = pushed(reference, 2 * BOUNDS.max_error)
    assert compared(reference, got).faults(BOUNDS) != []


def test_the_row_of_another_position_is_not_explained(reference):
    got = {site: rows.copy() for site, rows in reference.rows(TOKENS).items()}
    got["resid_post"][2, 17] = got["resid_post"][2, 18]
    fault = compared(reference, got).faults(BOUNDS)[0]
    count = sum(int((~np.isnan(rows).all(axis=-1)).sum()) for rows in got.values())
    assert fault.startswith(f"1 of {count} rows")
