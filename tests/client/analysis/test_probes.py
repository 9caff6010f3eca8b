"""Probes: what is sent, what is refused, the scores of replies, and the files of probes."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import string
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

import residuum
from residuum.protocol.generation.events import ReplyBuilder
from residuum.protocol.requests import plan_spec
from residuum.v1 import capture_pb2, inference_pb2, probe_pb2, tensor_pb2
from tests.client.support.peer import HIDDEN, POST, rows

RNG = np.random.default_rng(7)
DIRECTION, OTHER = RNG.normal(size=(2, HIDDEN)).astype(np.float32)
ONE = residuum.Probe(DIRECTION, -0.5, layer=2, activation="sigmoid", name="one")
SEVERAL = residuum.Probe(RNG.normal(size=(3, HIDDEN)) / 50, [0, 1, -1], layer=4, activation="softmax", name="several")


def scores(probe, sequence, positions):
    """The scores of the peer's rows, in float64: [positions, outputs]."""
    outputs = rows(sequence, POST, probe.layer, positions).astype(np.float64) @ probe.weights.T.astype(np.float64)
    outputs += probe.bias
    if probe.activation == "sigmoid":
        return 0.5 * (1 + np.tanh(outputs / 2))
    if probe.activation == "softmax":
        return np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    return outputs


