"""`residuum generate`: the requests that it sends, and the arguments that it refuses."""

from __future__ import annotations

import json
import sys
import threading
import uuid

import numpy as np
import pytest
from safetensors.numpy import save_file

import residuum
from residuum.cli.generation.probes import ScorePrinter
from residuum.cli.output import Output
from residuum.directions.values import Origin
from residuum.v1 import capture_pb2, inference_pb2, selection_pb2, steering_pb2
from residuum.values.selections.texts import parse_layers
from tests.client.support.peer import HIDDEN


def test_generate(cli):
    assert cli("generate", "a bb", "--max-tokens", 3)[:2] == (0, " 3 4 5\n")
    code, out, _ = cli("generate", "a bb", "--max-tokens", 2, "--json", "--id", "by-hand")
    reply = json.loads(out)
    assert code == 0
    assert (reply["request_id"], reply["text"], reply["usage"]["generated_tokens"]) == ("by-hand", " 3 4", 2)


def test_generate_sends_every_sampling_parameter(cli, peer, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    code, out, _ = cli(
        "generate", "a", "--max-tokens", 2, "--min-p", 0.5, "--presence-penalty", 1, "--frequency-penalty", -1,
        "--repetition-penalty", 1.5, "--stop-token-id", 7, "--stop-token-id", 8, "--bad-word", "no",
        "--logit-bias", "3:-2.5", "--json-schema", schema, "--logprobs", 1, "--prompt-logprobs", 0, "--json",
    )  # fmt: skip
    assert code == 0
    assert peer.requests[-1].sampling == inference_pb2.SamplingParameters(
        max_tokens=2, min_p=0.5, presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5,
        stop_token_ids=[7, 8], bad_words=["no"], logit_bias=[inference_pb2.LogitBias(token_id=3, bias=-2.5)],
        json_schema='{"type": "object"}', logprobs=1, prompt_logprobs=0,
    )  # fmt: skip
    reply = json.loads(out)
    assert reply["sequences"][0]["logprobs"] == {
        "tokens": [-0.25, -0.375],
        "top_ids": [[2], [3]],
        "top": [[-0.25], [-0.375]],
    }
    assert reply["prompt_logprobs"] == {"tokens": [None], "top_ids": [[]], "top": [[]]}
    assert cli("generate", "a", "--json-schema", '{"type": "string"}', "--max-tokens", 0)[:2] == (0, "\n")
    assert peer.requests[-1].sampling.json_schema == '{"type": "string"}'


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--logit-bias", "x"], "TOKEN_ID:BIAS"),
        (["--logit-bias", "3:-2", "--logit-bias", "3:5"], "--logit-bias is given twice for the token 3"),
        (["--capture", "1", "--label", "y=0", "--label", "y=1"], "The label 'y' is given twice"),
        (["--json-schema", "nowhere.json"], "nowhere.json"),
        (["--json-schema", "{"], "json_schema is not a JSON document"),
        (["--id", ""], "'' is not a valid request ID"),
        (["--capture", "1", "--positions", ""], "positions='' is unknown"),
        (["--capture", "1", "--sae", ""], "No sparse autoencoder can be read"),
        (["--capture", "1", "--features", ""], "--features"),
        (["--presence-penalty", "3"], "presence_penalty must be from -2 to 2"),
    ],
)
def test_invalid_flags_are_refused(cli, peer, flags, told):
    code, _, err = cli("generate", "a", *flags)
    assert (code, told in err) == (1, True)
    assert not peer.requests


@pytest.mark.parametrize("flag", ["--logprobs", "--prompt-logprobs"])
def test_log_probabilities_need_json(cli, peer, capsys, flag):
    with pytest.raises(SystemExit):
        cli("generate", "a", flag, "1")
    assert "need --json" in capsys.readouterr().err
    assert not peer.requests


