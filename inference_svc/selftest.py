"""The startup self-test: it captures and steers one tiny request through the same path as any request.

Two things can go wrong without an error. The engine may never call the hooks, as with another model runner or a stale
compiled graph. And residuum may have misjudged the structure of the model. The service would then deliver zeros or
wrong rows, or steer nothing. It must not report SERVING in that state.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan
from residuum.v1 import capture_pb2, selection_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from inference_svc.engine.engine import Engine

    Rows = npt.NDArray[np.float32]

_PROMPT_TOKENS = 5
_NEW_TOKENS = 2
_BANK_ROW = 0
_STREAM = capture_pb2.SITE_RESID_POST
_PUSH = 4.0
"""The length of the steering vector, in multiples of the largest row norm: far larger than any rounding error."""
_ROWS_SECONDS = 10.0
"""How long the self-test waits for the rows of a request that has ended."""
_POLL_SECONDS = 0.02
_UNEXPLAINED = 0.05
"""Larger relative differences are not rounding: bfloat16 rounds to 1/256 at each step."""
_REPORT = "Please report the model and its configuration."


class SelfTestError(RuntimeError):
    """The taps do not work in this engine. The message says what the self-test measured."""


class _Captured(NamedTuple):
    """The rows and tokens of one request of the self-test."""

    rows: dict[int, Rows]
    """For each site, the rows of all positions but the last, float32 [layers, positions, hidden]."""
    tokens: list[int]
    """The generated token IDs."""


async def run_self_test(engine: Engine) -> None:
    """Capture a request, capture it again with steering after the middle layer, and check both.

    Raises:
        SelfTestError: Rows are missing, zero or not finite. Or they do not explain the model's own logits, or do not
            move as steering should move them.
    """
    layer = (engine.facts.num_layers - 1) // 2
    await engine.listen_to_logits()
    captured = await _capture(engine, "plain", ())
    for site in engine.facts.sites:
        _check_rows(captured.rows[site], capture_pb2.Site.Name(site))
    if _STREAM in captured.rows:
        await _check_logits(engine, captured.rows[_STREAM][-1], captured.tokens)
    plain = _of_prompt(captured)
    stream = _STREAM if _STREAM in plain else min(plain)
    push = _push(plain[stream][layer])
    await engine.load_vectors([(_BANK_ROW, push.astype("<f4").tobytes())])
    steered = _of_prompt(await _capture(engine, "steered", (_add(layer),)))
    if _STREAM in plain:
        _check_steering(plain[_STREAM], steered[_STREAM], push, layer)
    elif engine.facts.num_layers > 1 and np.array_equal(plain[stream][-1], steered[stream][-1]):
        raise SelfTestError(
            f"Steering after layer {layer} did not change the rows of the last layer. The model does not use what the "
            f"taps write. {_REPORT}"
        )


async def _capture(engine: Engine, name: str, operations: tuple[Operation, ...]) -> _Captured:
    facts = engine.facts
    capture_id = f"self-test-{name}"
    capture = Capture(
        capture_id=capture_id,
        sequence=0,
        layers=tuple(range(facts.num_layers)),
        positions=selection_pb2.PositionSelection(),
        sites=facts.sites,
        is_probe=True,
    )
    prompt = [(index + 1) % facts.vocab_size for index in range(_PROMPT_TOKENS)]
    sampling = SamplingParams(
        max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    plan = RequestPlan(len(prompt), capture, operations)
    tokens: list[int] = []
    async for delta in engine.generate(capture_id, prompt, sampling, plan, cache_salt=capture_id):
        tokens += delta.token_ids
    return _Captured(await _take_rows(engine, capture_id), tokens)


async def _take_rows(engine: Engine, capture_id: str) -> dict[int, Rows]:
    """Return by site the rows of all positions but the last one; NaN where none arrived.

    The row of a generated token arrives only when the worker has learnt that the request has ended. It learns this in a
    step after the last one, which may not have run yet.
    """
    facts = engine.facts
    num_positions = _PROMPT_TOKENS + _NEW_TOKENS - 1  # the last token is never fed to the model
    shape = (facts.num_layers, num_positions, facts.hidden_size)
    rows: dict[int, Rows] = {site: np.full(shape, np.nan, dtype=np.float32) for site in facts.sites}
    awaited = {(site, layer, position) for site in rows for layer in range(shape[0]) for position in range(shape[1])}
    deadline = time.monotonic() + _ROWS_SECONDS
    while awaited and time.monotonic() < deadline:
        for sites, layers, positions, values in await engine.take_probe(capture_id):
            block = np.frombuffer(values, dtype=np.float32).reshape(len(sites), len(layers), len(positions), -1)
            kept = [index for index, position in enumerate(positions) if position < num_positions]
            for site, of_site in zip(sites, block, strict=True):
                for index in kept:
                    rows[site][layers, positions[index]] = of_site[:, index]
                    awaited -= {(site, layer, positions[index]) for layer in layers}
        if awaited:
            await asyncio.sleep(_POLL_SECONDS)
    return rows


def _of_prompt(captured: _Captured) -> dict[int, Rows]:
    """Return only the rows of the prompt: steering may change the generated tokens."""
    return {site: rows[:, :_PROMPT_TOKENS] for site, rows in captured.rows.items()}


def _push(rows: Rows) -> Rows:
    """Return a long steering vector in a fixed pseudo-random direction, float32 [hidden]."""
    direction = np.random.default_rng(0).standard_normal(size=(rows.shape[-1],)).astype(np.float32)
    length = _PUSH * float(np.linalg.norm(rows, axis=-1).max())
    pushed: Rows = direction / np.linalg.norm(direction) * np.float32(length)
    return pushed


def _add(layer: int) -> Operation:
    return Operation(Kind.ADD, _BANK_ROW, (layer,), selection_pb2.PositionSelection())


def _check_rows(rows: Rows, site: str) -> None:
    if np.isnan(rows).any():
        bad = sorted({int(layer) for layer in np.argwhere(np.isnan(rows))[:, 0]})
        raise SelfTestError(
            f"{site}: rows of layers {bad} did not arrive, or hold NaN. Either the engine does not run the op that "
            f"captures rows, or the model itself computes NaN (a wrong --dtype can cause that). {_REPORT}"
        )
    if not np.isfinite(rows).all():
        raise SelfTestError(
            f"{site}: captured rows hold infinity. The model overflows its dtype, or its weights are damaged. Try "
            "another --dtype."
        )
    zero = [layer for layer in range(len(rows)) if not rows[layer].any()]
    if zero:
        raise SelfTestError(f"{site}: captured rows of layers {zero} are all zero: the taps wrote nothing. {_REPORT}")
    same = [layer for layer in range(1, len(rows)) if np.array_equal(rows[layer], rows[layer - 1])]
    if same:
        raise SelfTestError(
            f"{site}: captured rows of layers {same} equal those of the layer before, so they were captured in the "
            f"wrong place. {_REPORT}"
        )


async def _check_logits(engine: Engine, rows: Rows, tokens: Sequence[int]) -> None:
    """Check that the model computed its tokens from the last layer's rows, [positions, hidden]."""
    last = rows[_PROMPT_TOKENS - 1 :]
    ranks = await engine.explain_logits(np.ascontiguousarray(last, dtype="<f4").tobytes(), tokens)
    # When ranks divide the sampling among themselves, a rank may see another row. One rank that agrees is enough.
    hidden_error = min((error for error, _ in ranks), default=np.nan)
    token_gap = min((gap for _, gap in ranks), default=np.nan)
    if not (hidden_error < _UNEXPLAINED and token_gap < _UNEXPLAINED):
        raise SelfTestError(
            "resid_post of the last layer does not explain the model's own logits. The final norm of these rows "
            f"differs by {hidden_error:.1%} from the one that the model computed, and the served token's logit is "
            f"{token_gap:.1%} of their range below the largest. The rows are not this model's residual stream, so the "
            f"service refuses to serve them. {_REPORT}"
        )


def _check_steering(plain: Rows, steered: Rows, push: Rows, layer: int) -> None:
    scale = np.linalg.norm(push)
    moved = np.linalg.norm(steered - plain, axis=-1).max(axis=-1) / scale  # [layers]
    if (moved[:layer] > 0.01).any():  # noqa: PLR2004 - rounding moves rows by far less than a hundredth of the push
        raise SelfTestError(
            f"Steering after layer {layer} moved rows of earlier layers: the taps are at the wrong layers. {_REPORT}"
        )
    miss = np.linalg.norm(steered[layer] - plain[layer] - push, axis=-1).max() / scale
    if not miss < 0.05:  # noqa: PLR2004 - bfloat16 rounds the sum to 1/256
        raise SelfTestError(
            f"Steering after layer {layer} moved its rows by the wrong amount: they are off by {miss:.1%} of the "
            f"vector that was added. {_REPORT}"
        )
    if not (moved[layer + 1 :] > 0.05).all():  # noqa: PLR2004 - far more than rounding, far less than the push
        raise SelfTestError(
            f"Steering after layer {layer} did not move the rows of later layers. The model does not use what the "
            f"taps write. {_REPORT}"
        )