class TestValue:
    def test_a_probe_is_sent_with_the_digests_of_its_outputs(self):
        probe = residuum.Probe(
            [DIRECTION, OTHER], [0.5, -1], layer=3, site="mlp_out", activation="softmax", name="a.b-C"
        )
        assert probe.to_proto() == probe_pb2.Probe(
            name="a.b-C",
            layer=3,
            site=capture_pb2.SITE_MLP_OUT,
            outputs=[
                probe_pb2.ProbeOutput(digest=residuum.Vector(DIRECTION).digest, bias=0.5),
                probe_pb2.ProbeOutput(digest=residuum.Vector(OTHER).digest, bias=-1.0),
            ],
            activation=probe_pb2.PROBE_ACTIVATION_SOFTMAX,
        )
        assert probe.vectors == (residuum.Vector(DIRECTION), residuum.Vector(OTHER))
        assert (probe.width, probe.num_outputs) == (HIDDEN, 2)

    def test_a_probe_of_several_places_has_vectors_for_each(self):
        first, second = (residuum.Vector(row) for row in (DIRECTION, OTHER))
        weights = [np.concatenate([DIRECTION, OTHER]), np.concatenate([OTHER, OTHER])]
        probe = residuum.Probe(weights, [0.5, -1], layer=[3, 1], site=["resid_post", "mlp_out"], name="two")
        assert probe.to_proto() == probe_pb2.Probe(
            name="two",
            layer=3,
            site=capture_pb2.SITE_RESID_POST,
            outputs=[
                probe_pb2.ProbeOutput(digest=first.digest, bias=0.5),
                probe_pb2.ProbeOutput(digest=second.digest, bias=-1.0),
            ],
            further_places=[
                probe_pb2.ProbePlace(layer=1, site=capture_pb2.SITE_MLP_OUT, digests=[second.digest, second.digest])
            ],
        )
        assert probe.vectors == (first, second, second, second)
        assert probe.places == (("resid_post", 3), ("mlp_out", 1))
        assert "resid_post.3 + mlp_out.1, 2 outputs" in repr(probe)
        assert dataclasses.replace(probe, name="two") == probe
        x = RNG.normal(size=(5, 2 * HIDDEN)).astype(np.float32)
        np.testing.assert_allclose(probe.score(x), x @ np.array(weights).T + [0.5, -1], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("layer", [np.array(3), np.int64(3), np.array([3])[0]], ids=repr)
    def test_a_number_of_numpy_is_one_layer(self, layer):
        assert residuum.Probe(DIRECTION, layer=layer) == residuum.Probe(DIRECTION, layer=3)

    def test_an_array_of_numpy_is_a_list_of_layers(self):
        assert residuum.Probe([1, 2], layer=np.array([4, 2])) == residuum.Probe([1, 2], layer=[4, 2])

    def test_one_site_may_be_that_of_all_layers(self):
        probe = residuum.Probe(np.zeros((1, 3 * HIDDEN)), layer=(2, 4, 6), site="mlp_out")
        assert probe.places == (("mlp_out", 2), ("mlp_out", 4), ("mlp_out", 6))
        assert (probe.layer, probe.site) == ((2, 4, 6), "mlp_out")

    def test_by_default_a_probe_has_no_bias_and_no_activation_and_reads_the_stream(self):
        probe = residuum.Probe(DIRECTION, layer=3)
        output = probe_pb2.ProbeOutput(digest=residuum.Vector(DIRECTION).digest)
        assert probe.to_proto() == probe_pb2.Probe(name="probe", layer=3, outputs=[output])
        assert (probe.site, probe.activation, probe.name) == ("resid_post", None, "probe")

    def test_weights_of_one_output_may_be_a_row(self):
        probe = residuum.Probe(DIRECTION, 1.0, layer=3)
        assert probe == residuum.Probe([DIRECTION], [1.0], layer=np.int64(3))
        assert hash(probe) == hash(residuum.Probe(DIRECTION[None], 1, layer=3))
        assert probe.weights.shape == (1, HIDDEN)
        assert type(probe.layer) is int

    def test_one_bias_is_that_of_every_output(self):
        np.testing.assert_array_equal(residuum.Probe([DIRECTION, OTHER], 2, layer=1).bias, [2, 2])

    def test_probes_that_differ_in_anything_are_not_equal(self):
        base = residuum.Probe([DIRECTION, OTHER], layer=3)
        others = [
            dataclasses.replace(base, weights=[DIRECTION, DIRECTION]),
            dataclasses.replace(base, bias=[0, 1]),
            dataclasses.replace(base, layer=4),
            dataclasses.replace(base, site="mlp_out"),
            dataclasses.replace(base, activation="sigmoid"),
            dataclasses.replace(base, name="other"),
        ]
        assert len({base, *others}) == 7
        assert base == dataclasses.replace(base)
        assert base != "probe"

    def test_a_probe_does_not_change(self):
        weights = DIRECTION.copy()
        probe = residuum.Probe(weights, layer=3)
        weights[:] = 0
        np.testing.assert_array_equal(probe.weights[0], DIRECTION)
        with pytest.raises(ValueError, match="read-only"):
            probe.weights[0, 0] = 1
        with pytest.raises(ValueError, match="read-only"):
            probe.bias[0] = 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            probe.layer = 4
        assert pickle.loads(pickle.dumps(probe)) == probe

    def test_its_text_is_short(self):
        assert repr(ONE) == f"Probe('one', resid_post.2, 1 output of {HIDDEN} elements, activation sigmoid)"
        assert "3 outputs" in repr(SEVERAL)

    @pytest.mark.parametrize("probe", [ONE, SEVERAL, dataclasses.replace(SEVERAL, activation=None)])
    def test_scores_of_rows(self, probe):
        found = probe.score(rows(0, POST, probe.layer, range(5)))
        assert found.dtype == np.float32
        expected = scores(probe, 0, range(5))
        assert found.shape == ((5,) if probe is ONE else (5, 3)), "as in a reply"
        np.testing.assert_allclose(found, expected[:, 0] if probe is ONE else expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(probe.score(rows(0, POST, probe.layer, [3])[0]), found[3], rtol=1e-6)

    @pytest.mark.parametrize("bad", [np.zeros((2, HIDDEN + 1)), np.zeros(1), 3.0])
    def test_rows_of_another_width_have_no_scores(self, bad):
        with pytest.raises(residuum.BadVector, match=f"reads rows of {HIDDEN} elements, but this array has the shape"):
            ONE.score(bad)


INVALID = residuum.InvalidRequest
BAD = {
    "nan": (lambda: residuum.Probe([1, np.nan], layer=1), residuum.BadVector, "1 of 2 elements of weights are NaN"),
    "huge": (lambda: residuum.Probe([1, 1e39], layer=1), residuum.BadVector, "beyond float32"),
    "complex": (lambda: residuum.Probe([1j], layer=1), residuum.BadVector, "Probe: weights: .*complex"),
    "text": (lambda: residuum.Probe("abc", layer=1), residuum.BadVector, "Probe: weights: .*not an array of numbers"),
    "none": (lambda: residuum.Probe([], layer=1), residuum.BadVector, r"\[outputs, width\], or \[width\].*, not \[0\]"),
    "no outputs": (lambda: residuum.Probe(np.ones((0, 4)), layer=1), residuum.BadVector, r"not \[0, 4\]"),
    "cube": (lambda: residuum.Probe(np.ones((1, 2, 3)), layer=1), residuum.BadVector, r"not \[1, 2, 3\]"),
    "number": (lambda: residuum.Probe(1.0, layer=1), residuum.BadVector, r"not \[\]"),
    "biases": (lambda: residuum.Probe([1, 2], [1, 2], layer=1), INVALID, r"or \[outputs\], which is \[1\], not \[2\]"),
    "bias": (lambda: residuum.Probe([1, 2], np.inf, layer=1), residuum.BadVector, "elements of bias are NaN, infinite"),
    "bias text": (lambda: residuum.Probe([1, 2], "high", layer=1), residuum.BadVector, "Probe: bias"),
    "layer": (lambda: residuum.Probe([1, 2], layer=-1), residuum.UnknownLayer, "Layer -1 does not exist"),
    "layers": (lambda: residuum.Probe([1, 2, 3], layer=[1, 2]), residuum.BadVector, "3 elements cannot be those of 2"),
    "a text of layers": (lambda: residuum.Probe([1, 2], layer="1,2"), TypeError, "a layer, or a list of numbers"),
    "bytes as layers": (lambda: residuum.Probe([1, 2], layer=b"12"), TypeError, "a layer, or a list of numbers"),
    "no layers": (lambda: residuum.Probe([1, 2], layer=[]), INVALID, "0 layers and 1 sites"),
    "sites of layers": (
        lambda: residuum.Probe([1, 2], layer=[1, 2], site=["q"]),
        INVALID,
        "2 layers and 1 sites",
    ),
    "one site too many": (lambda: residuum.Probe([1, 2], layer=[1, 2], site=["q", 3]), TypeError, "a list of names"),
    "same places": (lambda: residuum.Probe([1, 2], layer=[1, 1]), INVALID, "place 2 is the same as place 1"),
    "too many places": (
        lambda: residuum.Probe(np.ones(17), layer=range(17)),
        INVALID,
        "reads at most 16 places, and this one has 17",
    ),
    "all layers": (lambda: residuum.Probe([1, 2], layer="all"), TypeError, "the number of a layer"),
    "no layer": (lambda: residuum.Probe([1, 2]), TypeError, "layer"),
    "by position": (lambda: residuum.Probe([1, 2], 0, 12), TypeError, "positional"),
    "site": (lambda: residuum.Probe([1, 2], layer=1, site="head"), residuum.UnknownSite, "'head' is not a site"),
    "sites": (lambda: residuum.Probe([1, 2], layer=1, site=["q"]), TypeError, "the name of one site"),
    "activation": (lambda: residuum.Probe([1, 2], layer=1, activation="relu"), INVALID, "None, 'sigmoid' or 'softmax'"),
    "activations": (lambda: residuum.Probe([1, 2], layer=1, activation=["sigmoid"]), INVALID, "None, 'sigmoid' or"),
    "softmax": (lambda: residuum.Probe([1, 2], layer=1, activation="softmax"), INVALID, "always 1. Use 'sigmoid'"),
    "name": (lambda: residuum.Probe([1, 2], layer=1, name="a b"), INVALID, "'a b' is not a valid name"),
    "no name": (lambda: residuum.Probe([1, 2], layer=1, name=None), TypeError, "name must be a text"),
    "twice": (
        lambda: plan_spec(None, None, None, None, probes=[ONE, ONE]),
        INVALID,
        "Several probes have the name 'one'",
    ),
    "vector": (
        lambda: plan_spec(None, None, None, None, probes=[residuum.Vector(DIRECTION)]),
        TypeError,
        r"a list of residuum.Probe, not Vector\(",
    ),
    "map": (lambda: plan_spec(None, None, None, None, probes={"one": ONE}), TypeError, "residuum.Probe, not a dict"),
    "prompt alone": (lambda: plan_spec(None, None, None, None, score_prompt=True), INVALID, "needs probes="),
    "prompt": (lambda: plan_spec(None, None, None, None, probes=ONE, score_prompt="no"), TypeError, "True or False"),
}


@pytest.mark.parametrize(("make", "error", "told"), BAD.values(), ids=BAD)
def test_bad_probes_are_refused_at_once(make, error, told):
    with pytest.raises(error, match=told):
        make()


class TestScikitLearn:
    """Models that scikit-learn has fitted. A probe gives their own probabilities and decisions."""

    X = RNG.normal(size=(200, HIDDEN)).astype(np.float32) * 3 + 1
    LABELS = (X[:, :3].sum(axis=1) > 3).astype(int) + (X[:, 3] > 2)  # 0, 1 or 2

    @pytest.mark.parametrize("classes", [2, 3])
    @pytest.mark.parametrize("scaled", [False, True])
    def test_a_logistic_regression(self, classes, scaled):
        linear_model, pipeline = pytest.importorskip("sklearn.linear_model"), pytest.importorskip("sklearn.pipeline")
        from sklearn.preprocessing import StandardScaler

        model = linear_model.LogisticRegression(max_iter=1000)
        model = pipeline.make_pipeline(StandardScaler(), model) if scaled else model
        model.fit(self.X, np.minimum(self.LABELS, classes - 1))
        probe = residuum.Probe.from_sklearn(model, layer=3)
        expected = model.predict_proba(self.X)
        found = probe.score(self.X)
        np.testing.assert_allclose(found, expected if classes == 3 else expected[:, 1], atol=1e-4)
        assert probe.output_names == (("0", "1", "2") if classes == 3 else ())

    @pytest.mark.parametrize("name", ["LinearSVC", "RidgeClassifier", "SGDClassifier", "Ridge"])
    def test_other_linear_models(self, name):
        svm, linear_model = pytest.importorskip("sklearn.svm"), pytest.importorskip("sklearn.linear_model")
        model = getattr(svm if name == "LinearSVC" else linear_model, name)()
        model.fit(self.X, np.minimum(self.LABELS, 1))
        expected = model.predict(self.X) if name == "Ridge" else model.decision_function(self.X)
        probe = residuum.Probe.from_sklearn(model, layer=3)
        np.testing.assert_allclose(probe.score(self.X), expected, rtol=1e-4, atol=1e-3)

    @pytest.mark.parametrize("scaled", [False, True])
    def test_a_frozen_model(self, scaled):
        frozen, linear_model = pytest.importorskip("sklearn.frozen"), pytest.importorskip("sklearn.linear_model")
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        model = make_pipeline(*[StandardScaler()] * scaled, linear_model.LogisticRegression(max_iter=1000))
        model.fit(self.X, self.LABELS)
        for inner in (model, model[-1]):
            assert residuum.Probe.from_sklearn(frozen.FrozenEstimator(inner), layer=3) == residuum.Probe.from_sklearn(
                inner, layer=3
            )

    def test_a_model_with_sparse_weights(self):
        linear_model = pytest.importorskip("sklearn.linear_model")
        model = linear_model.LogisticRegression(max_iter=1000).fit(self.X, self.LABELS)
        dense = residuum.Probe.from_sklearn(model, layer=3)
        assert residuum.Probe.from_sklearn(model.sparsify(), layer=3) == dense

    @pytest.mark.parametrize("name", ["SVC", "NuSVC"])
    @pytest.mark.parametrize("scaled", [False, True])
    def test_a_support_vector_machine_has_scores_of_two_classes_only(self, name, scaled):
        svm, pipeline = pytest.importorskip("sklearn.svm"), pytest.importorskip("sklearn.pipeline")
        from sklearn.preprocessing import StandardScaler

        def fitted(labels):
            model = getattr(svm, name)(kernel="linear", **({"nu": 0.05} if name == "NuSVC" else {}))
            return pipeline.make_pipeline(*[StandardScaler()] * scaled, model).fit(self.X, labels)

        two = fitted(np.minimum(self.LABELS, 1))
        found = residuum.Probe.from_sklearn(two, layer=3).score(self.X)
        np.testing.assert_allclose(found, two.decision_function(self.X), rtol=1e-4, atol=1e-2)
        with pytest.raises(INVALID, match=f"{name} has a classifier for each pair of classes"):
            residuum.Probe.from_sklearn(fitted(self.LABELS), layer=3)

    def test_a_model_that_subtracts_a_mean_is_refused_and_told_how_to_give_it(self):
        cross_decomposition = pytest.importorskip("sklearn.cross_decomposition")
        model = cross_decomposition.PLSRegression(1).fit(self.X + 5, self.LABELS)
        with pytest.raises(INVALID, match="subtracts the mean of the rows"):
            residuum.Probe.from_sklearn(model, layer=3)
        probe = residuum.Probe(model.coef_, model.predict(np.zeros((1, self.X.shape[1])))[0], layer=3)
        np.testing.assert_allclose(probe.score(self.X), model.predict(self.X).ravel(), rtol=1e-4, atol=1e-3)

    def test_a_model_that_predicts_exponentials_is_refused(self):
        linear_model = pytest.importorskip("sklearn.linear_model")
        for kind, options in (
            ("PoissonRegressor", {}),
            ("GammaRegressor", {}),
            ("TweedieRegressor", {"power": 1.5}),
            ("TweedieRegressor", {"link": "log"}),
        ):
            model = getattr(linear_model, kind)(**options).fit(self.X, self.LABELS + 1)
            with pytest.raises(INVALID, match=f"{kind} predicts the exponential of its linear output"):
                residuum.Probe.from_sklearn(model, layer=3)
        normal = linear_model.TweedieRegressor(alpha=0).fit(self.X, self.LABELS)
        found = residuum.Probe.from_sklearn(normal, layer=3).score(self.X)
        np.testing.assert_allclose(found, normal.predict(self.X), rtol=1e-4, atol=1e-3)

    def test_a_model_of_rows_of_several_layers(self):
        linear_model = pytest.importorskip("sklearn.linear_model")
        model = linear_model.LogisticRegression(max_iter=1000).fit(self.X, np.minimum(self.LABELS, 1))
        probe = residuum.Probe.from_sklearn(model, layer=[2, 4])
        assert [len(vector.values) for vector in probe.vectors] == [HIDDEN // 2] * 2
        np.testing.assert_allclose(probe.score(self.X), model.predict_proba(self.X)[:, 1], atol=1e-4)


class TestModels:
    """Models with scikit-learn's and torch's names, which the client does not import."""

    class LogisticRegression(SimpleNamespace):
        pass

    class LinearSVC(SimpleNamespace):
        pass

    class StandardScaler(SimpleNamespace):
        pass

    class MinMaxScaler(SimpleNamespace):
        pass

    def test_a_logistic_regression_of_two_classes_has_one_probability(self):
        model = self.LogisticRegression(coef_=DIRECTION[None].astype(np.float64), intercept_=np.array([0.25]))
        assert residuum.Probe.from_sklearn(model, layer=5, site="mlp_out", name="n") == residuum.Probe(
            DIRECTION, 0.25, layer=5, site="mlp_out", activation="sigmoid", name="n"
        )

    def test_one_of_several_classes_has_a_softmax(self):
        model = self.LogisticRegression(coef_=SEVERAL.weights, intercept_=SEVERAL.bias, solver="lbfgs")
        assert residuum.Probe.from_sklearn(model, layer=4, name="several") == SEVERAL

    def test_a_subclass_is_recognised(self):
        class Ours(self.LogisticRegression):
            pass

        assert residuum.Probe.from_sklearn(Ours(coef_=[[1.0]], intercept_=0.0), layer=1).activation == "sigmoid"

    @pytest.mark.parametrize("how", [{"solver": "liblinear"}, {"multi_class": "ovr", "solver": "lbfgs"}])
    def test_one_versus_rest_is_refused_unless_there_are_two_classes(self, how):
        with pytest.raises(INVALID, match="one-vs-rest"):
            residuum.Probe.from_sklearn(
                self.LogisticRegression(coef_=SEVERAL.weights, intercept_=SEVERAL.bias, **how), layer=4
            )
        two = self.LogisticRegression(coef_=DIRECTION[None], intercept_=[0.0], **how)
        assert residuum.Probe.from_sklearn(two, layer=4).activation == "sigmoid"

    def test_a_multinomial_model_of_two_classes_is_refused(self):  # scikit-learn doubles its output
        with pytest.raises(INVALID, match="is not the sigmoid of the output"):
            residuum.Probe.from_sklearn(
                self.LogisticRegression(coef_=DIRECTION[None], intercept_=[0.0], multi_class="multinomial"), layer=4
            )

    @pytest.mark.parametrize("coef", [DIRECTION, DIRECTION[None]])
    def test_other_models_have_no_activation(self, coef):
        model = self.LinearSVC(coef_=coef, intercept_=0.5)
        assert residuum.Probe.from_sklearn(model, layer=1) == residuum.Probe(DIRECTION, 0.5, layer=1)

    @pytest.mark.parametrize(("mean", "scale"), [(True, True), (True, False), (False, True), (False, False)], ids=str)
    @pytest.mark.parametrize("outputs", [1, 3])
    def test_a_scaler_becomes_part_of_the_weights(self, mean, scale, outputs):
        rng = np.random.default_rng(outputs)
        scaler = self.StandardScaler(
            mean_=rng.normal(size=HIDDEN) * 10 if mean or scale else None,  # as scikit-learn sets it
            with_mean=mean,
            scale_=rng.uniform(0.1, 5, size=HIDDEN) if scale else None,
        )
        model = self.LinearSVC(coef_=rng.normal(size=(outputs, HIDDEN)), intercept_=rng.normal(size=outputs))
        steps = [("scaler", scaler), ("off", "passthrough"), ("none", None), ("classifier", model)]
        probe = residuum.Probe.from_sklearn(SimpleNamespace(steps=steps), layer=1)
        x = rng.normal(size=(20, HIDDEN)) * 7
        scaled = (x - (scaler.mean_ if mean else 0)) / (scaler.scale_ if scale else 1)
        found = probe.score(x).reshape(len(x), outputs)
        np.testing.assert_allclose(found, scaled @ model.coef_.T + model.intercept_, rtol=1e-4, atol=1e-3)

    def test_two_scalers_apply_in_their_order(self):
        first = self.StandardScaler(with_mean=True, mean_=np.array([1.0, 2.0]), scale_=np.array([2.0, 4.0]))
        second = self.StandardScaler(with_mean=True, mean_=np.array([3.0, 5.0]), scale_=np.array([0.5, 8.0]))
        model = self.LinearSVC(coef_=np.array([[1.0, -2.0]]), intercept_=np.array([0.5]))
        steps = [("a", first), ("b", second), ("c", model)]
        probe = residuum.Probe.from_sklearn(SimpleNamespace(steps=steps), layer=1)
        x = np.array([[9.0, 10.0], [-3.0, 0.0]])
        twice = ((x - first.mean_) / first.scale_ - second.mean_) / second.scale_
        np.testing.assert_allclose(probe.score(x), twice @ model.coef_[0] + 0.5, rtol=1e-5)

    def test_a_search_has_its_best_model(self):
        best = self.LogisticRegression(coef_=DIRECTION[None], intercept_=[0.0])
        pipeline = SimpleNamespace(best_estimator_=SimpleNamespace(steps=[("classifier", best)]))
        assert residuum.Probe.from_sklearn(pipeline, layer=1).activation == "sigmoid"

    def test_what_cannot_become_a_probe_is_refused(self):
        with pytest.raises(INVALID, match="LogisticRegression has no coef_ and intercept_: it is not linear, or not"):
            residuum.Probe.from_sklearn(self.LogisticRegression(), layer=1)
        model = self.LinearSVC(coef_=DIRECTION, intercept_=0.5)
        for scaler, told in (
            (self.MinMaxScaler(scale_=1, min_=0), "step 'scaler' is a MinMaxScaler, and only StandardScaler"),
            (self.StandardScaler(), "step 'scaler' is not fitted"),
        ):
            with pytest.raises(INVALID, match=told):
                residuum.Probe.from_sklearn(SimpleNamespace(steps=[("scaler", scaler), ("m", model)]), layer=1)

    def test_a_linear_module_of_torch(self):
        torch = pytest.importorskip("torch")
        linear = torch.nn.Linear(HIDDEN, 3)
        x = np.random.default_rng(1).normal(size=(5, HIDDEN)).astype(np.float32)
        expected = torch.softmax(linear(torch.from_numpy(x)), dim=-1).detach().numpy()
        probe = residuum.Probe.from_torch(linear, layer=1, activation="softmax", name="three")
        np.testing.assert_allclose(probe.score(x), expected, rtol=1e-5)
        np.testing.assert_allclose(probe.score(torch.from_numpy(x)), expected, rtol=1e-5)
        small = torch.nn.Linear(HIDDEN, 1, bias=False).to(torch.bfloat16)
        probe = residuum.Probe.from_torch(small, layer=1)
        np.testing.assert_array_equal(probe.weights, small.weight.detach().float().numpy())
        np.testing.assert_array_equal(probe.bias, [0])

    def test_other_modules_of_torch_are_refused(self):
        torch = pytest.importorskip("torch")
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Linear, not Sigmoid"):
            residuum.Probe.from_torch(torch.nn.Sigmoid(), layer=1)
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Linear, not LayerNorm"):
            residuum.Probe.from_torch(torch.nn.LayerNorm(HIDDEN), layer=1)

    def test_a_subclass_of_linear_is_one(self):
        torch = pytest.importorskip("torch")
        own = type("Own", (torch.nn.Linear,), {})(HIDDEN, 2)
        assert residuum.Probe.from_torch(own, layer=1).num_outputs == 2


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def probes(draw):
    weights = draw(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=FLOATS))
    return residuum.Probe(
        weights,
        draw(hnp.arrays(np.float32, len(weights), elements=FLOATS)),
        layer=draw(st.integers(0, 2**31 - 2).filter(lambda layer: layer < 10**9)),
        site=draw(st.sampled_from(["resid_post", "resid_pre", "mlp_act", "q"])),
        activation=draw(st.sampled_from([None, "sigmoid", "softmax"] if len(weights) > 1 else [None, "sigmoid"])),
        name=draw(st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=64)),
        smooth=draw(
            st.one_of(
                st.none(),
                st.floats(0, 1, width=32, exclude_min=True, exclude_max=True).map(residuum.EMA),
                st.one_of(st.none(), st.integers(1, 1024)).map(residuum.RollingMax),
                st.one_of(st.none(), st.integers(1, 1024)).map(residuum.RollingMean),
            )
        ),
    )


class TestMLP:
    LAYERS = (
        residuum.ProbeLayer(RNG.normal(size=(2, 3)), [0.5, -0.5], "tanh"),
        residuum.ProbeLayer(RNG.normal(size=(1, 2)), 0.25, "gelu"),
    )
    MLP = residuum.Probe(RNG.normal(size=(3, HIDDEN)) / 50, layer=4, activation="sigmoid", name="mlp", mlp=LAYERS)

    def test_its_message_and_its_scores(self):
        message = self.MLP.to_proto()
        assert (len(message.outputs), len(message.mlp), self.MLP.num_outputs) == (3, 2, 1)
        assert len(self.MLP.vectors) == 3
        assert "an MLP of 3 layers" in repr(self.MLP)
        assert pickle.loads(pickle.dumps(self.MLP)) == self.MLP
        assert dataclasses.replace(self.MLP, mlp=[self.LAYERS[0], residuum.ProbeLayer([[1, 2]], 0)]) != self.MLP
        x = rows(0, POST, 4, range(5)).astype(np.float64)
        first = x @ self.MLP.weights.T.astype(np.float64)
        second = np.tanh(first) @ self.LAYERS[0].weights.T + self.LAYERS[0].bias
        gelu = second * (1 + np.vectorize(math.erf)(second / math.sqrt(2))) / 2
        third = gelu @ self.LAYERS[1].weights.T + self.LAYERS[1].bias
        np.testing.assert_allclose(self.MLP.score(x), 1 / (1 + np.exp(-third[:, 0])), rtol=1e-4)
        assert self.MLP.score(x[0]).shape == ()

    def test_a_sequential_of_torch(self):
        torch = pytest.importorskip("torch")
        torch.manual_seed(3)
        parts = [torch.nn.Linear(HIDDEN, 8), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(8, 4)]
        parts += [torch.nn.GELU(), torch.nn.Linear(4, 3, bias=False)]
        module = torch.nn.Sequential(*parts).eval()
        probe = residuum.Probe.from_torch(module, layer=1, activation="softmax")
        x = np.random.default_rng(1).normal(size=(5, HIDDEN)).astype(np.float32)
        expected = torch.softmax(module(torch.from_numpy(x)), dim=-1).detach().numpy()
        np.testing.assert_allclose(probe.score(x), expected, rtol=1e-4)

    @pytest.mark.parametrize("last", ["Sigmoid", "LayerNorm", "none"])
    def test_other_sequentials_are_refused(self, last):
        torch = pytest.importorskip("torch")
        parts = [torch.nn.Linear(4, 2), torch.nn.Sigmoid() if last == "Sigmoid" else torch.nn.LayerNorm(2)]
        with pytest.raises(TypeError, match="Give what follows"):
            residuum.Probe.from_torch(torch.nn.Sequential(*(parts if last != "none" else [])), layer=1)

    @pytest.mark.parametrize(
        ("make", "error"),
        [
            (lambda: residuum.ProbeLayer(np.ones((2, 2)), [1, 2, 3]), residuum.BadVector),
            (lambda: residuum.ProbeLayer([[math.nan]], 0), residuum.BadVector),
            (lambda: residuum.ProbeLayer([[1]], 0, "swish"), residuum.InvalidRequest),
            (lambda: residuum.Probe(np.ones((2, 4)), layer=1, mlp=[residuum.ProbeLayer([[1]], 0)]), INVALID),
            (lambda: residuum.Probe(np.ones((1, 4)), layer=1, mlp=[residuum.ProbeLayer([[1]], 0)] * 3), INVALID),
            (lambda: residuum.Probe(np.ones((2, 4)), layer=1, mlp=np.ones((1, 2))), TypeError),
        ],
    )
    def test_bad_layers_are_refused(self, make, error):
        with pytest.raises(error):
            make()

    async def test_a_reply_has_its_scores(self, client, peer):
        reply = await client.generate("a bb ccc", max_tokens=3, probes=self.MLP)
        expected = self.MLP.score(rows(0, POST, 4, [2, 3, 4]))
        np.testing.assert_allclose(reply.scores["mlp"], expected, rtol=1e-5)

    def test_a_saved_mlp_is_loaded_to_the_bit(self, tmp_path):
        self.MLP.save(tmp_path / "mlp.safetensors")
        assert residuum.Probe.load(tmp_path / "mlp.safetensors") == self.MLP


class TestFiles:
    @given(probe=probes())
    def test_a_saved_probe_is_loaded_to_the_bit(self, probe, tmp_path_factory):
        path = tmp_path_factory.getbasetemp() / "probe.safetensors"
        probe.save(path)
        loaded = residuum.Probe.load(path)
        assert loaded == probe
        assert loaded.weights.tobytes() == probe.weights.tobytes()

    def test_the_format_is_the_documented_one(self, tmp_path):
        path = tmp_path / "p.safetensors"
        SEVERAL.save(path)
        tensors = load_file(path)
        assert {name: (array.dtype, array.shape) for name, array in tensors.items()} == {
            "weight": (np.float32, (3, HIDDEN)),
            "bias": (np.float32, (3,)),
        }
        header = path.read_bytes()
        size = int.from_bytes(header[:8], "little")
        assert json.loads(header[8 : 8 + size])["__metadata__"] == {
            "format": "residuum.probe.v1",
            "layer": "4",
            "site": "resid_post",
            "activation": "softmax",
            "name": "several",
        }
        ONE.save(path)  # replaces it
        assert residuum.Probe.load(path) == ONE

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"format": "other"}, "its metadata does not have the format 'residuum.probe.v1'"),
            ({"layer": None}, "it has no layer"),
            ({"layer": "-1"}, "its layer is '-1'"),
            ({"layer": "9" * 5000}, "its layer is '9999"),
            ({"layer": "1²"}, "its layer is '1²'"),
            ({"layer": "1,"}, "its layer is '1,'"),
            ({"layer": "1,2,3", "site": "q,k"}, "it has 2 sites for 3 layers"),
            ({"site": "head"}, "p.safetensors: 'head' is not a site"),
            ({"activation": "relu"}, "p.safetensors: Probe: activation must be None"),
            ({"name": "a b"}, "p.safetensors: Probe: 'a b' is not a valid name"),
            ({"weight": None}, "it has no weight"),
            ({"weight": np.zeros(HIDDEN, np.float64)}, "its weight is not float32"),
            ({"weight": np.full((3, HIDDEN), np.nan, np.float32)}, "p.safetensors: Probe: .* are NaN"),
            ({"bias": np.zeros(2, np.float32)}, "p.safetensors: Probe: bias must be one number"),
            ({"smooth": "ema:7"}, "p.safetensors: 'ema:7' is not a smoothing"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path, change, told):
        path = tmp_path / "p.safetensors"
        metadata = {"format": "residuum.probe.v1", "layer": "4", "site": "q", "activation": "none", "name": "several"}
        metadata["smooth"] = None
        arrays = {"weight": np.ones((3, HIDDEN), np.float32), "bias": np.zeros(3, np.float32)}
        for part in (metadata, arrays):
            part.update({name: value for name, value in change.items() if name in part})
        keep = {name: array for name, array in arrays.items() if array is not None}
        save_file(keep, path, metadata={name: value for name, value in metadata.items() if value is not None})
        with pytest.raises(INVALID, match=told):
            residuum.Probe.load(path)

    @pytest.mark.parametrize("site", ["mlp_out", ["resid_post", "mlp_out"]])
    def test_a_probe_of_several_places(self, tmp_path, site):
        probe = residuum.Probe(np.tile(SEVERAL.weights, 2), layer=[4, 2], site=site, name="several")
        probe.save(tmp_path / "p.safetensors")
        loaded = residuum.Probe.load(tmp_path / "p.safetensors")
        assert loaded == probe
        assert (loaded.layer, loaded.site) == (probe.layer, probe.site)

    def test_a_file_that_is_none_is_refused(self, tmp_path):
        (tmp_path / "p").write_text("probe")
        with pytest.raises(INVALID, match="is not a safetensors file"):
            residuum.Probe.load(tmp_path / "p")
        with pytest.raises(FileNotFoundError):
            residuum.Probe.load(tmp_path / "missing")
        with pytest.raises(OSError, match="cannot be written"):
            ONE.save(tmp_path / "no" / "folder")


