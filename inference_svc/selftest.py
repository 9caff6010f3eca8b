"""The start-up self-test: one tiny request is captured and steered through the very path that will serve.

vLLM has taken hooks without calling them before (another model runner, a stale compiled graph). A service that would
then deliver zeros, or steer nothing, must not say SERVING.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm import SamplingParams

from inference_svc.taps.plan import Capture, Kind, Operation, RequestPlan
from residuum.v1 import capture_pb2, selection_pb2

if TYPE_CHECKING:
    import numpy.typing as npt

    from inference_svc.engine.engine import Engine

    Rows = npt.NDArray[np.float32]

_PROMPT_TOKENS = 5
_NEW_TOKENS = 2
_BANK_ROW = 0
_STREAM = capture_pb2.SITE_RESID_POST
_PUSH = 4.0
"""How far the rows are pushed, in multiples of their own norm: far beyond what rounding could do."""


class SelfTestError(RuntimeError):
    """The taps do not work in this engine. The message says what was seen."""


async def run_self_test(engine: Engine) -> None:
    """Capture one request unsteered, and again steered after the middle layer, and compare.

    Raises:
        SelfTestError: Rows are missing, zero or not finite, or do not move as they should under steering.
    """
    layer = (engine.facts.num_layers - 1) // 2
    plain = await _capture(engine, "plain", ())
    for site in engine.facts.sites:
        _check_rows(plain[site], capture_pb2.Site.Name(site))
    stream = _STREAM if _STREAM in plain else min(plain)
    push = _push(plain[stream][layer])
    await engine.load_vectors([(_BANK_ROW, push.astype("<f4").tobytes())])
    steered = await _capture(engine, "steered", (_add(layer),))
    if _STREAM in plain:
        _check_steering(plain[_STREAM], steered[_STREAM], push, layer)
    elif engine.facts.num_layers > 1 and np.array_equal(plain[stream][-1], steered[stream][-1]):
        raise SelfTestError(f"steering after layer {layer} did not reach the last layer")


async def _capture(engine: Engine, name: str, operations: tuple[Operation, ...]) -> dict[int, Rows]:
    """Return the rows of the prompt at each armed site, float32 [layers, positions, hidden]."""
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
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    plan = RequestPlan(len(prompt), capture, operations)
    async for _ in engine.generate(capture_id, prompt, sampling, plan, cache_salt=capture_id):
        pass
    shape = (facts.num_layers, _PROMPT_TOKENS, facts.hidden_size)
    rows: dict[int, Rows] = {site: np.full(shape, np.nan, dtype=np.float32) for site in facts.sites}
    for sites, layers, positions, values in await engine.take_probe(capture_id):
        block = np.frombuffer(values, dtype=np.float32).reshape(len(sites), len(layers), len(positions), -1)
        for site, of_site in zip(sites, block, strict=True):
            for at, position in enumerate(positions):
                if position < _PROMPT_TOKENS:
                    rows[site][layers, position] = of_site[:, at]
    return rows


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
