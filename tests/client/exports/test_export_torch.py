"""ActivationDataset yields every row once, with any workers, in a reproducible order. Nothing else needs torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import residuum
from residuum.captures.row_stream import in_turn, share
from tests.client.support.peer import HIDDEN, POST, PRE, row
from tests.client.support.shell import environment

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402 - only if torch is there

from residuum.torch import SITES, ActivationDataset  # noqa: E402

SITE_NUMBERS = {"resid_post": POST, "resid_pre": PRE}
NAMES = [f"torch-{number}" for number in range(5)]
TOKENS = {name: 20 + 7 * number for number, name in enumerate(NAMES)}  # rows of each sequence, site and layer: 2 more


@pytest.fixture(scope="module")
def endpoint(running_peer):
    """Five captures of two sequences, sites and layers each."""
    running_peer.servicer.reset()
    with residuum.Client(running_peer.endpoint) as client:
        for name, tokens in TOKENS.items():
            capture = residuum.Capture(layers=[1, 4], sites=("resid_post", "resid_pre"))
            client.generate("a bb ccc", max_tokens=tokens, n=2, capture=capture, request_id=name)
            client.manifest(name, wait=True)
    yield running_peer.endpoint
    with residuum.Client(running_peer.endpoint) as client:
        for name in NAMES:
            client.delete(name)


@pytest.fixture(params=[0, 64], ids=["in order", "shuffled"])
def shuffle_buffer(request):
    return request.param


def places(batches, names=NAMES):
    """Return the place of each row in order, and check that each row belongs to its place."""
    found = []
    for batch in batches:
        facts = (batch.captures, batch.sequences, batch.sites, batch.layers, batch.positions, batch.token_ids)
        for values, *fact in zip(batch.activations, *(column.tolist() for column in facts), strict=True):
            capture, sequence, site, layer, position, token = fact
            expected = row(sequence, SITE_NUMBERS[SITES[site]], layer, position).astype(np.float32)
            assert np.array_equal(values.float().numpy(), expected)
            assert token == ([1, 2, 3][position] if position < 3 else 3 + position - 2 + 100 * sequence)
            found.append((names[capture], sequence, SITES[site], layer, position))
    return found


ALL = [
    (name, sequence, site, layer, position)
    for name, tokens in TOKENS.items()
    for sequence in (0, 1)
    for site in SITE_NUMBERS
    for layer in (1, 4)
    for position in range(tokens + 2)
]


def test_an_epoch_exports_every_row_once(endpoint, shuffle_buffer):
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=50, shuffle_buffer=shuffle_buffer)
    assert data.captures == tuple(NAMES)
    assert (data.width, data.dtype) == (HIDDEN, torch.bfloat16)
    batches = list(data)
    assert Counter(places(batches)) == Counter(ALL)
    assert {len(batch.activations) for batch in batches[:-1]} == {50}
    assert 0 < len(batches[-1].activations) <= 50
    assert batches[0].labels is None
    assert batches[0].activations.is_contiguous()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_export_disjoint_rows(endpoint, context):
    """Each worker opens its own connection. The parent's connection from before the fork does not interfere."""
    with residuum.Client(endpoint) as client:
        client.manifest(NAMES[0])
        data = ActivationDataset(endpoint, prefix="torch-", batch_size=32, shuffle_buffer=100)
        loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context)
        assert Counter(places(loader)) == Counter(ALL)
        assert client.manifest(NAMES[0]).is_complete


def test_a_dataset_without_rows_causes_a_warning(endpoint):
    with pytest.warns(
        residuum.EmptyCaptureWarning, match=f"None of the {len(NAMES)} captures .* has no rows"
    ) as caught:
        assert list(ActivationDataset(endpoint, prefix="torch-", positions=5000)) == []
    assert len(caught) == 1


def test_workers_may_outnumber_captures(endpoint):
    data = ActivationDataset(endpoint, NAMES[:1], batch_size=32)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert Counter(places(loader, NAMES[:1])) == Counter(place for place in ALL if place[0] == NAMES[0])


