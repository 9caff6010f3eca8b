"""Checks of requests to the store. Each check raises a Failure that names the wrong field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.message import Message

from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, selection_pb2, store_pb2
from residuum.wire.dtypes import numpy_dtype
from residuum.wire.ids import is_valid_id
from residuum.wire.labels import Condition, LabelError, check_labels, parse_where
from residuum.wire.limits import (
    DIGEST_BYTES,
    MAX_CAPTURE_ROWS_AT_A_POSITION,
    MAX_CAPTURE_TOKENS,
    MAX_CAPTURES_PER_READ,
    MAX_DESCRIPTION_BYTES,
    MAX_DETAIL_LENGTH,
    MAX_ID_LENGTH,
    MAX_KEPT_SCORES,
    MAX_MESSAGE_SPANS,
    MAX_NAME_LENGTH,
    MAX_RULE_EVENTS_BYTES,
    MAX_SEAL_BYTES,
    MAX_SEQUENCES,
    MAX_STEERING_CHANGES_BYTES,
    max_capture_tokens,
)
from residuum.wire.probes.arithmetic import num_outputs
from residuum.wire.rows.encodings import EncodingError, RowFormat, site_width
from residuum.wire.selection import check_positions, layers_at, layers_by_site, resolve_layers
from residuum.wire.tokens import is_valid_tenant
from store_svc.captures.lifecycle import ABORTED, COMPLETE, INCOMPLETE
from store_svc.database.keys import MAX_LAYERS

_SITES = set(capture_pb2.Site.values()) - {capture_pb2.SITE_UNSPECIFIED}
_LOSS_REASONS = {capture_pb2.INCOMPLETE_REASON_OVERFLOW, capture_pb2.INCOMPLETE_REASON_WRITE_FAILED}
_REASONS = set(capture_pb2.IncompleteReason.values()) - {capture_pb2.INCOMPLETE_REASON_UNSPECIFIED}


def invalid(field: str, message: str) -> Failure:
    """Return the Failure for a field with a wrong value; `message` says what is wrong."""
    return Failure(Reason.ERROR_REASON_INVALID_FIELD, f"{field}: {message}", field=field)


def check_description(description: capture_pb2.CaptureDescription) -> None:
    """Check the description of a capture that is to be opened.

    Raises:
        Failure: INVALID_FIELD if a field is wrong.
    """
    if not is_valid_id(description.capture_id):
        raise invalid("description.capture_id", f"{description.capture_id[:MAX_ID_LENGTH]!r} is not a valid ID")
    if not is_valid_tenant(description.tenant):
        raise invalid("description.tenant", f"{description.tenant[:MAX_ID_LENGTH]!r} is not a valid tenant name")
    _check_origin(description)
    _check_length("description.model", description.model, MAX_NAME_LENGTH)
    _check_length("description.adapter", description.adapter, MAX_NAME_LENGTH)
    _check_size("description", description, MAX_DESCRIPTION_BYTES)
    if not 1 <= description.num_layers <= MAX_LAYERS:
        raise invalid("description.num_layers", f"must be 1 to {MAX_LAYERS}")
    if not 1 <= description.num_sequences <= MAX_SEQUENCES:
        raise invalid("description.num_sequences", f"must be 1 to {MAX_SEQUENCES}")
    _check_tokens("description.prompt_token_ids", description, [0] * description.num_sequences)
    if not description.hidden_size:
        raise invalid("description.hidden_size", "must be positive")
    try:
        numpy_dtype(description.dtype)
    except ValueError as error:
        raise invalid("description.dtype", str(error)) from None
    _check_spec(description.spec, description.num_layers)
    _check_widths(description)
    try:
        for site in description.spec.sites:
            RowFormat.of_capture(description, site)
    except EncodingError as error:
        raise invalid("description.spec.encoding", str(error)) from None
    rows = description.num_sequences * sum(map(len, layers_by_site(description.spec).values()))
    if rows > MAX_CAPTURE_ROWS_AT_A_POSITION:
        limit = MAX_CAPTURE_ROWS_AT_A_POSITION
        raise invalid("description.spec", f"sequences × sites × layers must be at most {limit}, not {rows}")


def _check_widths(description: capture_pb2.CaptureDescription) -> None:
    widths = description.site_widths
    if widths and (len(widths) != len(description.spec.sites) or not all(widths)):
        raise invalid("description.site_widths", "must have a positive number for each site")


def _check_origin(description: capture_pb2.CaptureDescription) -> None:
    if description.service_instance:
        check_service_instance("description.service_instance", description.service_instance)
    if len(description.sampling_digest) > DIGEST_BYTES:
        raise invalid("description.sampling_digest", f"must have at most {DIGEST_BYTES} bytes")
    try:
        description.request_time.ToJsonString()  # as readers of the manifest convert it
    except ValueError as error:
        raise invalid("description.request_time", str(error)) from None


def check_service_instance(field: str, name: str) -> None:
    """Check the ID of an inference service.

    Raises:
        Failure: INVALID_FIELD if it is malformed.
    """
    if not is_valid_id(name):
        raise invalid(field, f"{name[:MAX_ID_LENGTH]!r} is not a valid ID")


def _check_spec(spec: capture_pb2.CaptureSpec, num_layers: int) -> None:
    _check_layers("description.spec.layers", spec.layers, num_layers)
    if not spec.sites or len(set(spec.sites)) != len(spec.sites) or not _SITES.issuperset(spec.sites):
        raise invalid("description.spec.sites", "must name at least one site, each once")
    _check_site_layers(spec, num_layers)
    try:
        check_labels(spec.labels)
    except LabelError as error:
        raise invalid("description.spec.labels", str(error)) from None
    if spec.reduction not in capture_pb2.Reduction.values():
        raise invalid("description.spec.reduction", f"unknown reduction {int(spec.reduction)}")
    try:
        check_positions(spec.positions)
    except ValueError as error:
        raise invalid("description.spec.positions", str(error)) from None


def _check_layers(field: str, selection: selection_pb2.LayerSelection, num_layers: int) -> None:
    if selection.WhichOneof("selection") != "list":
        raise invalid(field, "must be given as a list")
    try:
        resolve_layers(selection, num_layers)
    except IndexError as error:
        last = num_layers - 1
        raise invalid(field, f"layer {error.args[0]} does not exist: the model has layers 0 to {last}") from None
    except ValueError as error:
        raise invalid(field, str(error)) from None


def _check_site_layers(spec: capture_pb2.CaptureSpec, num_layers: int) -> None:
    if not spec.site_layers:
        return
    field = "description.spec.site_layers"
    if len(spec.site_layers) != len(spec.sites):
        raise invalid(field, f"must have an entry for each of {len(spec.sites)} sites, not {len(spec.site_layers)}")
    for selection in spec.site_layers:
        _check_layers(field, selection, num_layers)
    if {layer for selection in spec.site_layers for layer in selection.list.layers} != set(spec.layers.list.layers):
        raise invalid(field, "must have description.spec.layers as their union")


def check_seal(seal: store_pb2.SealCaptureRequest, description: capture_pb2.CaptureDescription) -> None:
    """Check the message that seals a capture.

    Raises:
        Failure: INVALID_FIELD if a field is wrong.
    """
    if seal.outcome not in (COMPLETE, ABORTED, INCOMPLETE):
        raise invalid("outcome", "must be COMPLETE, ABORTED or INCOMPLETE")
    if (seal.outcome == INCOMPLETE) != (seal.incomplete_reason in _REASONS):
        raise invalid("incomplete_reason", "must be set with the outcome INCOMPLETE, and only then")
    _check_length("incomplete_detail", seal.incomplete_detail, MAX_DETAIL_LENGTH)
    _check_size("sequences", seal, MAX_SEAL_BYTES)
    if len(seal.sequences) != description.num_sequences:
        given, wanted = len(seal.sequences), description.num_sequences
        raise invalid("sequences", f"the capture has {wanted} sequences, not {given}")
    _check_tokens("sequences", description, [len(sequence.generated_token_ids) for sequence in seal.sequences])
    if any(len(change.first_positions) != description.num_sequences for change in seal.steering_changes):
        wanted = description.num_sequences
        raise invalid("steering_changes", f"each must have {wanted} first positions, one for each sequence")
    _check_described_tokens(seal, len(description.prompt_token_ids))
    size = sum(change.ByteSize() for change in seal.steering_changes)
    if size > MAX_STEERING_CHANGES_BYTES:
        raise invalid("steering_changes", f"must take at most {MAX_STEERING_CHANGES_BYTES} bytes, not {size}")
    _check_scores(seal, description)
    size = sum(event.ByteSize() for event in seal.rule_events)
    if size > MAX_RULE_EVENTS_BYTES:
        raise invalid("rule_events", f"must take at most {MAX_RULE_EVENTS_BYTES} bytes, not {size}")
    if any(event.sequence >= description.num_sequences for event in seal.rule_events):
        raise invalid("rule_events", f"must be of the capture's {description.num_sequences} sequences")


def _check_scores(seal: store_pb2.SealCaptureRequest, description: capture_pb2.CaptureDescription) -> None:
    prompt, total = len(description.prompt_token_ids), 0
    kept = [(item.scores, len(item.generated_token_ids), "sequences.scores") for item in seal.sequences]
    for scores, rows, field in [*kept, (seal.prompt_scores, prompt, "prompt_scores")]:
        if not scores.probes:
            continue
        outputs = [num_outputs(probe) for probe in description.probes.probes]
        if [len(probe.values) for probe in scores.probes] != [rows * count for count in outputs]:
            raise invalid(field, f"must have the scores of {len(outputs)} probes for {rows} tokens")
        total += rows * sum(outputs)
    if total > MAX_KEPT_SCORES:
        raise invalid("sequences.scores", f"must be at most {MAX_KEPT_SCORES} numbers in all, not {total}")


def _check_described_tokens(seal: store_pb2.SealCaptureRequest, prompt_tokens: int) -> None:
    _check_texts("prompt_token_texts", seal.prompt_token_texts, prompt_tokens)
    for sequence in seal.sequences:
        _check_texts("sequences.token_texts", sequence.token_texts, len(sequence.generated_token_ids))
    if len(seal.message_spans.spans) > MAX_MESSAGE_SPANS:
        given = len(seal.message_spans.spans)
        raise invalid("message_spans", f"must be at most {MAX_MESSAGE_SPANS} messages, not {given}")
    for span in seal.message_spans.spans:
        if span.first_position + span.num_positions > prompt_tokens:
            raise invalid("message_spans", f"each must end within the prompt, which has {prompt_tokens} tokens")


def _check_texts(field: str, texts: capture_pb2.TokenTexts, num_tokens: int) -> None:
    if not texts.lengths and not texts.text:
        return
    if len(texts.lengths) != num_tokens:
        raise invalid(field, f"must have one length for each of the {num_tokens} tokens, not {len(texts.lengths)}")
    if sum(texts.lengths) != len(texts.text):
        given, wanted = sum(texts.lengths), len(texts.text)
        raise invalid(field, f"the lengths must add up to the {wanted} characters of the text, not to {given}")


def check_many(request: store_pb2.ReadCapturesRequest) -> None:
    """Check a request for many captures, as far as that needs no capture.

    Raises:
        Failure: INVALID_FIELD if a field is wrong.
    """
    check_number("capture_ids", len(request.capture_ids), MAX_CAPTURES_PER_READ, "reads")
    try:
        check_positions(request.positions)
    except ValueError as error:
        raise invalid("positions", str(error)) from None


def check_number(field: str, given: int, most: int, does: str) -> None:
    """Check the number of captures in one call. `does` says what it does with them: "deletes".

    Raises:
        Failure: INVALID_FIELD if there are none or too many.
    """
    if not 1 <= given <= most:
        raise invalid(field, f"one call {does} 1 to {most} captures, not {given}")


def check_states(states: Iterable[capture_pb2.CaptureState.ValueType]) -> None:
    """Check the states of a filter. A newer caller's state would select nothing, in silence.

    Raises:
        Failure: INVALID_FIELD if a state does not exist.
    """
    for state in states:
        if state == capture_pb2.CAPTURE_STATE_UNSPECIFIED or state not in capture_pb2.CaptureState.values():
            raise invalid("states", f"there is no state {int(state)}")


def read_where(where: str) -> tuple[Condition, ...]:
    """Return the conditions of a filter on labels.

    Raises:
        Failure: INVALID_FIELD if it cannot be parsed.
    """
    try:
        return parse_where(where)
    except LabelError as error:
        raise invalid("where", str(error)) from None


def check_chunk(header: capture_pb2.ChunkHeader, description: capture_pb2.CaptureDescription) -> None:
    """Check that a chunk fits its capture.

    Raises:
        Failure: INVALID_FIELD if it does not.
    """
    _check_place("chunk.header", description, header.sequence, [header.site], header.layers)
    _check_positions("chunk.header", header.positions)
    width = site_width(description, header.site)
    if header.width != width:
        raise invalid("chunk.header.width", f"rows of this site have {width} elements, not {header.width}")
    if header.dtype != description.dtype:
        raise invalid("chunk.header.dtype", "differs from the capture's dtype")
    form, wanted = RowFormat.of(header), RowFormat.of_capture(description, header.site)
    if form != wanted:
        raise invalid("chunk.header.encoding", f"the capture's rows are {wanted}, not {form}")


def check_loss(loss: store_pb2.RowLoss, description: capture_pb2.CaptureDescription) -> None:
    """Check that the rows of a loss belong to its capture.

    Raises:
        Failure: INVALID_FIELD if they do not, or another field is wrong.
    """
    _check_place("loss", description, loss.sequence, loss.sites, loss.layers)
    if loss.reason not in _LOSS_REASONS:
        raise invalid("loss.reason", "must be OVERFLOW or WRITE_FAILED")
    if not loss.sites or not loss.layers or not loss.positions:
        raise invalid("loss", "must name at least one site, one layer and one position")
    if len(set(loss.sites)) != len(loss.sites) or len(set(loss.layers)) != len(loss.layers):
        raise invalid("loss", "must name each site and each layer once")
    _check_positions("loss", loss.positions)
    _check_length("loss.detail", loss.detail, MAX_DETAIL_LENGTH)


def _check_positions(field: str, positions: Sequence[int]) -> None:
    if len(positions) > MAX_CAPTURE_TOKENS or max(positions) >= MAX_CAPTURE_TOKENS:
        message = f"must be at most {MAX_CAPTURE_TOKENS} positions, each below {MAX_CAPTURE_TOKENS}"
        raise invalid(f"{field}.positions", message)


def _check_length(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise invalid(field, f"must have at most {limit} characters, not {len(text)}")


def _check_size(field: str, message: Message, limit: int) -> None:
    if message.ByteSize() > limit:
        raise invalid(field, f"the message must take at most {limit} bytes, not {message.ByteSize()}")


def _check_tokens(field: str, description: capture_pb2.CaptureDescription, generated: Iterable[int]) -> None:
    tokens = sum(len(description.prompt_token_ids) + count for count in generated)
    limit = max_capture_tokens(len(description.spec.sites))
    if tokens > limit:
        raise invalid(field, f"this capture has at most {limit} tokens in all its sequences, not {tokens}")


def _check_place(
    field: str,
    description: capture_pb2.CaptureDescription,
    sequence: int,
    sites: Iterable[int],
    layers: Iterable[int],
) -> None:
    if sequence >= description.num_sequences:
        last = description.num_sequences - 1
        message = f"sequence {sequence} does not exist: the capture has sequences 0 to {last}"
        raise invalid(f"{field}.sequence", message)
    for site in set(sites) - set(description.spec.sites):
        raise invalid(f"{field}.site", f"the capture has no site {site}")
    for site in sites:
        for layer in set(layers).difference(layers_at(description.spec, site)):
            raise invalid(f"{field}.layers", f"the capture has no layer {layer} at the site {site}")
