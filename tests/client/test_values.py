"""The vectors, operations and captures that users write, and their form in the contract."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import residuum
from residuum.v1 import capture_pb2, store_pb2, tensor_pb2
from residuum.values.replies.service_status import StoreStats
from residuum.wire.placement import StoreAddress

ROOT = Path(__file__).parents[2]
joy = residuum.Vector.from_array([3.0, 4.0])
ZERO = residuum.Vector.from_array([0.0, 0.0])


def test_stats_show_stored_captures():
    proto = store_pb2.GetStatsResponse(used_bytes=5, free_disk_bytes=6)
    old = StoreStats.from_proto(StoreAddress("x:1", "x:1"), store_pb2.GetStatsResponse())
    assert (old.retain_seconds, old.retain_bytes, old.server_time) == (None, None, None)
    proto.retention.max_age.FromMilliseconds(1500)
    proto.retention.max_bytes = 7
    proto.retention.captures_expired_by_age = 8
    proto.retention.captures_expired_by_size = 9
    proto.retention.bytes_expired = 10
    proto.server_time.seconds = 11
    stats = StoreStats.from_proto(StoreAddress("x:1", "x:1"), proto)
    assert (stats.used_bytes, stats.free_disk_bytes, stats.retain_seconds, stats.retain_bytes) == (5, 6, 1.5, 7)
    assert (stats.expired_by_age, stats.expired_by_size, stats.bytes_expired) == (8, 9, 10)
    assert stats.server_time.timestamp() == 11


# ------------------------------------------------------------------------------------------------------------- vectors


def test_digests_follow_the_contract():
    cases = json.loads((ROOT / "protos/residuum/v1/vector_digests.json").read_text())["vectors"]
    checked = 0
    for case in cases:
        values = np.frombuffer(bytes.fromhex(case["values_hex"]), "<f4")
        if case["dtype"] == "DATA_TYPE_FLOAT32" and values.size and np.isfinite(values).all():
            assert residuum.Vector.from_array(values).hexdigest == case["digest_hex"], case["name"]
            checked += 1
    assert checked >= 3


def test_vector():
    assert joy.hexdigest == joy.digest.hex()
    assert len(joy.digest) == 32
    assert (len(joy), joy.norm) == (2, 5.0)
    assert joy == residuum.Vector.from_array(np.array([3, 4], np.int64))
    assert joy != ZERO
    assert joy != "x"
    assert {joy, residuum.Vector.from_array((3, 4))} == {joy}
    assert repr(joy).startswith("Vector(2 elements, norm 5, digest ")
    assert joy.message.dtype == tensor_pb2.DATA_TYPE_FLOAT32


def test_vector_is_a_copy_and_read_only():
    array = np.ones(4, np.float32)
    vector = residuum.Vector.from_array(array)
    array[0] = 7
    assert vector.values[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        vector.values[0] = 2
    assert np.asarray(vector).dtype == np.float32
    assert np.array(vector, copy=True).flags.writeable


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "float16", ml_dtypes.bfloat16, "int32", "bool"])
def test_vectors_of_any_numeric_type_are_accepted(dtype):
    assert residuum.Vector.from_array(np.array([1, 0, 1], dtype)).values.tolist() == [1, 0, 1]


def test_vectors_of_strided_arrays_are_accepted():
    table = np.arange(12.0).reshape(3, 4)
    assert residuum.Vector.from_array(table[:, 1]).values.tolist() == [1, 5, 9]
    assert residuum.Vector.from_array(table[:, 1]) == residuum.Vector.from_array([1, 5, 9])


def test_torch_tensors_without_torch():
    class Tensor:  # like a CUDA bfloat16 tensor, which numpy cannot read without a conversion
        def detach(self):
            return self

        cpu = float = detach

        def is_floating_point(self):
            return True

        def element_size(self):
            return 2

        def numpy(self):
            return np.array([1.0, 2.0], np.float32)

    assert residuum.Vector.from_array(Tensor()).values.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        ([[1.0, 2.0]], "WRONG_LENGTH"),
        (1.0, "WRONG_LENGTH"),
        ([], "WRONG_LENGTH"),
        ([1.0, float("nan")], "BAD_VALUES"),
        ([1.0, float("inf")], "BAD_VALUES"),
        ([1e39], "BAD_VALUES"),
        (["a"], "WRONG_DTYPE"),
        ([[1.0], [1.0, 2.0]], "WRONG_DTYPE"),
        (None, "BAD_VALUES"),
        ([1j], "WRONG_DTYPE"),
        (np.array([1 + 2j, 3.0]), "WRONG_DTYPE"),
        (np.array([1.0], np.complex64), "WRONG_DTYPE"),
    ],
)
def test_invalid_arrays_are_not_vectors(array, reason):
    with pytest.raises(residuum.BadVector) as caught:
        residuum.Vector.from_array(array)
    assert caught.value.reason in (reason, "WRONG_LENGTH")


def test_complex_tensors_are_not_vectors():
    torch = pytest.importorskip("torch")
    with pytest.raises(residuum.BadVector, match="complex"):
        residuum.Vector.from_array(torch.tensor([1 + 2j]))
    assert residuum.Vector(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) == residuum.Vector([1.0, 2.0])


def test_the_constructor_converts_and_copies():
    array = np.array([3.0, 4.0], np.float32)
    assert residuum.Vector(array) == residuum.Vector([3, 4]) == joy
    array[0] = 7  # the caller's array is unchanged
    assert residuum.Vector(array) != joy
    with pytest.raises(residuum.BadVector, match=r"\[hidden\]"):
        residuum.Vector([[1.0]])


def test_load_vectors(tmp_path):
    np.save(tmp_path / "joy.npy", np.array([3.0, 4.0]))
    np.save(tmp_path / "table.npy", np.eye(2))
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "many.safetensors")
    assert residuum.load_vectors(tmp_path / "joy.npy") == {"joy": joy}
    assert list(residuum.load_vectors(tmp_path / "table.npy")) == ["table.0", "table.1"]
    assert residuum.load_vectors(str(tmp_path / "many.safetensors"))["a"].values.tolist() == [1, 1]


def test_files_without_vectors_are_refused(tmp_path):
    np.save(tmp_path / "bad.npy", np.array([[1.0], [np.nan]]))
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "bfloat16.npy", np.ones(2, ml_dtypes.bfloat16))
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, a=np.ones(2))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "several.npy").read_bytes()[:50])
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(residuum.BadVector, match=r"bad\.1"):
        residuum.load_vectors(tmp_path / "bad.npy")
    with pytest.raises(residuum.BadVector, match=r"\.npy files forget bfloat16 .* Convert"):
        residuum.load_vectors(tmp_path / "bfloat16.npy")
    for name in ("objects.npy", "several.npy", "cut.npy", "text.npy", "text.safetensors", "vector.txt"):
        with pytest.raises(residuum.BadVector, match=name):
            residuum.load_vectors(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        residuum.load_vectors(tmp_path / "none.npy")


@pytest.mark.parametrize(
    "read",
    [residuum.load_vectors, residuum.Directions.load, residuum.Probe.load, residuum.Lens.load, residuum.sae.load],
)
def test_files_of_float8_are_refused(tmp_path, read):
    header = b'{"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "small.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(residuum.InvalidRequest, match=r"small\.safetensors has tensors of float8 .* Conv") as caught:
        read(tmp_path / "small.safetensors")
    assert caught.value.reason == "WRONG_DTYPE"


# ---------------------------------------------------------------------------------------------------------- operations


def test_operations_are_sent_as_the_contract_says():
    add = residuum.Add(joy, layer=12, scale=6.0, positions="generated").to_proto()
    assert (add.add.digest, add.add.scale, list(add.layers.list.layers)) == (joy.digest, 6.0, [12])
    assert len(add.positions.phases) == 1
    ablate = residuum.Ablate(joy, layers="all").to_proto()
    assert ablate.layers.all
    assert ablate.ablate.scale == 1.0
    assert not ablate.HasField("positions")
    cap = residuum.Cap(joy, layers=iter([3, 1]), max=2.0).to_proto()
    assert list(cap.layers.list.layers) == [1, 3]
    assert not cap.cap.HasField("min")
    assert cap.cap.max == 2.0


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: residuum.Add(joy), residuum.InvalidRequest),
        (lambda: residuum.Add(joy, layer=1, layers=[2]), residuum.InvalidRequest),
        (lambda: residuum.Add(joy, layer=-1), residuum.UnknownLayer),
        (lambda: residuum.Add(joy, layers=[]), residuum.InvalidRequest),
        (lambda: residuum.Add(joy, layer="most"), residuum.InvalidRequest),
        (lambda: residuum.Add(joy, layer=1.5), TypeError),
        (lambda: residuum.Add(joy, layer=True), TypeError),
        (lambda: residuum.Add(joy, layer=1, scale="6"), TypeError),
        (lambda: residuum.Add(joy, layer=1, scale=None), TypeError),
        (lambda: residuum.Cap(joy, layer=1, max="6"), TypeError),
        (lambda: residuum.Add([1.0], layer=1), TypeError),
        (lambda: residuum.Add(joy, layer=1, scale=float("nan")), residuum.InvalidRequest),
        (lambda: residuum.Add(joy, layer=1, scale=1e39), residuum.InvalidRequest),
        (lambda: residuum.Add(joy, layer=1, positions="later"), residuum.InvalidRequest),
        (lambda: residuum.Ablate(ZERO, layer=1), residuum.BadVector),
        (lambda: residuum.Ablate(joy, layer=1, scale=float("inf")), residuum.InvalidRequest),
        (lambda: residuum.Cap(joy, layer=1), residuum.InvalidRequest),
        (lambda: residuum.Cap(joy, layer=1, min=2.0, max=1.0), residuum.InvalidRequest),
        (lambda: residuum.Cap(joy, layer=1, min=float("nan")), residuum.InvalidRequest),
        (lambda: residuum.Cap(ZERO, layer=1, max=1.0), residuum.BadVector),
    ],
)
def test_invalid_operations_are_refused(make, error):
    with pytest.raises(error):
        make()


@pytest.mark.parametrize("kind", [residuum.Add, residuum.Ablate, residuum.Cap])
def test_only_the_vector_is_positional(kind):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\(vector, layer=12, \w+=6\.0\)"):
        kind(joy, 12, 6.0)
    parameters = inspect.signature(kind.__init__).parameters
    assert [name for name in parameters if parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY] == [
        "self",
        "vector",
    ]


def test_operations_compare_by_value():
    add = residuum.Add(joy, layer=1, scale=2.0)
    assert pickle.loads(pickle.dumps(add)) == copy.deepcopy(add) == dataclasses.replace(add) == add
    assert residuum.Add(joy, layer=[1, 2]) == residuum.Add(joy, layer=(2, 1))
    assert hash(residuum.Add(joy, layer=1)) == hash(residuum.Add(joy, layer=1))


def test_steer_accepts_only_operations():
    from residuum.values.steering.operation_list import operation_list

    assert operation_list(None) == []
    assert len(operation_list([residuum.Add(joy, layer=1)] * 256)) == 256
    for value in ([joy], joy):
        with pytest.raises(TypeError, match=r"residuum\.Add, .*, Multiply and ClampFeature.*Add\(vector, layer=12"):
            operation_list(value)
    for value in (5, "joy", [None]):
        with pytest.raises(TypeError, match=r"residuum\.Add, Ablate, Cap, Replace, Set, Multiply and ClampFeature"):
            operation_list(value)
    with pytest.raises(residuum.InvalidRequest, match="256"):
        operation_list([residuum.Add(joy, layer=1)] * 257)


# ------------------------------------------------------------------------------------------------------------ captures


@pytest.mark.parametrize(("given", "sent"), [(1, 1), (31, 31), (32, 0)])
def test_the_default_flush_interval_is_not_sent(given, sent):
    """An older server knows only the default."""
    assert residuum.Capture(flush_interval=given).to_proto().flush_interval == sent


@pytest.mark.parametrize("interval", [0, 33, -1])
def test_a_flush_interval_out_of_range_is_refused(interval):
    with pytest.raises(residuum.InvalidRequest, match="from 1 to 32") as caught:
        residuum.Capture(flush_interval=interval)
    assert caught.value.metadata == {"field": "flush_interval"}


def test_captures_are_sent_as_the_contract_says():
    whole = residuum.Capture().to_proto()
    assert whole.layers.all
    assert list(whole.sites) == [capture_pb2.SITE_RESID_POST]
    assert not whole.HasField("positions")
    assert (whole.encoding, whole.overflow) == (0, capture_pb2.OVERFLOW_POLICY_WAIT)  # the server chooses
    some = residuum.Capture(
        layers=range(4), sites="mlp_out", positions="prompt", overflow="shed", before_steering=True
    ).to_proto()
    assert list(some.layers.list.layers) == [0, 1, 2, 3]
    assert list(some.sites) == [capture_pb2.SITE_MLP_OUT]
    assert some.overflow == capture_pb2.OVERFLOW_POLICY_SHED
    assert some.before_steering
    listed = residuum.Capture(sites="resid_post, attn_out")
    assert listed == residuum.Capture(sites=["resid_post", "attn_out"])
    assert listed.sites == ("resid_post", "attn_out")
    assert residuum.Capture(layers=iter([2, 1])) == residuum.Capture(layers=(1, 2))


def test_points_are_sent_as_the_layers_of_each_site():
    capture = residuum.Capture(points=["mlp_act.3-5", "resid_post.12", "mlp_act.9", "resid_post.0"])
    sent = capture.to_proto()
    assert list(sent.sites) == [capture_pb2.SITE_MLP_ACT, capture_pb2.SITE_RESID_POST]
    assert [list(layers.list.layers) for layers in sent.site_layers] == [[3, 4, 5, 9], [0, 12]]
    assert list(sent.layers.list.layers) == [0, 3, 4, 5, 9, 12]
    assert capture.points == ("mlp_act.3-5", "mlp_act.9", "resid_post.0", "resid_post.12")
    assert (capture.sites, capture.layers) == (("mlp_act", "resid_post"), (0, 3, 4, 5, 9, 12))
    assert capture == residuum.Capture(points="mlp_act.9, mlp_act.3-5, resid_post.12, resid_post.0")
    assert capture == dataclasses.replace(capture) == residuum.Capture(points=capture.points)
    assert hash(capture) == hash(dataclasses.replace(capture))


def test_points_with_all_layers_cover_the_others():
    sent = residuum.Capture(points=["q", "k.2", "q.3", "v.all"]).to_proto()
    assert sent.layers.all
    assert [layers.WhichOneof("selection") for layers in sent.site_layers] == ["all", "list", "all"]


def test_points_of_the_same_layers_are_sites_and_layers():
    sent = residuum.Capture(points=["q.2-3", "k.3", "k.2"]).to_proto()
    assert sent == residuum.Capture(layers=[2, 3], sites=["q", "k"]).to_proto()
    assert residuum.Capture(points="resid_pre").to_proto() == residuum.Capture(sites="resid_pre").to_proto()


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("blocks.12.hook_resid_post", "resid_post.12"),
        ("blocks.0.hook_resid_pre", "resid_pre.0"),
        ("blocks.3.mlp.hook_post", "mlp_act.3"),
        ("blocks.3.hook_mlp_out", "mlp_out.3"),
        ("blocks.3.attn.hook_rot_q", "q.3"),
        ("blocks.3.attn.hook_z", "z.3"),
        ("blocks.3.mlp.hook_in", "mlp_in.3"),
        ("value.7", "v.7"),
        ("attn_out_post.7", "attn_out.7"),
        ("blocks.3.attn.hook_q", "q_pre.3"),
        ("blocks.3.attn.hook_k", "k_pre.3"),
        ("q_norm_in.3", "q_pre.3"),
        ("k_norm_in.3", "k_pre.3"),
        (" resid_mid.7 ", "resid_mid.7"),
        ("embeddings", "resid_pre.0"),
    ],
)
def test_names_of_others_mean_the_same_rows(name, point):
    assert residuum.Capture(points=[name]) == residuum.Capture(points=point)


@pytest.mark.parametrize(
    ("points", "error", "told"),
    [
        ("", residuum.UnknownSite, "'' is not a point"),
        ([], residuum.InvalidRequest, "Name at least one point"),
        ("resid.3", residuum.UnknownSite, r"'resid.3' is not a point.*resid_post, resid_pre"),
        ("resid_post:3", residuum.UnknownSite, "is not a point"),
        ("q_norm_out.3", residuum.UnknownSite, "is not a point"),
        ("resid_post.", residuum.InvalidRequest, "does not name layers"),
        ("resid_post.5.stream-2", residuum.InvalidRequest, "does not name layers"),
        ("resid_post.-1", residuum.InvalidRequest, "does not name layers"),
        ("resid_post.5-3", residuum.InvalidRequest, "counts down"),
        ("resid_post.999999", residuum.InvalidRequest, "does not name layers"),
        ("blocks.3.attn.hook_q_normed", residuum.UnknownSite, "names no rows that are captured here"),
        ("blocks.3.hook_mlp_in", residuum.UnknownSite, 'the stream before the norm; "mlp_in" has'),
        ("blocks.3.ln1.hook_normalized", residuum.UnknownSite, '"attn_in" has them after it'),
        ("ln_final.hook_normalized", residuum.UnknownSite, 'the final norm\'s weight; "final_norm" has them after it'),
        ("blocks.3.attn.hook_pattern", residuum.UnknownSite, "attention_weights"),
        ("blocks.x.hook_resid_post", residuum.UnknownSite, "is not a point"),
        (
            "blocks.3.hook_nothing",
            residuum.UnknownSite,
            r"the names of TransformerLens that do are blocks\.N\.hook_resid_pre",
        ),
        (3, TypeError, "list of names"),
        ([3], TypeError, "A point is a text"),
    ],
)
def test_invalid_points_are_refused(points, error, told):
    with pytest.raises(error, match=told):
        residuum.Capture(points=points)


def test_points_replace_layers_and_sites():
    for other in ({"layers": 3}, {"sites": "q"}):
        with pytest.raises(residuum.InvalidRequest, match="either points= or layers= and sites="):
            residuum.Capture(points="resid_post.12", **other)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"layers": "some"}, residuum.InvalidRequest),
        ({"layers": []}, residuum.InvalidRequest),
        ({"layers": -3}, residuum.UnknownLayer),
        ({"layers": ["1"]}, TypeError),
        ({"layers": None}, TypeError),
        ({"sites": None}, TypeError),
        ({"before_steering": "yes"}, TypeError),
        ({"sites": "resid"}, residuum.UnknownSite),
        ({"sites": ""}, residuum.UnknownSite),
        ({"sites": "resid_post,"}, residuum.UnknownSite),
        ({"sites": "resid_post,resid_post"}, residuum.InvalidRequest),
        ({"sites": []}, residuum.InvalidRequest),
        ({"sites": ["resid_pre", "resid_pre"]}, residuum.InvalidRequest),
        ({"encoding": "zip"}, residuum.InvalidRequest),
        ({"overflow": "hope"}, residuum.InvalidRequest),
        ({"positions": slice(5, 5)}, residuum.InvalidRequest),
    ],
)
def test_invalid_captures_are_refused(arguments, error):
    with pytest.raises(error):
        residuum.Capture(**arguments)


def test_all_as_a_site_is_refused_with_the_names():
    with pytest.raises(residuum.UnknownSite, match=r"sites=client\.info\(\)\.sites"):
        residuum.Capture(sites="all")
    with pytest.raises(
        residuum.UnknownSite, match="choose among resid_post, resid_pre, attn_out, mlp_out, attn_in, resid_mid, mlp_in"
    ):
        residuum.Capture(sites="resid_post,attn")


def test_layers_of_the_wrong_type_are_refused_with_advice():
    for value in (None, 1.5):
        with pytest.raises(TypeError, match=r"layers= takes 'all', a number, a range or a list"):
            residuum.Capture(layers=value)
    with pytest.raises(TypeError, match=r"positions= takes"):
        residuum.Capture(positions=1.5)


@pytest.mark.parametrize(
    "use",
    [
        lambda rows: residuum.SAE(np.eye(8), np.eye(8)).encode(rows),
        lambda rows: residuum.SAE(np.eye(8), np.eye(8)).decode(rows),
        lambda rows: residuum.LensMap(np.eye(8)).apply(rows),
        lambda rows: residuum.EMA(0.5).apply(rows),
        lambda rows: residuum.Rule("p", above=2.5).fires_at(rows[:, 0]),
        lambda rows: residuum.Directions({1: np.ones(8)}).project({1: rows})[1],
    ],
)
def test_tensors_that_numpy_refuses_are_taken_as_rows(use):
    torch = pytest.importorskip("torch")
    rows = torch.arange(24.0).reshape(3, 8)
    for given in (rows.bfloat16(), rows.clone().requires_grad_()):
        np.testing.assert_array_equal(use(given), use(rows.numpy()))
