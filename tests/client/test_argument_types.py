"""An argument of the wrong type is refused before anything is sent, and the error names it."""

from __future__ import annotations

import re

import numpy as np
import pytest

import residuum
from residuum.directions import difference_of_means
from residuum.protocol.arguments import check_flag
from residuum.protocol.captures.reading import plan_read
from residuum.protocol.generation.lens import UnembedPlan
from residuum.protocol.requests import plan_spec
from residuum.protocol.sampling import sampling_parameters
from tests.client.support.extraction_files import write_extraction

NOWHERE = "127.0.0.1:1"
NOT_A_FLAG = re.escape("must be True or False, not 'no'.")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"endpoint": 5}, "endpoint must be a text, not 5."),
        ({"endpoint": ["a:1"]}, "endpoint must be a text, not ['a:1']."),
        ({"store": 5}, "store must be a text or a list of texts, not 5."),
        ({"store": b"a:1"}, "store must be a text or a list of texts, not b'a:1'."),
        ({"store": ["a:1", None]}, "store must be a text or a list of texts, not ['a:1', None]."),
        ({"tenant": 5}, "tenant must be a text, not 5."),
        ({"token": b"secret"}, "token must be a text, or a Path of its file, not bytes."),
        ({"tls": "ca.pem"}, "tls must be True, False or residuum.TLS, such as TLS(ca='ca.pem'), not 'ca.pem'."),
        ({"tls": {}}, "tls must be True, False or residuum.TLS, such as TLS(ca='ca.pem'), not {}."),
        ({"insecure": "no"}, "insecure must be True or False, not 'no'."),
        ({"shared_memory": "no"}, "shared_memory must be True or False, not 'no'."),
    ],
)
def test_clients(kind, arguments, told):
    with pytest.raises(TypeError, match=re.escape(told)):
        kind(**{"endpoint": NOWHERE, **arguments})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": 5}, "model must be a text, not 5."),
        ({"without_operator_rules": "yes"}, "without_operator_rules must be True or False, not 'yes'."),
        ({"stop": 5}, "stop must be a list of texts, not 5."),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token IDs, not 5."),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'."),
        ({"score_prompt": "no"}, "score_prompt must be True or False, not 'no'."),
    ],
)
async def test_generations(make, arguments, told):
    client = make(NOWHERE)
    for call, prompt in ((client.generate, "a"), (client.generate_many, ["a", "b"])):
        with pytest.raises(TypeError, match=re.escape(told)):
            await call(prompt, **arguments)


async def test_a_registration(make):
    with pytest.raises(TypeError, match=r"updatable must be True or False, not 'yes'\."):
        await make(NOWHERE).register(updatable="yes")


async def test_a_choice_of_no_hashable_type(make):
    with pytest.raises(residuum.InvalidRequest, match=re.escape("if_exists=[] does not exist")):
        await make(NOWHERE).generate("a", if_exists=[])
    with pytest.raises(residuum.InvalidRequest, match=re.escape("measure must be one of projection, cosine, not []")):
        await make(store=NOWHERE).search([1.0], layer=1, measure=[])
    with pytest.raises(residuum.InvalidRequest, match=re.escape("most, least, absolute, not ['most'].")):
        await make(store=NOWHERE).search([1.0], layer=1, order=["most"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"request_ids": "ab"}, "request_ids must be a list with an ID for each prompt, not 'ab'."),
        ({"request_ids": 5}, "request_ids must be a list with an ID for each prompt, not 5."),
        ({"request_ids": ["a", 2]}, "request_ids must be a list with an ID for each prompt, but has 2."),
        ({"request_ids": [["a"], "b"]}, "request_ids must be a list with an ID for each prompt, but has ['a']."),
        ({"max_concurrency": "8"}, "max_concurrency must be a whole number, not '8'."),
        ({"max_concurrency": 2.5}, "max_concurrency must be a whole number, not 2.5."),
        ({"max_concurrency": None}, "max_concurrency must be a whole number, not None."),
        ({"progress": "no"}, "progress must be True or False, not 'no'."),
    ],
)
async def test_batches(make, arguments, told):
    client = make(NOWHERE)
    for call in (client.generate_many, client.generate_as_completed):
        with pytest.raises(TypeError, match=re.escape(told)):
            await call(["a", "b"], **arguments)


