"""The middleware that adds scores to vLLM's answers, around a small application."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inference_svc.engine.streams import Delta
from inference_svc.vllm_serve.score_fields import ScoreFields, current_answer
from residuum.v1 import rule_pb2

NAMES = ["one", "two"]


def delta(*values, events=(), prompt=()):
    """Tokens with the scores of a probe with one output, and of one with two."""
    one = np.array(values, np.float32)[:, None]
    of_prompt = np.array(prompt, np.float32)[:, None]
    return Delta(
        "", list(range(len(values))), scores=(one, np.concatenate([one, -one], axis=1)), rule_events=events,
        prompt_scores=(of_prompt, np.concatenate([of_prompt, of_prompt], axis=1)) if prompt else (),
    )  # fmt: skip


async def answered(app, kind="http"):
    """Run an application behind the middleware, and return what it sends."""
    sent = []

    async def send(message):
        sent.append(message)

    await ScoreFields(app)({"type": kind, "path": "/v1/completions"}, None, send)
    return sent


def start(kind=b"application/json", status=200, **more):
    headers = [(b"Content-Type", kind), (b"x-other", b"1"), *((name.encode(), value) for name, value in more.items())]
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(document, more=False):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return {"type": "http.response.body", "body": text, "more_body": more}


def event(choices, **more):
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def parsed(message):
    return [json.loads(line[6:]) for line in message["body"].split(b"\n") if line.startswith(b"data: {")]


async def test_a_whole_answer_has_the_scores_of_each_choice():
    async def app(scope, receive, send):
        answer = current_answer()
        answer.has_scores = True
        answer.add(0, NAMES, delta(0.5, prompt=(0.25, np.nan)))
        answer.add(0, NAMES, delta(0.75))
        answer.add(1, NAMES, delta(np.inf))
        whole = json.dumps({"choices": [{"index": 0, "text": "é"}, {"index": 1}]}, ensure_ascii=False).encode()
        await send(start(**{"content-length": str(len(whole)).encode()}))
        await send(body(whole[:20], more=True))
        await send(body(whole[20:]))

    begin, end = await answered(app)
    document = json.loads(end["body"])
    assert document["choices"][0] == {
        "index": 0,
        "text": "é",
        "residuum": {
            "scores": {"one": [0.5, 0.75], "two": [[0.5, -0.5], [0.75, -0.75]]},
            "prompt_scores": {"one": [0.25, None], "two": [[0.25, 0.25], [None, None]]},
        },
    }
    assert document["choices"][1]["residuum"]["scores"] == {"one": [None], "two": [[None, None]]}
    headers = dict(begin["headers"])
    assert headers[b"content-length"] == str(len(end["body"])).encode()
    assert headers[b"x-other"] == b"1"


async def test_a_streamed_answer_has_the_scores_beside_the_token():
    fired = rule_pb2.RuleEvent(rule="r", token=1, score=0.75, action=rule_pb2.RULE_ACTION_STEER, first_position=9)

    async def app(scope, receive, send):
        answer = current_answer()
        answer.has_scores = True
        await send(start(b"text/event-stream"))
        answer.add(0, NAMES, delta(0.5))
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
        await send(body(event([role]), more=True))
        await send(body(event([{"index": 0, "delta": {"content": "a"}}]), more=True))
        answer.add(0, NAMES, delta(0.75, events=(fired,)))  # vLLM sends nothing for some outputs
        answer.add(0, NAMES, delta(1.0))
        await send(body(event([{"index": 0, "delta": {"content": "b"}}]) + event([], usage={}), more=True))
        await send(body(b"data: [DONE]\n\n"))

    sent = await answered(app)
    assert sent[0] == start(b"text/event-stream")
    first, second = parsed(sent[1])[0], parsed(sent[2])[0]
    assert "residuum" not in first["choices"][0], "the role has no token"
    assert second["choices"][0]["residuum"] == {"scores": {"one": [0.5], "two": [[0.5, -0.5]]}}
    third, usage = parsed(sent[3])
    assert third["choices"][0]["residuum"]["scores"]["one"] == [0.75, 1.0]
    assert third["choices"][0]["residuum"]["rule_events"] == [
        {"rule": "r", "token": 1, "score": 0.75, "action": "steer", "first_position": 9}
    ]
    assert usage == {"choices": [], "usage": {}}
    assert sent[4]["body"] == b"data: [DONE]\n\n"


@pytest.mark.parametrize("kind", ["http", "websocket"])
async def test_other_answers_pass_unchanged(kind):
    messages = [start(), body(b"{not json", more=True), body(b"")]

    async def app(scope, receive, send):
        assert (current_answer() is not None) == (kind == "http")
        for message in messages:
            await send(message)

    assert await answered(app, kind) == messages


async def test_an_error_passes_unchanged():
    messages = [start(status=400), body({"error": "bad"})]

    async def app(scope, receive, send):
        current_answer().has_scores = True
        for message in messages:
            await send(message)

    assert await answered(app) == messages


async def test_each_request_has_its_own_answer():
    seen = []

    async def app(scope, receive, send):
        seen.append(current_answer())

    await answered(app)
    await answered(app)
    assert seen[0] is not seen[1]
