"""The wrapper of the engine, on a fake AsyncLLM: its calls of vLLM, and its interpretation of the answers."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.engine import arguments as engine_arguments
from inference_svc.engine import engine as engine_module
from inference_svc.engine import streams
from inference_svc.engine.engine import Engine
from inference_svc.engine.facts import _site_layers
from inference_svc.engine.ranks import UntappedLayersError, check_ranks
from inference_svc.engine.sampling import sampling_params
from inference_svc.engine.streams import Delta
from inference_svc.settings import InferenceSettings
from inference_svc.taps.plan import Kind, Operation, RequestPlan
from inference_svc.taps.vllm.worker import SETTINGS_VARIABLE
from residuum.rpc.errors import Failure
from residuum.v1 import capture_pb2, inference_pb2
from svc_common.machine import machine_id
from tests.inference.service_support import FACTS
from tests.inference.taps_support import capture, select


class Tokenizer:
    def get_vocab(self):
        return {"a": 1, "long": 2}

    def encode(self, text):
        return [1, *text.encode()]

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))

    def apply_chat_template(self, messages, *, return_dict, tokenize, **options):
        assert not return_dict
        if messages[-1]["role"] == "system":
            raise ValueError("the last word is the system's")
        continues = messages[-1]["role"] == "assistant"
        assert options == (
            {"add_generation_prompt": False, "continue_final_message": True}
            if continues
            else {"add_generation_prompt": True}
        )
        if tokenize:
            return [len(message["content"]) for message in messages]
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + self.after

    after = ""
    """Text that the template adds after the last message although the message is to be continued."""


class FakeLLM:
    """The part of AsyncLLM that the wrapper uses."""

    def __init__(self):
        self.asked = []
        self.outputs = []
        self.prompt_logprobs = None
        self.error = None
        self.closed = 0
        self.answers = {}
        """For each method of the workers, its answers in turn: one list with an item for each rank."""
        self.errored = False

    async def generate(self, prompt, sampling, request_id, *, lora_request, data_parallel_rank):
        self.asked.append((prompt, sampling, request_id))
        self.adapter = lora_request
        try:
            for output in self.outputs:
                yield SimpleNamespace(
                    outputs=[output], prompt_logprobs=self.prompt_logprobs, prompt_token_ids=prompt["prompt_token_ids"]
                )
                self.prompt_logprobs = []
            if self.error:
                raise self.error
        finally:
            self.closed += 1

    async def collective_rpc(self, method, args=()):
        self.asked.append((method, args))
        answers = self.answers[method]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def completion(text, token_ids, finish_reason=None, stop_reason=None, logprobs=None):
    return SimpleNamespace(
        text=text, token_ids=token_ids, finish_reason=finish_reason, stop_reason=stop_reason, logprobs=logprobs
    )


@pytest.fixture
def llm():
    return FakeLLM()


@pytest.fixture
def engine(llm):
    return Engine(llm, Tokenizer(), FACTS)


async def generate(engine, plan=None, cache_salt=None, prompt=(1, 2), **parameters):
    sampling = sampling_params(inference_pb2.SamplingParameters(**parameters), 0)
    async with aclosing(engine.generate("r#0", prompt, sampling, plan, cache_salt)) as deltas:
        return sampling, [delta async for delta in deltas]


async def test_deltas_have_the_content_of_vllms_outputs(engine, llm):
    llm.outputs = [completion("a", [1]), completion("b", [2, 3], "stop", "###"), completion("", [], "stop", 42)]
    _, deltas = await generate(engine)
    assert deltas == [
        Delta("a", [1]),
        Delta("b", [2, 3], "stop", "###"),
        Delta("", [], "stop", "", 42),  # a stop token is not a stop string
    ]


async def test_a_request_that_the_engine_aborts_failed(engine, llm, monkeypatch):
    monkeypatch.setattr(streams, "_DEATH_SECONDS", 0.1)
    llm.outputs = [completion("a", [1]), completion("", [], "abort")]
    with pytest.raises(Failure) as caught:
        await generate(engine)
    assert (caught.value.reason_name, "finish reason abort" in str(caught.value)) == ("INTERNAL", True)


async def test_a_request_that_is_aborted_because_another_replica_died_tells_of_the_death(engine, llm):
    """vLLM reports the death only after it has aborted the requests of the other replicas."""
    llm.outputs = [completion("a", [1]), completion("", [], "abort")]
    asyncio.get_running_loop().call_later(0.1, setattr, llm, "errored", True)
    with pytest.raises(Failure) as caught:
        await generate(engine)
    assert caught.value.reason_name == "ENGINE_DEAD"


async def test_a_request_has_the_adapter_of_its_name_or_none(llm):
    engine = Engine(llm, Tokenizer(), FACTS, {"joy": "vLLM's joy", "calm": "vLLM's calm"})
    llm.outputs = [completion("a", [1], "stop")]
    for name, adapter in (("calm", "vLLM's calm"), ("", None)):
        async with aclosing(
            engine.generate("r#0", [1], sampling_params(inference_pb2.SamplingParameters(), 0), None, None, name)
        ) as deltas:
            assert [delta.text async for delta in deltas] == ["a"]
        assert llm.adapter == adapter


def logprobs_of(entries):
    """vLLM's log-probabilities of one token: its own and the most likely ones, (ID, log-probability, rank) each."""
    return {token_id: Logprob(logprob, rank) for token_id, logprob, rank in entries}


