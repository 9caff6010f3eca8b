"""residuum.training: the order of rows, ranks, resumption, and what other packages take."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import residuum
from residuum.training import ActivationBatches, DictionaryLearningBuffer, SAELensData, SparsifyData
from residuum.training.order import Layout, Order
from tests.client.support.extraction_files import write_extraction

SMALL = {"buffer_bytes": 640, "block_bytes": 64}  # groups of about 10 rows, blocks of 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    lengths = [[3, 9, 1, 4], [7, 7], [1], [12, 8, 5, 6, 2, 2]]
    return write_extraction(tmp_path_factory.mktemp("rows") / "job", lengths)


TOTAL = 67


def numbers_of(batches):
    return np.concatenate([batch.rows for batch in batches]).tolist()


@given(
    shards=st.lists(st.integers(0, 40), min_size=1, max_size=6), block=st.integers(1, 9), group=st.integers(1, 60),
    seed=st.integers(0, 99), epoch=st.integers(0, 3), shuffle=st.booleans(), data=st.data(),
)  # fmt: skip
def test_an_order_is_a_permutation_of_the_chosen_rows(shards, block, group, seed, epoch, shuffle, data):
    total = sum(shards)
    where = data.draw(st.none() | st.lists(st.booleans(), min_size=total, max_size=total))
    mask = None if where is None else np.array(where, bool)
    layout = Layout(shards, block_rows=block, group_rows=group, where=mask)
    order = Order(layout, seed=seed, epoch=epoch, shuffle=shuffle)
    firsts = np.concatenate([[0], np.cumsum(shards)])
    found = []
    for number in range(len(order.group_starts) - 1):
        group = order.group(number)
        numbers = group.numbers
        read = [firsts[piece.shard] + np.arange(shards[piece.shard])[piece.rows] for piece in group.pieces]
        assert [len(part) for part in read] == [piece.count for piece in group.pieces]
        assert np.array_equal(np.concatenate(read)[group.taken], numbers)  # what is read is what the order says
        assert order.group_at(len(found)) == number
        found.extend(numbers.tolist())
    wanted = np.arange(total) if mask is None else np.flatnonzero(mask)
    assert sorted(found) == wanted.tolist()
    if not shuffle:
        assert found == wanted.tolist()


def test_rows_come_from_everywhere():
    """The first group has rows of all parts of the files, and neighbours do not stay together."""
    layout = Layout([50_000] * 4, block_rows=100, group_rows=20_000)
    numbers = Order(layout, seed=1, epoch=0).group(0).numbers
    counts = np.bincount(numbers // 20_000, minlength=10)
    assert counts.min() > 800
    assert (np.abs(np.diff(numbers)) == 1).mean() < 0.01
    other = Order(layout, seed=1, epoch=1).group(0).numbers
    assert not np.array_equal(numbers, other)


@pytest.mark.parametrize("points", ["resid_post.5", ["resid_post.5", "blocks.3.hook_resid_post"], None])
def test_batches_have_the_rows_that_they_name(folder, points):
    """With several points, the rows of a token stay together, in the order of the points."""
    batches = ActivationBatches(folder, points, batch_size=7, epochs=2, **SMALL)
    layers = {"resid_post.5": [5], None: [3, 5]}.get(points if points is None else str(points), [5, 3])
    seen = []
    for batch in batches:
        wanted = 1000.0 * batch.rows[:, None, None] + 10 * np.array(layers)[:, None] + np.arange(4)
        assert batch.activations.dtype == torch.float32
        assert np.array_equal(batch.activations.numpy(), wanted if len(layers) > 1 else wanted[:, 0])
        seen.extend(batch.rows.tolist())
    assert sorted(seen) == sorted([*range(TOTAL)] * 2)
    assert sorted(seen[:TOTAL]) == list(range(TOTAL))
    assert seen[:TOTAL] != seen[TOTAL:]
    assert len(batches) == 10


@pytest.mark.parametrize("points", ["resid_post", "resid_post.all", "resid_post.3,resid_post.5", ["resid_post.3,5"]])
def test_points_may_name_several_layers(folder, points):
    assert ActivationBatches(folder, points).points == ("resid_post.3", "resid_post.5")


def test_a_range_of_layers(tmp_path):
    folder = write_extraction(tmp_path / "job", [[3]], layers=(3, 4, 5))
    assert ActivationBatches(folder, "resid_post.3-4").points == ("resid_post.3", "resid_post.4")
    assert ActivationBatches(folder, "resid_post.5,resid_post.4").points == ("resid_post.5", "resid_post.4")


def test_batches_of_bfloat16(tmp_path):
    import ml_dtypes

    values = np.random.default_rng(0).standard_normal((2, 50, 4)).astype(ml_dtypes.bfloat16)
    folder = write_extraction(
        tmp_path / "job", [[20, 5], [25]], values=lambda rows: values[:, rows], dtype=ml_dtypes.bfloat16
    )
    for dtype in (None, torch.float32):
        batches = ActivationBatches(folder, batch_size=7, epochs=2, dtype=dtype, **SMALL)
        for batch in batches:
            assert batch.activations.dtype == (dtype or torch.bfloat16)
            wanted = values[:, batch.rows].astype(np.float32).swapaxes(0, 1)
            assert np.array_equal(batch.activations.float().numpy(), wanted)


def loads_of(batches, monkeypatch):
    """The epoch and number of each group that is read."""
    found, begin = [], batches._reader._begin
    monkeypatch.setattr(batches._reader, "_begin", lambda key: (found.append(key), begin(key))[1])
    return found


def test_the_next_epoch_is_read_ahead(folder, monkeypatch):
    batches = ActivationBatches(folder, "resid_post.3", batch_size=5, epochs=2, **SMALL)
    loads = loads_of(batches, monkeypatch)
    groups = len(batches._reader._order_of(0).group_starts) - 1
    assert groups > 2
    for _ in range(len(batches)):
        next(batches)
    assert loads == [*((0, number) for number in range(groups)), (1, 0)]
    list(batches)
    assert loads[groups:] == [(1, number) for number in range(len(batches._reader._order_of(1).group_starts) - 1)]


def test_a_rank_reads_only_its_own_groups(folder, monkeypatch):
    for rank in range(3):
        batches = ActivationBatches(folder, "resid_post.3", batch_size=5, epochs=1, rank=rank, world_size=3, **SMALL)
        loads = loads_of(batches, monkeypatch)
        list(batches)
        order = batches._reader._order_of(0)
        first, last = order.group_at(batches._start), order.group_at(batches._stop - 1)
        assert loads == [(0, number) for number in range(first, last + 1)]


def test_data_that_fit_one_group_are_read_once(folder, monkeypatch):
    batches = ActivationBatches(folder, "resid_post.3", batch_size=9, epochs=4)
    for _ in range(2):
        next(batches)
    for number in range(len(batches._reader._parts)):
        batches._reader._parts[number] = None  # no file is read any more
    rest = list(batches)
    for batch in rest:
        assert np.array_equal(batch.activations[:, 0].numpy(), 1000.0 * batch.rows + 30)
    epochs = [np.concatenate([batch.rows for batch in rest[at : at + 8]]).tolist() for at in (6, 14)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(TOTAL))
    assert epochs[0] != epochs[1]


def test_groups_are_cut_by_rows():
    """Blocks at the ends of shards, or with few chosen rows, are small; groups are full all the same."""
    layout = Layout([3] * 1000, block_rows=100, group_rows=300)
    order = Order(layout, seed=0, epoch=0)
    assert np.diff(order.group_starts).tolist() == [300] * 10
    sizes = np.diff(Order(Layout([130] * 50, block_rows=100, group_rows=1000), seed=0, epoch=0).group_starts)
    assert sizes.sum() == 6500
    assert sizes.max() <= 1100
    assert sizes[:-1].min() >= 900


def test_rows_in_the_order_of_the_files(folder):
    batches = ActivationBatches(folder, "resid_post.3", batch_size=5, epochs=1, shuffle=False, **SMALL)
    assert numbers_of(batches) == list(range(TOTAL))


def test_only_some_rows(folder):
    rows = residuum.Extracted(folder)
    batches = ActivationBatches(rows, "resid_post.3", batch_size=5, epochs=1, where=rows.positions > 0, **SMALL)
    assert sorted(numbers_of(batches)) == np.flatnonzero(rows.positions).tolist()


@given(world=st.integers(1, 9), batch=st.integers(1, 9), seed=st.integers(0, 9), drop=st.booleans())
@settings(max_examples=25)
def test_ranks_are_disjoint_and_complete(folder, world, batch, seed, drop):
    if drop and TOTAL // world < batch:
        with pytest.raises(residuum.InvalidRequest, match="has no batch"):
            ActivationBatches(folder, batch_size=batch, world_size=world, drop_last=True)
        return
    ranks = [
        ActivationBatches(
            folder, "resid_post.3", batch_size=batch, epochs=1, rank=rank, world_size=world, seed=seed, drop_last=drop,
            **SMALL,
        )
        for rank in range(world)
    ]  # fmt: skip
    found = [numbers_of(rank) for rank in ranks]
    every = [number for part in found for number in part]
    assert len(set(every)) == len(every)
    if drop:
        assert {len(part) for part in found} == {TOTAL // world // batch * batch}
    else:
        assert sorted(every) == list(range(TOTAL))
        assert max(map(len, found)) - min(map(len, found)) <= 1


@given(done=st.integers(0, 25), batch=st.integers(3, 9), rank=st.integers(0, 1))
@settings(max_examples=25)
def test_an_iteration_continues_with_the_same_batches(folder, done, batch, rank):
    arguments = {"batch_size": batch, "epochs": 4, "rank": rank, "world_size": 2, **SMALL}
    first = ActivationBatches(folder, **arguments)
    done = min(done, 4 * len(first) - 1)
    for _ in range(done):
        next(first)
    state = json.loads(json.dumps(first.state_dict()))
    second = ActivationBatches(folder, **arguments)
    second.load_state_dict(state)
    rest, again = list(first), list(second)
    assert [part.rows.tolist() for part in again] == [part.rows.tolist() for part in rest]
    assert all(torch.equal(one.activations, two.activations) for one, two in zip(rest, again, strict=True))


def test_continuing_reads_no_earlier_rows(folder, monkeypatch):
    first = ActivationBatches(folder, "resid_post.3", batch_size=4, epochs=1, **SMALL)
    for _ in range(12):
        next(first)
    second = ActivationBatches(folder, "resid_post.3", batch_size=4, epochs=1, **SMALL)
    second.load_state_dict(first.state_dict())
    loaded, load = [], second._reader._load
    monkeypatch.setattr(
        second._reader, "_load", lambda order, number, memory: (loaded.append(number), load(order, number, memory))[1]
    )
    assert len(list(second)) == len(first) - 12
    assert min(loaded) == 2  # of groups of 20 rows


def test_bfloat16_and_other_types(tmp_path):
    import ml_dtypes

    from residuum.training.batches import tensor_of

    values = np.arange(6, dtype=np.float32).reshape(2, 3).astype(ml_dtypes.bfloat16)
    assert torch.equal(tensor_of(values, None, None), torch.arange(6.0).reshape(2, 3).to(torch.bfloat16))
    assert torch.equal(tensor_of(values, torch.float32, None), torch.arange(6.0).reshape(2, 3))


# ------------------------------------------------------------------------------------------- what other packages take


def test_saelens_takes_an_endless_iterator_of_tensors(folder):
    data = SAELensData(folder, "resid_post.5", batch_size=10, **SMALL)
    assert iter(data) is data
    shapes = [tuple(next(data).shape) for _ in range(15)]
    assert shapes[:8] == [(10, 4)] * 6 + [(7, 4), (10, 4)]
    state, wanted = data.state_dict(), next(data)
    data.load_state_dict(state)
    assert torch.equal(next(data), wanted)


def test_saelens_takes_tensors_by_hook(folder):
    batch = next(SAELensData(folder, by_hook=True, batch_size=10, **SMALL))
    assert list(batch) == ["blocks.3.hook_resid_post", "blocks.5.hook_resid_post"]
    assert torch.equal(*(tensor - shift for tensor, shift in zip(batch.values(), (30, 50), strict=True)))


def test_dictionary_learning_takes_an_iterator_with_a_config(folder):
    buffer = DictionaryLearningBuffer(folder, "resid_post.3", out_batch_size=16, **SMALL)
    batch = next(iter(buffer))
    assert batch.shape == (16, 4)
    batch += 1  # the trainer may change its batch
    assert json.loads(json.dumps(buffer.config))["d_submodule"] == 4
    assert next(DictionaryLearningBuffer(folder, out_batch_size=16)).shape == (16, 2, 4)


def test_sparsify_takes_a_model_that_looks_rows_up(folder):
    data = SparsifyData(folder, context_length=5, **SMALL)
    assert len(data) == TOTAL // 5
    outputs = {}
    for name in data.model.hookpoints:
        module = data.model.base_model.get_submodule(name)
        module.register_forward_hook(lambda _, __, output, name=name: outputs.setdefault(name, []).append(output))
    for batch in torch.utils.data.DataLoader(data.select(range(2, len(data))), batch_size=3):
        data.model(batch["input_ids"])
    first, second = (torch.cat([part.flatten(0, 1) for part in outputs[name]]) for name in data.model.hookpoints)
    assert first.shape == ((len(data) - 2) * 5, 4)
    assert torch.equal(first + 20, second)
    numbers = ((first[:, 0] - 30) / 1000).int().tolist()
    assert len(set(numbers)) == len(numbers)
    assert numbers != sorted(numbers)
    assert data.model.hookpoints == ["layers.3", "layers.5"]
    parts = [data.shard(3, index)._items for index in range(3)]
    assert {number for part in parts for number in part} == set(range(12))


def test_sparsify_gets_rows_in_the_order_that_it_asks_for(folder):
    model = SparsifyData(folder, "resid_post.3", context_length=5, **SMALL).model
    places = torch.arange(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    straight, mixed = (model(part[None])[0][0] for part in (places, order))
    assert torch.equal(mixed, straight[order])


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"points": "resid_post.4"}, r"no rows of resid_post\.4\. Choose among resid_post\.3, resid_post\.5"),
        ({"points": []}, "no rows of no point"),
        ({"points": "mlp_out"}, "no rows of mlp_out"),
        ({"points": "resid_post.3-5"}, r"no rows of resid_post\.4"),
        ({"seed": -1}, "seed= must be a whole number of at least 0, not -1"),
        ({"seed": 1.5}, "seed= must be"),
        ({"dtype": "float32"}, "dtype= must be a floating-point dtype of torch"),
        ({"dtype": torch.int8}, "dtype= must be a floating-point dtype of torch"),
        ({"batch_size": 0}, "batch_size= must be a whole number of at least 1"),
        ({"epochs": 0}, "epochs="),
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist"),
        ({"where": np.ones(3, bool)}, "must be an array of 67 bools"),
        ({"where": np.zeros(67, bool)}, "no rows to read"),
        ({"batch_size": 99, "drop_last": True}, "has no batch"),
    ],
)
def test_bad_arguments(folder, arguments, match):
    with pytest.raises(residuum.InvalidRequest, match=match):
        ActivationBatches(folder, **arguments)


def test_an_item_of_sparsify_has_rows(folder):
    with pytest.raises(residuum.InvalidRequest, match="context_length= must be a whole number of at least 1"):
        SparsifyData(folder, context_length=0)


def test_an_extraction_without_rows(tmp_path):
    folder = write_extraction(tmp_path / "job", [[]], total=0)
    for points in (None, "resid_post.3"):
        with pytest.raises(residuum.InvalidRequest, match="no rows to read"):
            ActivationBatches(folder, points)


def test_points_with_different_element_types(folder, monkeypatch):
    rows = residuum.Extracted(folder)
    at = rows.at
    one, other = at("resid_post.3"), at("resid_post.5")
    other = type(other)([np.zeros(part.shape, np.float16) for part in other.shards], 4, np.dtype(np.float16))
    monkeypatch.setattr(rows, "at", lambda name: one if name == "resid_post.3" else other)
    with pytest.raises(residuum.InvalidRequest, match=r"resid_post\.3 4 × float32, resid_post\.5 4 × float16"):
        ActivationBatches(rows)


def test_a_state_of_other_rows_is_refused(folder, tmp_path):
    """The number of rows is the same, and so is the number of chosen ones."""
    other = write_extraction(tmp_path / "job", [[9, 3, 1, 4], [7, 7], [1], [12, 8, 5, 6, 2, 2]])
    state = json.loads(json.dumps(ActivationBatches(folder).state_dict()))
    ActivationBatches(folder).load_state_dict(state)
    with pytest.raises(residuum.InvalidRequest, match="data was"):
        ActivationBatches(other).load_state_dict(state)
    even = np.arange(TOTAL - 1) % 2 == 0
    masks = [np.append(even, False), np.append(~even, False)]
    state = ActivationBatches(folder, where=masks[0]).state_dict()
    with pytest.raises(residuum.InvalidRequest, match="where was"):
        ActivationBatches(folder, where=masks[1]).load_state_dict(state)


def test_a_state_of_other_blocks_is_refused(tmp_path):
    """The number of blocks is the same, but their rows are others, and so is the order."""
    folder = write_extraction(tmp_path / "job", [[10, 10]])
    row_bytes = 4 * 4
    sizes = {"buffer_bytes": 2 * 12 * row_bytes}
    state = ActivationBatches(folder, "resid_post.3", block_bytes=11 * row_bytes, **sizes).state_dict()
    with pytest.raises(residuum.InvalidRequest, match="blocks was"):
        ActivationBatches(folder, "resid_post.3", block_bytes=12 * row_bytes, **sizes).load_state_dict(state)


def test_a_state_of_other_data_is_refused(folder):
    state = ActivationBatches(folder, seed=1).state_dict()
    with pytest.raises(residuum.InvalidRequest, match="seed was 1 and is 2"):
        ActivationBatches(folder, seed=2).load_state_dict(state)


def test_a_job_that_is_not_complete(tmp_path):
    folder = write_extraction(tmp_path / "job", [[4, 4]], total=3)
    with pytest.raises(residuum.InvalidRequest, match="is not complete"):
        ActivationBatches(folder)
    assert sorted(numbers_of(ActivationBatches(folder, epochs=1, allow_partial=True))) == list(range(8))


def test_it_imports_torch_and_no_trainer(folder):
    code = (
        "import sys, residuum; assert 'torch' not in sys.modules; import residuum.training; "
        "assert not {'sae_lens', 'dictionary_learning', 'sparsify', 'datasets', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
