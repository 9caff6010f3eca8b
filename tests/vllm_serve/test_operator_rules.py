"""Rules of the operator in `vllm serve`: they watch requests that know nothing of residuum, too."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest

import residuum
from tests.reference.hf import Reference
from tests.reference.tiny import HIDDEN
from tests.vllm_serve.serving import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm_serve.serving import Server

pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8, 9, 10]
ASKED = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
FILE = """
[[rule]]
name = "stop"
probe = "always.safetensors"
above = 0.9
for_tokens = 6
then = "abort"
may_opt_out = true

[[rule]]
name = "joy"
probe = "always.safetensors"
above = 0.9
for_tokens = 2
then = "steer"
may_opt_out = true
[[rule.steer]]
set = { vector = "joy.npy" }
layers = [3]
"""
JOY = np.random.default_rng(3).normal(size=HIDDEN).astype(np.float32)


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("vllm")
    residuum.Probe.from_attention(np.zeros(HIDDEN), np.zeros(HIDDEN), 1.0, layer=1).save(folder / "always.safetensors")
    np.save(folder / "joy.npy", JOY)
    (folder / "rules.toml").write_text(FILE)
    with running_server(folder, tiny_llama, fork=True, RESIDUUM_RULES_FILE=str(folder / "rules.toml")) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="module")
def steered_token(tiny_llama: Path) -> int:
    """The token that the last layer's row predicts once it is set to JOY."""
    model = Reference(tiny_llama).model
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return int(model.lm_head(model.model.norm(torch.tensor(JOY)[None])).argmax())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("own", [False, True], ids=["plain", "with a probe"])
def test_every_request_is_watched(api: openai.OpenAI, steered_token: int, *, stream: bool, own: bool) -> None:
    probe = residuum.Probe(np.ones(HIDDEN), layer=2, name="own")
    body = {"vllm_xargs": residuum.vllm_xargs(probes=[probe])} if own else {}
    answer = api.completions.create(
        **ASKED, stream=stream, extra_body={**body, "return_token_ids": True}
    )  # fmt: skip
    choices = [choice for part in (list(answer) if stream else [answer]) for choice in part.choices]
    token_ids = [token for choice in choices for token in choice.model_extra["token_ids"]]
    assert len(token_ids) == 6
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("rule", "operator:stop")
    fields = [choice.model_extra.get("residuum", {}) for choice in choices]
    events = [event for field in fields for event in field.get("rule_events", [])]
    assert [(event["rule"], event["token"], event["action"]) for event in events] == [
        ("operator:joy", 1, "steer"),
        ("operator:stop", 5, "abort"),
    ]
    scores = [field["scores"] for field in fields if "scores" in field]
    assert {name for part in scores for name in part} == ({"own"} if own else set()), "not those of the operator"
    first = events[0]["first_position"] - len(PROMPT)  # the position's row predicts the token after it
    assert 1 < first + 1 < 6
    assert set(token_ids[first + 1 :]) == {steered_token}
    assert steered_token not in token_ids[: first + 1]


def test_a_request_may_opt_out(api: openai.OpenAI) -> None:
    xargs = residuum.vllm_xargs(without_operator_rules=True)
    (choice,) = api.completions.create(**ASKED, extra_body={"vllm_xargs": xargs}).choices
    assert choice.finish_reason == "length"
    assert "residuum" not in choice.model_extra


def test_the_metrics_of_vllm_count_the_rules_that_fire(server: Server, api: openai.OpenAI) -> None:
    def counts() -> dict[tuple[str, str], float]:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert "vllm:" in text
        line = re.compile(r'residuum_inference_rules_fired_total\{action="(\w+)",rule="([^"]+)"\} (\S+)')
        return {(rule, action): float(count) for action, rule, count in line.findall(text)}

    before = counts()
    api.completions.create(**ASKED)
    api.completions.create(**ASKED, extra_body={"vllm_xargs": residuum.vllm_xargs(without_operator_rules=True)})
    more = {key: count - before.get(key, 0) for key, count in counts().items()}
    assert more == {("operator:joy", "steer"): 1, ("operator:stop", "abort"): 1}


def test_the_log_names_the_request_of_each_rule_that_fires(server: Server, api: openai.OpenAI) -> None:
    """By the ID that the caller knows: its own, otherwise that of the answer, also with several prompts at once."""

    def lines() -> list[dict[str, Any]]:
        found = re.findall(r'\{".*\}', server.log.read_text())  # vLLM's lines have other braces
        return [line for line in map(json.loads, found) if line.get("event") == "rule fired"]

    before = len(lines())
    own = {"vllm_xargs": residuum.vllm_xargs(probes=residuum.Probe(np.ones(HIDDEN), layer=2), request_id="mine")}
    one = api.completions.create(**ASKED, extra_headers={"X-Request-Id": "one"}).id
    several = {**ASKED, "prompt": [PROMPT, PROMPT[1:]]}
    two = api.completions.create(**several).id
    api.completions.create(**several, extra_body=own)
    fired = [(line["rule"], line["request_id"]) for line in lines()[before:]]
    names = [one, two, f"{two}-1", "mine", "mine-1"]
    assert one == "cmpl-one"
    assert sorted(fired) == sorted((rule, name) for rule in ("operator:joy", "operator:stop") for name in names)