FIRST = logprobs_of([(7, -0.5, 1), (8, -1.5, 2)])
"""The token is among the most likely two, so vLLM lists it once."""
SECOND = logprobs_of([(9, -4.0, 3), (3, -0.25, 1), (4, -2.0, 2)])
"""The token is not among the most likely two."""


async def test_log_probabilities_equal_vllms(engine, llm):
    llm.prompt_logprobs = [None, SECOND]
    llm.outputs = [completion("a", [7], logprobs=[FIRST]), completion("", [9], "length", logprobs=[FIRST, SECOND])]
    llm.outputs.insert(1, completion("", [], logprobs=[FIRST]))  # some versions repeat earlier log-probabilities
    _, (first, empty, second) = await generate(engine, prompt=[5, 9], logprobs=2, prompt_logprobs=2)
    assert first.logprobs.part(slice(None)) == inference_pb2.Logprobs(
        tokens=[-0.5], num_top=2, top_token_ids=[7, 8], top=[-0.5, -1.5]
    )
    assert empty.logprobs is None
    other = inference_pb2.Logprobs(tokens=[-4.0], num_top=2, top_token_ids=[3, 4], top=[-0.25, -2.0])
    assert second.logprobs.part(slice(None)) == other
    assert first.prompt_logprobs.part(slice(None)) == other, "the first token of the prompt has no log-probability"
    assert second.prompt_logprobs is None
    merged = first.followed_by(empty).followed_by(second)
    assert merged.logprobs.tokens.tolist() == [-0.5, -4.0]
    assert merged.prompt_logprobs is first.prompt_logprobs


async def test_log_probabilities_of_a_prompt_need_its_computation(engine, llm):
    await generate(engine, prompt_logprobs=0)
    ((_, asked, _),) = llm.asked
    assert asked.skip_reading_prefix_cache


@pytest.mark.parametrize("error", [ValueError("no such thing"), VLLMValidationError("no such thing")])
async def test_a_refusal_of_vllm_is_an_invalid_request(engine, llm, error):
    llm.error = error
    with pytest.raises(Failure, match="vLLM refuses the request: no such thing") as caught:
        await generate(engine)
    assert (caught.value.reason_name, caught.value.metadata) == ("INVALID_FIELD", {"field": "sampling"})


async def test_an_error_after_the_first_token_is_no_refusal(engine, llm):
    llm.outputs = [completion("a", [1])]
    llm.error = ValueError("a defect")
    with pytest.raises(ValueError, match="a defect"):
        await generate(engine)


