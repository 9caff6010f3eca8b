"""The tokenizer, and the thread that uses it: tokenizing a long text takes longer than a step of the engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from inference_svc.admission.fields import invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from residuum.v1 import inference_pb2

Result = TypeVar("Result")


class TokenizerThread:
    """A tokenizer and its thread. A tokenizer is not thread-safe, so one thread does all work with it.

    Attributes:
        tokenizer: vLLM's tokenizer; None if the engine has none.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Prepare the thread. It starts with the first work."""
        self.tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def do(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do work in the thread, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


def messages_of(chat: inference_pb2.Chat) -> list[dict[str, str]]:
    """Return the messages of a chat in the form that chat templates take."""
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, tokenize: bool) -> Any:
    """Return the prompt that the model's chat template makes of messages: a text, or its token IDs.

    The model continues a last message of the assistant; otherwise it begins one.

    Raises:
        Failure: The template refuses the messages.
    """
    goes_on = messages[-1]["role"] == "assistant"
    how = {"continue_final_message": True} if goes_on else {}
    try:
        return tokenizer.apply_chat_template(
            messages, return_dict=False, tokenize=tokenize, add_generation_prompt=not goes_on, **how
        )
    except Exception as error:  # jinja and transformers raise unrelated classes for a template's errors
        raise invalid("chat", f"The model's chat template refuses the chat: {error}") from error
