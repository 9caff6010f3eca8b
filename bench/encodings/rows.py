"""Part `rows`: the accuracy of encodings for rows of a real model, and their cost on this CPU.

The rows are SmolLM2's residual stream over English text, computed by transformers in float32 and rounded to bfloat16,
as on a server. All errors are relative to those rows, in float64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from bench.encodings.forms import CASES, SEED, Case
from bench.machine import ROOT
from bench.output import markdown_table
from residuum.v1 import capture_pb2, tensor_pb2
from residuum.wire.rows.encodings import PROJECT, RowFormat, basis_of
from residuum.wire.rows.projection import projection_matrix

Rows = npt.NDArray[Any]


BLOCK = 32
"""Positions that are encoded together, as in a block of generated tokens."""

_TEXT = "LICENSE"
_TOKENS = 512
_REPEATS = 9
_SVD_RANK = 128
_PAIRS = 20_000
_VECTORS = 8


def measure(model: Path, layers: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the accuracy and cost of each encoding.

    Args:
        model: The model's folder.
        layers: The layers; None for all.
    """
    rows = real_rows(model)
    rows = rows if layers is None else rows[list(layers)]
    vectors = principal_directions(rows)
    raw_bytes = rows.shape[2] * rows.dtype.itemsize
    cases = [measure_case(case, rows, vectors) for case in CASES]
    return {
        "model": model.name,
        "text": f"the first {rows.shape[1]} tokens of {_TEXT}",
        "layers": rows.shape[0],
        "positions": rows.shape[1],
        "width": rows.shape[2],
        "raw_bytes": raw_bytes,
        "cases": [{**case, "smaller": round(raw_bytes / case["bytes_per_row"], 2)} for case in cases],
        "svd": compare_with_svd(rows),
    }


def real_rows(model: Path) -> Rows:
    """Return a model's residual stream after each layer for a text, bfloat16 [layers, positions, width]."""
    from transformers import AutoTokenizer

    from bench.conformance.architectures import ARCHITECTURES
    from bench.conformance.reference import Reference

    tokens = AutoTokenizer.from_pretrained(str(model))((ROOT / _TEXT).read_text())["input_ids"][:_TOKENS]
    return Reference(ARCHITECTURES["llama"], model).rows(tokens)["resid_post"].astype(ml_dtypes.bfloat16)