async def test_parameters_that_vllm_may_refuse_are_checked_with_the_prompt(engine, llm, monkeypatch):
    """vLLM names the parameter, or a grammar compiler raises an exception of its own."""

    def request(**parameters):
        token_ids = inference_pb2.TokenIds(ids=[1])
        sampling = inference_pb2.SamplingParameters(**parameters)
        return inference_pb2.GenerateRequest(token_ids=token_ids, sampling=sampling)

    errors = []

    def verify(sampling, *configs):
        if errors:
            raise errors.pop()

    monkeypatch.setattr(SamplingParams, "verify", verify)
    llm.vllm_config = SimpleNamespace(model_config=None, speculative_config=None, structured_outputs_config=None)
    for error, parameters, field in (
        (RuntimeError("a flaw at 3"), {"regex": "(", "min_p": 0.5}, "sampling.regex"),
        (
            VLLMValidationError("too large", parameter="logit_bias"),
            {"logit_bias": [inference_pb2.LogitBias(token_id=1)], "min_p": 1},
            "sampling.logit_bias",
        ),
        (ValueError("not here"), {"min_p": 0.5}, "sampling.min_p"),
    ):
        errors.append(error)
        with pytest.raises(Failure, match=f"vLLM refuses {field[9:]}: {error.args[0]}") as caught:
            await engine.tokenize(request(**parameters))
        assert (caught.value.reason_name, caught.value.metadata) == ("INVALID_FIELD", {"field": field})
    errors.append(RuntimeError("not asked"))
    assert await engine.tokenize(request(temperature=0.5, stop_token_ids=[1])) == [1]
    assert await engine.tokenize(request(regex="(", max_tokens=0)) == [1], "no token is generated"


async def test_a_plain_request_is_a_plain_request(engine, llm):
    sampling, _ = await generate(engine)
    ((prompt, asked, request_id),) = llm.asked
    # vLLM treats it as its own renderer's output: it neither parses it nor hands it to a thread
    assert (prompt, request_id) == ({"type": "token", "prompt_token_ids": [1, 2]}, "r#0")
    assert asked.extra_args is None
    assert not asked.skip_reading_prefix_cache
    assert asked is not sampling  # sequences must not share the top-level fields, which the wrapper writes
    assert sampling.extra_args is None
    assert not sampling.skip_clone
    assert asked.clone().stop is asked.stop  # vLLM does not make a deep copy of it either


async def test_a_captured_prompt_is_computed_and_not_read_from_the_cache(engine, llm):
    plan = RequestPlan(2, capture())
    await generate(engine, plan)
    ((_, asked, _),) = llm.asked
    assert asked.skip_reading_prefix_cache
    assert RequestPlan.from_extra_args(asked.extra_args) == plan


async def test_a_prompt_whose_last_token_is_captured_may_be_read_from_the_cache(engine, llm):
    await generate(engine, RequestPlan(2, replace(capture(), positions=select((-1, None)))))
    ((_, asked, _),) = llm.asked
    assert not asked.skip_reading_prefix_cache


async def test_a_steered_prompt_may_be_read_from_its_own_part_of_the_cache(engine, llm):
    await generate(engine, RequestPlan(2), cache_salt="pepper")
    ((prompt, asked, _),) = llm.asked
    assert prompt["cache_salt"] == "pepper"
    assert not asked.skip_reading_prefix_cache


async def test_closing_the_iterator_closes_vllms(engine, llm):
    llm.outputs = [completion("a", [1]), completion("b", [2])]
    sampling = sampling_params(inference_pb2.SamplingParameters(), 0)
    deltas = engine.generate("r#0", [1], sampling, None, None)
    await anext(deltas)
    await deltas.aclose()
    assert llm.closed == 1


async def test_a_dead_engine_is_a_failure_of_the_contract(engine, llm):
    llm.error = EngineDeadError()
    with pytest.raises(Failure) as caught:
        await generate(engine)
    assert caught.value.reason_name == "ENGINE_DEAD"


async def test_probes_of_all_ranks_are_joined(engine, llm):
    llm.answers["residuum_take_probe"] = [[["a"], [], ["b", "c"]]]
    assert await engine.take_probe("self-test") == ["a", "b", "c"]


