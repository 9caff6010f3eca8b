"""Requests to a front end whose start failed get the cause."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError, VLLMValidationError

import residuum
from inference_svc import selftest
from inference_svc.admission.captures import resolve_capture
from inference_svc.admission.rules_file import RulesFile
from inference_svc.admission.steering import _check_site
from inference_svc.tap_settings import TapSettings
from inference_svc.vllm_serve.front import FrontEnd
from inference_svc.vllm_serve.requests.outputs import stopped_failure
from inference_svc.vllm_serve.requests.refusals import http_error
from inference_svc.vllm_serve.requests.request_admission import ReceivedRequest, capture_id
from inference_svc.vllm_serve.requests.xargs import ResiduumArguments
from inference_svc.vllm_serve.score_fields import Answer
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, inference_pb2
from svc_common.machine import machine_id

PROMPT = {"type": "token", "prompt_token_ids": [1, 2, 3]}
LAYERS = 2
VECTOR = residuum.Vector.from_array([1.0] * 8)
STEERED = residuum.vllm_xargs(steer=[residuum.Add(VECTOR, layer=1)])


class Silent:
    """An engine that generates, but whose taps deliver no rows, as if vLLM never called the hooks."""

    errored = False

    def __init__(self, layers, control):
        model = SimpleNamespace(
            served_model_name="tiny", max_model_len=64, dtype=torch.float32, enforce_eager=True,
            get_total_num_hidden_layers=lambda: LAYERS, get_hidden_size=lambda: 8, get_vocab_size=lambda: 16,
            max_logprobs=20,
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(
            model_config=model,
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            use_v2_model_runner=False,
        )
        self.rank = {"rank": 0, "tensor_rank": 0, "captures": True, "ring_bytes": 1}
        self.rank |= {"first_layer": 0, "num_layers": layers, "machine": machine_id()}
        self.rank |= {"control_path": control, "site_widths": [], "steering_sites": [1], "attention": []}
        self.rank |= {"site_layers": [list(range(layers))]}
        self.rank |= {"pool_bytes": 0, "table_bytes": 0, "folded_norms": 0, "score_board": ""}

    async def collective_rpc(self, method, args=()):
        return [self.rank] if method == "residuum_describe" else [[]]

    async def generate(self, prompt, sampling_params, request_id, **options):
        choice = SimpleNamespace(
            index=0, text="a", token_ids=[1], finish_reason="length", stop_reason=None, logprobs=None
        )
        yield SimpleNamespace(outputs=[choice])


async def started(llm):
    front = FrontEnd(TapSettings(), None, llm, llm.generate, index=0, count=1)
    await asyncio.wait({front._startup._task})
    return front


@pytest.fixture(autouse=True)
def _no_row_is_waited_for(monkeypatch):
    monkeypatch.setattr(selftest, "_ROWS_SECONDS", 0.05)


@pytest.fixture
def control(tmp_path):
    path = tmp_path / "folder" / "control"
    path.parent.mkdir()
    path.touch()
    return str(path)


def refusal(front):
    with pytest.raises(GracefulHTTPError) as refused:
        front.generate(PROMPT, SamplingParams(extra_args=STEERED), "r", {})  # not awaited
    assert refused.value.http_status == HTTPStatus.INTERNAL_SERVER_ERROR
    return str(refused.value)


async def test_after_a_failed_self_test_requests_fail_with_its_cause(control):
    front = await started(Silent(LAYERS, control))
    told = refusal(front)
    assert "its self-test failed: SITE_RESID_POST: rows of layers [0, 1] did not arrive" in told
    assert refusal(front) == told, "every request gets the cause"


async def test_every_api_server_hears_of_a_failed_self_test(control):
    llm = Silent(LAYERS, control)
    second = FrontEnd(TapSettings(), None, llm, llm.generate, index=1, count=2)
    done, _ = await asyncio.wait({second._startup._task}, timeout=0.3)
    assert not done, "the first one has not begun"
    first = FrontEnd(TapSettings(), None, llm, llm.generate, index=0, count=2)
    await asyncio.wait({first._startup._task, second._startup._task}, timeout=30)
    assert "its self-test failed: SITE_RESID_POST: rows of layers" in refusal(second)
    assert refusal(second) == refusal(first)


async def test_an_api_server_is_ready_when_the_first_one_is(control):
    llm = Silent(LAYERS, control)
    second = FrontEnd(TapSettings(), None, llm, llm.generate, index=1, count=2)
    Path(control).with_name("startup").touch()
    await asyncio.wait_for(second._startup._task, 30)


async def test_requests_fail_if_a_layer_is_not_tapped(control):
    front = await started(Silent(LAYERS - 1, control))
    assert "not every layer is known to be tapped: No rank captures layer" in (refusal(front))


async def test_a_request_sent_before_the_self_test_failed_fails_in_its_answer(control):
    llm = Silent(LAYERS, control)
    front = FrontEnd(TapSettings(), None, llm, llm.generate, index=0, count=1)
    answer = front.generate(PROMPT, SamplingParams(extra_args=STEERED), "r", {})
    with pytest.raises(GracefulHTTPError, match="self-test failed"):
        await anext(answer)


async def test_a_request_before_the_workers_answered_is_checked_in_its_answer(control):
    llm, described = Silent(LAYERS, control), asyncio.Event()
    answer_at_once = llm.collective_rpc

    async def answer(method, args=()):
        await described.wait()
        return await answer_at_once(method, args)

    llm.collective_rpc = answer
    Path(control).with_name("startup").touch()
    front = FrontEnd(TapSettings(), None, llm, llm.generate, index=1, count=2)
    bad = SamplingParams(extra_args=residuum.vllm_xargs(residuum.Capture(layers=[LAYERS])))
    early = asyncio.ensure_future(anext(front.generate(PROMPT, bad, "r", {})))
    await asyncio.wait({early}, timeout=0.1)
    assert not early.done()
    described.set()
    with pytest.raises(VLLMValidationError, match="There is no layer 2"):
        await early
    with pytest.raises(VLLMValidationError, match="There is no layer 2"):
        front.generate(PROMPT, bad, "r", {})  # not awaited


async def test_requests_without_residuum_arguments_are_served(control):
    front = await started(Silent(LAYERS, control))
    outputs = [output async for output in front.generate(PROMPT, SamplingParams(), "r", {})]
    assert outputs[0].outputs[0].text == "a"


async def test_rules_that_do_not_fit_the_model_stop_all_requests(control, tmp_path):
    """Also those without residuum's arguments, which the rules were to watch."""
    llm = Silent(LAYERS, control)
    residuum.Probe([1.0, 2.0], layer=0).save(tmp_path / "probe.safetensors")
    path = tmp_path / "rules.toml"
    path.write_text('[[rule]]\nname = "r"\nprobe = "probe.safetensors"\nabove = 1.0\n')
    front = FrontEnd(TapSettings(), RulesFile(path), llm, llm.generate, index=0, count=1)
    await asyncio.wait({front._startup._task})
    with pytest.raises(GracefulHTTPError, match="RESIDUUM_RULES_FILE") as refused:
        front.generate(PROMPT, SamplingParams(), "r", {})
    assert refused.value.http_status == HTTPStatus.INTERNAL_SERVER_ERROR