@pytest.mark.parametrize("states", [5, [5], [["open"]], None])
async def test_states(make, states):
    client = make(store=NOWHERE)
    told = re.escape(f"states must be a text or a list of texts, not {states}.")
    for call in (client.captures, client.captures_page):
        with pytest.raises(TypeError, match=told):
            await call(states=states)
    with pytest.raises(TypeError, match=told):
        await client.delete(prefix="a", states=states)


@pytest.mark.parametrize("value", ["5", 2.5, None, True])
async def test_whole_numbers(make, value):
    client = make(store=NOWHERE)
    told = f"must be a whole number, not {value!r}."
    with pytest.raises(TypeError, match=re.escape(f"page_size {told}")):
        await client.captures_page(page_size=value)
    for name in ("k", "context"):
        with pytest.raises(TypeError, match=re.escape(f"{name} {told}")):
            await client.search([1.0], layer=1, **{name: value})
    with pytest.raises(TypeError, match=re.escape(f"top_k {told}")):
        await make(NOWHERE).unembed([1.0], top_k=value)


async def test_captures(make):
    client = make(store=NOWHERE)
    told = r"captures must be a list of requests, replies or IDs, not 5\."
    with pytest.raises(TypeError, match=told):
        await client.rows(5, layer=1)
    with pytest.raises(TypeError, match=told):
        await client.search([1.0], layer=1, captures=5)


@pytest.mark.parametrize("wait", [10, 2.5, 1, "no"])
async def test_a_wait_that_is_no_flag(make, tmp_path, wait):
    """A number would wait without a limit, although it is a time for `manifest`."""
    client = make(store=NOWHERE)
    told = re.escape(f"wait must be True or False, not {wait!r}.")
    with pytest.raises(TypeError, match=told):
        await client.activations("a", wait=wait)
    with pytest.raises(TypeError, match=told):
        await client.export("a", tmp_path / "a.npz", wait=wait)


async def test_flags_of_reads(make, tmp_path):
    client = make(store=NOWHERE)
    for call in (client.activations("a", allow_partial="no"), client.follow("a", allow_partial="no"),
                 client.captures(allow_partial="no"), client.stats(allow_partial="no")):  # fmt: skip
        with pytest.raises(TypeError, match=f"allow_partial {NOT_A_FLAG}"):
            await call
    with pytest.raises(TypeError, match=f"progress {NOT_A_FLAG}"):
        await client.activations("a", progress="no")
    with pytest.raises(TypeError, match=f"archived {NOT_A_FLAG}"):
        await client.manifest("a", archived="no")
    with pytest.raises(TypeError, match=f"check_store {NOT_A_FLAG}"):
        await make(NOWHERE).info(check_store="no")
    with pytest.raises(TypeError, match=f"allow_partial {NOT_A_FLAG}"):
        difference_of_means({}, {}, allow_partial="no")


async def test_an_export_that_must_not_replace_a_file(make, tmp_path):
    path = tmp_path / "a.npz"
    path.write_text("mine")
    with pytest.raises(TypeError, match=f"overwrite {NOT_A_FLAG}"):
        await make(store=NOWHERE).export("a", path, overwrite="no")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("rows", [["a"], [[1, 2], [3]], object()])
async def test_rows(make, rows):
    with pytest.raises(residuum.InvalidRequest, match="rows= is not an array of numbers: "):
        await make(NOWHERE).unembed(rows)
    with pytest.raises(residuum.InvalidRequest, match="tokens= is not an array of numbers: "):
        await make(NOWHERE).unembed([1.0], tokens=rows)