async def test_ranks_that_compute_logits_return_an_explanation(engine, llm):
    llm.answers["residuum_explain_logits"] = [[None, [0.01, 0.0]]]
    assert await engine.explain_logits(b"rows", [3]) == [(0.01, 0.0)]
    assert llm.asked == [("residuum_explain_logits", (b"rows", [3]))]


async def test_steering_is_changed_on_every_rank(engine, llm):
    llm.answers["residuum_change_steering"] = [[{"r#0": 5}] * 2, [{"r#0": 5}, {"r#0": 6}]]
    operation = Operation(Kind.ADD, 1, (0, 2), select(), 2.0)
    assert await engine.change_steering({"r#0": [operation]}) == {"r#0": 5}
    assert llm.asked == [("residuum_change_steering", ({"r#0": [operation.to_data()]},))]
    with pytest.raises(RuntimeError, match="ranks"):
        await engine.change_steering({"r#0": [operation]})
    llm.answers["residuum_forget"] = [[None]]
    await engine.forget(("r#0",))
    assert llm.asked[-1] == ("residuum_forget", (["r#0"],))


async def test_an_engine_that_dies_during_a_change_of_steering_is_a_failure_of_the_contract(engine, llm, monkeypatch):
    """After the engine dies, vLLM never answers."""
    monkeypatch.setattr(engine_module, "_DEATH_POLL_SECONDS", 0.01)

    async def die(method, args):
        llm.errored = True
        await asyncio.Event().wait()

    llm.collective_rpc = die
    with pytest.raises(Failure) as caught:
        await asyncio.wait_for(engine.change_steering({}), 20)
    assert caught.value.reason_name == "ENGINE_DEAD"


async def test_draining_asks_until_every_rank_is_done(engine, llm):
    llm.answers["residuum_drain"] = [[False, True], [True, False], [True, True]]
    assert await engine.drain(20)
    assert len(llm.asked) == 3


async def test_draining_gives_up(engine, llm):
    llm.answers["residuum_drain"] = [[False]]
    assert not await engine.drain(0.05)


TEXT = inference_pb2.GenerateRequest(text="ab")


def chat(*roles):
    messages = [inference_pb2.ChatMessage(role=role, content="x" * (at + 1)) for at, role in enumerate(roles)]
    return inference_pb2.GenerateRequest(chat=inference_pb2.Chat(messages=messages))


def ids(*numbers):
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=numbers))


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (TEXT, [1, 97, 98]),
        (inference_pb2.GenerateRequest(text=""), []),
        (ids(5, FACTS.vocab_size - 1), [5, FACTS.vocab_size - 1]),
        (ids(), []),
        (chat("system", "user"), [1, 2]),
        (chat("user", "assistant"), [1, 2]),
        (chat(), []),
    ],
    ids=["text", "empty text", "ids", "no ids", "chat", "chat to continue", "empty chat"],
)
async def test_prompts_become_tokens(engine, request_, tokens):
    assert await engine.tokenize(request_) == tokens


async def test_the_text_of_a_prompt_is_the_sent_text_or_the_templates_output(engine):
    assert await engine.prompts.text(TEXT, [1, 97, 98]) == TEXT.text
    assert await engine.prompts.text(chat("system", "user"), [1, 2]) == "<system>x<user>xx"
    with pytest.raises(Failure, match="came as token IDs, so it has no text") as caught:
        await engine.prompts.text(ids(5), [5])
    assert caught.value.metadata == {"field": "capture.keep_prompt"}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.GenerateRequest(), "prompt"),
        (ids(FACTS.vocab_size), "token_ids"),
        (chat("system"), "chat"),
    ],
    ids=["no prompt", "id beyond the vocabulary", "chat that the template refuses"],
)
async def test_invalid_prompts_are_refused(engine, request_, field):
    with pytest.raises(Failure) as caught:
        await engine.tokenize(request_)
    assert (caught.value.reason_name, caught.value.metadata) == ("INVALID_FIELD", {"field": field})


