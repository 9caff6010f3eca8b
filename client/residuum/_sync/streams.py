"""When a synchronous stream starts. `residuum._async.streams` has the same for event loops; both by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from residuum._sync.tokens import TokenStream, accept

if TYPE_CHECKING:
    from residuum._sync.io import Call
    from residuum._sync.tokens import Start, Update
    from residuum.protocol.events import ReplyBuilder


class Stream(TokenStream):
    """The tokens of a generation as they are made.

    The request runs as long as the stream is open: leaving the with-block, `close`, or dropping the last reference
    stops it in the engine, and its capture then ends aborted.

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
        """Made by `Client.stream`. Without the `builder` of an accepted call it waits until the call is accepted."""
        super().__init__(lambda: (call, builder or accept(call, endpoint)), endpoint, update)
        self._open()


def make_stream(start: Start, endpoint: str, update: Update) -> Stream:
    """Start a generation, and return its stream when it is accepted."""
    call, builder = start()
    return Stream(call, endpoint, update, builder)
