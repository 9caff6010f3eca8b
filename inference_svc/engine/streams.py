"""The request to vLLM for one sequence, and the outputs that it returns."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.admission.fields import invalid
from inference_svc.engine.finish_reasons import ABORTED, FAILED
from inference_svc.engine.logprobs import TokenLogprobs
from inference_svc.engine.sampling import REFUSALS
from residuum.rpc.errors import Failure, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import numpy.typing as npt
    from vllm import SamplingParams
    from vllm.inputs import TokensInput, TokensPrompt
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from residuum.v1 import rule_pb2

_DEATH_SECONDS = 10.0
"""How long vLLM may take to report that a replica died, after it aborted the requests of the others."""
_DEATH_POLL_SECONDS = 0.05


Scored: TypeAlias = "Sequence[npt.NDArray[np.float32]]"
"""The scores of each probe, float32 [tokens, outputs]."""


class Delta(NamedTuple):
    """The text and tokens that one step of the engine adds to a sequence."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    """"stop" or "length" in the sequence's last delta; None before."""
    stop_reason: str = ""
    """The stop string, or the name of the rule, that ended the sequence, if one did."""
    stop_token_id: int | None = None
    """The stop token that ended the sequence, if one did."""
    logprobs: TokenLogprobs | None = None
    """The log-probabilities of the tokens, if the request asked for them and there are tokens."""
    prompt_logprobs: TokenLogprobs | None = None
    """The log-probabilities of the prompt's tokens from the second on, in one delta if the request asked for them."""
    scores: Scored = ()
    """The scores of the tokens; empty without probes."""
    prompt_scores: Scored = ()
    """The scores of the prompt's tokens, in one delta if the request asked for them."""
    rule_events: tuple[rule_pb2.RuleEvent, ...] = ()
    """The rules that fired at the tokens."""

    def with_scores(self, scores: Scored) -> Delta:
        """Return this delta with scores of its tokens. `_replace` would take several times as long for each token."""
        return Delta._make((*self[:_BEFORE_SCORES], scores, *self[_BEFORE_SCORES + 1 :]))

    def followed_by(self, other: Delta) -> Delta:
        """Return this delta and a later one as a single delta."""
        logprobs = self.logprobs or other.logprobs
        if self.logprobs is not None and other.logprobs is not None:
            logprobs = self.logprobs.followed_by(other.logprobs)
        return Delta(
            self.text + other.text,
            [*self.token_ids, *other.token_ids],
            other.finish_reason,
            other.stop_reason,
            other.stop_token_id,
            logprobs,
            self.prompt_logprobs or other.prompt_logprobs,
            tuple(map(np.concatenate, zip(self.scores, other.scores, strict=True)))
            if self.scores and other.scores
            else self.scores or other.scores,
            self.prompt_scores or other.prompt_scores,
            self.rule_events + other.rule_events,
        )

    def cut(self, count: int, text: str, finish_reason: str, stop_reason: str) -> Delta:
        """Return the last delta of a sequence that ends after the first `count` of these tokens.

        Args:
            count: The number of tokens that are left.
            text: Their text.
            finish_reason: Why the sequence ends.
            stop_reason: What ended it.
        """
        return self._replace(
            text=text,
            token_ids=self.token_ids[:count],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            stop_token_id=None,
            logprobs=self.logprobs.first(count) if self.logprobs else None,
            scores=tuple(values[:count] for values in self.scores),
        )

    def without_tokens(self) -> Delta:
        """Return this delta without its tokens. The sequence ends here because it may generate none."""
        return Delta(
            "",
            (),
            "length" if self.finish_reason else None,
            prompt_logprobs=self.prompt_logprobs,
            prompt_scores=self.prompt_scores,
        )


_BEFORE_SCORES = Delta._fields.index("scores")


async def stream(
    llm: AsyncLLM,
    prompt: TokensPrompt | TokensInput,
    sampling: SamplingParams,
    engine_id: str,
    adapter: LoRARequest | None = None,
    replica: int | None = None,
) -> AsyncGenerator[Delta]:
    """Generate one sequence with a vLLM engine, step by step. Closing the generator stops the engine's request.

    Args:
        llm: The engine.
        prompt: The prompt in vLLM's form.
        sampling: The sampling parameters.
        engine_id: The ID of the request in the engine.
        adapter: The LoRA adapter; None: the model itself.
        replica: The replica that generates; None: vLLM chooses.

    Raises:
        Failure: The engine is dead, refuses the request, or stopped it.
    """
    has_begun = False
    try:
        outputs = llm.generate(prompt, sampling, engine_id, lora_request=adapter, data_parallel_rank=replica)
        async with aclosing(outputs):
            async for output in outputs:
                has_begun, completion = True, output.outputs[0]
                if completion.finish_reason in {ABORTED, FAILED}:
                    raise await _stop_failure(llm, completion.finish_reason)
                yield _delta(output, sampling)
    except EngineDeadError as error:
        raise engine_dead_failure() from error
    except REFUSALS as error:
        if has_begun:
            raise
        # `check_with_vllm` checks the parameters that vLLM is known to refuse. A later vLLM may refuse others.
        raise invalid("sampling", f"vLLM refuses the request: {error}") from error


def _delta(output: RequestOutput, sampling: SamplingParams) -> Delta:
    completion = output.outputs[0]
    stop, token_ids = completion.stop_reason, completion.token_ids
    delta = Delta(
        completion.text,
        token_ids,
        completion.finish_reason,
        stop if isinstance(stop, str) else "",
        stop if isinstance(stop, int) else None,
    )
    if sampling.logprobs is not None and token_ids:
        # Some versions of vLLM repeat earlier log-probabilities if a step adds no token.
        found = (completion.logprobs or [])[-len(token_ids) :]
        delta = delta._replace(logprobs=TokenLogprobs.from_vllm(token_ids, found, sampling.logprobs))
    if sampling.prompt_logprobs is not None and output.prompt_logprobs:
        # The first token has no log-probability.
        found, prompt = output.prompt_logprobs[1:], (output.prompt_token_ids or [])[1:]
        delta = delta._replace(prompt_logprobs=TokenLogprobs.from_vllm(prompt, found, sampling.prompt_logprobs))
    return delta


async def _stop_failure(llm: AsyncLLM, reason: str) -> Failure:
    """Return the failure of a request that the engine stopped by itself.

    If a replica dies, vLLM aborts the requests of the others before it reports the death.
    """
    deadline = time.monotonic() + (_DEATH_SECONDS if reason == ABORTED else 0.0)
    while not llm.errored and time.monotonic() < deadline:  # noqa: ASYNC110 - vLLM has no event for it
        await asyncio.sleep(_DEATH_POLL_SECONDS)
    if llm.errored:
        return engine_dead_failure()
    return Failure(
        Reason.ERROR_REASON_INTERNAL,
        f"The engine stopped the request (finish reason {reason}). The service's log may say why; try again.",
    )


def engine_dead_failure() -> Failure:
    """Return the failure of a call to a dead engine."""
    return Failure(
        Reason.ERROR_REASON_ENGINE_DEAD,
        "The engine has died, and the service is stopping. Try again once the service has been restarted.",
    )
