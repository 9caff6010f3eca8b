"""The startup self-test: it captures and steers one tiny request through the same path as any request.

Three things can go wrong without an error. The engine may never call the hooks, as with another model runner or a stale
compiled graph. Residuum may have misjudged the structure of the model. And vLLM itself may compute the model wrongly.
The service would then deliver zeros or wrong rows, or steer nothing. It must not report SERVING in that state.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from inference_svc.taps.plan import Capture, Gate, Kind, Operation, RequestPlan
from residuum.v1 import capture_pb2, selection_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from inference_svc.engine.engine import Engine

    Rows = npt.NDArray[np.float32]

_PROMPT_TOKENS = 5
_NEW_TOKENS = 4
_POSITIONS = _PROMPT_TOKENS + _NEW_TOKENS - 1
"""The last token is never fed to the model."""
_BANK_ROW = 0
_STREAM = capture_pb2.SITE_RESID_POST
_PUSH = 4.0
"""The length of the steering vector, in multiples of the largest row norm: far larger than any rounding error."""
_ROWS_SECONDS = 10.0
"""How long the self-test waits for the rows of a request that has ended."""
_POLL_SECONDS = 0.02
_UNEXPLAINED = 0.05
"""Larger relative differences are not rounding: bfloat16 rounds to 1/256 at each step."""
_UNEQUAL_STEPS = 0.25
"""Rows of a token that was generated, and of the same token in a prompt, differ less than this by rounding."""
_OFF_PUSH = 0.05
"""Steered rows are off by less than this part of the vector by rounding: bfloat16 rounds the sum to 1/256."""
_REPORT = "Please report the model and its configuration."


class SelfTestError(RuntimeError):
    """The taps do not work in this engine. The message says what the self-test measured."""


class _Captured(NamedTuple):
    """The rows and tokens of one request of the self-test."""

    rows: dict[int, Rows]
    """For each site, the rows of all positions but the last, float32 [layers, positions, hidden]."""
    tokens: list[int]
    """The generated token IDs."""


async def self_test_replicas(engine: Engine) -> None:
    """Run the self-test in each replica of an engine.

    Raises:
        SelfTestError: A replica failed; see `run_self_test`. If there are several, the message names it.
    """
    replicas = engine.replicas()
    for index, replica in enumerate(replicas):
        try:
            await run_self_test(replica)
        except SelfTestError as error:
            raise SelfTestError(f"Replica {index}: {error}" if len(replicas) > 1 else str(error)) from None


async def run_self_test(engine: Engine) -> None:
    """Capture a request, capture its reply as part of a prompt, capture it with steering, and compare.

    Raises:
        SelfTestError: Rows are missing, zero or not finite. Or they do not explain the model's own logits, depend on
            whether a token was generated, or do not move as steering should move them.
    """
    layer = (engine.facts.num_layers - 1) // 2
    if _STREAM in engine.facts.sites:
        await engine.listen_to_logits()
    prompt = [(index + 1) % engine.facts.vocab_size for index in range(_PROMPT_TOKENS)]
    captured = await _capture(engine, "plain", prompt)
    for site in engine.facts.sites:
        _check_rows(captured.rows[site], site, engine.facts.layers_at(site))
    if _STREAM in captured.rows:
        await _check_logits(engine, captured.rows[_STREAM][-1], captured.tokens)
    stream = _STREAM if _STREAM in captured.rows else min(engine.facts.sites)
    await _check_other_ranks(engine, prompt, captured)
    as_prompt = await _capture(engine, "prompt", [*prompt, *captured.tokens[:-1]])
    has_stream = list(engine.facts.layers_at(stream))
    _check_rows(as_prompt.rows[stream], stream, has_stream)
    _check_steps(captured.rows[stream][has_stream], as_prompt.rows[stream][has_stream])
    plain = _of_prompt(captured)
    push = _push(engine.facts.hidden_size, plain[stream][layer if layer in has_stream else has_stream[0]])
    await engine.load_vectors([(_BANK_ROW, push.astype("<f4").tobytes())])
    steered = _of_prompt(await _capture(engine, "steered", prompt, _add_twice_and_undo(layer, push)))
    if _STREAM in plain:
        _check_steering(plain[_STREAM], steered[_STREAM], push, layer)
    elif has_stream[-1] > layer and np.array_equal(plain[stream][has_stream[-1]], steered[stream][has_stream[-1]]):
        raise SelfTestError(
            f"Steering after layer {layer} did not change the rows of the last layer. The model does not use what the "
            f"taps write. {_REPORT}"
        )
    for site in engine.facts.steering_sites:
        if site != _STREAM:
            layers = engine.facts.layers_at(site)
            await _check_steering_at(engine, site, prompt, plain, layers[(len(layers) - 1) // 2])


async def _check_other_ranks(engine: Engine, prompt: Sequence[int], captured: _Captured) -> None:
    """Check that the other tensor-parallel ranks capture the same rows. Captures one after the other go to all of them.

    Raises:
        SelfTestError: They do not.
    """
    for number in range(1, engine.facts.tensor_parallel_size):
        other = await _capture(engine, f"rank{number}", prompt)
        for site in engine.facts.sites:
            layers = list(engine.facts.layers_at(site))
            _check_rows(other.rows[site], site, layers)
            error = _difference(captured.rows[site][layers], other.rows[site][layers])
            if not error < _UNEQUAL_STEPS:
                raise SelfTestError(
                    f"Two ranks that share the layers capture different rows of one prompt: at "
                    f"{capture_pb2.Site.Name(site)}, they differ by {error:.0%} or more in half of the layers. "
                    f"{_REPORT}"
                )


async def _check_steering_at(
    engine: Engine, site: capture_pb2.Site.ValueType, prompt: Sequence[int], plain: dict[int, Rows], layer: int
) -> None:
    """Check that steering at a site inside the layers moves the rows there, and that the model goes on with them."""
    after = _STREAM if _STREAM in plain else site
    # Also longer than the stream: next to it, the rows of a part may be so short that their change is lost by rounding.
    push = _push(engine.facts.width(site), plain[site][layer], plain[after][layer])
    await engine.load_vectors([(_BANK_ROW, push.astype("<f4").tobytes())])
    name = capture_pb2.Site.Name(site)
    steered = _of_prompt(await _capture(engine, f"steered-{name.lower()}", prompt, (_add(layer, site),)))
    miss = np.linalg.norm(steered[site][layer] - plain[site][layer] - push, axis=-1).max() / np.linalg.norm(push)
    if not miss < _OFF_PUSH:
        raise SelfTestError(
            f"Steering at {name} of layer {layer} moved its rows by the wrong amount: they are off by {miss:.1%} of "
            f"the vector that was added. Leave the site out of --capture-sites. {_REPORT}"
        )
    later = [at for at in engine.facts.layers_at(after) if at >= layer + (after != _STREAM)]
    if (plain[after][later] == steered[after][later]).all(axis=(-2, -1)).any():
        raise SelfTestError(
            f"Steering at {name} of layer {layer} did not change what the model computes from these rows. Leave the "
            f"site out of --capture-sites. {_REPORT}"
        )


async def _capture(
    engine: Engine, name: str, prompt: Sequence[int], operations: tuple[Operation, ...] = ()
) -> _Captured:
    """Run a request that feeds `_POSITIONS` tokens to the model."""
    facts = engine.facts
    capture_id = f"self-test-{name}"
    capture = Capture(
        capture_id=capture_id,
        sequence=0,
        layers=tuple(range(facts.num_layers)),
        positions=selection_pb2.PositionSelection(),
        sites=facts.sites,
        is_probe=True,
        site_layers=facts.site_layers,
    )
    sampling = SamplingParams(
        max_tokens=_POSITIONS + 1 - len(prompt),
        temperature=0.0,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    plan = RequestPlan(len(prompt), capture, operations)
    tokens: list[int] = []
    async for delta in engine.generate(capture_id, list(prompt), sampling, plan, cache_salt=capture_id):
        tokens += delta.token_ids
    return _Captured(await _take_rows(engine, capture_id), tokens)


async def _take_rows(engine: Engine, capture_id: str) -> dict[int, Rows]:
    """Return by site the rows of all layers and all positions but the last one; NaN where none arrived.

    The row of a generated token arrives only when the worker has learnt that the request has ended. It learns this in a
    step after the last one, which may not have run yet.
    """
    facts = engine.facts
    rows: dict[int, Rows] = {
        site: np.full((facts.num_layers, _POSITIONS, facts.width(site)), np.nan, np.float32) for site in facts.sites
    }
    awaited = {
        (site, layer, position)
        for site in facts.sites
        for layer in facts.layers_at(site)
        for position in range(_POSITIONS)
    }
    deadline = time.monotonic() + _ROWS_SECONDS
    while awaited and time.monotonic() < deadline:
        for units, positions, values in await engine.take_probe(capture_id):
            block = np.frombuffer(values, dtype=np.float32).reshape(len(units), len(positions), -1)
            kept = [index for index, position in enumerate(positions) if position < _POSITIONS]
            at = [positions[index] for index in kept]
            for (site, layer), of_unit in zip(units, block, strict=True):
                rows[site][layer, at] = of_unit[kept]
                awaited -= {(site, layer, position) for position in at}
        if awaited:
            await asyncio.sleep(_POLL_SECONDS)
    return rows


def _of_prompt(captured: _Captured) -> dict[int, Rows]:
    """Return only the rows of the prompt: steering may change the generated tokens."""
    return {site: rows[:, :_PROMPT_TOKENS] for site, rows in captured.rows.items()}


def _push(width: int, *rows: Rows) -> Rows:
    """Return a steering vector in a fixed pseudo-random direction, far longer than the rows, float32 [width]."""
    direction = np.random.default_rng(0).standard_normal(size=(width,)).astype(np.float32)
    length = _PUSH * max(float(np.linalg.norm(some, axis=-1).max()) for some in rows)
    pushed: Rows = direction / np.linalg.norm(direction) * np.float32(length)
    return pushed


def _add(
    layer: int, site: capture_pb2.Site.ValueType = _STREAM, scale: float = 1.0, gate: Gate | None = None
) -> Operation:
    return Operation(Kind.ADD, _BANK_ROW, (layer,), selection_pb2.PositionSelection(), scale, site=site, gate=gate)


def _add_twice_and_undo(layer: int, push: Rows) -> tuple[Operation, ...]:
    """Return operations that add the vector once in total, if gates work.

    The first adds it twice. Now every row is far above the threshold. So the second, whose gate is open below it, does
    nothing, and the third takes the vector away once.
    """
    threshold = float(np.linalg.norm(push)) / 2
    above, below = Gate(_BANK_ROW, threshold), Gate(_BANK_ROW, threshold, -math.inf)
    return _add(layer, scale=2.0), _add(layer, gate=below), _add(layer, scale=-1.0, gate=above)


def _check_rows(every: Rows, of: capture_pb2.Site.ValueType, layers: Sequence[int]) -> None:
    """Check the rows at a site, in the layers that have it."""
    rows, site = every[list(layers)], capture_pb2.Site.Name(of)
    if np.isnan(rows).any():
        bad = sorted({layers[index] for index in np.argwhere(np.isnan(rows))[:, 0]})
        raise SelfTestError(
            f"{site}: rows of layers {bad} did not arrive, or hold NaN. Either the engine does not run the op that "
            f"captures rows, or the model itself computes NaN (a wrong --dtype can cause that). {_REPORT}"
        )
    if not np.isfinite(rows).all():
        raise SelfTestError(
            f"{site}: captured rows hold infinity. The model overflows its dtype, or its weights are damaged. Try "
            "another --dtype."
        )
    zero = [layer for layer, of_layer in zip(layers, rows, strict=True) if not of_layer.any()]
    if zero:
        raise SelfTestError(f"{site}: captured rows of layers {zero} are all zero: the taps wrote nothing. {_REPORT}")
    same = [layers[index] for index in range(1, len(rows)) if np.array_equal(rows[index], rows[index - 1])]
    if same and of != capture_pb2.SITE_ROUTING_WEIGHTS:  # a single expert's weight can always be 1
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


def _difference(rows: Rows, expected: Rows) -> float:
    """Return how far rows are from others, relative to their lengths, [layers, positions, hidden].

    In a mixture of experts, rounding may choose another expert, which changes the rows from some layer on. That does
    not happen at every position and in half of the layers. So this is the median over the layers, of the position where
    it is least.
    """
    lengths = np.maximum(np.linalg.norm(expected, axis=-1), np.finfo(np.float32).tiny)
    return float(np.median(np.linalg.norm(rows - expected, axis=-1) / lengths, axis=0).min())


def _check_steps(rows: Rows, as_prompt: Rows) -> None:
    """Check that the generated tokens' rows are those of the same tokens in a prompt, [layers, positions, hidden]."""
    error = _difference(rows[:, _PROMPT_TOKENS:], as_prompt[:, _PROMPT_TOKENS:])
    if not error < _UNEQUAL_STEPS:
        raise SelfTestError(
            f"vLLM computes other rows for a token that it generates than for the same token in a prompt: in half of "
            f"the layers they differ by {error:.0%} or more. vLLM 0.32 does this on NVIDIA Hopper GPUs if every layer "
            'has the same sliding window. Set its argument compilation_config to {"cudagraph_mode": "PIECEWISE"}, or '
            "attention_backend to TRITON_ATTN. If that does not help, leave all sites but resid_post out of "
            "--capture-sites, and please report the model and its configuration."
        )


def _check_steering(plain: Rows, steered: Rows, push: Rows, layer: int) -> None:
    scale = np.linalg.norm(push)
    moved = np.linalg.norm(steered - plain, axis=-1).max(axis=-1) / scale  # [layers]
    if (moved[:layer] > 0.01).any():  # noqa: PLR2004 - rounding moves rows by far less than a hundredth of the push
        raise SelfTestError(
            f"Steering after layer {layer} moved rows of earlier layers: the taps are at the wrong layers. {_REPORT}"
        )
    miss = np.linalg.norm(steered[layer] - plain[layer] - push, axis=-1).max() / scale
    if not miss < _OFF_PUSH:
        raise SelfTestError(
            f"Steering after layer {layer} moved its rows by the wrong amount: they are off by {miss:.1%} of the "
            f"vector that was added. {_REPORT}"
        )
    if not (moved[layer + 1 :] > 0.05).all():  # noqa: PLR2004 - far more than rounding, far less than the push
        raise SelfTestError(
            f"Steering after layer {layer} did not move the rows of later layers. The model does not use what the "
            f"taps write. {_REPORT}"
        )
