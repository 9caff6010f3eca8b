"""Sends the requests to the service, and compares every captured row with the reference."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

import residuum
from bench.conformance.architectures import Architecture
from bench.conformance.reference import FINAL_NORM, WIDE_SITES, Change, Reference, adding
from bench.conformance.results import Comparison, Rows
from bench.conformance.setup import Setup
from bench.conformance.stock import run_stock
from bench.conformance.workload import NEW_TOKENS, Request, make_changed_request, make_requests

_REQUEST_SECONDS = 120.0
_TRIES = 3
"""How often the request whose steering changes is sent, if the change comes after its last token."""
_NORMED = {"attn_in", "mlp_in", FINAL_NORM, *WIDE_SITES}
"""Sites whose rows have a length of their own, as after a norm, and not that of the stream."""


def compare(
    architecture: Architecture, setup: Setup, endpoint: str, model: Path, scratch: Path
) -> tuple[Comparison, tuple[int, int]]:
    """Send the requests, and compare the rows.

    Args:
        architecture: The architecture.
        setup: The setup of the engine.
        endpoint: host:port of the inference service.
        model: The model's folder.
        scratch: A folder that does not exist yet.

    Returns:
        The comparison, and tensor and pipeline parallel size from a manifest.
    """
    with residuum.Client(endpoint) as client:
        info = client.info()
        answers = _ask_alone(client, setup) if setup.quantization else _ask_together(client, setup)
        comparison = Comparison()
        if setup.alone:
            for number, answer in enumerate(answers):
                if answer.request.later:
                    continue  # the change comes at another position each time
                alone = _ask(client, setup, answer.request, 1.0, number)
                _compare_alone(number, answer, alone, setup, comparison)
    comparison.site_layers = {
        site: layers for site, layers in info.site_layers.items() if len(layers) < info.num_layers
    }
    if setup.quantization:
        _compare_with_stock(answers, architecture, setup, model, scratch, comparison)
    else:
        _compare_with_transformers(answers, architecture, setup, model, info, comparison)
    layout = answers[0].acts.manifest.proto.description.layout
    return comparison, (layout.tensor_parallel_size, layout.pipeline_parallel_size)


@dataclass(frozen=True)
class _Answer:
    """What came of a request."""

    request: Request
    acts: residuum.Activations
    generated: tuple[int, ...]
    """The reply, as the manifest has it."""
    logprobs: Rows
    """The log-probability that vLLM gave each token of the reply, [tokens]."""
    lens: Rows
    """The one that the service's logit lens of the last layer gives it, [tokens]; empty without rows of that layer."""
    changed_at: int | None = None
    """The first position with the later steering."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the reply without its last token, which is never fed to the model."""
        # The expected rows depend only on the request.
        return [*self.request.prompt, *self.generated][: len(self.request.prompt) + self.request.new_tokens - 1]

    @property
    def changes(self) -> dict[tuple[str, int], Change]:
        """The steering, for the reference."""
        stop, later = self.changed_at, self.request.later
        return {
            **{place: adding(push, stop=stop) for place, push in self.request.pushes.items()},
            **{place: adding(push, start=stop or 0) for place, push in later.items()},
        }


def _ask_together(client: residuum.Client, setup: Setup) -> list[_Answer]:
    info = client.info()
    inside = [site for site in info.steering_sites if site != "resid_post"]
    requests = make_requests({site: (info.site_widths[site], info.site_layers[site]) for site in inside})
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        changed = [pool.submit(_ask_changed, client, setup)] if setup.changes else []
        # Sampled, because greedy replies of a tiny random model repeat themselves.
        answers = pool.map(
            lambda request, seed: _ask(client, setup, request, 1.0, seed), requests, range(len(requests))
        )
        return [*answers, *(answer.result() for answer in changed)]


def _ask_alone(client: residuum.Client, setup: Setup) -> list[_Answer]:
    return [_ask(client, setup, request, temperature=0.0) for request in make_requests() if not request.pushes]


def _ask(client: residuum.Client, setup: Setup, request: Request, temperature: float, seed: int = 0) -> _Answer:
    reply = client.generate(
        list(request.prompt),
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        temperature=temperature,
        seed=seed,
        logprobs=1,
        capture=residuum.Capture(layers="all", sites=setup.sites),
        steer=_steering(request.pushes),
        timeout=_REQUEST_SECONDS,
    )
    return _answer(client, request, reply)


def _ask_changed(client: residuum.Client, setup: Setup) -> _Answer:
    request = make_changed_request()
    for _ in range(_TRIES):
        with client.stream(
            list(request.prompt),
            max_tokens=request.new_tokens,
            ignore_eos=True,
            temperature=1.0,
            logprobs=1,
            capture=residuum.Capture(layers="all", sites=setup.sites),
            steer=_steering(request.pushes),
            updatable=True,
            timeout=_REQUEST_SECONDS,
        ) as stream:
            next(stream)
            (first,) = stream.update_steering(_steering(request.later))
            for _ in stream:
                pass
        answer = replace(_answer(client, request, stream.reply), changed_at=first)
        if first < len(answer.token_ids):
            break
    return answer


