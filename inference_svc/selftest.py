"""The start-up self-test: one tiny request is captured and steered through the path that will serve.

Hooks may be in the model without being called, as with another model runner or a stale compiled graph. What was found
out about the model may be wrong. A service that would then deliver zeros or wrong rows, or steer nothing, must not say
SERVING.
"""

from __future__ import annotations

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
"""How far the rows are pushed, in multiples of their own norm: far beyond what rounding could do."""
_UNEXPLAINED = 0.05
"""Relative differences beyond this are no rounding: bfloat16 rounds to 1/256 at each step."""


class SelfTestError(RuntimeError):
    """The taps do not work in this engine. The message says what was seen."""


class _Captured(NamedTuple):
    """A captured request."""

    rows: dict[int, Rows]
    """By site the rows of all positions but the last one, float32 [layers, positions, hidden]."""
    tokens: list[int]
    """The generated tokens."""


async def run_self_test(engine: Engine) -> None:
    """Capture one request unsteered, and again steered after the middle layer, and compare.

    Raises:
        SelfTestError: Rows are missing, zero or not finite, do not explain the model's own logits, or do not move as
            they should under steering.
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
        raise SelfTestError(f"steering after layer {layer} did not reach the last layer")


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
    positions_captured = _PROMPT_TOKENS + _NEW_TOKENS - 1  # the last token is never fed to the model
    shape = (facts.num_layers, positions_captured, facts.hidden_size)
    rows: dict[int, Rows] = {site: np.full(shape, np.nan, dtype=np.float32) for site in facts.sites}
    for sites, layers, positions, values in await engine.take_probe(capture_id):
        block = np.frombuffer(values, dtype=np.float32).reshape(len(sites), len(layers), len(positions), -1)
        for site, of_site in zip(sites, block, strict=True):
            for at, position in enumerate(positions):
                if position < positions_captured:
                    rows[site][layers, position] = of_site[:, at]
    return _Captured(rows, tokens)


def _of_prompt(captured: _Captured) -> dict[int, Rows]:
    """Return the rows of the prompt alone: what is generated may differ under steering."""
    return {site: rows[:, :_PROMPT_TOKENS] for site, rows in captured.rows.items()}


def _push(rows: Rows) -> Rows:
    direction = np.random.default_rng(0).standard_normal(size=(rows.shape[-1],)).astype(np.float32)
    length = _PUSH * float(np.linalg.norm(rows, axis=-1).max())
    pushed: Rows = direction / np.linalg.norm(direction) * np.float32(length)
    return pushed


def _add(layer: int) -> Operation:
    return Operation(Kind.ADD, _BANK_ROW, (layer,), selection_pb2.PositionSelection())


def _check_rows(rows: Rows, site: str) -> None:
    if np.isnan(rows).any():
        bad = sorted({int(layer) for layer in np.argwhere(np.isnan(rows))[:, 0]})
        raise SelfTestError(f"{site}: rows of layers {bad} did not arrive, or are not numbers; is the op in the graph?")
    if not np.isfinite(rows).all():
        raise SelfTestError(f"{site}: captured rows are not finite")
    zero = [layer for layer in range(len(rows)) if not rows[layer].any()]
    if zero:
        raise SelfTestError(f"{site}: captured rows of layers {zero} are all zero")
    same = [layer for layer in range(1, len(rows)) if np.array_equal(rows[layer], rows[layer - 1])]
    if same:
        raise SelfTestError(f"{site}: captured rows of layers {same} equal those of the layer before")


async def _check_logits(engine: Engine, rows: Rows, tokens: Sequence[int]) -> None:
    """Check that the last layer's rows, [positions, hidden], are what the model computed the tokens from."""
    last = rows[_PROMPT_TOKENS - 1 :]
    ranks = await engine.explain_logits(np.ascontiguousarray(last, dtype="<f4").tobytes(), tokens)
    # Ranks that share the sampling out among them may see another row than the one that was asked for.
    hidden_error = min((error for error, _ in ranks), default=np.nan)
    token_gap = min((gap for _, gap in ranks), default=np.nan)
    if not (hidden_error < _UNEXPLAINED and token_gap < _UNEXPLAINED):
        raise SelfTestError(
            "resid_post of the last layer does not explain the model's own logits: what the final norm makes of it "
            f"differs by {hidden_error:.1%} from what the model computed, and the served token's logit is "
            f"{token_gap:.1%} of their range below the largest. The rows are not this model's residual stream, so the "
            "service refuses to serve them. Please report the model and its configuration."
        )


def _check_steering(plain: Rows, steered: Rows, push: Rows, layer: int) -> None:
    scale = np.linalg.norm(push)
    moved = np.linalg.norm(steered - plain, axis=-1).max(axis=-1) / scale  # [layers]
    if (moved[:layer] > 0.01).any():  # noqa: PLR2004 - rounding moves rows by far less than a hundredth of the push
        raise SelfTestError(f"steering after layer {layer} moved rows of the layers before it")
    miss = np.linalg.norm(steered[layer] - plain[layer] - push, axis=-1).max() / scale
    if not miss < 0.05:  # noqa: PLR2004 - bfloat16 rounds the sum to 1/256
        raise SelfTestError(f"steering after layer {layer} missed its aim by {miss:.1%} of the push")
    if not (moved[layer + 1 :] > 0.05).all():  # noqa: PLR2004 - what was pushed must reach the layers behind
        raise SelfTestError(f"steering after layer {layer} did not reach the layers after it")