def test_ranks_export_disjoint_rows(endpoint):
    found = Counter()
    for rank in range(3):
        data = ActivationDataset(endpoint, prefix="torch-", batch_size=32, rank=rank, world_size=3)
        found.update(places(data))
    assert found == Counter(ALL)


def test_the_order_follows_from_seed_and_epoch(endpoint):
    def order(seed=0, epoch=0):
        data = ActivationDataset(endpoint, prefix="torch-", batch_size=50, shuffle_buffer=200, seed=seed)
        data.set_epoch(epoch)
        return places(data)

    first = order()
    assert order() == first
    assert order(epoch=1) != first
    assert order(seed=1) != first
    assert first != ALL


def test_rows_are_shuffled_across_captures(endpoint):
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=64, shuffle_buffer=512, concurrent_reads=4)
    first = next(iter(data))
    assert len(set(first.captures.tolist())) >= 3
    assert len(set(zip(first.layers.tolist(), first.sites.tolist(), strict=True))) >= 3


def test_without_shuffling_rows_come_capture_by_capture(endpoint):
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=50, shuffle_buffer=0, concurrent_reads=1)
    found = places(data)
    assert list(dict.fromkeys(place[0] for place in found)) == NAMES
    assert found == sorted(found, key=lambda place: NAMES.index(place[0]))
    own = [place[4] for place in found if place[:4] == (NAMES[0], 0, "resid_post", 4)]
    assert own == sorted(own)


def test_persistent_workers_get_the_epoch(endpoint):
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=50, shuffle_buffer=200)
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="spawn", persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        data.set_epoch(epoch)
        orders.append(places(loader))
    assert orders[0] == orders[2] != orders[1]
    assert Counter(orders[1]) == Counter(ALL)


def test_an_iteration_resumes_from_a_saved_state(endpoint):
    def made():
        return ActivationDataset(endpoint, prefix="torch-", batch_size=50, shuffle_buffer=200)

    data = made()
    data.set_epoch(3)
    whole = places(data)
    data = made()
    data.set_epoch(3)
    iterator = iter(data)
    begun = places([next(iterator) for _ in range(4)])
    resumed = made()
    resumed.load_state_dict(data.state_dict())
    assert begun + places(resumed) == whole
    assert places(resumed) == whole, "the next epoch begins at its beginning"


def test_a_state_is_kept_until_the_next_batch(endpoint):
    """A job that is stopped again before its first batch does not lose its place."""
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=50)
    state = {**data.state_dict(), "epoch": 3, "batches": 4}
    data.load_state_dict(state)
    assert data.state_dict() == state
    iterator = iter(data)
    assert data.state_dict() == state
    next(iterator)
    assert data.state_dict() == {**state, "batches": 5}


def test_an_epoch_that_was_over_does_not_shorten_the_next_one(endpoint):
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=50)
    every = len(list(data))
    over = data.state_dict()
    assert (over["epoch"], over["batches"]) == (0, every)
    data.load_state_dict(over)
    iter(data)  # StatefulDataLoader makes two iterators then, and uses the second one
    assert len(list(data)) == every
    data.load_state_dict(over)
    data.set_epoch(0)
    assert list(data) == []
    data.load_state_dict(over)
    data.set_epoch(1)
    assert data.state_dict() == {**over, "epoch": 1, "batches": 0}
    assert len(list(data)) == every


def test_an_epoch_that_is_set_before_the_state_of_one_that_was_over_is_read(endpoint):
    """StatefulDataLoader loads its state when it is iterated, then drops that iterator and makes the real one."""
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=50, shuffle_buffer=200)
    over = {**data.state_dict(), "epoch": 1, "batches": len(list(data))}
    data.set_epoch(2)
    wanted = places(data)
    data.load_state_dict(over)
    iter(data)
    assert places(data) == wanted
    assert data.state_dict()["epoch"] == 2