def _steering(pushes: Mapping[tuple[str, int], Rows]) -> list[residuum.Add]:
    return [
        residuum.Add(residuum.Vector.from_array(push), layer=layer, site=site) for (site, layer), push in pushes.items()
    ]


def _answer(client: residuum.Client, request: Request, reply: residuum.Reply) -> _Answer:
    acts = client.activations(reply.request_id, allow_partial=True)
    generated = acts.manifest.sequences[0].generated_token_ids if acts.manifest.sequences else ()
    return _Answer(request, acts, tuple(generated), _logprobs(reply), _lens(client, acts, len(request.prompt)))


def _lens(client: residuum.Client, acts: residuum.Activations, prompt_tokens: int) -> Rows:
    stream = acts.select(site="resid_post") if "resid_post" in acts.sites else None
    if stream is None or not stream.present[-1].all():
        return np.zeros(0, np.float32)
    last = slice(prompt_tokens - 1, None)  # the row before the reply predicts its first token
    return client.unembed(stream.stack()[-1, last], top_k=1, tokens=stream.next_token_ids[last]).tokens


def _logprobs(reply: residuum.Reply) -> Rows:
    return np.zeros(0, np.float32) if reply.logprobs is None else reply.logprobs.tokens


def _compare_with_transformers(
    answers: list[_Answer],
    architecture: Architecture,
    setup: Setup,
    model: Path,
    info: residuum.ModelInfo,
    comparison: Comparison,
) -> None:
    reference = Reference(architecture, model)
    reference.widths = info.site_widths
    for answer in answers:
        run = partial(reference.rows, answer.token_ids, answer.changes)
        if answer.changed_at is not None:
            comparison.changed_rows = max(len(answer.token_ids) - answer.changed_at, 0)
        if architecture.routed:
            got = {site: answer.acts.select(site=site).stack().astype(np.float32) for site in setup.sites}
            expected = comparison.explain(run, got, setup.bounds(architecture))
        else:
            expected = run()
        _add(answer, expected, setup, architecture, comparison)
        if {"q", "k"} <= set(setup.sites):
            for layer, weights in reference.weights.items():
                if info.attention[layer].num_heads and layer in info.site_layers["q"]:
                    comparison.see_attention(residuum.attention_weights(answer.acts, layer, info), weights)
        if "resid_post" in setup.sites:
            _compare_logprobs(answer, reference, comparison)


def _add(
    answer: _Answer, expected: Mapping[str, Rows], setup: Setup, architecture: Architecture, comparison: Comparison
) -> None:
    comparison.states[answer.acts.manifest.state] += 1
    if len(answer.lens):
        comparison.see_lens(answer.lens, answer.logprobs)
    comparison.see_layers(expected["resid_post"])
    of_stream = setup.bounds(architecture).of_stream
    for site in setup.sites:
        rows = answer.acts.select(site=site)
        layers = list(rows.layers)
        stream = expected["resid_pre"] if of_stream and site not in _NORMED else None
        comparison.add(rows.stack(), rows.present, expected[site][layers], None if stream is None else stream[layers])


def _compare_alone(number: int, together: _Answer, alone: _Answer, setup: Setup, comparison: Comparison) -> None:
    for site in setup.sites:
        pair = [answer.acts.select(site=site) for answer in (alone, together)]
        points = [f"request {number}: {site}.{layer}" for layer in pair[0].layers]
        comparison.see_alone(pair[0].stack(), pair[1].stack(), points)


def _compare_logprobs(answer: _Answer, reference: Reference, comparison: Comparison) -> None:
    """Compare the log-probabilities of the reply with those that follow from the rows after the last layer.

    The rows may be what the model computed although transformers computes others: then these agree.
    """
    last = answer.acts.select(site="resid_post").stack()[-1].astype(np.float32)
    before = len(answer.request.prompt) - 1  # the row at this position predicts the first token of the reply
    count = min(len(answer.generated), len(answer.logprobs), len(last) - before)
    predicted = reference.logprobs(last)[before : before + count]
    comparison.see_logprobs(predicted[np.arange(count), answer.generated[:count]], answer.logprobs[:count])


def _compare_with_stock(
    answers: list[_Answer], architecture: Architecture, setup: Setup, model: Path, scratch: Path, comparison: Comparison
) -> None:
    prompts = [answer.request.prompt for answer in answers]
    for answer, stock in zip(
        answers, run_stock(model, setup.stock_arguments(), prompts, NEW_TOKENS, scratch), strict=True
    ):
        comparison.other_replies += stock.generated != answer.generated
        expected = {"resid_post": stock.rows, "resid_pre": np.concatenate([stock.rows[:1], stock.rows[:-1]])}
        _add(answer, expected, setup, architecture, comparison)
