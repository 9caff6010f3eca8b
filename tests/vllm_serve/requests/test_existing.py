"""`vllm serve` answers a request whose capture exists already without generating, in every form of output."""

from __future__ import annotations

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

import residuum
from inference_svc.resources.score_board import ScoreMemory
from inference_svc.vllm_serve.requests.outputs import digest_of
from inference_svc.vllm_serve.score_fields import Answer, _current
from residuum.v1 import capture_pb2, probe_pb2, rule_pb2
from tests.session.faces import PROMPT, RANK, OpenAIFace, ScriptedStore


class StoreWithCapture(ScriptedStore):
    """A store that holds a complete capture of the request, with two sequences."""

    def __init__(self):
        super().__init__("ok")
        self.asked = []
        self.kept = ()
        """The scores of each sequence."""

    async def open(self, description, *, is_new_id, if_exists, on_queued):
        await super().open(description, is_new_id=is_new_id, if_exists=if_exists, on_queued=on_queued)
        self.asked.append(if_exists)
        if if_exists != capture_pb2.IF_EXISTS_SKIP:
            return None
        sequences = [
            capture_pb2.SequenceOutcome(generated_token_ids=ids, finish_reason=why)
            for ids, why in (([1, 2], "length"), ([3], "stop"))
        ]
        manifest = capture_pb2.CaptureManifest(
            description=description, state=capture_pb2.CAPTURE_STATE_COMPLETE, sequences=sequences
        )
        if self.kept:
            for sequence, scores in zip(manifest.sequences, self.kept, strict=True):
                sequence.scores.CopyFrom(scores)
            manifest.prompt_scores.CopyFrom(self.kept[1])
            manifest.rule_events.add(rule="high", token=1, score=4.0, action=rule_pb2.RULE_ACTION_FLAG)
        return manifest


class Tokenizer:
    eos_token_id = 3
    max_chars_per_token = 4

    def decode(self, token_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return "".join(f" {token}" for token in token_ids)


def sampling(if_exists="skip", **fields):
    xargs = residuum.vllm_xargs(residuum.Capture(), request_id="r", if_exists=if_exists)
    return SamplingParams(**{"n": 2, "max_tokens": 2, **fields}, extra_args=xargs)


async def answers_of(face, parameters):
    prompt = {"type": "token", "prompt_token_ids": PROMPT}
    return [output async for output in face.front.generate(prompt, parameters, "cmpl-1", {})]


@pytest.fixture
async def face():
    face = OpenAIFace(StoreWithCapture(), 2)
    config = face.front._llm.vllm_config.model_config
    config.skip_tokenizer_init = False
    face.front._llm.get_tokenizer = Tokenizer
    return face


@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_a_capture_that_exists_is_the_answer(face, kind):
    outputs = await answers_of(face, sampling(output_kind=kind))
    assert [output.finished for output in outputs] == (
        [True] if kind == RequestOutputKind.FINAL_ONLY else [False, True]
    )
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(PROMPT)}
    said = [
        (item.index, item.text, item.token_ids, item.finish_reason) for output in outputs for item in output.outputs
    ]
    assert said == [(0, " 1 2", [1, 2], "length"), (1, "", [3], "stop")]
    assert not face.store.seals
    assert not face.registry.running


async def test_a_stop_token_is_the_stop_reason_and_has_no_text(face):
    outputs = await answers_of(face, sampling(stop_token_ids=[3], ignore_eos=True))
    said = {item.index: (item.text, item.token_ids, item.stop_reason) for part in outputs for item in part.outputs}
    assert said == {0: (" 1 2", [1, 2], None), 1: ("", [3], 3)}


@pytest.mark.parametrize(
    ("asked", "text", "reason"),
    [
        ({}, "", None),
        ({"stop_token_ids": [3]}, "", None),  # vLLM reports its EOS token as no reason
        ({"include_stop_str_in_output": True}, " 3", None),
        ({"include_stop_str_in_output": True, "ignore_eos": True, "stop_token_ids": [3]}, " 3", 3),
        ({"ignore_eos": True, "stop": ["3"]}, " ", "3"),
        ({"ignore_eos": True, "stop": [" "], "include_stop_str_in_output": True}, " ", " "),
    ],
)
async def test_what_ended_an_answer_is_in_its_text_if_vllm_would_show_it(face, asked, text, reason):
    outputs = await answers_of(face, sampling(**asked))
    (said,) = [(item.text, item.stop_reason) for part in outputs for item in part.outputs if item.index == 1]
    assert said == (text, reason)