def test_workers_do_not_skip_the_batches_of_a_state_of_one_process(endpoint):
    """Each worker would skip as many batches of its own, in every epoch."""
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=50)
    data.load_state_dict({**data.state_dict(), "batches": 4})
    with pytest.raises(residuum.InvalidRequest, match="would leave out 4 batches of its own"):
        list(DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    data.load_state_dict({**data.state_dict(), "batches": 0})
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert Counter(places(loader)) == Counter(ALL)


def test_a_state_of_other_captures_is_refused(endpoint):
    """The order is another one, for example because the store has got more captures."""
    data = ActivationDataset(endpoint, NAMES[:4], batch_size=50)
    next(iter(data))
    state = data.state_dict()
    ActivationDataset(endpoint, NAMES[:4], batch_size=50).load_state_dict(state)
    ActivationDataset(endpoint, NAMES[:4]).load_state_dict({"epoch": 0, "batches": 1})  # of an older version
    for names, others in ((NAMES, {}), (NAMES[:4], {"seed": 1}), (NAMES[:4], {"layers": [1]})):
        other = ActivationDataset(endpoint, names, batch_size=50, **others)
        with pytest.raises(residuum.InvalidRequest, match="state is of other captures or arguments"):
            other.load_state_dict(state)


def test_only_the_selected_rows_are_yielded(endpoint):
    data = ActivationDataset(
        endpoint, NAMES[:2], layers=[4], sites="resid_pre", sequences=1, positions="generated", batch_size=16,
        dtype=torch.float32, labels={"torch-0": 1, "torch-1": 7, "other": 3},
    )  # fmt: skip
    batches = list(data)
    wanted = [place for place in ALL if place[0] in NAMES[:2] and place[1:4] == (1, "resid_pre", 4) and place[4] >= 3]
    assert Counter(places(batches)) == Counter(wanted)
    for batch in batches:
        assert batch.activations.dtype == torch.float32
        assert batch.labels.dtype == torch.int64
        assert batch.labels.tolist() == [(1, 7)[capture] for capture in batch.captures.tolist()]
    labels = ActivationDataset(endpoint, NAMES[:1], labels={"torch-0": 0.5})
    assert next(iter(labels)).labels.dtype == torch.float32


def tokens_of(batches, data):
    """Return (capture, sequence, position) of each token in order, and check its row at every place."""
    found = []
    for batch in batches:
        places = list(zip(batch.sites.tolist(), batch.layers.tolist(), strict=True))
        assert tuple((SITES[site], layer) for site, layer in places) == data.places
        facts = (batch.captures, batch.sequences, batch.positions, batch.token_ids)
        for values, *fact in zip(batch.activations, *(column.tolist() for column in facts), strict=True):
            capture, sequence, position, token = fact
            for value, (site, layer) in zip(values, places, strict=True):
                expected = row(sequence, SITE_NUMBERS[SITES[site]], layer, position).astype(np.float32)
                assert np.array_equal(value.float().numpy(), expected)
            assert token == ([1, 2, 3][position] if position < 3 else 3 + position - 2 + 100 * sequence)
            found.append((data.captures[capture], sequence, position))
    return found


TOKENS_OF_ALL = [
    (name, sequence, at) for name, count in TOKENS.items() for sequence in (0, 1) for at in range(count + 2)
]


def test_aligned_batches_have_every_token_once_with_all_its_rows(endpoint, shuffle_buffer):
    data = ActivationDataset(endpoint, prefix="torch-", aligned=True, batch_size=50, shuffle_buffer=shuffle_buffer)
    batches = list(data)
    assert data.places == (("resid_post", 1), ("resid_post", 4), ("resid_pre", 1), ("resid_pre", 4))
    assert {batch.activations.shape for batch in batches[:-1]} == {(50, 4, HIDDEN)}
    assert batches[0].activations.dtype == torch.bfloat16
    assert Counter(tokens_of(batches, data)) == Counter(TOKENS_OF_ALL)
    assert len(data) == len(batches) == -(-len(TOKENS_OF_ALL) // 50)
    if shuffle_buffer:
        assert tokens_of(batches, data) != TOKENS_OF_ALL


def test_aligned_rows_can_be_selected(endpoint):
    data = ActivationDataset(
        endpoint, NAMES[:3], aligned=True, layers=[4], sites=["resid_pre", "resid_post"], sequences=1,
        positions="generated", batch_size=16, labels={name: number for number, name in enumerate(NAMES)},
    )  # fmt: skip
    assert data.places == (("resid_pre", 4), ("resid_post", 4))
    batches = list(data)
    wanted = [place for place in TOKENS_OF_ALL if place[0] in NAMES[:3] and place[1] == 1 and place[2] >= 3]
    assert Counter(tokens_of(batches, data)) == Counter(wanted)
    assert all(batch.labels.tolist() == batch.captures.tolist() for batch in batches)


def test_aligned_captures_come_in_order_without_shuffling(endpoint):
    data = ActivationDataset(
        endpoint, prefix="torch-", aligned=True, batch_size=7, shuffle_buffer=0, concurrent_reads=1
    )
    assert tokens_of(data, data) == TOKENS_OF_ALL


def test_aligned_captures_must_have_the_same_places(endpoint):
    with residuum.Client(endpoint) as client:
        client.generate("a", max_tokens=3, capture=residuum.Capture(layers=[4]), request_id="torch-narrow")
        client.manifest("torch-narrow", wait=True)
        try:
            with pytest.raises(
                residuum.InvalidRequest, match="torch-0 and torch-narrow differ in their layers or sites"
            ):
                ActivationDataset(endpoint, [NAMES[0], "torch-narrow"], aligned=True)
            data = ActivationDataset(
                endpoint, [NAMES[0], "torch-narrow"], aligned=True, layers=[4], sites="resid_post", sequences=0
            )
            assert len(tokens_of(data, data)) == TOKENS[NAMES[0]] + 2 + 3
        finally:
            client.delete("torch-narrow")


def test_aligned_tokens_of_a_partial_capture_have_all_their_rows(running_peer, endpoint):
    running_peer.servicer.script.lost_layers = (1,)
    try:
        with residuum.Client(endpoint) as client:
            client.generate("a bb", max_tokens=4, capture=residuum.Capture(layers=[1, 4]), request_id="torch-part")
            client.manifest("torch-part", wait=True)
            both = ActivationDataset(endpoint, ["torch-part"], aligned=True, allow_partial=True)
            assert (list(both), len(both)) == ([], 0)
            one = ActivationDataset(endpoint, ["torch-part"], aligned=True, allow_partial=True, layers=[4])
            (batch,) = one
            assert (batch.activations.shape, len(one)) == ((5, 1, HIDDEN), 1)
            client.delete("torch-part")
    finally:
        running_peer.servicer.reset()


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_have_equally_many_full_batches(endpoint, workers):
    """Otherwise a distributed job waits for ever for the rank that has fewer."""
    ranks = [
        ActivationDataset(endpoint, NAMES[:4], batch_size=13, drop_last=True, rank=rank, world_size=2)
        for rank in range(2)
    ]
    for epoch in range(2):
        found = []
        for data in ranks:
            data.set_epoch(epoch)
            loader = DataLoader(
                data, batch_size=None, num_workers=workers, multiprocessing_context="spawn" if workers else None
            )
            found.append([len(batch.activations) for batch in loader])
            assert len(found[-1]) == data.num_batches(workers)
        assert found[0] == found[1]
        assert {*found[0]} == {13}


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_length_is_the_number_of_batches(endpoint, aligned, drop_last):
    data = ActivationDataset(endpoint, prefix="torch-", aligned=aligned, batch_size=37, drop_last=drop_last)
    assert len(data) == len(list(data))
    generated = ActivationDataset(
        endpoint,
        prefix="torch-",
        aligned=aligned,
        batch_size=37,
        drop_last=drop_last,
        positions="generated",
        layers=[4],
    )
    assert len(generated) == len(list(generated))
    for epoch in range(2):
        data.set_epoch(epoch)
        for rank in range(2):
            part = ActivationDataset(
                endpoint, prefix="torch-", aligned=aligned, batch_size=37, drop_last=drop_last, rank=rank, world_size=2
            )
            part.set_epoch(epoch)
            assert len(part) == len(list(part))
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert data.num_batches(2) == len(list(loader))


def test_captures_and_labels_are_chosen_by_label(endpoint):
    with residuum.Client(endpoint) as client:
        for number, name in enumerate(NAMES):
            client.label(name, {"split": "train" if number else "test", "y": number % 2 == 1, "text": "a"})
        try:
            data = ActivationDataset(endpoint, prefix="torch-", where="split = train", labels="y", batch_size=64)
            assert data.captures == tuple(NAMES[1:])
            for batch in data:
                assert batch.labels.tolist() == [(number + 1) % 2 for number in batch.captures.tolist()]
            with pytest.raises(residuum.InvalidRequest, match="label 'text' of torch-0 is the text 'a'"):
                ActivationDataset(endpoint, prefix="torch-", labels="text")
            with pytest.raises(residuum.InvalidRequest, match="5 of 5 captures have no label"):
                ActivationDataset(endpoint, prefix="torch-", labels="none")
            with pytest.raises(residuum.InvalidRequest, match="with labels 'split = none' to read"):
                ActivationDataset(endpoint, where="split = none")
        finally:
            for name in NAMES:
                client.label(name, dict.fromkeys(("split", "y", "text")))


def test_partial_batches_can_be_dropped(endpoint):
    data = ActivationDataset(endpoint, prefix="torch-", batch_size=100, shuffle_buffer=300, drop_last=True)
    batches = list(data)
    assert {len(batch.activations) for batch in batches} == {100}
    assert len(batches) == len(ALL) // 100


def test_batches_of_a_loader_can_be_pinned_and_moved(endpoint):
    batch = next(iter(ActivationDataset(endpoint, prefix="torch-", batch_size=8)))
    moved = batch._replace(activations=batch.activations.to(torch.float64))
    assert moved.activations.shape == (8, HIDDEN)
    assert isinstance(batch, tuple)


def test_incomplete_captures_are_skipped_or_refused(running_peer, endpoint):
    running_peer.servicer.script.lost_layers = (1,)
    try:
        with residuum.Client(endpoint) as client:
            client.generate("a", max_tokens=3, capture=residuum.Capture(layers=[1, 4]), request_id="torch-broken")
            client.manifest("torch-broken", wait=True)
            with pytest.warns(residuum.LeftOutWarning, match=r"1 of the 6 .* torch-broken \(incomplete\)"):
                assert "torch-broken" not in ActivationDataset(endpoint, prefix="torch-").captures
            with pytest.raises(residuum.IncompleteCapture, match="OVERFLOW"):
                ActivationDataset(endpoint, [NAMES[0], "torch-broken"])
            data = ActivationDataset(endpoint, prefix="torch-b", allow_partial=True)
            (batch,) = data
            assert set(batch.layers.tolist()) == {4}
            assert not batch.activations.isnan().any()
            client.delete("torch-broken")
    finally:
        running_peer.servicer.reset()


def test_an_unknown_capture_is_reported_before_an_epoch(endpoint):
    with pytest.raises(residuum.UnknownCapture, match="never-was"):
        ActivationDataset(endpoint, [*NAMES, "never-was"])


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layers": [1, 2, 4, 5]}, "The capture torch-0 has no layers 2, 5. It has 1, 4. Choose among these."),
        ({"sites": ["resid_post", "mlp_out"]}, "has no sites mlp_out. It has"),
        ({"sequences": [0, 2]}, "has no sequences 2. It has 0, 1."),
    ],
)
def test_a_missing_layer_or_site_is_reported_before_an_epoch(endpoint, choice, message):
    with pytest.raises(residuum.InvalidRequest, match=re.escape(message)):
        ActivationDataset(endpoint, prefix="torch-", **choice)


