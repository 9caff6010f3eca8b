"""The stream of a synchronous generation. `residuum._async.streams` is for asyncio; both are written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residuum._sync.tokens import TokenStream, accept

if TYPE_CHECKING:
    from residuum._sync.io import Call
    from residuum._sync.tokens import Start, Update
    from residuum.protocol.generation.events import ReplyBuilder


class Stream(TokenStream):
    """Yields the tokens of a generation as the model generates them.

    The request runs while the stream is open. Leaving the block early, `close`, or dropping the last reference stops
    the request in the engine. Its capture then ends aborted.

    Example:
        >>> with client.stream("Once upon a time", max_tokens=64) as stream:
        ...     for delta in stream:
        ...         print(delta.text, end="")
        >>> stream.reply.usage
        Usage(prompt_tokens=4, generated_tokens=64)
    """

    def __init__(
        self, call: Call, endpoint: str, update: Update | None = None, builder: ReplyBuilder | None = None
    ) -> None:
        """Use `Client.stream` instead. Without the `builder` of an accepted call, wait until the call is accepted."""
        super().__init__(lambda: (call, builder or accept(call, endpoint)), endpoint, update)
        self._open()


def make_stream(start: Start, endpoint: str, update: Update) -> Stream:
    """Start a generation, wait until it is accepted, and return its stream."""
    call, builder = start()
    return Stream(call, endpoint, update, builder)