def principal_directions(rows: Rows) -> npt.NDArray[np.float32]:
    """Return the principal directions of the middle layer's rows, float32 [vectors, width], of norm 1.

    They represent probes, because a probe looks for differences between rows.
    """
    middle = rows[len(rows) // 2, 1:].astype(np.float64)  # the first position differs from all others
    _, _, directions = np.linalg.svd(middle - middle.mean(axis=0), full_matrices=False)
    return np.ascontiguousarray(directions[:_VECTORS], dtype=np.float32)


def measure_case(case: Case, rows: Rows, vectors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Return the bytes, the errors and the costs of one encoding."""
    form = case.form(rows.shape[2], tensor_pb2.DATA_TYPE_BFLOAT16)
    basis = basis_of(form, capture_pb2.EncodingOptions(seed=SEED), list(vectors))
    blocks = [rows[:, at : at + BLOCK] for at in range(0, rows.shape[1], BLOCK)]
    payloads = [form.encode(block, basis) for block in blocks]
    decoded = np.concatenate(
        [_decoded(form, payload, *block.shape[:2]) for payload, block in zip(payloads, blocks, strict=True)], axis=1
    ).astype(np.float64)
    count = rows.shape[0] * rows.shape[1]
    return {
        "name": case.name,
        "bytes_per_row": sum(map(len, payloads)) / count,
        **errors(case, rows.astype(np.float64), decoded, vectors, basis),
        "encode_us": 1e6 * _seconds(_encoder(form, blocks[0], basis)) / (rows.shape[0] * BLOCK),
        "decode_us": 1e6
        * _seconds(lambda: _decoded(form, payloads[0], *blocks[0].shape[:2]))
        / (rows.shape[0] * BLOCK),
    }


def errors(
    case: Case,
    exact: npt.NDArray[np.float64],
    decoded: npt.NDArray[np.float64],
    vectors: npt.NDArray[np.float32],
    basis: npt.NDArray[np.float32] | None,
) -> dict[str, float | None]:
    """Return the errors of decoded rows compared with exact rows, both [layers, positions, ...].

    Returns:
        `l2`: the distance relative to the row's length, median over rows, and `l2_worst`, the largest; None for
        projections. `cosine`: the root mean square error of the cosine between two rows of a layer; None for inner
        products with given vectors. `score`: the correlation of inner products with directions over the positions of a
        layer; the least over directions, median over layers.
    """
    whole = exact.shape == decoded.shape and not case.projects and case.encoding != PROJECT
    distances = np.linalg.norm(decoded - exact, axis=2) / np.linalg.norm(exact, axis=2) if whole else None
    if case.encoding == PROJECT:
        scores = decoded
    else:
        axes = vectors.T.astype(np.float64)
        scores = decoded @ (basis.astype(np.float64).T @ axes if case.projects and basis is not None else axes)
    return {
        "l2": float(np.median(distances)) if distances is not None else None,
        "l2_worst": float(distances.max()) if distances is not None else None,
        "cosine": None if case.encoding == PROJECT else cosine_error(exact, decoded),
        "score": float(np.median(correlations(exact @ vectors.T.astype(np.float64), scores).min(axis=1))),
    }


def cosine_error(exact: npt.NDArray[np.float64], decoded: npt.NDArray[np.float64]) -> float:
    """Return the root mean square error of cosines between rows of one layer, over randomly drawn pairs."""
    rng = np.random.default_rng(0)
    layer = rng.integers(0, exact.shape[0], _PAIRS)
    first = rng.integers(0, exact.shape[1], _PAIRS)
    second = (first + rng.integers(1, exact.shape[1], _PAIRS)) % exact.shape[1]
    truth, found = (_cosines(rows[layer, first], rows[layer, second]) for rows in (exact, decoded))
    return float(np.sqrt(np.mean((truth - found) ** 2)))


def correlations(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the correlation over positions of two [layers, positions, n], as [layers, n]. Position 0 is left out."""
    return _cosines(*(values[:, 1:] - values[:, 1:].mean(axis=1, keepdims=True) for values in (one, other)))


def compare_with_svd(rows: Rows) -> dict[str, Any]:
    """Compare the time of a truncated SVD of one layer's rows with a random projection to as many dimensions."""
    layer = rows[len(rows) // 2].astype(np.float32)
    rank = min(_SVD_RANK, *layer.shape)
    matrix = projection_matrix(SEED, layer.shape[1], rank)
    svd_seconds = _seconds(lambda: np.linalg.svd(layer, full_matrices=False))
    projection_seconds = _seconds(lambda: layer @ matrix)
    left, values, right = np.linalg.svd(layer, full_matrices=False)
    kept = (left[:, :rank] * values[:rank]) @ right[:rank]
    return {
        "rows": list(layer.shape),
        "dimensions": rank,
        "svd_seconds": svd_seconds,
        "projection_seconds": projection_seconds,
        "times_slower": svd_seconds / projection_seconds,
        "svd_l2": float(np.linalg.norm(kept - layer) / np.linalg.norm(layer)),
        "svd_basis_bytes": int(right[:rank].nbytes),
    }


def table(part: dict[str, Any]) -> str:
    """Return the cases as a Markdown table."""
    head = (
        *("encoding", "bytes a row", "smaller", "relative L2", "worst", "cosines off by", "scores"),
        *("encode", "decode"),
    )
    lines = [
        (
            f"`{case['name']}`",
            f"{case['bytes_per_row']:.0f}",
            f"{case['smaller']:.2g}×",
            _percent(case["l2"]),
            _percent(case["l2_worst"]),
            "" if case["cosine"] is None else _plain(case["cosine"]),
            f"{case['score']:.4f}",
            f"{case['encode_us']:.1f} µs",
            f"{case['decode_us']:.1f} µs",
        )
        for case in part["cases"]
    ]
    return markdown_table(head, lines, right="--:")


def svd_line(part: dict[str, Any]) -> str:
    """Return a sentence that compares random projections with SVD."""
    svd = part["svd"]
    return (
        f"SVD of {svd['rows'][0]} rows to {svd['dimensions']} dimensions: {1e3 * svd['svd_seconds']:.0f} ms, "
        f"{svd['times_slower']:.0f} times the {1e3 * svd['projection_seconds']:.2f} ms of a random projection. It is "
        f"{_percent(svd['svd_l2'])} off these very rows, and its basis takes {svd['svd_basis_bytes']} bytes more."
    )


def _percent(part: float | None) -> str:
    return "" if part is None else f"{_plain(100 * part)} %"


def _plain(value: float) -> str:
    return "0" if not value else f"{value:.2g}" if value < 10 else f"{value:.0f}"  # noqa: PLR2004 - two digits


def _decoded(form: RowFormat, payload: bytes, layers: int, positions: int) -> Rows:
    prefixes, rows = form.split(payload, layers, positions)
    return form.decode(rows, prefixes if prefixes is None else prefixes[:, None])


def _encoder(form: RowFormat, block: Rows, basis: npt.NDArray[np.float32] | None) -> Callable[[], object]:
    """Return a function that encodes a block with the CPU worker's encoder in one thread."""
    import torch

    from inference_svc.taps.cpu import encoder

    torch.set_num_threads(1)
    rows = torch.from_numpy(block.view(np.uint16)).view(torch.bfloat16)
    # For random projections the worker gets the signs, for PROJECT the vectors.
    given = None if basis is None else basis.T if form.encoding == PROJECT else np.sign(basis)
    tensor = None if given is None else torch.from_numpy(np.ascontiguousarray(given, dtype=np.float32))
    out = torch.empty(len(block), form.payload_bytes(1, block.shape[1]), dtype=torch.uint8)
    return lambda: encoder.encode(rows, form, tensor, out)


def _seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a call. The shortest of several runs, because other load may disturb some."""
    work()
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _cosines(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    products: npt.NDArray[np.float64] = (one * other).sum(axis=1)
    ratios: npt.NDArray[np.float64] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return ratios