def test_the_capture_that_lacks_a_layer_is_named(endpoint):
    with residuum.Client(endpoint) as client:
        client.generate("a", max_tokens=3, capture=residuum.Capture(layers=[4]), request_id="torch-narrow")
        client.manifest("torch-narrow", wait=True)
        try:
            with pytest.raises(residuum.InvalidRequest, match="torch-narrow has no layers 1"):
                ActivationDataset(endpoint, [*NAMES, "torch-narrow"], layers=[1, 4])
            both = ActivationDataset(endpoint, [NAMES[0], "torch-narrow"])  # all that each has
            assert {layer for batch in both for layer in batch.layers.tolist()} == {1, 4}
        finally:
            client.delete("torch-narrow")


def test_a_worker_reports_its_error(endpoint):
    with residuum.Client(endpoint) as client:
        client.generate("a", max_tokens=3, capture=residuum.Capture(layers=[1, 4]), request_id="torch-gone")
        client.manifest("torch-gone", wait=True)
        data = ActivationDataset(endpoint, [NAMES[0], "torch-gone"], batch_size=8)
        client.delete("torch-gone")
    with pytest.raises(residuum.UnknownCapture, match="torch-gone"):
        list(data)
    with pytest.raises(residuum.ResiduumError, match="torch-gone"):
        list(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context="fork"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefix": "nobody-"}, "no capture whose ID starts with 'nobody-'"),
        ({"captures": []}, "no capture to read"),
        ({"captures": "torch-0"}, "as a list"),
        ({"captures": NAMES, "prefix": "torch-"}, "as a list"),
        ({"prefix": "torch-", "batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"prefix": "torch-", "shuffle_buffer": -1}, "shuffle_buffer must be at least 0, not -1"),
        ({"prefix": "torch-", "rank": 2, "world_size": 2}, "rank 2 does not exist"),
        ({"prefix": "torch-", "concurrent_reads": 0}, "concurrent_reads"),
        ({"prefix": "torch-", "batch_size": 2.5}, "batch_size must be a whole number, not 2.5"),
        ({"prefix": "torch-", "seed": -1}, "seed must be at least 0, not -1"),
        ({"prefix": "torch-", "dtype": "float32"}, "dtype must be one of torch.float32, torch.float16"),
        ({"prefix": "torch-", "dtype": torch.int64}, "torch.float64, or None, not torch.int64"),
        ({"prefix": "torch-", "dtype": torch.float8_e4m3fn}, "not torch.float8_e4m3fn"),
        ({"prefix": "torch-", "labels": {"torch-1": 1}}, "4 of 5 captures have no label; the first is torch-0"),
    ],
)
def test_invalid_arguments_are_refused(endpoint, arguments, message):
    with pytest.raises(residuum.InvalidRequest, match=re.escape(message)):
        ActivationDataset(endpoint, **arguments)


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_disjoint_and_complete(shuffle):
    for count in (0, 1, 7, 100):
        for of in (1, 2, 3, 8):
            parts = [share(count, number, of, shuffle=shuffle, seed=5, epoch=2) for number in range(of)]
            assert sorted(number for part in parts for number in part) == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_captures_are_read_in_rotation():
    makers = [lambda n=n: iter([f"{n}{k}" for k in range(n)]) for n in (2, 0, 3, 1)]
    assert list(in_turn(makers, 2)) == ["20", "21", "30", "31", "10", "32"]
    assert list(in_turn(makers, 1)) == ["20", "21", "30", "31", "32", "10"]
    assert list(in_turn([], 3)) == []


def test_only_this_module_needs_torch(endpoint):
    code = "import sys; sys.modules['torch'] = None; import residuum, residuum.cli; import residuum.torch"
    done = subprocess.run([sys.executable, "-c", code], env=environment(endpoint), capture_output=True, check=False)
    assert done.returncode == 1
    assert b"ImportError: residuum.torch needs torch" in done.stderr.splitlines()[-1]