async def test_vectors(make):
    with pytest.raises(TypeError, match=r"vectors must be a list of residuum\.Vector, not 5\."):
        await make(NOWHERE).put_vectors(5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"endpoints": "a:1"}, "endpoints must be a list of endpoints, not 'a:1'."),
        ({"keep": 5}, "keep must be a text or a list of texts, not 5."),
        ({"column": 5}, "column must be a text, not 5."),
        ({"model": 5}, "model must be a text, not 5."),
        ({"max_concurrency": 1.5}, "max_concurrency must be a whole number, not 1.5."),
        ({"chat": "no"}, "chat must be True or False, not 'no'."),
        ({"pack": "no"}, "pack must be True or False, not 'no'."),
        ({"keep_captures": "no"}, "keep_captures must be True or False, not 'no'."),
        ({"progress": "no"}, "progress must be True or False, not 'no'."),
    ],
)
async def test_extractions(make, tmp_path, arguments, told):
    capture = residuum.Capture(layers=[1])
    with pytest.raises(TypeError, match=re.escape(told)):
        await make(NOWHERE).extract(["a"], tmp_path / "rows", capture=capture, **arguments)


def test_the_rows_of_an_extraction(tmp_path):
    rows = residuum.Extracted(write_extraction(tmp_path / "job", [[4, 4]], total=3))
    with pytest.raises(TypeError, match=f"allow_partial {NOT_A_FLAG}"):
        rows.export(tmp_path / "out", allow_partial="no")


def test_training(tmp_path):
    pytest.importorskip("torch")
    from residuum.torch import ActivationDataset
    from residuum.training import ActivationBatches

    with pytest.raises(TypeError, match=r"store must be a text or a list of texts, not 5\."):
        ActivationDataset(store=5, prefix="a")
    with pytest.raises(TypeError, match=r"captures must be a list of requests, replies or IDs, not 5\."):
        ActivationDataset(NOWHERE, 5)
    for name in ("aligned", "drop_last", "allow_partial"):
        with pytest.raises(TypeError, match=f"{name} {NOT_A_FLAG}"):
            ActivationDataset(NOWHERE, ["a"], **{name: "no"})
    folder = write_extraction(tmp_path / "job", [[4, 4]])
    for name in ("shuffle", "drop_last", "same_width", "allow_partial"):
        with pytest.raises(TypeError, match=f"{name} {NOT_A_FLAG}"):
            ActivationBatches(folder, **{name: "no"})


def test_other_flags():
    with pytest.raises(TypeError, match=f"send_vectors {NOT_A_FLAG}"):
        residuum.vllm_xargs(residuum.Capture(), send_vectors="no")
    for name in ("temporary", "progress"):
        with pytest.raises(TypeError, match=f"{name} {NOT_A_FLAG}"), residuum.serve("model", **{name: "no"}):
            pass


def test_whole_numbers_of_numpy_are_accepted():
    (request,) = UnembedPlan([1.0, 2.0], np.int64(3), None).requests()
    assert request.num_top == 3


@pytest.mark.parametrize("one", [True, np.True_, 1, np.int64(1)])
def test_what_can_only_mean_true_or_false_is_accepted(kind, one):
    zero = type(one)(0)
    assert check_flag("flag", one) is True
    assert check_flag("flag", zero) is False
    assert plan_spec(None, None, None, None, updatable=one).spec.steering.updatable
    assert not plan_spec(None, None, None, None, updatable=zero).spec.HasField("steering")
    assert sampling_parameters({"ignore_eos": one}).ignore_eos
    made = kind(NOWHERE, tls=one, insecure=zero, shared_memory=zero)
    assert made.credentials.tls == residuum.TLS()
    assert kind(NOWHERE, tls=zero, insecure=one).credentials.tls is None


@pytest.mark.parametrize(("wait", "follows"), [(True, True), (np.True_, True), (False, False), (0, False)])
def test_waits_that_are_accepted(wait, follows):
    choice = {"layers": None, "sites": None, "sequences": None, "positions": None, "allow_partial": 1}
    assert plan_read("a", follow=wait, **choice).request.follow is follows