class TestRequests:
    async def test_scores_come_with_the_tokens(self, client, peer):
        deltas = await client.stream("a bb ccc", max_tokens=4, probes=[ONE, SEVERAL])
        assert [delta.token_ids for delta in deltas] == [(4,), (5,), (6,), (7,)]
        for step, delta in enumerate(deltas):
            assert delta.prompt_scores is None
            assert {name: found.shape for name, found in delta.scores.items()} == {"one": (1,), "several": (1, 3)}
            np.testing.assert_allclose(delta.scores["one"], scores(ONE, 0, [2 + step])[:, 0], rtol=1e-5)
            np.testing.assert_allclose(delta.scores["several"], scores(SEVERAL, 0, [2 + step]), rtol=1e-5)
        assert peer.requests[-1].spec.probes == probe_pb2.ProbeSpec(probes=[ONE.to_proto(), SEVERAL.to_proto()])

    async def test_a_reply_has_the_scores_of_each_sequence(self, client):
        reply = await client.generate("a bb ccc", max_tokens=3, n=2, probes=[ONE, SEVERAL])
        for number, sequence in enumerate(reply.sequences):
            assert sequence.scores["one"].dtype == np.float32
            np.testing.assert_allclose(sequence.scores["one"], scores(ONE, number, [2, 3, 4])[:, 0], rtol=1e-5)
            np.testing.assert_allclose(sequence.scores["several"], scores(SEVERAL, number, [2, 3, 4]), rtol=1e-5)
        assert reply.scores is reply.sequences[0].scores
        assert reply.prompt_scores is None

    async def test_the_scores_of_the_prompt_come_before_the_first_token(self, client, peer):
        deltas = await client.stream("a bb ccc", max_tokens=2, probes=[ONE, SEVERAL], score_prompt=True)
        assert [bool(delta.prompt_scores) for delta in deltas] == [True, True, False, False]
        assert [delta.token_ids for delta in deltas] == [(), (), (4,), (5,)]
        assert [len(delta.scores["several"]) for delta in deltas] == [0, 0, 1, 1]
        assert [len(delta.prompt_scores["one"]) for delta in deltas[:2]] == [2, 1]
        assert deltas[1].prompt_scores["several"].shape == (1, 3)
        assert peer.requests[-1].spec.probes.score_prompt
        reply = await client.generate(
            "a bb ccc", max_tokens=2, probes=[ONE, SEVERAL], score_prompt=True, prompt_logprobs=0
        )
        np.testing.assert_allclose(reply.prompt_scores["one"], scores(ONE, 0, [0, 1, 2])[:, 0], rtol=1e-5)
        np.testing.assert_allclose(reply.prompt_scores["several"], scores(SEVERAL, 0, [0, 1, 2]), rtol=1e-5)
        np.testing.assert_array_equal(reply.prompt_scores["several"][-1], reply.scores["several"][0])
        assert len(reply.prompt_logprobs) == 3

    async def test_a_reply_without_tokens_has_scores_of_none(self, client):
        reply = await client.generate("a bb", max_tokens=0, probes=[ONE, SEVERAL], score_prompt=True)
        assert {name: found.shape for name, found in reply.scores.items()} == {"one": (0,), "several": (0, 3)}
        assert {name: found.shape for name, found in reply.prompt_scores.items()} == {"one": (2,), "several": (2, 3)}

    async def test_without_probes_there_are_no_scores(self, client):
        (delta,) = await client.stream("a", max_tokens=1)
        assert (delta.scores, delta.prompt_scores) == (None, None)
        reply = await client.generate("a", max_tokens=1, probes=[])
        assert (reply.scores, reply.prompt_scores) == (None, None)

    async def test_a_skipped_reply_has_no_scores(self, client, peer):
        peer.script.skipped = True
        (delta,) = await client.stream("a", max_tokens=1, probes=ONE)
        assert delta.scores is None
        assert (await client.generate("a", max_tokens=1, probes=ONE)).scores is None

    async def test_one_probe_needs_no_list(self, client, peer):
        reply = await client.generate("a", max_tokens=1, probes=ONE)
        assert list(reply.scores) == ["one"]

    async def test_a_registration_knows_its_probes(self, client, peer):
        registration = await client.register(probes=[ONE, SEVERAL], score_prompt=True)
        assert registration.probes == (ONE, SEVERAL)
        assert set(peer.vectors) == {vector.digest for vector in (*ONE.vectors, *SEVERAL.vectors)}
        reply = await client.generate("a bb", max_tokens=2, registration=registration)
        np.testing.assert_allclose(reply.scores["one"], scores(ONE, 0, [1, 2])[:, 0], rtol=1e-5)
        assert len(reply.prompt_scores["one"]) == 2

    async def test_only_an_id_does_not_tell_the_probes(self, client):
        registration = await client.register(probes=ONE, score_prompt=True)
        reply = await client.generate("a bb", max_tokens=2, registration=registration.request_id)
        assert (reply.scores, reply.prompt_scores) == (None, None)

    @pytest.mark.parametrize("wrong", [{"probes": ONE}, {"probes": [ONE], "score_prompt": True}])
    async def test_a_registered_request_takes_no_other_probes(self, client, wrong):
        registration = await client.register()
        with pytest.raises(INVALID, match=r"already has its .*probes"):
            await client.generate("a", registration=registration, **wrong)

    async def test_many_prompts_share_their_probes(self, client):
        made = (probe for probe in [ONE, SEVERAL])  # can be read once
        replies = await client.generate_many(
            ["a", "a bb"], max_tokens=2, probes=made, score_prompt=True, progress=False
        )
        for reply, count in zip(replies, (1, 2), strict=True):
            positions = [count - 1, count]
            np.testing.assert_allclose(reply.scores["one"], scores(ONE, 0, positions)[:, 0], rtol=1e-5)
            np.testing.assert_allclose(reply.prompt_scores["several"], scores(SEVERAL, 0, range(count)), rtol=1e-5)
        ended = await client.generate_as_completed(["a", "a bb"], max_tokens=2, probes=ONE, progress=False)
        assert all(len(reply.scores["one"]) == 2 for _, reply in ended)

    @pytest.mark.parametrize("call", ["generate_many", "generate_as_completed"])
    async def test_bad_probes_of_many_prompts_are_refused_before_any_starts(self, client, peer, call):
        with pytest.raises(INVALID, match="Several probes"):
            await getattr(client, call)(["a", "b"], probes=[ONE, ONE])
        assert peer.calls == []


