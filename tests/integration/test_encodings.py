"""Encodings and reductions of a real model, through both services, compared with its raw rows."""

from __future__ import annotations

import numpy as np
import pytest

import residuum

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

LAYERS = (3, 20)
PROMPT = "The old lighthouse keeper climbed the stairs one last time"
JOY = residuum.Vector(np.sin(np.arange(576)))
WOE = residuum.Vector(np.cos(np.arange(576)))


def captured(client: residuum.Client, **fields: object) -> residuum.Activations:
    reply = client.generate(PROMPT, max_tokens=40, ignore_eos=True, capture=residuum.Capture(layers=LAYERS, **fields))
    return client.activations(reply)


@pytest.fixture(scope="module")
def raw(client: residuum.Client) -> residuum.Activations:
    return captured(client, encoding="raw")


def close(got: np.ndarray, expected: np.ndarray, limit: np.ndarray | float = 0.0) -> None:
    """Allow a limit plus the difference between two runs in bfloat16: 1 % of the row's largest element."""
    assert got.shape == expected.shape
    slack = 0.01 * np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(got - expected) <= limit + slack).all()


@pytest.mark.parametrize("encoding", ["fp32", "fp16", "bf16"])
def test_casts_as_an_encoding(client: residuum.Client, raw: residuum.Activations, encoding: str) -> None:
    acts = captured(client, encoding=encoding)
    for layer in LAYERS:
        close(acts[layer], raw[layer])


@pytest.mark.parametrize("axis", ["row", "dimension"])
def test_encoding_full8(client: residuum.Client, raw: residuum.Activations, axis: str) -> None:
    acts = captured(client, encoding="full8", axis=axis)
    assert acts.width == 576
    for layer in LAYERS:
        part = acts.encoded(layer)
        scale = part["scale"][part["group"]] if axis == "dimension" else part["scale"][:, None]
        close(acts[layer], raw[layer], scale / 2)


@pytest.mark.parametrize("encoding", ["rp", "rp8"])
def test_encoding_by_random_projection(client: residuum.Client, raw: residuum.Activations, encoding: str) -> None:
    acts = captured(client, encoding=encoding, seed=11)
    assert (acts.width, acts.manifest.dimensions) == (512, 512)
    matrix = acts.projection().astype(np.float64)
    for layer in LAYERS:
        limit = acts.encoded(layer)["scale"][:, None] / 2 if encoding == "rp8" else 0.0
        close(acts[layer], raw[layer] @ matrix, limit)
        lengths = np.linalg.norm(acts[layer], axis=1) / np.linalg.norm(raw[layer], axis=1)
        assert np.abs(lengths - 1).max() < 0.25  # five standard deviations of 512 dimensions are 0.16


@pytest.mark.parametrize("encoding", ["topk", "topk8"])
def test_encoding_topk(client: residuum.Client, raw: residuum.Activations, encoding: str) -> None:
    acts = captured(client, encoding=encoding, dimensions=64)
    for layer in LAYERS:
        part, exact = acts.encoded(layer), raw[layer]
        kept = np.take_along_axis(exact, part["index"].astype(np.int64), axis=1)
        found = np.take_along_axis(acts[layer], part["index"].astype(np.int64), axis=1)
        close(found, kept, part["scale"][:, None] / 2 if encoding == "topk8" else 0.0)
        assert (np.count_nonzero(acts[layer], axis=1) <= 64).all()
        rest = np.sort(np.abs(exact), axis=1)[:, -64]  # no left-out element is larger than these
        assert (np.abs(kept).min(axis=1) >= 0.95 * rest).all()


def test_encoding_as_scores_of_vectors(client: residuum.Client, raw: residuum.Activations) -> None:
    acts = captured(client, encoding="project", vectors=[JOY, WOE])
    for layer in LAYERS:
        expected = raw[layer].astype(np.float64) @ np.stack([JOY.values, WOE.values], axis=1)
        slack = 0.01 * np.abs(raw[layer]).sum(axis=1, keepdims=True)
        assert (np.abs(acts[layer] - expected) <= slack).all()


@pytest.mark.parametrize("reduction", ["last", "mean", "max", "sum"])
def test_reductions_with_an_encoding(client: residuum.Client, raw: residuum.Activations, reduction: str) -> None:
    acts = captured(client, encoding="fp32", reduction=reduction)
    count, prompt = len(raw.positions), raw.prompt_tokens
    assert acts.positions.tolist() == [prompt - 1, count - 1]
    functions = {"last": lambda rows: rows[-1], "mean": np.mean, "max": np.max, "sum": np.sum}
    for layer in LAYERS:
        for got, rows in zip(acts[layer], (raw[layer][:prompt], raw[layer][prompt:]), strict=True):
            expected = rows[-1] if reduction == "last" else functions[reduction](rows.astype(np.float64), axis=0)
            close(got[None], expected[None])


def test_encodings_side_by_side(client: residuum.Client, raw: residuum.Activations) -> None:
    """Requests of one batch, each with its own encoding."""
    encodings = ["raw", "full8", "rp8", "topk8"]
    requests = [{"capture": residuum.Capture(layers=LAYERS, encoding=encoding)} for encoding in encodings]
    registered = [client.register(**request) for request in requests]
    streams = [client.stream(PROMPT, registration=item, max_tokens=40, ignore_eos=True) for item in registered]
    for stream in streams:
        with stream:
            for _ in stream:
                pass
    for encoding, stream in zip(encodings, streams, strict=True):
        acts = client.activations(stream.reply)
        assert acts.encoding == encoding
        prompt = acts.prompt_tokens
        if encoding == "full8":
            close(acts[20][:prompt], raw[20][:prompt], acts.encoded(20)["scale"][:prompt, None] / 2)


def test_the_server_lists_its_encodings(client: residuum.Client) -> None:
    info = client.info()
    assert set(info.encodings) == {
        *("raw", "fp32", "fp16", "bf16", "full8", "rp8", "topk8", "rp", "topk", "project", "sae")
    }
    assert (info.default_encoding, info.reductions) == ("raw", ("none", "last", "mean", "max", "sum"))
    with pytest.raises(residuum.InvalidRequest, match="rp8 takes 1 to 576 dimensions, not 577"):
        captured(client, encoding="rp8", dimensions=577)