def test_generate_from_standard_input(cli, monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a bb ccc")))
    assert cli("generate", "-", "--max-tokens", 1)[1] == " 4\n"
    assert cli("generate", "four", "--chat", "--max-tokens", 1)[1] == " 5\n"


def test_generate_captures_and_steers(cli, peer, tmp_path):
    np.save(tmp_path / "joy.npy", np.ones(HIDDEN))
    save_file({"a": np.ones(HIDDEN, np.float32), "b": np.ones(HIDDEN, np.float32)}, tmp_path / "v.safetensors")
    code, out, err = cli(
        "generate", "a bb", "--max-tokens", 2, "--capture", "0,2-4", "--positions", "prompt", "--stop", "x",
        "--add", f"{tmp_path / 'joy.npy'}@1*2.5", "--ablate", f"{tmp_path / 'v.safetensors'}:b@all",
    )  # fmt: skip
    assert (code, out) == (0, " 3 4\n")
    assert "residuum pull req-" in err
    sent = peer.requests[-1]
    assert list(sent.spec.capture.layers.list.layers) == [0, 2, 3, 4]
    assert [operation.WhichOneof("operation") for operation in sent.spec.steering.operations] == ["add", "ablate"]
    assert sent.spec.steering.operations[0].add.scale == 2.5


def test_generate_says_what_to_do_with_a_capture_that_exists(cli, peer):
    assert cli("generate", "a", "--capture", "1", "--id", uuid.uuid4().hex)[0] == 0
    assert not peer.requests[-1].spec.if_exists
    assert cli("generate", "a", "--capture", "1", "--id", uuid.uuid4().hex, "--if-exists", "replace")[0] == 0
    assert peer.requests[-1].spec.if_exists == capture_pb2.IF_EXISTS_REPLACE
    peer.script.skipped = True
    name = uuid.uuid4().hex
    code, out, err = cli("generate", "a", "--capture", "1", "--id", name, "--if-exists", "skip", "--max-tokens", 1)
    assert (code, out, peer.requests[-1].spec.if_exists) == (0, " 2\n", capture_pb2.IF_EXISTS_SKIP)
    assert f"nothing generated, the capture exists: residuum pull {name}" in err


@pytest.mark.parametrize("given", [("--id", "mine"), ("--capture", "1"), ()])
def test_if_exists_needs_an_id_and_a_capture(cli, given):
    with pytest.raises(SystemExit):
        cli("generate", "a", "--if-exists", "skip", *given)


def test_generate_sends_the_model(cli, peer):
    assert cli("generate", "a", "--model", "peer")[0] == 0
    assert peer.requests[-1].spec.model == "peer"
    code, out, err = cli("generate", "a", "--model", "joy")
    assert (code, out, "Here is peer." in err) == (1, "", True)


def test_generate_sends_the_flush_interval(cli, peer):
    assert cli("generate", "a", "--capture", "1", "--flush-interval", 4)[0] == 0
    assert peer.requests[-1].spec.capture.flush_interval == 4
    peer.requests.clear()
    code, _, err = cli("generate", "a", "--capture", "1", "--flush-interval", 0)
    assert (code, "--flush-interval must be from 1 to 32 tokens, not 0" in err) == (1, True)
    assert not peer.requests


def test_generate_captures_sites_before_steering(cli, peer):
    assert cli("generate", "a", "--capture", "1", "--sites", "resid_pre,attn_out", "--before-steering")[0] == 0
    capture = peer.requests[-1].spec.capture
    assert list(capture.sites) == [capture_pb2.SITE_RESID_PRE, capture_pb2.SITE_ATTN_OUT]
    assert capture.before_steering
    assert cli("generate", "a", "--capture", "1")[0] == 0
    capture = peer.requests[-1].spec.capture
    assert list(capture.sites) == [capture_pb2.SITE_RESID_POST]
    assert not capture.before_steering


def test_generate_captures_points(cli, peer):
    assert cli("generate", "a", "--capture", "resid_post.1,blocks.3.hook_resid_pre, mlp_out")[0] == 0
    capture = peer.requests[-1].spec.capture
    assert capture == residuum.Capture(points=["resid_post.1", "resid_pre.3", "mlp_out"]).to_proto()
    assert cli("generate", "a", "--capture", "attn_out")[0] == 0
    assert peer.requests[-1].spec.capture.layers.all
    peer.requests.clear()
    for given, told in (
        (["resid.1"], "'resid.1' is not a point"),
        (["q.x"], "'x' does not name layers"),
        (["1,resid_post.2"], "'1' is not a point"),
    ):
        code, out, err = cli("generate", "a", "--capture", *given)
        assert (code, out) == (1, "")
        assert told in err
    with pytest.raises(SystemExit):
        cli("generate", "a", "--capture", "q.1", "--sites", "k")
    assert not peer.requests


@pytest.mark.parametrize(
    ("sites", "told"),
    [
        ("all", "'all' is not a site; `residuum info` lists all sites that the server was started with."),
        (
            "",
            (
                "choose among resid_post, resid_pre, attn_out, mlp_out, attn_in, resid_mid, mlp_in, q, k, v, z, "
                "mlp_act, router_logits, final_norm, routing_weights, q_pre, k_pre."
            ),
        ),
        ("attn_out,attn_out", "each site once"),
    ],
)
def test_invalid_sites_are_refused(cli, peer, sites, told):
    code, out, err = cli("generate", "a", "--capture", "all", "--sites", sites)
    assert (code, out) == (1, "")
    assert told in err
    assert not peer.requests


def test_steering_keeps_the_order_of_the_command_line(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    save_file({"a": np.ones(HIDDEN, np.float32)}, "v.safetensors")
    steer = [
        "--cap",
        "joy.npy@1:-2:3.5",
        "--add",
        "joy.npy@2",
        "--cap",
        "v.safetensors:a@0,3-4::1",
        "--ablate",
        "joy.npy@5",
    ]
    assert cli("generate", "a bb", *steer, "--max-tokens", 1)[0] == 0
    sent = peer.requests[-1].spec.steering.operations
    assert [operation.WhichOneof("operation") for operation in sent] == ["cap", "add", "cap", "ablate"]
    assert (sent[0].cap.min, sent[0].cap.max) == (-2, 3.5)
    assert list(sent[2].layers.list.layers) == [0, 3, 4]
    assert not sent[2].cap.HasField("min")


def test_saved_directions_steer_with_a_vector_for_each_layer(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vectors = {layer: np.full(HIDDEN, layer + 1.0) for layer in range(4)}
    joy = residuum.Directions(vectors)
    joy.save("joy.safetensors")
    residuum.Directions(vectors, origin=residuum.directions.Origin(site="resid_pre")).save("pre.safetensors")
    steer = (
        "--add",
        "joy.safetensors@1-2*0.5",
        "--add",
        "pre.safetensors@3",
        "--add",
        "joy.safetensors:resid_post.3@0",
    )
    assert cli("generate", "a", *steer)[0] == 0
    own, before, one = peer.requests[-1].spec.steering.operations
    assert list(own.layers.list.layers) == [1, 2]
    assert list(own.layer_digests) == [joy[1].digest, joy[2].digest]
    assert own.add.scale == 0.5
    assert list(before.layers.list.layers) == [2], "the stream before layer 3 is that after layer 2"
    assert list(before.layer_digests) == [joy[3].digest]
    assert one.add.digest == joy[3].digest
    code, _, err = cli("generate", "a", "--add", "joy.safetensors@4")
    assert (code, err) == (1, "residuum: There is no direction for the layers [4]. Choose among [0, 1, 2, 3].\n")


def test_replace_and_keep_norm_can_be_set_on_the_command_line(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    steer = ("--replace", "joy.npy@1:-2.5", "--ablate", "joy.npy@all*0.5")
    assert cli("generate", "a", *steer, "--steer-positions", "generated", "--keep-norm")[0] == 0
    replace, ablate = peer.requests[-1].spec.steering.operations
    assert (replace.replace.value, ablate.ablate.scale, ablate.layers.all) == (-2.5, 0.5, True)
    for operation in (replace, ablate):
        assert operation.keep_norm
        assert list(operation.positions.phases) == [selection_pb2.PHASE_GENERATED]


def test_rows_can_be_set_on_the_command_line(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("row.npy", np.ones(HIDDEN))
    assert cli("generate", "a", "--set", "row.npy@1-2", "--steer-positions", "last_prompt", "--max-tokens", 1)[0] == 0
    (operation,) = peer.requests[-1].spec.steering.operations
    assert (operation.WhichOneof("operation"), list(operation.layers.list.layers)) == ("set", [1, 2])
    assert len(operation.positions.ranges) == 1


def test_the_site_to_steer_is_chosen_on_the_command_line(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("mask.npy", np.ones(HIDDEN))
    steer = ("--multiply", "mask.npy@1,3", "--add", "mask.npy@2", "--steer-site", "mlp_out")
    assert cli("generate", "a", *steer)[0] == 0
    for operation, kind in zip(peer.requests[-1].spec.steering.operations, ("multiply", "add"), strict=True):
        assert (operation.WhichOneof("operation"), operation.site) == (kind, capture_pb2.SITE_MLP_OUT)
    code, _, err = cli("generate", "a", "--add", "mask.npy@1", "--steer-site", "mlp")
    assert code == 1
    assert "'mlp' is not a site; choose among resid_post" in err


def test_directions_of_neurons_apply_where_they_were_made(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    residuum.Directions({2: np.ones(HIDDEN)}, origin=Origin(site="mlp_act")).save("neurons.safetensors")
    residuum.Directions({2: np.ones(HIDDEN)}, origin=Origin(site="resid_pre")).save("pre.safetensors")
    assert cli("generate", "a", "--add", "neurons.safetensors@2", "--add", "pre.safetensors@2")[0] == 0
    own, before = peer.requests[-1].spec.steering.operations
    assert (own.site, list(own.layers.list.layers)) == (capture_pb2.SITE_MLP_ACT, [2])
    assert (before.site, list(before.layers.list.layers)) == (0, [1])


@pytest.mark.parametrize("replace", ["joy.npy@1", "joy.npy@1:", "joy.npy@1:x", "joy.npy@1:1:2", "joy.npy:1", "joy.npy"])
def test_invalid_replacements_are_refused(cli, tmp_path, monkeypatch, replace):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    code, _, err = cli("generate", "a", "--replace", replace)
    assert code == 1
    assert err.startswith("residuum: ")
    assert err.count("\n") == 1


def test_a_gate_is_chosen_on_the_command_line(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    save_file({"a": np.ones(HIDDEN, np.float32), "b": np.full(HIDDEN, 2, np.float32)}, "v.safetensors")
    refusal = residuum.Directions({layer: np.full(HIDDEN, layer + 1.0) for layer in range(4)})
    refusal.save("refusal.safetensors")

    def gates(*flags):
        assert cli("generate", "a", *flags, "--max-tokens", 1)[0] == 0
        return [operation.gate for operation in peer.requests[-1].spec.steering.operations]

    one, two = gates("--add", "joy.npy@1", "--ablate", "joy.npy@2", "--gate", "joy.npy:-2.5")
    assert one == two
    assert (one.threshold, one.below, one.HasField("sharpness")) == (-2.5, False, False)
    assert one.digest == residuum.Vector(np.ones(HIDDEN)).digest
    (soft,) = gates("--add", "joy.npy@1", "--gate", "v.safetensors:b:0.5,cosine,below,sharpness=20,bias=0.25")
    assert soft.digest == residuum.Vector(np.full(HIDDEN, 2)).digest
    assert (soft.measure, soft.below, soft.sharpness, soft.bias) == (steering_pb2.GATE_MEASURE_COSINE, True, 20, 0.25)
    (of_layer,) = gates("--add", "joy.npy@1", "--gate", "refusal.safetensors@2:3")
    assert of_layer.digest == refusal[2].digest
    (by_layer,) = gates("--add", "joy.npy@1,3", "--gate", "refusal.safetensors@1,3:3,below")
    assert list(by_layer.layer_digests) == [refusal[1].digest, refusal[3].digest]
    (every,) = gates("--add", "refusal.safetensors@all", "--gate", "refusal.safetensors:3")
    assert len(every.layer_digests) == 4


def test_a_gate_of_one_direction_is_for_its_site(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN, np.float32))
    residuum.Directions({1: np.ones(HIDDEN)}, origin=Origin(site="z")).save("z.safetensors")
    code, _, err = cli("generate", "a", "--add", "joy.npy@1", "--gate", "z.safetensors:3")
    assert code == 1
    assert "for the site z" in err
    assert cli("generate", "a", "--add", "z.safetensors@1", "--gate", "z.safetensors:3")[0] == 0


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        ("joy.npy", "the threshold is missing"),
        ("joy.npy:high", "'high' is not a number. Use VECTOR:THRESHOLD"),
        ("joy.npy:1,bias=b", "'b' is not a number. Use VECTOR:THRESHOLD"),
        ("joy.npy:1,above", "'above' is not an option of a gate"),
        ("joy.npy:1,sharpness", "'sharpness' is not an option of a gate"),
        ("joy.npy:1,sharpness=0", "sharpness must be above 0"),
        ("joy.npy:1,cosine", "never opens"),
        ("joy.npy@2:1", "only a file of Directions.save has layers"),
        ("joy.npy:sad:1", "choose one of its vectors: joy"),
        ("none.npy:1", "none.npy"),
        ("", "--gate"),
    ],
)
def test_an_invalid_gate_is_refused(cli, tmp_path, monkeypatch, gate, told):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    code, _, err = cli("generate", "a", "--add", "joy.npy@1", "--gate", gate)
    assert code == 1
    assert err.startswith("residuum: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "flag", [("--keep-norm",), ("--steer-positions", "prompt"), ("--gate", "joy.npy:1"), ("--gate", "")]
)
def test_steering_options_need_a_vector(cli, flag):
    with pytest.raises(SystemExit):
        cli("generate", "a", *flag)


@pytest.mark.parametrize(
    "cap", ["joy.npy@1", "joy.npy@1:2", "joy.npy@1::", "joy.npy@1:2:1", "joy.npy@1:a:b", "joy.npy"]
)
def test_invalid_caps_are_refused(cli, tmp_path, monkeypatch, cap):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    code, _, err = cli("generate", "a", "--cap", cap)
    assert code == 1
    assert err.startswith("residuum: ")
    assert err.count("\n") == 1


def test_several_replies_are_printed_separately(cli):
    assert cli("generate", "a", "--n", 2, "--max-tokens", 2)[:2] == (0, "[0] 2 3\n[1] 102 103\n")
    assert len(json.loads(cli("generate", "a", "--n", 2, "--json")[1])["sequences"]) == 2


@pytest.mark.parametrize(
    "steer", ["joy.npy", "none.npy@1", "v.safetensors@1", "v.safetensors:c@1", "joy.npy@x", "joy.npy@1*much"]
)
def test_invalid_steering_is_refused(cli, tmp_path, monkeypatch, steer):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    save_file({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, "v.safetensors")
    code, out, err = cli("generate", "a", "--add", steer)
    assert (code, out) == (1, "")
    assert err.startswith("residuum: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "text", "told"),
    [
        ("--add", "joy.npy@1*x", "'x' is not a number. Use VECTOR@LAYERS*SCALE."),
        ("--ablate", "joy.npy@1*", "'' is not a number. Use VECTOR@LAYERS*SCALE."),
        ("--cap", "joy.npy@1:x:2", "'x' is not a number. Use VECTOR@LAYERS:MIN:MAX; either bound may be left empty."),
        ("--replace", "joy.npy@1:", "'' is not a number. Use VECTOR@LAYERS:VALUE."),
    ],
)
def test_what_is_no_number_is_refused_with_the_syntax(cli, tmp_path, monkeypatch, flag, text, told):
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", np.ones(HIDDEN))
    assert cli("generate", "a", flag, text) == (1, "", f"residuum: {flag} {text}: {told}\n")


def test_generate_stops_at_its_timeout(cli, peer):
    peer.script.hold = threading.Event()
    code, out, err = cli("generate", "a", "--timeout", "0.3")
    assert (code, out) == (1, " 2\n")
    assert "in time" in err
    assert "longer --timeout" in err


@pytest.mark.parametrize(("text", "layers"), [("12", [12]), ("0,5,10-12", [0, 5, 10, 11, 12]), (" 1 , 2 ", [1, 2])])
def test_layers_can_be_selected_by_message(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1,,2", "1.5", "3-1", "²", "0-²", "0-99999999", "123456"])
def test_invalid_layer_messages_are_refused(text):
    with pytest.raises(residuum.InvalidRequest):
        parse_layers(text)


def test_descending_layer_ranges_are_refused_with_advice():
    with pytest.raises(residuum.InvalidRequest, match=r"counts down.*use '1-3'"):
        parse_layers("5,3-1")


@pytest.fixture
def probes(tmp_path):
    """Two files of probes, whose scores of the peer's rows are their positions, and 100 and 200 times the sequence."""
    at_position, of_sequence = np.eye(HIDDEN, dtype=np.float32)[[3, 0]]
    residuum.Probe(at_position, layer=2, name="position").save(tmp_path / "position.safetensors")
    residuum.Probe([100 * of_sequence, 200 * of_sequence], 0.5, layer=2).save(tmp_path / "sequence.safetensors")
    return tmp_path / "position.safetensors", tmp_path / "sequence.safetensors"


def test_generate_prints_scores_the_id_and_the_text_of_each_token(cli, peer, probes):
    position, sequence = probes
    code, out, _ = cli("generate", "a bb ccc", "--max-tokens", 2, "--probe", position, "--probe", f"{sequence}:by.n")
    assert (code, out) == (0, "2\t0.5\t0.5\t4\t' 4'\n3\t0.5\t0.5\t5\t' 5'\n")
    assert [probe.name for probe in peer.requests[-1].spec.probes.probes] == ["position", "by.n"]
    assert not peer.requests[-1].spec.probes.score_prompt


def test_generate_prints_the_scores_of_the_prompt_first(cli, probes):
    code, out, _ = cli("generate", "a bb ccc", "--max-tokens", 1, "--probe", probes[0], "--score-prompt")
    assert code == 0
    assert out.splitlines() == ["0\t1\t(prompt)", "1\t2\t(prompt)", "2\t3\t(prompt)", "2\t4\t' 4'"]


def test_scores_on_a_terminal_are_a_table(capsys):
    output = Output(as_json=False)
    output.is_terminal = True
    several = residuum.Probe(np.eye(2), layer=1, name="x")
    one = residuum.Probe(np.ones(2), layer=1, name="much-longer")
    printer = ScorePrinter([several, one], [7, 8], output)
    rows = {"x": np.float32([[0.25, 1], [1e-9, -123456]]), "much-longer": np.float32([0.5, 12])}
    printer.add(
        residuum.TokenDelta("", (), prompt_scores=rows, scores={"x": np.empty((0, 2)), "much-longer": np.empty(0)})
    )
    printer.add(residuum.TokenDelta("", (3, 4), scores=rows))
    printer.add(residuum.TokenDelta(" café\n", (), scores={"x": np.empty((0, 2)), "much-longer": np.empty(0)}))
    printer.add(residuum.TokenDelta(" it", (5, 6), scores=rows))
    assert capsys.readouterr().out.splitlines() == [
        "       x.0         x.1  much-longer       token  text",
        "      0.25           1          0.5           7  (prompt)",
        "     1e-09  -1.235e+05           12           8  (prompt)",
        "      0.25           1          0.5           3  ''",
        "     1e-09  -1.235e+05           12           4  ''",
        "                                                 ' café\\n'",
        "      0.25           1          0.5           5  ''",
        "     1e-09  -1.235e+05           12           6  ' it'",
    ]


def test_scores_of_several_replies_are_below_their_texts(cli, probes, tmp_path):
    flags = ["--max-tokens", 2, "--probe", probes[0], "--probe", probes[1]]
    code, out, _ = cli("generate", "a bb", "--n", 2, "--score-prompt", *flags)
    assert code == 0
    assert out.splitlines() == [
        "[0] 3 4",
        "  position (prompt): 0 1",
        "  probe.0 (prompt): 0.5 0.5",
        "  probe.1 (prompt): 0.5 0.5",
        "  position: 1 2",
        "  probe.0: 0.5 0.5",
        "  probe.1: 0.5 0.5",
        "[1] 103 104",
        "  position: 1 2",
        "  probe.0: 100.5 100.5",
        "  probe.1: 200.5 200.5",
    ]
    (tmp_path / "prompts.txt").write_text("a bb\na\n")
    code, out, _ = cli("generate", "--file", tmp_path / "prompts.txt", "--max-tokens", 2, "--probe", probes[0])
    assert (code, out) == (0, "[1] 3 4\n  position: 1 2\n[2] 2 3\n  position: 0 1\n")


def test_outputs_with_names(cli, peer, tmp_path):
    names = ["calm", "0"]
    path = tmp_path / "two.safetensors"
    residuum.Probe(np.eye(HIDDEN)[[3, 0]], layer=2, name="two", output_names=names).save(path)
    code, out, _ = cli("generate", "a bb", "--n", 2, "--max-tokens", 2, "--probe", path)
    assert (code, out.splitlines()[:3]) == (0, ["[0] 3 4", "  two.calm: 1 2", "  two.0: 0 0"])
    code, _, err = cli("generate", "a bb", "--max-tokens", 2, "--probe", path, "--rule", "two:above=1,output=0")
    assert code == 0, err
    (rule,) = peer.requests[-1].spec.probes.rules
    assert rule.output == 1, "the output of the name 0"
    cli("generate", "a bb", "--max-tokens", 2, "--probe", path, "--rule", "two:above=1,output=1")
    assert peer.requests[-1].spec.probes.rules[0].output == 1


def test_scores_are_in_the_json(cli, probes, tmp_path):
    flags = ["--max-tokens", 1, "--probe", probes[0], "--probe", probes[1], "--score-prompt", "--json"]
    reply = json.loads(cli("generate", "a bb", *flags)[1])
    assert reply["sequences"][0]["scores"] == {"position": [1.0], "probe": [[0.5, 0.5]]}
    assert reply["prompt_scores"] == {"position": [0.0, 1.0], "probe": [[0.5, 0.5], [0.5, 0.5]]}
    (tmp_path / "prompts.txt").write_text("a bb\n")
    reply = json.loads(cli("generate", "--file", tmp_path / "prompts.txt", *flags)[1])
    assert reply["prompt_scores"]["position"] == [0.0, 1.0]


def test_json_has_no_infinite_scores(cli, tmp_path):
    huge = np.full(HIDDEN, 3e38, np.float32)
    residuum.Probe(huge, layer=2).save(tmp_path / "p.safetensors")
    out = cli("generate", "a bb", "--max-tokens", 1, "--probe", tmp_path / "p.safetensors", "--json")[1]
    assert "Infinity" not in out
    assert json.loads(out)["sequences"][0]["scores"] == {"probe": [None]}


def test_a_skipped_reply_is_printed_without_scores(cli, peer, probes):
    peer.script.skipped = True
    assert cli("generate", "a", "--max-tokens", 2, "--probe", probes[0])[:2] == (0, " 2 3\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--probe", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--probe", "{}:a b"], "'a b' is not a valid name"),
        (["--probe", "{}:"], "'' is not a valid name"),
        (["--probe", "{}", "--probe", "{}"], "Give each its own with --probe FILE:NAME"),
    ],
)
def test_bad_probes_are_refused(cli, peer, probes, flags, told):
    code, _, err = cli("generate", "a", *(flag.format(probes[0]) for flag in flags))
    assert (code, told in err) == (1, True), err
    assert not peer.requests


def test_the_advice_about_an_old_server_names_the_flag(cli, peer, probes):
    peer.script.is_old = True
    assert "leave out --probe and --rule." in cli("generate", "a", "--probe", probes[0])[2]


def test_generate_prints_what_fires_after_its_token(cli, peer, probes):
    flags = ["--max-tokens", 9, "--probe", f"{probes[0]}:at", "--smooth", "max:4"]
    rules = ["--rule", "at:above=2.5,name=late", "--rule", "at:above=1,for=3,abort"]
    code, out, err = cli("generate", "a bb ccc", *flags, *rules)
    assert (code, out) == (0, "2\t4\t' 4'\n3\t5\t' 5'\n4\t6\t' 6'\n")
    assert err == "rule late fired at token 1, score 3: flag\nrule at fired at token 2, score 4: abort\n"
    sent = peer.requests[-1].spec.probes
    assert sent.probes[0].smoothing.max == 4
    assert [(rule.name, rule.probe, rule.for_tokens) for rule in sent.rules] == [("late", "at", 1), ("at", "at", 3)]
    reply = json.loads(cli("generate", "a bb ccc", *flags, *rules, "--json")[1])
    assert [(event["rule"], event["action"]) for event in reply["events"]] == [("late", "flag"), ("at", "abort")]
    assert (reply["sequences"][0]["finish_reason"], reply["sequences"][0]["stop_reason"]) == ("rule", "at")
    out = cli("generate", "a bb ccc", *flags, *rules, "--n", 2)[1]
    assert out.count("  rule at fired at token 2, score 4: abort") == 2


def test_a_rule_steers_with_an_operation(cli, peer, probes, tmp_path):
    np.save(tmp_path / "joy.npy", np.ones(HIDDEN, np.float32))
    rule = f"position:below=9,output=0,add={tmp_path / 'joy.npy'}@1,3*2"
    code, _, err = cli("generate", "a", "--max-tokens", 2, "--probe", probes[0], "--rule", rule)
    assert (code, "steer, steered from position 100" in err) == (0, True), err
    (operation,) = peer.requests[-1].spec.probes.rules[0].steering.operations
    assert (list(operation.layers.list.layers), operation.add.scale) == ([1, 3], 2.0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rule", "position:above=nan"], "must be a finite float32, not nan"),
        (["--rule", "position"], "either above= or below="),
        (["--rule", "position:above=1,below=2"], "either above= or below="),
        (["--rule", "position:above=1,for=0"], "for_tokens must be at least 1, not 0"),
        (["--rule", "position:above=1,for=x"], "for takes a whole number, not 'x'. Use PROBE:above=T"),
        (["--rule", "position:above=1,what"], "'what' is not an option of a rule"),
        (["--rule", "position:above=1,output=1"], "output 1 does not exist"),
        (["--rule", "position:above=x"], "above takes a number, not 'x'. Use PROBE"),
        (["--rule", "other:above=1"], "names the probe 'other'"),
        (["--smooth", "ema:2"], "'ema:2' is not a smoothing"),
        (["--smooth", "median"], "'median' is not a smoothing"),
    ],
)
def test_bad_rules_are_refused(cli, peer, probes, flags, told):
    code, _, err = cli("generate", "a", "--probe", probes[0], *flags)
    assert (code, told in err) == (1, True), err
    assert not peer.requests


@pytest.mark.parametrize("flags", [["--rule", "p:above=1"], ["--smooth", "max"]])
def test_rules_and_smoothing_need_a_probe(cli, capsys, flags):
    with pytest.raises(SystemExit):
        cli("generate", "a", *flags)
    assert f"{flags[0]} needs --probe" in capsys.readouterr().err


def test_score_prompt_needs_a_probe(cli, peer, capsys):
    with pytest.raises(SystemExit):
        cli("generate", "a", "--score-prompt")
    assert "--score-prompt needs --probe" in capsys.readouterr().err


def test_an_autoencoder_is_chosen_on_the_command_line(cli, peer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sae = residuum.SAE(np.ones((5, HIDDEN)), np.eye(5, HIDDEN))
    residuum.sae.save(sae, "sae.safetensors")

    def clamped(flag):
        assert cli("generate", "a", "--clamp-feature", flag, "--max-tokens", 1)[0] == 0
        (operation,) = peer.requests[-1].spec.steering.operations
        return operation.clamp_feature

    feature = clamped("sae.safetensors:3@1:0.5")
    assert feature.digest == sae.vector(3).digest
    assert (feature.min, feature.max) == (0.5, 0.5)
    assert not clamped("sae.safetensors:3@1:2:").HasField("max")
    for wrong in ("sae.safetensors:3@1", "sae.safetensors@1:0", "sae.safetensors:x@1:0", "sae.safetensors:3@1:a"):
        code, _, err = cli("generate", "a", "--clamp-feature", wrong)
        assert (code, "use SAE:FEATURE@LAYERS:VALUE" in err) == (1, True)
    code, _, err = cli("generate", "a", "--clamp-feature", "sae.safetensors:5@1:0")
    assert (code, "The feature 5 does not exist" in err) == (1, True)
    code, _, err = cli("generate", "a", "--capture", "1", "--sae", "sae.safetensors", "--features", "1,x")
    assert (code, "give whole numbers" in err) == (1, True)