async def test_a_reply_that_cannot_be_continued_is_refused(engine, monkeypatch):
    """A tokenizer without this ability closes the message, so the model would begin a new answer."""
    monkeypatch.setattr(Tokenizer, "after", "</assistant>")
    with pytest.raises(Failure, match="tokenizer cannot continue") as caught:
        await engine.tokenize(chat("user", "assistant"))
    assert (caught.value.reason_name, caught.value.metadata) == ("INVALID_FIELD", {"field": "chat"})
    empty = chat("user", "assistant")
    empty.chat.messages[-1].content = " \n"
    with pytest.raises(Failure, match="last message is empty") as caught:
        await engine.tokenize(empty)
    assert (caught.value.reason_name, caught.value.metadata) == ("INVALID_FIELD", {"field": "chat"})


LONGEST = 4 * FACTS.max_model_len  # characters; the longest token has four


@pytest.mark.parametrize(
    "request_",
    [
        inference_pb2.GenerateRequest(text="x" * (LONGEST + 1)),
        inference_pb2.GenerateRequest(
            chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x" * LONGEST)])
        ),
        chat(*["user"] * (FACTS.max_model_len + 1)),
    ],
    ids=["text", "chat", "messages"],
)
async def test_prompts_too_long_for_any_model_are_not_tokenized(engine, monkeypatch, request_):
    for method in ("encode", "apply_chat_template"):
        monkeypatch.delattr(Tokenizer, method)
    with pytest.raises(Failure) as caught:
        await engine.tokenize(request_)
    assert caught.value.reason_name == "PROMPT_TOO_LONG"


async def test_the_event_loop_continues_while_a_long_text_is_tokenized(engine, monkeypatch):
    other_did_run = threading.Event()

    def read_slowly(self, text):
        assert other_did_run.wait(20), "the event loop was blocked"
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", read_slowly)
    reading = asyncio.create_task(engine.tokenize(TEXT))
    await asyncio.sleep(0)
    other_did_run.set()
    assert await reading == [1]


@pytest.fixture
def engine_without_tokenizer(llm):
    return Engine(llm, None, FACTS)


async def test_without_a_tokenizer_token_ids_are_accepted(engine_without_tokenizer):
    assert await engine_without_tokenizer.tokenize(ids(5, 6)) == [5, 6]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (TEXT, "text"),
        (inference_pb2.GenerateRequest(text=""), "text"),
        (chat("user"), "chat"),
        (
            inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[1]), sampling=inference_pb2.SamplingParameters(stop=["x"])
            ),
            "sampling.stop",
        ),
        (
            inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[1]), sampling=inference_pb2.SamplingParameters(regex="x")
            ),
            "sampling.regex",
        ),
        (
            inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[1]), sampling=inference_pb2.SamplingParameters(bad_words=["x"])
            ),
            "sampling.bad_words",
        ),
    ],
    ids=["text", "empty text", "chat", "stop string", "regex", "bad words"],
)
async def test_without_a_tokenizer_texts_are_refused(engine_without_tokenizer, request_, field):
    with pytest.raises(Failure, match="This engine has no tokenizer") as caught:
        await engine_without_tokenizer.tokenize(request_)
    assert (caught.value.reason_name, caught.value.metadata) == ("INVALID_FIELD", {"field": field})


async def test_tokens_become_text_only_with_a_tokenizer(engine, engine_without_tokenizer, llm):
    await generate(engine)
    await generate(engine_without_tokenizer)
    assert [asked.detokenize for _, asked, _ in llm.asked] == [True, False]


