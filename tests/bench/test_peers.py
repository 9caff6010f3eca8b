import numpy as np
import pytest
import torch

from bench.capture.workload import Mode, Runner, Workload
from bench.isolated.configuration import Peer
from bench.peers.child import PeerJob, WrongRowsError, count_rows
from bench.peers.hook_worker import Captures
from bench.plain import restore
from inference_svc.taps.steps.layout import StepRows


def step(captures, layer, rows, **counts):
    """Run one forward pass of one layer over rows of some requests, followed by one row of padding."""
    captures.place(lambda: StepRows(list(counts), [0] * len(counts), list(counts.values())))
    captures.hook(layer)(None, None, (rows, torch.ones_like(rows)))


@pytest.mark.parametrize("flush_every", [1, 3, 32])
def test_hooks_keep_every_row_of_every_request_in_order(flush_every):
    captures = Captures(flush_every)
    source = torch.arange(2 * 9 * 4, dtype=torch.float32).reshape(2, 9, 4)
    for layer in (0, 1):
        step(captures, layer, source[layer][:6], a=3, b=2)  # prompts, and padding
        for at in range(5):
            step(captures, layer, torch.stack([source[layer][3 + at], -source[layer][at]]), a=1, b=1)
    taken = captures.take(["a", "b"], positions=7)
    assert torch.equal(taken["a"], (source + 1)[:, [0, 1, 2, 3, 4, 5, 6]])
    expected = torch.cat([source[:, 3:5], -source[:, :5]], dim=1) + 1
    assert torch.equal(taken["b"], expected)
    assert captures.take(["a", "b"], positions=7) == {}


def test_hooks_find_requests_whose_ids_have_vllms_suffix():
    captures = Captures(1)
    step(captures, 0, torch.ones(2, 4), **{"a-1-0123abcd": 1, "a-12-0123abcd": 1})
    assert list(captures.take(["a-1"], positions=1)) == ["a-1"]


def test_hooks_keep_no_rows_of_a_run_without_requests():
    captures = Captures(1)
    captures.hook(0)(None, None, torch.ones(2, 4))
    assert captures.take(["a"], positions=1) == {}


def test_rows_of_peers_are_counted():
    layers = [np.ones((5, 8), dtype=np.uint8)] * 3
    assert count_rows([layers, layers], 2, 3, 5) == (2 * 3 * 5, 2 * 3 * 5 * 8)
    assert count_rows([[np.ones((3, 5, 8), dtype=np.uint8)]], 1, 3, 5) == (15, 15 * 8)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ([], "rows of 0 requests were returned instead of 1"),
        ([[np.ones((4, 8))]], "4 rows"),
        ([[np.ones((6, 8))]], "6 rows"),
        ([[np.zeros((5, 8))]], "rows with only zeros"),
    ],
)
def test_wrong_rows_are_an_error(held, told):
    with pytest.raises(WrongRowsError, match=told):
        count_rows(held, 1, 1, 5)


def test_a_job_survives_json():
    from dataclasses import asdict

    workload = Workload("m", layers=(1, 2))
    data = {
        "peer": "hooks-32",
        "mode": "custom",
        "round": 1,
        "runner": "v2",
        "folder": "/tmp/x",
        "workload": asdict(workload),
    }
    job = restore(PeerJob, data)
    assert job == PeerJob(Peer.HOOKS_32, Mode.CUSTOM, 1, Runner.V2, workload, "/tmp/x")
    assert job.layers == (1, 2)