async def loaded(*_arguments, **_options):
    return [None]


async def test_the_answer_has_the_scores_and_events_of_the_capture(face):
    probe = residuum.Probe(np.ones((2, 4)), layer=1, name="two")
    memory = ScoreMemory(1 << 16)
    face.front._serve([{**RANK, "score_board": memory.path}])
    kept = [probe_pb2.KeptScores(probes=[probe_pb2.ProbeScores(values=values)]) for values in ([1, 2, 3, 4], [5, 6])]
    face.store.kept, answer = kept, Answer("/v1/completions")
    face.front._llm.collective_rpc = loaded
    token = _current.set(answer)
    try:
        xargs = residuum.vllm_xargs(
            residuum.Capture(),
            rules=[residuum.Rule(probe, above=3.5, output=1, name="high")],
            score_prompt=True,
            request_id="r",
            if_exists="skip",
        )
        await answers_of(face, SamplingParams(n=2, max_tokens=2, extra_args=xargs))
    finally:
        _current.reset(token)
    document = {"choices": [{"index": 0}, {"index": 1}]}
    assert answer.put_into(document)
    first, second = (choice["residuum"] for choice in document["choices"])
    assert first["scores"] == {"two": [[1, 2], [3, 4]]}
    assert first["prompt_scores"] == {"two": [[5, 6]]}
    assert first["rule_events"] == [{"rule": "high", "token": 1, "score": 4.0, "action": "flag"}]
    assert second == {"scores": {"two": [[5, 6]]}}


async def test_if_exists_reaches_the_store(face):
    for script in face.scripts:
        script.put_nowait(([1], "stop"))
    assert await answers_of(face, sampling("replace"))
    assert face.store.asked == [capture_pb2.IF_EXISTS_REPLACE]
    (seal,) = face.store.seals
    assert seal.attempt == face.store.opened[0].attempt


async def test_a_capture_cannot_answer_with_logprobs(face):
    with pytest.raises(VLLMValidationError, match="holds no logprobs"):
        await answers_of(face, sampling(logprobs=1))
    assert not face.store.opened


def test_different_sampling_makes_a_different_request():
    same = {digest_of(sampling(output_kind=kind)) for kind in RequestOutputKind}
    assert len(same) == 1
    assert digest_of(sampling(temperature=0.5)) not in same
    assert digest_of(sampling(seed=1)) not in same
    assert digest_of(sampling(max_tokens=3)) not in same
    assert digest_of(sampling(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))) not in same


def test_what_a_logits_processor_reads_makes_a_different_request():
    def digest(**others):
        asked = sampling()
        asked.extra_args |= others
        return digest_of(asked)

    same = {
        digest(),
        digest(kv_transfer_params={"do_remote_decode": True}, session_id="7"),
        digest_of(SamplingParams(n=2, max_tokens=2)),
    }
    assert len(same) == 1
    assert digest(target_token=4) not in same
    assert digest(target_token=4) != digest(target_token=5)
    assert digest(a=1, b=2) == digest(b=2, a=1)


async def test_what_the_engine_changes_in_structured_outputs_does_not_change_the_digest(face):
    """vLLM writes into them before it copies the parameters, and the digest may be made after that."""
    asked = sampling(structured_outputs=StructuredOutputsParams(choice=["a", "b"]), if_exists="fail")
    before, seen = digest_of(asked), []

    async def generate(prompt, sampling_params, request_id, **options):
        sampling_params.structured_outputs.choice = None
        sampling_params.structured_outputs.grammar = 'root ::= "a" | "b"'
        seen.append(digest_of(sampling_params))
        raise RuntimeError("scripted")
        yield

    face.front._serving.runner._generate = generate
    with pytest.raises(RuntimeError, match="scripted"):
        await answers_of(face, asked)
    assert before not in seen, "the engine has changed what it got"
    assert digest_of(asked) == before