def test_every_sampling_parameter_reaches_vllm():
    made = sampling_params(
        inference_pb2.SamplingParameters(
            stop_token_ids=[7], min_p=0.25, presence_penalty=-1, frequency_penalty=0.5, repetition_penalty=1.5,
            logit_bias=[inference_pb2.LogitBias(token_id=3, bias=-2.5)], bad_words=["no"],
            logprobs=0, prompt_logprobs=3, temperature=1.0,
        ),
        0,
    )  # fmt: skip
    assert (made.stop_token_ids, made.min_p, made.logit_bias, made.bad_words) == ([7], 0.25, {3: -2.5}, ["no"])
    assert (made.presence_penalty, made.frequency_penalty, made.repetition_penalty) == (-1, 0.5, 1.5)
    assert (made.logprobs, made.prompt_logprobs, made.structured_outputs) == (0, 3, None)
    asked = inference_pb2.SamplingParameters(prompt_logprobs=3, json_schema="{}")
    later = sampling_params(asked, 1)
    assert later.prompt_logprobs is None, "only the first sequence has those of the prompt"
    assert (later.structured_outputs.json, later.structured_outputs.regex) == ("{}", None)
    assert sampling_params(inference_pb2.SamplingParameters(regex="a"), 0).structured_outputs.regex == "a"


def test_without_tokens_vllm_computes_one_step():
    made = sampling_params(inference_pb2.SamplingParameters(max_tokens=0, prompt_logprobs=1, regex="a"), 0)
    assert (made.max_tokens, made.prompt_logprobs, made.structured_outputs) == (1, 1, None)


def test_sampling_defaults_are_the_contracts():
    made = sampling_params(inference_pb2.SamplingParameters(), 0)
    assert (made.max_tokens, made.temperature, made.top_p, made.top_k, made.seed) == (16, 0.0, 1.0, 0, None)
    assert (made.repetition_penalty, made.logprobs, made.prompt_logprobs, made.logit_bias) == (1.0, None, None, None)
    assert made.output_kind == RequestOutputKind.DELTA


def test_explicit_sampling_reaches_vllm():
    made = sampling_params(
        inference_pb2.SamplingParameters(
            max_tokens=5, temperature=0.5, top_p=0.25, top_k=7, seed=3, stop=["x"], ignore_eos=True, min_tokens=2
        ),
        4,
    )
    assert (made.max_tokens, made.temperature, made.top_p, made.top_k) == (5, 0.5, 0.25, 7)
    assert (made.seed, made.stop, made.ignore_eos, made.min_tokens) == (7, ["x"], True, 2)


def test_an_empty_stop_list_and_seed_zero_are_kept():
    made = sampling_params(inference_pb2.SamplingParameters(seed=0), 0)
    assert (made.seed, made.stop) == (0, [])


def test_engine_arguments_of_the_taps_take_precedence():
    settings = InferenceSettings(model="folder", max_model_len=77, engine_args={"block_size": 32})
    args = engine_arguments.tapped_engine_args(settings)
    assert args.worker_cls == "inference_svc.taps.vllm.cpu_worker.TappedCpuWorker"
    assert (args.model, args.max_model_len, args.block_size) == ("folder", 77, 32)


def test_the_compile_cache_key_depends_on_the_ops_in_the_graph():
    def key(**settings):
        return engine_arguments.tapped_engine_args(InferenceSettings(model="folder", **settings)).additional_config

    assert key() == key(ring_mib=3)
    different = [key(), key(capture_sites="resid_post,resid_pre"), key(fold_norms=True)]
    assert all(one != other for at, one in enumerate(different) for other in different[:at])
    assert key(capture_sites="resid_pre, resid_post") == key(capture_sites="resid_post,resid_pre")


def test_an_engine_without_taps_gets_all_other_arguments():
    settings = InferenceSettings(model="folder", max_model_len=77, kv_cache_gib=0.5, engine_args={"block_size": 32})
    args, plain = engine_arguments.tapped_engine_args(settings), engine_arguments.engine_arguments(settings)
    assert {"worker_cls", "additional_config"}.isdisjoint(plain)
    assert {name: getattr(args, name) for name in plain} == plain
    assert plain["kv_cache_memory_bytes"] == 1 << 29


