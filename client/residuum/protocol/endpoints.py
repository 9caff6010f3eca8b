"""Checks endpoints. No I/O: both clients use it."""

from __future__ import annotations

from residuum.exceptions import InvalidRequest
from residuum.protocol.arguments import check_text
from residuum.wire.endpoints import ARCHIVE_SCHEMES, parse_endpoint


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint after checking that it has the form host:port.

    Raises:
        InvalidRequest: It has another form.
        TypeError: It is no text.
    """
    if not endpoint:
        raise InvalidRequest(
            "'' is not an endpoint. Give an inference service as host:port, such as localhost:50051, or only a store, "
            "with store=.",
            reason="INVALID_FIELD",
        )
    if check_text("endpoint", endpoint).startswith(ARCHIVE_SCHEMES):
        raise InvalidRequest(
            f"{endpoint!r} is the URL of an archive, but this needs a service. Give its endpoint as host:port, such as "
            "localhost:50051. Archives are read by residuum.Archive, ActivationDataset and residuum.ray, and by the "
            "commands ls, pull and manifest.",
            reason="INVALID_FIELD",
        )
    try:
        parse_endpoint(endpoint)
    except ValueError:
        raise InvalidRequest(
            f"{endpoint!r} is not an endpoint. Use host:port, such as localhost:50051.", reason="INVALID_FIELD"
        ) from None
    return endpoint