class TestVectors:
    async def test_the_vectors_are_sent_once(self, client, peer):
        steer = residuum.Add(residuum.Vector(DIRECTION), layer=1)  # the vector of a probe, too
        for _ in range(2):
            await client.generate("a", max_tokens=1, probes=[ONE, SEVERAL], steer=steer)
        assert peer.vectors_received == 4
        assert peer.calls.count("PutVectors") == 1

    async def test_vectors_that_the_server_dropped_are_sent_again(self, client, peer):
        await client.generate("a", max_tokens=1, probes=SEVERAL)
        peer.script.drop_vectors = True
        reply = await client.generate("a", max_tokens=1, probes=SEVERAL)
        assert reply.scores["several"].shape == (1, 3)
        assert peer.calls.count("PutVectors") == 2

    async def test_a_probe_of_another_width_is_refused(self, client):
        with pytest.raises(residuum.BadVector, match=f"has 5 elements, not {HIDDEN}"):
            await client.generate("a", probes=residuum.Probe(np.ones(5), layer=1))


class TestOtherServers:
    async def test_a_server_that_would_ignore_the_probes_is_not_asked(self, client, peer):
        peer.script.is_old = True
        for call in (client.generate("a", probes=ONE), client.register(probes=ONE)):
            with pytest.raises(INVALID, match=r"has no probes: .* --score-mib 0 .* older than the client"):
                await call
        await client.generate("a", max_tokens=1)
        assert (peer.calls.count("GetModelInfo"), peer.calls.count("Generate")) == (2, 1)
        assert not {"PutVectors", "RegisterRequest"} & {*peer.calls}
        peer.script.is_old = False
        for _ in range(2):
            await client.generate("a", max_tokens=1, probes=ONE)
        assert peer.calls.count("GetModelInfo") == 3, "it is asked once"

    async def test_a_server_that_would_ignore_attention_is_not_asked(self, client, peer):
        pooled = residuum.Probe.from_attention(np.ones(HIDDEN), np.ones(HIDDEN), layer=1)
        with pytest.raises(INVALID, match="would ignore the attention"):
            await client.generate("a", probes=pooled)
        assert not {"PutVectors", "Generate"} & {*peer.calls}

    async def test_a_server_that_would_read_one_place_of_several_is_not_asked(self, client, peer):
        several = residuum.Probe(np.ones(2 * HIDDEN), layer=[1, 2])
        with pytest.raises(INVALID, match="would read only the first place"):
            await client.generate("a", probes=several)
        assert not {"PutVectors", "Generate"} & {*peer.calls}

    async def test_the_first_prompt_of_many_tells(self, client, peer):
        peer.script.is_old = True
        with pytest.raises(INVALID, match="has no probes"):
            await client.generate_many(["a", "b", "c"], probes=ONE, progress=False, max_concurrency=1)
        assert "Generate" not in peer.calls

    async def test_a_server_says_what_its_probes_read(self, client):
        info = await client.info()
        assert info.probe_sites == ("resid_post", "mlp_out")
        assert info.limits["max_probe_outputs"] == 256
        proto = inference_pb2.GetModelInfoResponse(dtype=tensor_pb2.DATA_TYPE_FLOAT32)
        old = residuum.ModelInfo.from_proto(proto)
        assert (old.probe_sites, old.limits["max_probe_outputs"]) == ((), 0)

    async def test_missing_scores_are_the_servers_fault(self, client, peer):
        peer.script.scored_probes = 1
        with pytest.raises(residuum.ServerFault, match="inconsistent scores: of 1 probes instead of 2"):
            await client.generate("a", probes=[ONE, SEVERAL])

    @pytest.mark.parametrize(
        ("delta", "told"),
        [
            ({"token_ids": [1, 2], "scores": [[0.5] * 3]}, "3 numbers of the probe 'several' for 2 rows with 3 each"),
            ({"token_ids": [1], "scores": []}, "of 0 probes instead of 1"),
            ({"token_ids": [], "scores": [[0.5] * 3]}, "for 0 rows"),
            ({"prompt_scores": [[0.5] * 4]}, "4 numbers of the probe 'several' for 1 rows"),
        ],
    )
    def test_scores_of_another_number_are_the_servers_fault(self, delta, told):
        builder = ReplyBuilder([SEVERAL])
        builder.add(inference_pb2.GenerateResponse(started=inference_pb2.GenerationStarted(request_id="r")))
        message = inference_pb2.TokenDelta(token_ids=delta.get("token_ids"))
        for name in ("scores", "prompt_scores"):
            for values in delta.get(name, ()):
                getattr(message, name).add(values=values)
        with pytest.raises(residuum.ServerFault, match=told):
            builder.add(inference_pb2.GenerateResponse(delta=message))

    def test_a_delta_without_tokens_needs_no_scores(self):
        builder = ReplyBuilder([SEVERAL])
        builder.add(inference_pb2.GenerateResponse(started=inference_pb2.GenerationStarted(request_id="r")))
        for message in (inference_pb2.TokenDelta(text="a"), inference_pb2.TokenDelta(text="a")):
            delta = builder.add(inference_pb2.GenerateResponse(delta=message))
            assert delta.scores["several"].shape == (0, 3)
        message = inference_pb2.TokenDelta(token_ids=[1, 2], scores=[probe_pb2.ProbeScores(values=range(6))])
        delta = builder.add(inference_pb2.GenerateResponse(delta=message))
        np.testing.assert_array_equal(delta.scores["several"], [[0, 1, 2], [3, 4, 5]])