def test_workers_find_their_settings_in_the_environment(monkeypatch):
    monkeypatch.setenv(SETTINGS_VARIABLE, "")
    for name in ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")  # restores SIGINT's handler afterwards
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    settings = InferenceSettings(
        model="folder", ring_mib=3, max_active_vectors=5, capture_sites="mlp_out,resid_pre", store="b=h:2,h:1"
    )
    engine_arguments.prepare_environment(settings, "/control")
    worker = json.loads(engine_arguments.os.environ[SETTINGS_VARIABLE])
    assert worker == {
        "control_dir": "/control",
        "ring_bytes": 3 << 20,
        "stores": ["b", "h:1"],
        "bank_rows": 5,
        "service_pid": os.getpid(),
        "machine": machine_id(),
        "sites": [capture_pb2.SITE_RESID_PRE, capture_pb2.SITE_MLP_OUT],
        "fold_norms": None,
        "score_board": "",
        "sae_bytes": 0,
    }
    assert engine_arguments.os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def rank(number, first_layer, num_layers, control_path, *, place=0, captures=True, machine=None):
    """The description of a rank. `place` is that in its tensor-parallel group."""
    return {
        "rank": number,
        "tensor_rank": place,
        "machine": machine or machine_id(),
        "first_layer": first_layer,
        "num_layers": num_layers,
        "captures": captures,
        "control_path": str(control_path) if captures else "",
        "site_widths": [],
    }


def test_the_layers_of_a_site_are_those_of_all_stages():
    stages = [{"site_layers": [[0, 1], [1]]}, {"site_layers": [[0, 1], [1]]}, {"site_layers": [[2, 3], [3]]}]
    assert _site_layers(stages, 4) == ((0, 1, 2, 3), (1, 3))
    assert _site_layers(stages[:2], 2) == ((0, 1), (1,))
    assert _site_layers([{"site_layers": [[0, 1], [0, 1]]}], 2) == ()


def test_ranks_capture_each_layer_once(tmp_path):
    here = tmp_path / "rank.sock"
    here.touch()
    stages = [
        rank(0, 0, 3, here),
        rank(1, 0, 3, here, place=1),
        rank(2, 3, 2, here),
        rank(3, 3, 2, here, place=1, captures=False),
    ]
    check_ranks(stages, 5)
    for wrong, told in [
        (stages[:2], "No rank captures layers 3, 4; those captured are rank 0: 0–2, rank 1: 0–2"),
        ([*stages, rank(4, 4, 1, here)], "Several ranks would capture the same rows: .*rank 4: 4–4"),
        ([], "those captured are none"),
    ]:
        with pytest.raises(UntappedLayersError, match=told):
            check_ranks(wrong, 5)


def test_a_stage_on_another_machine_is_refused(tmp_path):
    here = tmp_path / "rank0.sock"
    here.touch()
    for away in (
        rank(1, 2, 2, tmp_path / "rank1.sock"),
        rank(1, 2, 2, here, machine="another one, which sees the same folder"),
    ):
        with pytest.raises(UntappedLayersError, match="rows of rank 1: 2–3, which run on another machine"):
            check_ranks([rank(0, 0, 2, here), away], 4)


def test_the_service_reports_the_refusal_of_the_taps(monkeypatch, tmp_path):
    def fail(arguments):
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(engine_module.AsyncLLM, "from_engine_args", fail)
    with pytest.raises(RuntimeError, match="root cause above"):
        engine_module._start_llm(None, tmp_path / "refused")
    (tmp_path / "refused").write_text("Bert cannot be tapped: it is no decoder")
    with pytest.raises(engine_module.EngineRefusedError, match="Bert cannot be tapped"):
        engine_module._start_llm(None, tmp_path / "refused")


@pytest.mark.parametrize(
    ("fields", "num_bytes"),
    [
        ({}, 64 << 20),
        ({"score_mib": 3}, 3 << 20),
        ({"score_mib": 0}, 0),
        ({"pipeline_parallel_size": 2}, 0),
        ({"engine_args": {"data_parallel_size": 2}}, 0),
    ],
)
def test_memory_for_scores_is_allocated_only_where_there_are_probes(fields, num_bytes):
    """Without the file of the board, a worker allocates no buffer either."""
    settings = InferenceSettings(model="folder", **fields)
    arguments = SimpleNamespace(**{"data_parallel_size": 1, **engine_arguments.engine_arguments(settings)})
    memory = engine_module._score_memory(settings, arguments)
    assert (Path(memory.path).stat().st_size if memory else 0) == num_bytes
