"""Sampling parameters in vLLM's form, and vLLM's own checks of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from inference_svc.admission.fields import invalid
from inference_svc.admission.sampling import is_prefill_only, max_new_tokens
from residuum.v1 import inference_pb2
from residuum.wire.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

REFUSALS = (ValueError, VLLMValidationError)
"""What vLLM raises for invalid parameters. Only in older versions is the second one a subclass of the first."""

_MAX_KEPT_BYTES = 256
"""The largest parameters whose form for vLLM is kept for later requests. Making it takes longer than copying it."""

_CHECKED_BY_VLLM = ("bad_words", "json_schema", "regex", "min_p", "logit_bias")
"""Parameters that vLLM refuses for some values, models or engines. Only requests with one of these are checked."""


def sampling_params(parameters: inference_pb2.SamplingParameters, sequence: int) -> SamplingParams:
    """Return vLLM's form of checked sampling parameters, for one sequence of a request. Requests share it."""
    data = parameters.SerializeToString()
    if len(data) > _MAX_KEPT_BYTES or parameters.WhichOneof("structured_output"):  # vLLM writes into its grammars
        return make_sampling_params(parameters, sequence)
    return _kept_params(data, sequence)


@lru_cache(maxsize=64)
def _kept_params(data: bytes, sequence: int) -> SamplingParams:
    return make_sampling_params(inference_pb2.SamplingParameters.FromString(data), sequence)


def make_sampling_params(parameters: inference_pb2.SamplingParameters, sequence: int) -> SamplingParams:
    """Return a new object of vLLM's form of checked sampling parameters."""
    p = parameters
    if is_prefill_only(p):
        # vLLM generates at least one token. It comes from the step that computes the prompt, and is dropped later.
        return SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=_prompt_logprobs(p, sequence),
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
    return SamplingParams(
        max_tokens=max_new_tokens(p),
        min_tokens=p.min_tokens,
        temperature=p.temperature,
        top_p=p.top_p if p.HasField("top_p") else 1.0,
        top_k=p.top_k,
        min_p=p.min_p,
        seed=(p.seed + sequence) % (1 << 63) if p.HasField("seed") else None,
        stop=list(p.stop),
        stop_token_ids=list(p.stop_token_ids),
        ignore_eos=p.ignore_eos,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        repetition_penalty=p.repetition_penalty if p.HasField("repetition_penalty") else 1.0,
        logit_bias={item.token_id: item.bias for item in p.logit_bias} or None,
        bad_words=list(p.bad_words),
        structured_outputs=_structured_outputs(p),
        logprobs=p.logprobs if p.HasField("logprobs") else None,
        prompt_logprobs=_prompt_logprobs(p, sequence),
        output_kind=RequestOutputKind.DELTA,
    )


def asked_of_vllm(parameters: inference_pb2.SamplingParameters) -> list[str]:
    """Return the names of the given parameters that vLLM must check; see `check_with_vllm`."""
    if is_prefill_only(parameters):
        return []
    return [name for name in _CHECKED_BY_VLLM if getattr(parameters, name)]


def check_with_vllm(parameters: inference_pb2.SamplingParameters, config: Any, tokenizer: Any) -> None:
    """Let vLLM check the parameters that it may refuse. This may take longer than a step of the engine.

    Args:
        parameters: The parameters, whose ranges were checked.
        config: vLLM's `VllmConfig`.
        tokenizer: vLLM's tokenizer; None if the engine has none.

    Raises:
        Failure: vLLM refuses a parameter. The metadata names it.
    """
    made = make_sampling_params(parameters, 0)
    try:
        made.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)
    except Exception as error:  # the grammars' compilers raise unrelated classes
        asked = asked_of_vllm(parameters)
        named = getattr(error, "parameter", None)
        name = named if named in asked else parameters.WhichOneof("structured_output") or asked[0]
        raise invalid(f"sampling.{name}", f"vLLM refuses {name}: {error}") from error
    if parameters.bad_words:
        _check_bad_words(made, tokenizer)


def _check_bad_words(made: SamplingParams, tokenizer: Any) -> None:
    try:
        made.update_from_tokenizer(tokenizer)
    except Exception as error:  # as above
        raise invalid("sampling.bad_words", f"vLLM refuses bad_words: {error}") from error
    found = made.bad_words_token_ids or []
    # Some of vLLM's model runners have tables of these sizes, and would stop the engine.
    if len(found) > MAX_BAD_WORDS or sum(map(len, found)) > MAX_BAD_WORD_TOKENS:
        raise invalid(
            "sampling.bad_words",
            f"The bad_words make {len(found)} token sequences with {sum(map(len, found))} tokens, because a word may "
            f"have another sequence after a space. At most {MAX_BAD_WORDS} sequences and {MAX_BAD_WORD_TOKENS} tokens "
            "are allowed. Send fewer or shorter words.",
        )


def _structured_outputs(p: inference_pb2.SamplingParameters) -> StructuredOutputsParams | None:
    kind = p.WhichOneof("structured_output")
    if kind is None:
        return None
    return (
        StructuredOutputsParams(json=p.json_schema) if kind == "json_schema" else StructuredOutputsParams(regex=p.regex)
    )


def _prompt_logprobs(p: inference_pb2.SamplingParameters, sequence: int) -> int | None:
    """Return the requested number. Only the first sequence computes them, because all have the same prompt."""
    return p.prompt_logprobs if p.HasField("prompt_logprobs") and sequence == 0 else None
