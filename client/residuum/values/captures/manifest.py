"""A capture's manifest, as frozen Python values."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from residuum.exceptions import InvalidRequest, NoMessageSpans, NoTokenTexts
from residuum.v1 import capture_pb2
from residuum.values.captures.capture import AXES, REDUCTIONS
from residuum.values.captures.manifest_json import from_document, to_document
from residuum.values.captures.manifest_names import (
    ARCHIVE_STATES,
    FINAL_STATES,
    STATES,
    name_of,
    reason_name,
    site_name,
    to_datetime,
)
from residuum.values.captures.manifest_records import (
    RowSet,
    SequenceOutcome,
    SteeringChange,
    SteeringRecord,
    row_sets,
    steering_records,
)
from residuum.values.captures.spans import MessageSpan, spans_of
from residuum.values.captures.tokens import split_texts
from residuum.values.probes.rules import RuleEvent
from residuum.values.probes.scores import Scores, kept_scores
from residuum.values.selections.layers_and_positions import Positions
from residuum.values.selections.points import SITES
from residuum.wire.dtypes import dtype_name
from residuum.wire.labels import LabelValue, to_dict
from residuum.wire.rows.encodings import ENCODING_NAMES, FULL8, RAW, RowFormat


@dataclass(frozen=True)
class Manifest:
    """What a capture holds, what it lacks, and why.

    Its state is "complete" only if every requested row is in the store.

    Attributes:
        capture_id: The capture's ID, which is also its request's.
        model: The model that was served.
        adapter: The LoRA adapter that the request used; empty for none.
        state: "open", "complete", "incomplete" or "aborted"; all but "open" are final.
        reason: Why the capture is incomplete, such as "OVERFLOW"; empty otherwise.
        detail: The same reason, explained for a person.
        layers: The requested layers, of all sites; see `layers_at`.
        sites: The requested sites.
        positions: The requested positions.
        before_steering: Whether the rows were captured before steering, instead of as the model continued with them.
        encoding: The encoding of the rows, such as "raw" or "rp8"; "unknown" if this version does not know it.
        dimensions: Numbers in an encoded row of "rp8", "rp", "topk8", "topk" and "project"; 0 for the other encodings.
        seed: The seed of the random projection of "rp8" and "rp".
        axis: Which numbers share a scale in "full8": those of a "row" or of a "dimension"; empty for other encodings.
        projected_onto: The digests of the vectors of "project" in hexadecimal, in the order of the numbers in a row.
        sae: The digest of the encoder of "sae" in hexadecimal; empty for other encodings.
        features: The features that "sae" keeps; empty: the strongest of each row.
        reduction: The reduction of each phase to one row: "last", "mean", "max" or "sum"; "none" if every row was
            captured.
        dtype: The element type in which the model computed the rows, such as "bfloat16".
        hidden_size: Elements of a row as the model computed it.
        num_layers: Number of the model's decoder layers.
        prompt_token_ids: The prompt's token IDs.
        sequences: The sequences in order; empty until the capture is sealed.
        present: The rows in the store.
        missing: The missing rows, as far as is known.
        num_rows: Rows in the store, counted once for each layer and site.
        num_bytes: Bytes of chunks in the store.
        steered: Whether the request was steered, at the start or later.
        steering: The steering operations at the start, in order.
        steering_changes: Changes of the steering while the request was generating; known once the capture is sealed.
        rule_events: The rules that fired; known once the capture is sealed.
        vllm_version: The version of vLLM that ran the model.
        request_time: When the request was accepted.
        open_time: When the capture was opened.
        end_time: When the capture became final.
        labels: The capture's labels. They are the only part of a final manifest that can change.
        prompt_text: The prompt's text, if the request asked to keep it (`Capture.keep_prompt`); else empty.
        proto: The message that this manifest was made from. It has further fields, such as the layout.
    """

    capture_id: str
    model: str
    adapter: str
    state: str
    reason: str
    detail: str
    layers: tuple[int, ...]
    sites: tuple[str, ...]
    positions: Positions
    before_steering: bool
    encoding: str
    dimensions: int
    seed: int
    axis: str
    projected_onto: tuple[str, ...]
    sae: str
    features: tuple[int, ...]
    reduction: str
    dtype: str
    hidden_size: int
    num_layers: int
    prompt_token_ids: tuple[int, ...]
    sequences: tuple[SequenceOutcome, ...]
    present: tuple[RowSet, ...]
    missing: tuple[RowSet, ...]
    num_rows: int
    num_bytes: int
    steered: bool
    steering: tuple[SteeringRecord, ...]
    steering_changes: tuple[SteeringChange, ...]
    rule_events: tuple[RuleEvent, ...]
    vllm_version: str
    request_time: datetime.datetime | None
    open_time: datetime.datetime | None
    end_time: datetime.datetime | None
    labels: Mapping[str, LabelValue] = field(hash=False)
    prompt_text: str
    proto: capture_pb2.CaptureManifest = field(repr=False, compare=False)

    @property
    def archive_state(self) -> str:
        """Where the rows are, in a store that has an archive, once the capture has ended.

        "pending": only in the store. "copied": in both. "moved": only in the archive; the store reads them from there.
        Empty if the store has no archive.
        """
        return ARCHIVE_STATES.get(self.proto.archive_state, "")

    @property
    def is_final(self) -> bool:
        """Whether the capture has ended: no more rows will come."""
        return self.state in FINAL_STATES

    @property
    def is_complete(self) -> bool:
        """Whether every requested row is in the store."""
        return self.state == "complete"

    def layers_at(self, site: str) -> tuple[int, ...]:
        """Return the requested layers at a site.

        Raises:
            KeyError: The capture does not have the site.
        """
        if site not in self.sites:
            raise KeyError(f"the capture {self.capture_id} has no site {site!r}; it has {', '.join(self.sites)}")
        spec = self.proto.description.spec
        return tuple(spec.site_layers[self.sites.index(site)].list.layers) if spec.site_layers else self.layers

    @property
    def row_format(self) -> RowFormat:
        """The byte layout of the rows at the first site.

        Raises:
            ValueError: This version does not know the encoding.
        """
        return RowFormat.of_capture(self.proto.description)

    def format_at(self, site: str) -> RowFormat:
        """Return the byte layout of the rows at one of the sites.

        Raises:
            ValueError: This version does not know the encoding.
        """
        return RowFormat.of_capture(self.proto.description, SITES.get(site))

    @property
    def width(self) -> int:
        """Elements of a decoded row at the first site: its width, or fewer if rows were projected."""
        return self.row_format.decoded_width

    def tokens(self, sequence: int = 0) -> tuple[str, ...]:
        """Return the text of each token of the prompt and of one sequence.

        A token's text is what it adds to the text of the tokens before it; special tokens are shown. If a character
        takes several tokens, the last of them has it, and the others have an empty text.

        Args:
            sequence: The sequence.

        Raises:
            NoTokenTexts: The texts are not known; the message says why.
            KeyError: The sequence does not exist.

        Example:
            >>> manifest.tokens()[:3]
            ('The', ' sea', ' is')
        """
        self._check_sequence(sequence)
        parts = [self.proto.prompt_token_texts] if self.proto.HasField("prompt_token_texts") else []
        if sequence < len(self.proto.sequences) and self.proto.sequences[sequence].HasField("token_texts"):
            parts.append(self.proto.sequences[sequence].token_texts)
        detail = next((part.unknown_detail for part in parts if part.unknown_detail), "")
        if detail or len(parts) < 2:  # noqa: PLR2004 - the prompt and the reply
            raise NoTokenTexts(
                f"The capture {self.capture_id} has no texts of its tokens: {detail or self._why_not_described()} Its "
                "token IDs are in token_ids.",
                metadata={"capture_id": self.capture_id},
            )
        return split_texts(parts[0]) + split_texts(parts[1])

    def spans(self, sequence: int = 0) -> tuple[MessageSpan, ...]:
        """Return the positions of the messages of a conversation, in order: those of the prompt, and the reply.

        The reply is a message of the assistant. If the prompt ends with a message of the assistant, the reply continues
        it, and both are one span.

        Args:
            sequence: The sequence of the reply.

        Raises:
            NoMessageSpans: The prompt is not a conversation, or the positions are not known; the message says why.
            KeyError: The sequence does not exist.

        Example:
            >>> for span in manifest.spans():
            ...     print(span.role, span.first, span.last)
            system 3 8
            user 13 20
            assistant 25 48
        """
        self._check_sequence(sequence)
        detail = self.proto.message_spans.unknown_detail
        if detail or not self.proto.HasField("message_spans") or sequence >= len(self.proto.sequences):
            raise NoMessageSpans(
                f"The capture {self.capture_id} has no positions of messages: {detail or self._why_not_described()}",
                metadata={"capture_id": self.capture_id},
            )
        return spans_of(self.proto, sequence)

    def scores(self, sequence: int = 0) -> Scores | None:
        """Return the scores of one sequence's tokens, as in the reply; see `Sequence.scores`.

        Args:
            sequence: The sequence.

        Returns:
            The scores by the names of the probes, float32 [tokens] or [tokens, outputs]. None if the request had no
            probes, the capture is not sealed, or the scores were too many to be stored: more than 131,072 numbers.

        Raises:
            KeyError: The sequence does not exist.
        """
        self._check_sequence(sequence)
        if sequence >= len(self.proto.sequences):
            return None
        return kept_scores(self.proto.description.probes.probes, self.proto.sequences[sequence].scores)

    @property
    def prompt_scores(self) -> Scores | None:
        """The scores of the prompt's positions, as in the reply; None if there are none. See `scores`."""
        return kept_scores(self.proto.description.probes.probes, self.proto.prompt_scores)

    def _check_sequence(self, sequence: int) -> None:
        count = max(self.proto.description.num_sequences, 1)
        if not 0 <= sequence < count:
            raise KeyError(f"sequence {sequence} does not exist: {self.capture_id} has sequences 0 to {count - 1}")

    def _why_not_described(self) -> str:
        """Return why a manifest says nothing of its tokens but their IDs, without a detail from the server."""
        if not self.is_final and not self.sequences:
            return "its request still runs. They are known when it has ended."
        if not self.sequences:
            return "it was never sealed, because its inference service was killed or lost its connection to the store."
        return "it was made by an older version of residuum."

    def describe_missing(self, limit: int = 4) -> str:
        """Return one line that says which rows are missing.

        Args:
            limit: The number of row sets to name; the others are only counted.
        """
        if self.is_complete:
            return "nothing is missing"
        if not self.missing and not self.is_final:
            return "nothing is known to be missing yet: the capture is still open"
        if not self.missing and self.sequences:
            return "no row of its tokens is missing"
        if not self.missing:
            return "the store does not know which rows are missing"
        named = "; ".join(str(rows) for rows in self.missing[:limit])
        rest = len(self.missing) - limit
        return named + (f"; and {rest} more" if rest > 0 else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as a JSON document with the schema `protos/residuum/v1/manifest.schema.json`.

        It has all fields of the message under their contract names, and the fields of `vllm_capture`'s manifests:
        `request_id`, `tp_rank`, `tp_world_size`, `mode`, `compression`, and for each sequence `prompt_len`, `total_len`
        and each layer's `shape`, [rows, width]. A sequence of `total_len` tokens has one row fewer, because its last
        token is never fed to the model.

        Example:
            >>> acts.manifest.to_dict()["sequences"]["0"]["layers"]["12"]["shape"]
            [68, 576]
        """
        return to_document(self.proto)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict` as a string."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest from the output of `to_json`, or from the message's JSON form.

        Raises:
            InvalidRequest: The text is neither.
        """
        try:
            return cls.from_proto(from_document(json.loads(text)))
        except (ValueError, TypeError, RecursionError, json_format.ParseError) as error:
            raise InvalidRequest(f"The text is not a manifest: {error}", reason="INVALID_FIELD") from None

    @classmethod
    def from_proto(cls, proto: capture_pb2.CaptureManifest) -> Manifest:
        """Return the manifest of a message."""
        description = proto.description
        return cls(
            capture_id=description.capture_id,
            model=description.model,
            adapter=description.adapter,
            state=STATES.get(proto.state, "unknown"),
            reason=reason_name(proto.incomplete_reason),
            detail=proto.incomplete_detail,
            layers=_layers(description),
            sites=tuple(site_name(site) for site in description.spec.sites) or ("resid_post",),
            positions=Positions.from_proto(description.spec.positions),
            before_steering=description.spec.before_steering,
            encoding=ENCODING_NAMES.get(description.spec.encoding or RAW, "unknown"),
            dimensions=description.spec.encoding_options.dimensions or len(description.spec.encoding_options.vectors),
            seed=description.spec.encoding_options.seed,
            axis=name_of(AXES, description.spec.encoding_options.axis) if description.spec.encoding == FULL8 else "",
            projected_onto=tuple(digest.hex() for digest in description.spec.encoding_options.vectors),
            sae=description.spec.encoding_options.sae.digest.hex(),
            features=tuple(description.spec.encoding_options.sae.chosen),
            reduction=name_of(REDUCTIONS, description.spec.reduction),
            dtype=dtype_name(description.dtype),
            hidden_size=description.hidden_size,
            num_layers=description.num_layers,
            prompt_token_ids=tuple(description.prompt_token_ids),
            sequences=tuple(
                SequenceOutcome(tuple(item.generated_token_ids), item.finish_reason) for item in proto.sequences
            ),
            present=row_sets(proto.present),
            missing=row_sets(proto.missing),
            num_rows=proto.num_rows,
            num_bytes=proto.num_bytes,
            steered=bool(description.steering.operations)
            or any(item.steering.operations for item in proto.steering_changes),
            steering=steering_records(description.steering),
            steering_changes=tuple(
                SteeringChange(tuple(item.first_positions), steering_records(item.steering), item.rule)
                for item in proto.steering_changes
            ),
            rule_events=tuple(map(RuleEvent.from_proto, proto.rule_events)),
            vllm_version=description.vllm_version,
            request_time=to_datetime(description.request_time),
            open_time=to_datetime(proto.open_time),
            end_time=to_datetime(proto.end_time),
            labels=to_dict(proto.labels),
            prompt_text=description.prompt_text,
            proto=proto,
        )


def _layers(description: capture_pb2.CaptureDescription) -> tuple[int, ...]:
    if description.spec.layers.WhichOneof("selection") == "list":
        return tuple(description.spec.layers.list.layers)
    return tuple(range(description.num_layers))