def named(vllm_id, chosen="", path="/v1/chat/completions"):
    """Return the ID that the caller of a captured request knows, and the number of its prompt."""
    arguments = ResiduumArguments(inference_pb2.RequestSpec(request_id=chosen), ())
    received = ReceivedRequest(arguments, PROMPT, SamplingParams(), vllm_id, "", Answer(path))
    return capture_id(SimpleNamespace(request_id=chosen, capture=object()), received.known_id), received.prompt_number


@pytest.mark.parametrize(
    ("vllm_id", "name"),
    [
        ("cmpl-7f-0", "cmpl-7f"),  # the first prompt of a completion: as the answer's id
        ("cmpl-7f-0-0", "cmpl-7f-0"),  # the same, with an X-Request-Id that ends with -0
        ("cmpl-7f-1", "cmpl-7f-1"),  # the second prompt
        ("cmpl-7f-10", "cmpl-7f-10"),
        ("chatcmpl-7f-0", "chatcmpl-7f-0"),  # a chat has one prompt, and no number
        ("chatcmpl-7f_1", "chatcmpl-7f_1"),
        ("resp_7f_0", "resp_7f"),  # the first turn of a response
        ("resp_7f_2", "resp_7f-2"),
    ],
)
def test_a_capture_is_named_as_the_answer(vllm_id, name):
    assert named(vllm_id)[0] == name


