"""A real language model in bfloat16, through both services, compared with transformers in float32."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

import residuum
from examples.demo import __main__ as demo
from examples.demo.reference import compare
from examples.demo.verdict import BELOW, FOR_TOKENS, make_probe, watch
from examples.head_ablation import ablate
from examples.pictures import draw_lens, draw_sweep, first_layer
from tests.reference.hf import Reference

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.shares_engine("integration")]

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Once upon a time, in a land far away, " * 6,
    "The three primary colours are",
    "My favourite food is",
    "Hello",
    "To bake bread, you need",
)
ALL = residuum.Capture(layers="all")
CLEAR_LOGITS = 1.0
"""A lead of the best logit over the second that bfloat16 does not turn: its rounding moves them by up to 0.3."""


def test_the_demo_watches_a_reply_and_a_rule_ends_it(client: residuum.Client) -> None:
    """The rule fires where the scores say so; the probe tells the two kinds of sentences apart."""
    means = demo.find_means(client, demo.Totals())
    probe = make_probe(means[0], means[1], demo.STEERED_LAYER)
    assert probe.score(means[0]) > 0.85
    assert probe.score(means[1]) < 0.15
    console = Console(file=io.StringIO())
    reply = watch(client, probe, console)
    assert reply.scores is not None
    fires = residuum.Rule(probe, below=BELOW, for_tokens=FOR_TOKENS).fires_at(reply.scores["happy"])
    assert fires is not None, "the demo shows a rule that fires"
    assert reply.finish_reason == "rule"
    assert len(reply.token_ids) == fires + 1
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert reply.text in shown


def test_every_row_of_eight_concurrent_requests(client: residuum.Client, smollm2: Path) -> None:
    replies = client.generate_many(PROMPTS, max_tokens=40, capture=ALL, progress=False)
    captured = []
    for reply in replies:
        acts = client.activations(reply.request_id)
        assert acts.manifest.state == "complete"
        assert len(acts.positions) == len(reply.prompt_token_ids) + len(reply.token_ids) - 1
        captured.append((acts.token_ids.tolist(), acts.stack()))
    agreement = compare(str(smollm2), captured)
    assert not agreement.unexplained.any()
    assert agreement.cosines.mean() >= 0.999
    assert (agreement.cosines < 0.99).mean() < 0.01, "rounding explains single rows, not many"


def test_the_model_generates_text(client: residuum.Client, smollm2: Path) -> None:
    """The prompt is the chat template's. Each token is the one that transformers chooses, wherever the choice is clear.

    In bfloat16, the text itself depends on the processor: for the first word of this reply, two tokens are almost
    equally likely.
    """
    assert client.generate("The capital of France is", max_tokens=3, temperature=0.0).text.startswith(" Paris")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    reply = client.generate(question, max_tokens=24, temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert list(reply.prompt_token_ids) == tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=False
    )
    reference, first = Reference(smollm2), len(reply.prompt_token_ids) - 1
    logits = reference.logits([*reply.prompt_token_ids, *reply.token_ids][:-1])[first:]
    best, second = np.partition(logits, -2)[:, :-3:-1].T
    assert (best - second > CLEAR_LOGITS).sum() >= 3, "otherwise the reference decides too little"
    # So a token with a clear lead must be the one that was generated.
    assert reference.shortfall(reply.prompt_token_ids, reply.token_ids) <= CLEAR_LOGITS


def test_a_chat_that_ends_with_the_assistant_is_continued(client: residuum.Client) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    begun = "The capital of France is the city of"
    reply = client.generate([question, {"role": "assistant", "content": begun}], max_tokens=1)
    assert reply.text == " Paris"
    anew = client.generate([question], max_tokens=1)
    assert reply.prompt_token_ids[: len(anew.prompt_token_ids)] == anew.prompt_token_ids, (
        "the prompt is in the same turn"
    )
    with pytest.raises(residuum.InvalidRequest, match="empty"):
        client.generate([question, {"role": "assistant", "content": ""}], max_tokens=1)


def test_a_steered_capture_is_right_among_seven_plain_requests(client: residuum.Client) -> None:
    direction = residuum.Vector.from_array(np.random.default_rng(1).standard_normal(576).astype(np.float32))
    steer = [residuum.Add(direction, layer=12, scale=0.1)]
    # The reply must be clear: if two tokens are equally likely, the shape of the batch decides in bf16, as in stock
    # vLLM. tests/conformance has the same test in float32, where the batch must have no effect.
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
    alone = client.generate(prompt, max_tokens=24, capture=ALL, steer=steer)
    neighbours = [client.stream(other, max_tokens=60, ignore_eos=True) for other in PROMPTS[:7]]
    for neighbour in neighbours:
        next(iter(neighbour))  # all neighbours are running
    together = client.generate(prompt, max_tokens=24, capture=ALL, steer=steer)
    for neighbour in neighbours:
        neighbour.close()
    assert together.token_ids == alone.token_ids
    rows = [client.activations(reply.request_id).stack() for reply in (together, alone)]
    distance = np.linalg.norm(rows[0] - rows[1], axis=-1) / np.linalg.norm(rows[1], axis=-1)
    assert np.median(distance) < 0.01
    assert distance.max() < 0.25, "bf16 noise, which is largest in a few ill-conditioned rows"


def test_sequences_of_one_prompt_have_their_own_rows(client: residuum.Client) -> None:
    reply = client.generate("A colour is", max_tokens=12, n=3, temperature=1.0, seed=7, ignore_eos=True, capture=ALL)
    assert len({sequence.token_ids for sequence in reply.sequences}) > 1
    acts = client.activations(reply.request_id)
    assert acts.manifest.state == "complete"
    prompt = len(reply.prompt_token_ids)
    for index, sequence in enumerate(reply.sequences):
        one = acts.select(sequence=index)
        assert one.token_ids.tolist() == [*reply.prompt_token_ids, *sequence.token_ids][:-1]
        assert one[29].shape == (prompt + 11, 576)
    first, second = (acts.select(sequence=index)[5][:prompt] for index in (0, 1))
    assert np.linalg.norm(first - second) < 0.02 * np.linalg.norm(first), "the same prompt, the same rows"


def test_equal_seeds_give_equal_replies(client: residuum.Client) -> None:
    replies = [client.generate("A colour is", max_tokens=12, temperature=1.0, seed=11).token_ids for _ in range(2)]
    assert replies[0] == replies[1]


def test_a_stop_string_ends_the_capture_with_the_reply(client: residuum.Client) -> None:
    reply = client.generate("Count: 1, 2, 3,", max_tokens=40, stop=["7"], capture=ALL)
    assert reply.finish_reason == "stop"
    assert reply.sequences[0].stop_reason == "7"
    assert "7" not in reply.text
    acts = client.activations(reply.request_id)
    assert acts.manifest.state == "complete"
    assert len(acts.positions) == len(reply.prompt_token_ids) + len(reply.token_ids) - 1


@pytest.mark.parametrize("prompt", [[504], [504, 3575]])
def test_one_generated_token_of_a_short_prompt_is_captured(client: residuum.Client, prompt: list[int]) -> None:
    reply = client.generate(prompt, max_tokens=1, ignore_eos=True, capture=ALL)
    acts = client.activations(reply.request_id)
    assert acts.token_ids.tolist() == prompt


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("prompt", lambda prompt, rows: range(prompt)),
        ("generated", range),
        ("last_prompt", lambda prompt, rows: [prompt - 1]),
    ],
)
def test_selected_positions_are_captured(client: residuum.Client, positions: str, expected: object) -> None:
    reply = client.generate(
        PROMPTS[0], max_tokens=40, ignore_eos=True, capture=residuum.Capture(layers=[3, 29], positions=positions)
    )
    acts = client.activations(reply.request_id)
    prompt = len(reply.prompt_token_ids)
    assert acts.positions.tolist() == list(expected(prompt, prompt + 39))  # type: ignore[operator]
    assert acts.layers == (3, 29)


def test_following_while_the_model_generates(client: residuum.Client) -> None:
    with client.stream(PROMPTS[4], max_tokens=150, ignore_eos=True, capture=ALL) as stream:
        request_id = stream.started.request_id
        pieces = client.follow(request_id, layers=[0, 29])
        first = next(iter(pieces))
        assert client.manifest(request_id).state == "open", "the first rows arrive before the last token"
        for _ in stream:
            pass
    seen = {(piece.layer, position) for piece in (first, *pieces) for position in piece.positions.tolist()}
    rows = len(stream.reply.prompt_token_ids) + 149
    assert seen >= {(layer, position) for layer in (0, 29) for position in range(rows)}


def test_an_aborted_request_has_an_aborted_capture(client: residuum.Client) -> None:
    with client.stream(PROMPTS[4], max_tokens=900, ignore_eos=True, capture=ALL) as stream:
        request_id = stream.started.request_id
        next(iter(stream))
        client.abort(request_id)
        with pytest.raises(residuum.RequestAborted):
            for _ in stream:
                pass
    with pytest.raises(residuum.AbortedCapture):
        client.activations(request_id)
    partial = client.activations(request_id, allow_partial=True)
    assert partial.manifest.state == "aborted"
    client.abort(request_id)  # aborting an ended request is no error


def test_dropping_a_stream_aborts_the_request(client: residuum.Client) -> None:
    stream = client.stream(PROMPTS[4], max_tokens=900, ignore_eos=True, capture=ALL)
    request_id = stream.started.request_id
    next(iter(stream))
    stream.close()
    assert client.manifest(request_id, wait=True).state == "aborted"


def test_a_vector_is_sent_once(client: residuum.Client) -> None:
    vector = residuum.Vector.from_array(np.random.default_rng(2).standard_normal(576).astype(np.float32))
    assert client.put_vectors([vector]).bytes_sent == 576 * 4
    assert client.put_vectors([vector]).bytes_sent == 0
    assert client.find_missing_vectors([vector]) == []


def test_a_registration_can_be_used_only_once(client: residuum.Client) -> None:
    registration = client.register(capture=residuum.Capture(layers=[0]), request_id="registered-once")
    assert client.register(capture=residuum.Capture(layers=[0]), request_id="registered-once").request_id
    reply = client.generate("Hello", max_tokens=2, registration=registration)
    assert reply.request_id == "registered-once"
    assert client.activations(reply.request_id).layers == (0,)
    with pytest.raises(residuum.UnknownRequest):
        client.generate("Hello", max_tokens=2, registration=registration)


def test_requests_of_one_batch_are_steered_by_their_own_vectors(client: residuum.Client) -> None:
    rng = np.random.default_rng(6)
    vectors = [residuum.Vector.from_array(5 * rng.standard_normal(576).astype(np.float32)) for _ in range(8)]
    capture = residuum.Capture(layers=[12], positions="prompt")

    def rows(steer: list[residuum.Add]) -> np.ndarray:
        reply = client.generate(PROMPTS[0], max_tokens=1, capture=capture, steer=steer)
        return client.activations(reply.request_id)[12]

    plain = rows([])
    with ThreadPoolExecutor(8) as pool:
        steered = list(pool.map(lambda v: rows([residuum.Add(v, layer=12, scale=1.0)]), vectors))
    for vector, moved in zip(vectors, steered, strict=True):
        # The rows that were computed alone and those of a batch differ by rounding (bf16 has 8 bits), in hundredths of
        # their length. The first token's row is by far the longest.
        length = np.linalg.norm(plain, axis=-1) + np.linalg.norm(vector.values)
        errors = [np.linalg.norm(moved - plain - other.values, axis=-1) for other in vectors]
        own = errors[vectors.index(vector)]
        assert (own < 0.01 * length).all()
        assert (np.median(own / length)) < 0.005
        # The vectors are far from each other, so any other one is far off in every row but the first.
        assert all((error[1:] > 20 * own[1:]).all() for error in errors if error is not own)


def test_captures_are_listed_and_deleted(client: residuum.Client) -> None:
    reply = client.generate("Hello", max_tokens=2, capture=residuum.Capture(layers=[0]), request_id="to-be-deleted")
    client.activations(reply.request_id)
    assert [item.capture_id for item in client.captures(prefix="to-be-deleted")] == ["to-be-deleted"]
    assert client.delete("to-be-deleted") > 0
    with pytest.raises(residuum.UnknownCapture):
        client.manifest("to-be-deleted")


def test_removing_a_head_equals_setting_its_output_to_zero(client: residuum.Client) -> None:
    """The example removes heads by a mask. Here the rows are captured, changed and set."""
    prompt, layer, head = "The capital of France is", 0, 4
    changes = ablate(client, prompt, [layer, 22])
    assert changes.shape == (2, 9)
    assert np.abs(changes).argmax() == head, "by far the most important one"
    reply = client.generate(prompt, max_tokens=1)
    scored = [*reply.prompt_token_ids, reply.token_ids[0]]
    capture = residuum.Capture(layers=[layer], sites=["z", "attn_out"])

    def score(steer: list[residuum.Set] | list[residuum.Multiply] | None) -> tuple[float, residuum.Activations]:
        reply = client.generate(scored, max_tokens=0, prompt_logprobs=0, steer=steer, capture=capture)
        assert reply.prompt_logprobs is not None
        return float(reply.prompt_logprobs.tokens[-1]), client.activations(reply)

    plain, rows_before = score(None)
    rows = np.array(rows_before[layer], np.float32).reshape(len(scored), 9, 64)
    rows[:, head] = 0
    without, rows_set = score(
        [
            residuum.Set(residuum.Vector(row.reshape(-1)), layer=layer, site="z", positions=[position])
            for position, row in enumerate(rows)
        ]
    )
    _, rows_masked = score([residuum.Multiply(client.info().mask("z", [head]), layer=layer, site="z")])
    before, of_set, of_masked = (found.select(site="attn_out")[layer] for found in (rows_before, rows_set, rows_masked))
    removed = np.linalg.norm(of_masked - before, axis=-1)
    assert (removed > 0.1).all()
    assert (np.linalg.norm(of_set - of_masked, axis=-1) < 0.02 * removed).all()
    assert without - plain == pytest.approx(changes[0, head], abs=0.3), (
        "bfloat16 rounds the logits of a batch otherwise"
    )


def test_the_pictures_show_where_the_capital_comes_from(client: residuum.Client, tmp_path: Path) -> None:
    """In the lower layers, the country's row has the answer; in the upper layers, the last row has it."""
    before = {entry.capture_id for entry in client.captures()}
    clean, corrupted = "The capital of France is", "The capital of Italy is"
    lens = draw_lens(client, clean, tmp_path)
    assert lens.top_texts[-1][-1] == " Paris"
    assert (lens.predicted.top_ids.shape, lens.tokens[3]) == ((30, 5, 10), " France")
    found = first_layer(lens)
    assert found > 10
    assert lens.ranks[lens.layers.index(found) - 1, -1] > 1
    sweep = draw_sweep(client, clean, corrupted, tmp_path, layers=[0, 29])
    assert sweep.recovered[0, 3] > 0.8
    assert sweep.recovered[1, 4] == pytest.approx(1.0, abs=0.1)
    assert np.abs(sweep.recovered[[0, 1], [4, 3]]).max() < 0.1
    for name, words in (("logit-lens", "Paris"), ("patch-sweep", "France")):
        assert words in (tmp_path / f"{name}.svg").read_text()
    assert {entry.capture_id for entry in client.captures()} == before
