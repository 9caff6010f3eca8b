"""Directions from two sets of examples, compared with float64 numpy, and sets that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import residuum
from residuum import directions
from tests.client.support.captured import activations

LAYERS, HIDDEN = 3, 6


@pytest.fixture
def random():
    return np.random.default_rng(0)


def captures(random, count, *, positions=4, shift=0.0, **facts):
    """Captures, and their values as they were captured: bfloat16, [captures, layers, positions, hidden]."""
    made = [
        activations(random.standard_normal((LAYERS, positions, HIDDEN)) + shift, name=f"req-{number}", **facts)
        for number in range(count)
    ]
    return made, np.stack([acts.stack() for acts in made]).astype(np.float64)


def close(found, expected):
    for layer, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(found[layer].values, row, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------------ difference of means


def test_difference_of_means_at_the_last_prompt_token(random):
    happy, above = captures(random, 5, shift=1.0)
    sad, below = captures(random, 3)
    found = directions.difference_of_means(happy, sad)
    close(found, above[:, :, 3].mean(axis=0) - below[:, :, 3].mean(axis=0))
    assert found.origin == directions.Origin(
        method="difference_of_means", model="tiny", site="resid_post", positions="last_prompt",
        positive_examples=5, negative_examples=3, steered=False,
    )  # fmt: skip
    assert repr(found) == "Directions(3 layers × 6, difference_of_means of 5 + 3 examples, resid_post of 'tiny')"


def test_a_long_capture_counts_no_more_than_a_short_one(random):
    long, long_rows = captures(random, 1, positions=40)
    short, short_rows = captures(random, 1, positions=2)
    other, other_rows = captures(random, 1)
    found = directions.difference_of_means([*long, *short], other, positions=None)
    expected = (long_rows[0].mean(axis=1) + short_rows[0].mean(axis=1)) / 2 - other_rows[0].mean(axis=1)
    close(found, expected)
    assert found.origin.positions == "all"


@pytest.mark.parametrize(
    ("positions", "rows"),
    [("prompt", slice(0, 3)), ("generated", slice(3, 5)), (slice(1, None), slice(1, 5)), (-1, [2]), ("all", slice(5))],
)
def test_positions(random, positions, rows):
    values = random.standard_normal((LAYERS, 5, HIDDEN))
    acts = activations(values, prompt=3, generated=3)
    none = {layer: np.zeros((1, HIDDEN)) for layer in range(LAYERS)}
    others = activations(np.zeros((LAYERS, 5, HIDDEN)), prompt=3, generated=3)
    found = directions.difference_of_means(acts, others, positions=positions)
    close(found, acts.stack()[:, rows].astype(np.float64).mean(axis=1))
    if positions not in ("all", -1):  # -1 is the same as the default
        with pytest.raises(residuum.InvalidRequest, match="every row is an example"):
            directions.difference_of_means(none, none, positions=positions)


def test_each_set_is_read_once_without_holding_all(random):
    alive = 0

    class Counted(dict):
        def __init__(self, rows):
            nonlocal alive
            alive += 1
            super().__init__(rows)

        def __del__(self):
            nonlocal alive
            alive -= 1

    def stream():
        for _ in range(50):
            assert alive <= 1
            yield Counted({0: random.standard_normal((2, HIDDEN))})

    assert directions.difference_of_means(stream(), stream()).origin.positive_examples == 100


def test_mappings_and_a_single_mapping_are_accepted(random):
    above = {layer: random.standard_normal((40, HIDDEN)) for layer in (2, 7)}
    below = {layer: random.standard_normal((21, HIDDEN)).astype(np.float32) for layer in (2, 7)}
    parts = [{layer: rows[part] for layer, rows in below.items()} for part in (slice(0, 20), slice(20, 21))]
    expected = [above[layer].mean(axis=0) - below[layer].astype(np.float64).mean(axis=0) for layer in (2, 7)]
    for given_below in (below, parts):
        found = directions.difference_of_means(above, given_below)
        close(found, expected)
        assert found.layers == (2, 7)
        assert (found.origin.positive_examples, found.origin.negative_examples) == (40, 21)
        assert found.origin.model == found.origin.positions == ""


def test_sums_are_float64():
    big = {0: np.tile(np.float32([1 << 24, 1]), (4096, 1)), 1: np.ones((4096, 2), np.float32)}
    found = directions.difference_of_means(big, {0: np.zeros((1, 2)), 1: np.zeros((1, 2))})
    assert found[0].values.tolist() == [1 << 24, 1]


def test_torch_tensors(random):
    torch = pytest.importorskip("torch")
    rows = random.standard_normal((4, HIDDEN)).astype(np.float32)
    tensor = torch.tensor(rows).to(torch.bfloat16).requires_grad_()
    found = directions.difference_of_means({0: tensor}, {0: np.zeros((1, HIDDEN))})
    close(found, [tensor.detach().float().numpy().astype(np.float64).mean(axis=0)])


def test_layers(random):
    acts, rows = captures(random, 2)
    for chosen in ([0, 2], (2, 0)):
        found = directions.difference_of_means(acts[0], acts[1], layers=chosen)
        assert found.layers == (0, 2)
        close(found, (rows[0] - rows[1])[[0, 2], 3])
    assert directions.difference_of_means(acts[0], acts[1], layers="all").layers == (0, 1, 2)
    with pytest.raises(residuum.UnknownLayer, match=r"capture req-0: it lacks the layers \[9\]; it has \[0, 1, 2\]"):
        directions.difference_of_means(acts[0], acts[1], layers=[1, 9])
    fewer = activations(np.zeros((2, 4, HIDDEN)), name="fewer")
    with pytest.raises(residuum.UnknownLayer, match=r"negative: capture fewer: it lacks the layers \[2\]"):
        directions.difference_of_means(acts[0], fewer)
    with pytest.raises(residuum.InvalidRequest, match=r"the layers \[2\], which earlier examples lack"):
        directions.difference_of_means(fewer, acts[0])
    assert directions.difference_of_means(fewer, acts[0], layers=[1]).layers == (1,)


def test_the_selected_site_is_used(random):
    acts = [activations(random.standard_normal((1, 2, HIDDEN)), sites=("resid_post", "mlp_out")) for _ in range(2)]
    chosen = [one.select(site="mlp_out") for one in acts]
    found = directions.difference_of_means(*chosen)
    close(found, [(chosen[0][0][1] - chosen[1][0][1]).astype(np.float64)])
    assert found.origin.site == "mlp_out"
    with pytest.raises(residuum.InvalidRequest, match=r"mlp_out selected, but .* resid_post\. Select one"):
        directions.difference_of_means(acts[0], chosen[1])


# ------------------------------------------------------------------------------------------------------ what is refused


def zeros(**facts):
    return activations(np.zeros((LAYERS, 4, HIDDEN)), **facts)


def joy(scale=1.0):
    return residuum.Add(residuum.Vector(np.ones(HIDDEN)), layer=0, scale=scale)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "huge"}, r"from the model 'huge', but positive: capture req from 'tiny'"),
        ({"adapter": "calm"}, r"from the model 'tiny with the adapter calm', but positive: capture req from 'tiny'"),
        ({"steer": [joy()]}, r"was not steered, but negative: capture req was captured after steering"),
        ({"steer": [joy()], "before_steering": True}, "captured before steering"),
        ({"before_steering": True}, None),  # it has no effect for a request that is not steered
        ({"sites": ("resid_pre",)}, "Select one with"),
    ],
)
def test_only_compatible_captures_can_be_compared(other, message):
    if message is None:
        assert directions.difference_of_means(zeros(), zeros(**other))
        return
    for method in (directions.difference_of_means, directions.pca):
        with pytest.raises(residuum.InvalidRequest, match=message):
            method(zeros(), zeros(**other))


def test_captures_must_have_the_same_steering():
    found = directions.difference_of_means(zeros(steer=[joy()]), zeros(steer=[joy()]))
    assert found.origin.steered
    with pytest.raises(residuum.InvalidRequest, match=r"captured after steering, but .* steered differently"):
        directions.difference_of_means(zeros(steer=[joy()]), zeros(steer=[joy(2.0)]))
    with pytest.raises(residuum.InvalidRequest, match=r"captured before .* captured after"):
        directions.difference_of_means(zeros(steer=[joy()], before_steering=True), zeros(steer=[joy()]))
    meant = [{layer: acts[layer] for layer in acts} for acts in (zeros(), zeros(steer=[joy()]))]
    assert directions.difference_of_means(*meant).layers == (0, 1, 2)


def test_captures_must_have_the_same_changes_of_steering():
    def changed(first, scale=1.0, prompt=2, rows=4):
        values = np.zeros((LAYERS, rows, HIDDEN))
        return activations(values, prompt=prompt, generated=3, changes=[(first, [joy(scale)])])

    plain = activations(np.zeros((LAYERS, 4, HIDDEN)), prompt=2, generated=3)
    found = directions.difference_of_means(changed(3), changed(4, prompt=3, rows=5), positions="generated")
    assert found.origin.steered  # both from the second token of the reply on
    for other in (changed(2), changed(3, 2.0)):
        with pytest.raises(residuum.InvalidRequest, match=r"captured after steering, but .* steered differently"):
            directions.difference_of_means(changed(3), other, positions="generated")
    with pytest.raises(residuum.InvalidRequest, match=r"was not steered, but .* captured after steering"):
        directions.pca(plain, changed(3), positions="generated")
    # Rows before the change are as without it: those of the prompt, or those of another sequence.
    for other in (changed(2), changed(3, 2.0), changed(0xFFFFFFFF)):
        assert not directions.difference_of_means(plain, other, positions="last_prompt").origin.steered


def test_different_hidden_sizes_are_refused():
    narrow = {layer: np.zeros((1, HIDDEN - 1)) for layer in range(LAYERS)}
    with pytest.raises(residuum.BadVector, match=r"layer 0: its rows have 5 elements, .* positive: .* have 6"):
        directions.difference_of_means(zeros(), narrow)
    with pytest.raises(residuum.BadVector, match="layer 1: its rows have 2"):
        directions.difference_of_means({0: np.zeros((1, 3)), 1: np.zeros((1, 2))}, zeros())


@pytest.mark.parametrize("method", [directions.difference_of_means, directions.pca])
@pytest.mark.parametrize("empty", [[], iter(()), {0: np.zeros((0, HIDDEN))}])
def test_empty_sets_are_refused(method, empty):
    full = {0: np.ones((2, HIDDEN))}
    for sets in ((empty, full), (full, empty)):
        with pytest.raises(residuum.InvalidRequest, match=r"(positive|negative) (has no examples|has 0 examples)"):
            method(*sets)
    with pytest.raises(residuum.InvalidRequest, match="positive has no examples"):
        method([], [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("req-1", "not str"),
        (12, "not int"),
        (np.zeros((2, HIDDEN)), "not ndarray"),
        ([np.zeros((2, HIDDEN))], "not ndarray"),
        ([residuum.Vector([1.0])], "not Vector"),
        (residuum.Vector([1.0]), "not Vector"),
    ],
)
def test_invalid_sets_are_refused(given, message):
    with pytest.raises(TypeError, match=f"negative takes what client.activations.*{message}"):
        directions.difference_of_means(zeros(), given)


def test_async_iterables():
    async def stream():
        yield zeros()

    with pytest.raises(TypeError, match=r"acts async for acts in"):
        directions.difference_of_means(stream(), zeros())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros(HIDDEN), r"mapping 0, layer 0: rows must have the shape \[rows, hidden\].*\[6\]"),
        (np.zeros((1, 1, HIDDEN)), "rows must have the shape"),
        (np.zeros((1, 0)), "rows must have the shape"),
        (np.zeros((1, HIDDEN), complex), "complex"),
        ([["a", "b"]], "real numbers"),
        (np.full((2, HIDDEN), np.nan), r"NaN or infinite elements in the layers \[0\]"),
    ],
)
def test_invalid_arrays_are_refused(rows, message):
    with pytest.raises(residuum.BadVector, match=message):
        directions.difference_of_means({0: rows}, {0: np.zeros((1, HIDDEN))})


def test_invalid_mappings_are_refused():
    with pytest.raises(residuum.InvalidRequest, match="5 rows in layer 0, but 4 in layer 1"):
        directions.difference_of_means({0: np.zeros((5, 2)), 1: np.zeros((4, 2))}, {})
    with pytest.raises(residuum.InvalidRequest, match="has no layer"):
        directions.difference_of_means({}, {})
    with pytest.raises(residuum.InvalidRequest, match="'last' does not name layers"):
        directions.difference_of_means({0: np.zeros((1, 2))}, {0: np.zeros((1, 2))}, layers="last")


def test_infinite_rows_of_a_capture_are_refused():
    values = np.zeros((LAYERS, 4, HIDDEN))
    values[1, 3, 0] = np.inf
    with pytest.raises(residuum.BadVector, match=r"capture req: it has NaN or infinite elements in the layers \[1\]"):
        directions.difference_of_means(activations(values), zeros())
    assert directions.difference_of_means(activations(values), zeros(), positions=0), (
        "the infinite row is at another position"
    )


def test_positions_that_were_not_captured_are_refused():
    replies = zeros(prompt=9, positions=[9, 10, 11, 12], generated=5)
    with pytest.raises(residuum.InvalidRequest, match=r"'last_prompt' selects 8, but .*rows only for 9-12"):
        directions.difference_of_means(replies, replies)
    some = zeros(prompt=9, positions=[5, 6, 7, 8])
    with pytest.raises(residuum.InvalidRequest, match=r"'prompt' selects 0-4"):
        directions.difference_of_means(some, some, positions="prompt")
    with pytest.raises(residuum.InvalidRequest, match="positions='generated' selects none of its positions"):
        directions.difference_of_means(some, some, positions="generated")
    assert directions.difference_of_means(some, some, positions=range(-4, 0)).hidden_size == HIDDEN


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("open", residuum.OpenCapture),
        ("incomplete", residuum.IncompleteCapture),
        ("aborted", residuum.AbortedCapture),
    ],
)
def test_incomplete_captures_are_refused(state, kind):
    for method in (directions.difference_of_means, directions.pca):
        with pytest.raises(kind, match="allow_partial=True"):
            method(zeros(), zeros(state=state))


def test_partial_captures_contribute_their_present_rows(random):
    present = np.ones((LAYERS, 4), dtype=bool)
    present[1, 2:] = False  # of one layer half of the rows are lost
    present[2] = False  # and of another all
    partial = activations(random.standard_normal((LAYERS, 4, HIDDEN)), state="incomplete", present=present)
    whole, rows = captures(random, 2)
    found = directions.difference_of_means([partial, whole[0]], whole[1], positions=None, allow_partial=True)
    expected = [
        (partial[0].astype(np.float64).mean(axis=0) + rows[0, 0].mean(axis=0)) / 2,
        (partial[1][:2].astype(np.float64).mean(axis=0) + rows[0, 1].mean(axis=0)) / 2,
        rows[0, 2].mean(axis=0),
    ]
    close(found, np.array(expected) - rows[1].mean(axis=1))
    with pytest.raises(residuum.InvalidRequest, match=r"negative: no capture has rows of the layers \[2\]"):
        directions.difference_of_means(whole[0], partial, positions=None, allow_partial=True)


def test_pairs_with_a_missing_row_are_left_out(random):
    whole, rows = captures(random, 4)
    present = np.ones((LAYERS, 4), dtype=bool)
    present[1, 3] = False
    partial = activations(whole[0].stack(), state="aborted", present=present)
    found = directions.pca([partial, whole[1]], whole[2:], allow_partial=True)
    pairs = rows[:2, :, 3] - rows[2:, :, 3]
    assert abs(found[1].values @ pairs[1, 1]) == pytest.approx(np.linalg.norm(pairs[1, 1]), rel=1e-5)
    assert abs(found[0].values @ reference(pairs[:, 0])) == pytest.approx(1)


# ----------------------------------------------------------------------------------------------------------------- PCA


def reference(rows):
    """The first right singular vector."""
    return np.linalg.svd(rows)[2][0]


def paired_rows(random, pairs, hidden, *, lean=2.0):
    """Positive and negative rows [pairs, hidden] that differ along one line, by various lengths."""
    line = random.standard_normal(hidden)
    below = random.standard_normal((pairs, hidden))
    lengths = lean + random.standard_normal((pairs, 1))
    return below + lengths * line + 0.1 * random.standard_normal((pairs, hidden)), below


@pytest.mark.parametrize(("pairs", "hidden"), [(1, 9), (5, 9), (9, 9), (40, 9), (200, 3), (30, 400)])
@pytest.mark.parametrize("method", ["pca_center", "pca_diff"])
def test_pca_is_the_first_component(random, pairs, hidden, method):
    above, below = paired_rows(random, pairs, hidden)
    if pairs == 1 and method == "pca_diff":
        with pytest.raises(residuum.InvalidRequest, match="Layer 4 has 1 pairs of rows, but at least 2"):
            directions.pca({4: above}, {4: below}, method=method)
        return
    found = directions.pca({4: above}, {4: below}, method=method)
    differences = above - below
    if method == "pca_center":
        middle = (above + below) / 2
        expected = reference(np.concatenate([above - middle, below - middle]))
    else:
        expected = reference(differences - differences.mean(axis=0))
    assert abs(found[4].values @ expected) == pytest.approx(1, abs=1e-5)
    assert found[4].norm == pytest.approx(1, abs=1e-6)
    assert ((differences @ found[4].values) > 0).mean() >= 0.5
    assert found.origin.method == method
    assert found.origin.positive_examples == found.origin.negative_examples == pairs


def test_swapped_sets_give_the_opposite(random):
    above, below = paired_rows(random, 7, 12)
    for method in ("pca_center", "pca_diff"):
        there = directions.pca({0: above}, {0: below}, method=method)
        back = directions.pca({0: below}, {0: above}, method=method)
        np.testing.assert_allclose(there[0].values, -back[0].values, atol=1e-6)


def test_both_methods_find_the_planted_direction():
    """Differences that agree along one axis and vary along another."""
    differences = np.array([[3.0, 1, 0], [3, -1, 0], [3, 2, 0], [3, -2, 0]])
    none = np.zeros_like(differences)
    found = {
        method: directions.pca({0: differences}, {0: none}, method=method)[0].values
        for method in ("pca_center", "pca_diff")
    }
    np.testing.assert_allclose(found["pca_center"], [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(np.abs(found["pca_diff"]), [0, 1, 0], atol=1e-6)


def test_the_sign_follows_the_majority_of_pairs():
    differences = np.array([[1.0, 0], [1, 0], [1, 0], [-9, 0]])  # their mean points the other way
    assert directions.pca({0: differences}, {0: np.zeros((4, 2))})[0].values.tolist() == [1, 0]
    even = np.array([[1.0, 0], [-3, 0]])
    assert directions.pca({0: even}, {0: np.zeros((2, 2))})[0].values.tolist() == [-1, 0]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_pca_of_very_large_and_very_small_numbers(random, scale):
    above, below = paired_rows(random, 6, 4)
    small = directions.pca({0: above}, {0: below})
    np.testing.assert_allclose(directions.pca({0: above * scale}, {0: below * scale})[0].values, small[0].values, 1e-4)


@pytest.mark.parametrize(
    ("differences", "method", "message"),
    [
        (np.zeros((3, 2)), "pca_center", "Layer 0 has no principal component: the sets are the same"),
        (np.zeros((3, 2)), "pca_diff", "the sets are the same"),
        (np.tile([1 / 3, 1e5], (9, 1)), "pca_diff", "all differences are the same; use method='pca_center'"),
        (np.ones((3, 2)), "umap", "method='umap' is unknown"),
        (np.full((3, 2), 1e39), "pca_center", "more than float32 can hold"),
    ],
)
def test_pca_without_differences_is_refused(differences, method, message):
    with pytest.raises(residuum.InvalidRequest, match=message):
        directions.pca({0: differences}, {0: np.zeros_like(differences)}, method=method)


def test_sets_of_different_sizes_are_not_pairs(random):
    above, below = ({0: random.standard_normal((count, HIDDEN))} for count in (20, 17))
    with pytest.raises(residuum.InvalidRequest, match="negative has 17 examples, but positive has more"):
        directions.pca(above, below)
    with pytest.raises(residuum.InvalidRequest, match="positive has 17 examples, but negative has more"):
        directions.pca(below, above)


def test_pairs_across_captures_and_mappings(random):
    """The i-th examples of both sets are a pair, however the sets are split into captures and mappings."""
    above, below = paired_rows(random, 37, HIDDEN)
    below = below.astype(np.float32)
    whole = directions.pca({0: above}, {0: below})
    singles = [activations(row[None, None], dtype=np.float32) for row in below]
    parts = [{0: above[:5]}, {0: above[5:6]}, {0: above[6:]}]
    np.testing.assert_allclose(directions.pca(parts, singles)[0].values, whole[0].values, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), pairs=st.integers(2, 30), hidden=st.integers(1, 20), lean=st.floats(-3, 3))
def test_pca_explains_at_least_as_much_as_any_direction(seed, pairs, hidden, lean):
    random = np.random.default_rng(seed)
    above, below = paired_rows(random, pairs, hidden, lean=lean)
    found = directions.pca({0: above}, {0: below})[0].values.astype(np.float64)
    caught = np.linalg.norm((above - below) @ found)
    assert caught == pytest.approx(np.linalg.norm(above - below, ord=2), rel=1e-5)
