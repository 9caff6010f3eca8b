"""If residuum misjudges a model's structure, the service refuses to serve: the self-test compares rows with logits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.conformance.architectures import ARCHITECTURES
from bench.conformance.check import check
from bench.conformance.results import Verdict
from bench.conformance.setup import Setup
from svc_common.launcher import start_store
from tests import one_process, warm_start

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("conformance"), pytest.mark.slow]

WRONG_GUESS = "tests.conformance.wrong_guess.WrongGuess"
LEFTOVER, SUM = "exaone4", "llama"
"""An architecture whose second tensor is unused, and one whose second tensor is part of the stream."""


def test_a_wrong_guess_is_not_served(tmp_path):
    store = start_store(tmp_path)
    try:
        store.wait_until_serving(60.0)
        setup = Setup(engine_args={"worker_extension_cls": WRONG_GUESS, **one_process.ENGINE_ARGS})
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(
                pool.map(
                    lambda name: check(ARCHITECTURES[name], setup, store.endpoint, tmp_path / name, warm_start.launch),
                    (LEFTOVER, SUM),
                )
            )
    finally:
        store.stop()
    for outcome in outcomes:
        assert outcome.verdict is Verdict.REFUSED
        assert "resid_post of the last layer does not explain the model's own logits" in outcome.detail
        assert outcome.rows == 0
