"""What one sequence's request to vLLM is made of, and what comes back."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from inference_svc.admission.sampling import max_new_tokens
from inference_svc.engine.finish_reasons import ABORTED, FAILED
from residuum.rpc.errors import Failure, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from vllm.inputs import TokensInput, TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    from residuum.v1 import inference_pb2


class Delta(NamedTuple):
    """The text and tokens that one step of the engine adds to a sequence."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    """"stop" or "length" in the sequence's last delta; None before."""
    stop_reason: str = ""
    """The stop text that ended the sequence, if one did."""

    def followed_by(self, other: Delta) -> Delta:
        """Return this delta and a later one as a single delta."""
        return Delta(
            self.text + other.text, [*self.token_ids, *other.token_ids], other.finish_reason, other.stop_reason
        )


async def stream(
    llm: AsyncLLM, prompt: TokensPrompt | TokensInput, sampling: SamplingParams, engine_id: str
) -> AsyncGenerator[Delta]:
    """Generate one sequence with a vLLM engine, step by step. Closing the generator stops the engine's request.

    Raises:
        Failure: The engine is dead, or gave the request up.
    """
    try:
        async with aclosing(llm.generate(prompt, sampling, engine_id)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                if completion.finish_reason in {ABORTED, FAILED}:
                    raise Failure(
                        Reason.ERROR_REASON_INTERNAL,
                        f"The engine gave the request up (finish reason {completion.finish_reason}). The service's log "
                        "may say why; try again.",
                    )
                stop = completion.stop_reason
                yield Delta(
                    completion.text,
                    completion.token_ids,
                    completion.finish_reason,
                    stop if isinstance(stop, str) else "",
                )
    except EngineDeadError as error:
        raise engine_dead_failure() from error


def sampling_params(parameters: inference_pb2.SamplingParameters, sequence: int) -> SamplingParams:
    """Return vLLM's form of checked sampling parameters, for one sequence of a request."""
    p = parameters
    return SamplingParams(
        max_tokens=max_new_tokens(p),
        min_tokens=p.min_tokens,
        temperature=p.temperature,
        top_p=p.top_p if p.HasField("top_p") else 1.0,
        top_k=p.top_k,
        seed=(p.seed + sequence) % (1 << 63) if p.HasField("seed") else None,
        stop=list(p.stop),
        ignore_eos=p.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )


def engine_dead_failure() -> Failure:
    """Return the failure of a call to a dead engine."""
    return Failure(
        Reason.ERROR_REASON_ENGINE_DEAD,
        "The engine has died, and the service is stopping. Try again once the service has been restarted.",
    )
