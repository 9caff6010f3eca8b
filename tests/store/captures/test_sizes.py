"""The longest messages of a capture stay below gRPC's limit."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from residuum.v1 import capture_pb2, probe_pb2, rule_pb2, selection_pb2, steering_pb2, store_pb2
from residuum.wire.limits import (
    MAX_ID_LENGTH,
    MAX_MANIFEST_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PROBE_OUTPUTS,
    MAX_PROBES_BYTES,
    MAX_RULES,
    MAX_SEAL_BYTES,
    MAX_STEERING_CHANGES_BYTES,
    max_capture_tokens,
)
from store_svc.captures.ledger import Cells
from store_svc.captures.lifecycle import Capture
from store_svc.captures.positions import Positions
from store_svc.checks import check_description, check_seal
from tests.store.support import ABORTED, COMPLETE, describe

SITES = [site for site in capture_pb2.Site.values() if site]
LAYERS = range(8)
RULE_ABORTS = rule_pb2.RULE_ACTION_ABORT
MOST_DIGESTS = 8192
"""The most vectors that one request's steering can name, limited by the entries of a server's tables."""
LARGEST_TOKEN = (1 << 21) - 1
NOW = Timestamp(seconds=1_800_000_000, nanos=999_999_999)


@pytest.mark.parametrize("sites", [SITES[:4], SITES], ids=["four sites", "all sites"])
@pytest.mark.parametrize(
    ("sequences", "prompt_share", "stored", "texts"),
    [
        (1, 0.0, "every row", False),
        (1, 0.5, "half of the rows", False),
        (1, 0.5, "half of the rows", True),
        (8, 0.0, "half of the rows", False),
    ],
)
def test_the_longest_manifest_fits_a_message_with_its_steering(
    sequences: int, prompt_share: float, stored: str, texts: bool, sites: list[int]
) -> None:
    """Select every second position at every site, which gives the most ranges of positions."""
    each = max_capture_tokens(len(sites)) // sequences
    prompt = int(each * prompt_share)
    selection = selection_pb2.PositionSelection(every=2)
    description = describe("x" * MAX_ID_LENGTH, layers=LAYERS, sites=sites, sequences=sequences, positions=selection)
    description.prompt_token_ids[:] = [LARGEST_TOKEN] * prompt
    description.steering.operations.add(layer_digests=[b"d" * 32] * MOST_DIGESTS)
    for number in range(MAX_PROBE_OUTPUTS):
        description.probes.probes.add(name="p" * 64, outputs=[probe_pb2.ProbeOutput(digest=b"d" * 32, bias=number)])
    description.probes.rules.extend(
        [rule_pb2.Rule(name="r" * 64, probe="p" * 64, above=0.5, action=RULE_ABORTS)] * MAX_RULES
    )
    room = MAX_PROBES_BYTES - description.probes.ByteSize() - 100
    description.probes.probes[0].mlp.add(weights=bytes(room))
    assert MAX_PROBES_BYTES - 100 < description.probes.ByteSize() <= MAX_PROBES_BYTES
    check_description(description)
    outcome = capture_pb2.SequenceOutcome(generated_token_ids=[LARGEST_TOKEN] * (each - prompt), finish_reason="length")
    seal = store_pb2.SealCaptureRequest(
        capture_id=description.capture_id,
        sequences=[outcome] * sequences,
        outcome=COMPLETE if stored == "every row" else ABORTED,
    )
    change = steering_pb2.SteeringChange(first_positions=[LARGEST_TOKEN] * sequences)
    change.steering.operations.add(layer_digests=[b"d" * 32] * (MAX_STEERING_CHANGES_BYTES // 2 // 34 - 10))
    seal.steering_changes.extend([change] * 2)
    event = rule_pb2.RuleEvent(
        rule="r" * 64, sequence=sequences - 1, token=LARGEST_TOKEN, score=0.5, action=RULE_ABORTS
    )
    seal.rule_events.extend([event] * (MAX_RULES * sequences))
    if texts:  # as long as the service sends them
        room = MAX_SEAL_BYTES - seal.ByteSize() - 100
        length = [room - 2 * prompt - 20]
        seal.prompt_token_texts.text = "x" * length[0]
        seal.prompt_token_texts.lengths.extend(length + [0] * (prompt - 1))
        assert MAX_SEAL_BYTES - prompt - 1000 < seal.ByteSize() <= MAX_SEAL_BYTES
    check_seal(seal, description)
    capture = Capture(1, description, NOW, 0.0)
    rows = Positions.of(range(0, each - 1, 2 if stored == "every row" else 4))
    for sequence in range(sequences):
        for site in sites:
            capture.add(Cells(sequence, site, LAYERS, rows), 1 << 20, 0.0)
    capture.close(seal, NOW, 0.0)
    if not capture.ended:
        capture.time_out(NOW, 5.0)
    manifest = capture.manifest()
    assert manifest.state == seal.outcome
    assert len(manifest.present) == sequences * len(sites)
    if texts:
        left_out = not manifest.prompt_token_texts.lengths
        size = manifest.ByteSize() + (seal.prompt_token_texts.ByteSize() if left_out else 0)
        assert left_out == (size > MAX_MANIFEST_BYTES)
        assert left_out == ("would not fit" in manifest.prompt_token_texts.unknown_detail)
        assert all(item.token_texts.unknown_detail for item in manifest.sequences) == left_out
    answer = store_pb2.ReadChunksResponse(manifest=manifest)
    assert max(seal.ByteSize(), answer.ByteSize()) < MAX_MESSAGE_BYTES