@pytest.mark.parametrize(
    ("vllm_id", "name"),
    [
        ("cmpl-7f-0", "mine"),
        ("cmpl-7f-1", "mine-1"),
        ("cmpl-7f-1-10", "mine-10"),
        ("chatcmpl-7f-1", "mine"),
        ("resp_7f_0", "mine"),
        ("resp_7f_1", "mine-1"),
    ],
)
def test_the_prompts_of_a_request_with_a_chosen_id_have_different_ids(vllm_id, name):
    assert named(vllm_id, "mine")[0] == name
    asked = SimpleNamespace(request_id="mine", capture=None)
    assert capture_id(asked, name) == name


@pytest.mark.parametrize(
    ("vllm_id", "name", "chosen", "number"),
    [("chatcmpl-7f_0", "chatcmpl-7f", "mine", 0), ("chatcmpl-7f_1_11", "chatcmpl-7f_1-11", "mine-11", 11)],
)
def test_the_conversations_of_a_batch_have_different_ids_and_choices(vllm_id, name, chosen, number):
    path = "/v1/chat/completions/batch"
    assert named(vllm_id, path=path) == (name, number)
    assert named(vllm_id, "mine", path) == (chosen, number)


def test_a_chosen_id_must_have_room_for_the_number_of_the_prompt():
    longest = "x" * 127
    assert named("cmpl-7f-0", longest)[0] == longest
    with pytest.raises(Failure, match=r"longer than 128 characters.* Choose a shorter one"):
        named("cmpl-7f-1", longest)


def test_a_request_that_ends_because_the_server_stops_may_be_sent_to_another():
    assert http_error(stopped_failure()).http_status == HTTPStatus.SERVICE_UNAVAILABLE


def test_a_site_that_is_not_enabled_is_named_as_in_python_with_the_variable_that_enables_it():
    facts = SimpleNamespace(sites=(capture_pb2.SITE_RESID_POST, capture_pb2.SITE_ATTN_OUT))
    with pytest.raises(Failure) as refused:
        resolve_capture(residuum.Capture(sites="mlp_out").to_proto(), facts)
    assert str(http_error(refused.value)).startswith(
        "UNKNOWN_SITE: The site mlp_out is not enabled on this server; enabled: resid_post, attn_out. Its operator "
        "enables sites with RESIDUUM_CAPTURE_SITES."
    )
    with pytest.raises(Failure) as refused:
        resolve_capture(capture_pb2.CaptureSpec(sites=[99]), facts)
    assert "The site 99 is not enabled" in str(http_error(refused.value))
    assert "There is no such site" in str(http_error(refused.value))


@pytest.mark.parametrize(
    ("site", "advice"),
    [
        ("q", "No server steers there."),
        ("resid_pre", "Steer resid_post of the layer before."),
        ("mlp_out", "Its operator enables the site with RESIDUUM_CAPTURE_SITES."),
    ],
)
def test_a_site_that_is_not_steered_has_the_advice_of_the_service(site, advice):
    facts = SimpleNamespace(steering_sites=(capture_pb2.SITE_RESID_POST,))
    with pytest.raises(Failure) as refused:
        _check_site(capture_pb2.Site.Value(f"SITE_{site.upper()}"), facts)
    text = str(http_error(refused.value))
    assert f"Rows at the site {site} cannot be steered; this server steers at: resid_post. {advice}" in text
