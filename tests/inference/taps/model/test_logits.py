"""The logits check, on a model of a few lines: do captured rows explain the model's own logits?"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inference_svc.taps.model.logits_check import LogitsCheck, ModelCall, calls_seen

WIDTH, VOCABULARY, TOKENS = 16, 40, 4


class Layer(nn.Module):
    def __init__(self, *, pair):
        super().__init__()
        self.linear, self.pair = nn.Linear(WIDTH, WIDTH), pair

    def forward(self, hidden):
        added = self.linear(hidden)
        return (added, hidden) if self.pair else hidden + added


class Model(nn.Module):
    """A layer, a norm and an unembedding, called as vLLM calls its models. It reshapes as gpt_bigcode does."""

    def __init__(self, *, pair):
        super().__init__()
        self.layer, self.norm = Layer(pair=pair), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden):
        output = self.layer(hidden)
        return self.norm((sum(output) if self.layer.pair else output).view(hidden.shape))

    def compute_logits(self, hidden_states):
        return self.head(hidden_states)


def run(call_model):
    call_model()


@pytest.fixture(params=[False, True], ids=["one tensor", "two tensors"])
def served(request):
    """A check that has recorded two served tokens, the rows that predicted them, and the tokens."""
    torch.manual_seed(0)
    model = Model(pair=request.param)
    with torch.inference_mode():
        check = LogitsCheck(model, [model.layer])
        check.remember(lambda: model(torch.zeros(TOKENS, WIDTH)))
        model.compute_logits(torch.randn(1, WIDTH))  # not recorded
        check.listen()
        rows, tokens = [], []
        for embedding in torch.randn(2, 1, WIDTH):
            output = model.layer(embedding)
            rows.append((sum(output) if model.layer.pair else output)[0])
            tokens.append(int(model.compute_logits(model(embedding)).argmax()))
        yield check, torch.stack(rows), tokens


def test_the_stream_explains_its_tokens(served):
    check, rows, tokens = served
    explanation = check.explain(rows, tokens, run)
    assert explanation.hidden_error < 1e-5
    assert explanation.token_gap < 1e-5


@pytest.mark.parametrize("count", [1, TOKENS - 1, TOKENS, TOKENS + 1, 5 * TOKENS - 1])
def test_any_number_of_rows_is_unembedded(served, count):
    check, _, _ = served
    rows = torch.randn(count, WIDTH)
    model = check._model
    torch.testing.assert_close(check.logits(rows, run), model.head(model.norm(rows)))


def test_no_layer_computes_anything(served):
    """Experts would wait for replicas that do not take part."""
    check, rows, tokens = served
    calls = []
    check._model.layer.linear.register_forward_hook(lambda *call: calls.append(call))
    check.explain(rows, tokens, run)
    assert not calls
    check._model(torch.zeros(TOKENS, WIDTH))
    assert calls, "the layer computes again"


def test_wrong_rows_do_not_explain_the_tokens(served):
    check, rows, tokens = served
    assert check.explain(rows + 0.3 * torch.randn_like(rows), tokens, run).hidden_error > 0.05


def test_rows_of_another_position_do_not_explain_the_tokens(served):
    check, rows, tokens = served
    assert check.explain(rows.flip(0), tokens, run).hidden_error > 0.05


def test_other_tokens_are_not_explained(served):
    check, rows, tokens = served
    assert check.explain(rows, [(token + 1) % VOCABULARY for token in tokens], run).token_gap > 0.05


def test_nan_logits_explain_nothing(served):
    check, rows, tokens = served
    explanation = check.explain(torch.full_like(rows, float("nan")), tokens, run)
    assert not explanation.hidden_error < 0.05


def test_missing_logits_are_reported(served):
    check, rows, tokens = served
    check.listen()
    with pytest.raises(LookupError, match="Model computed logits for 0 of 2 tokens by compute_logits"):
        check.explain(rows, tokens, run)


class CompiledModel(Model):
    """Calls `forward` past its hooks, as vLLM's decorator for compilation does."""

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [Model, CompiledModel])
def test_the_calls_of_a_model_are_seen_whether_or_not_it_runs_hooks(kind):
    model, hidden, seen = kind(pair=False), torch.ones(2, WIDTH), []
    with calls_seen(model, seen.append):
        model(hidden=hidden)
    model(hidden)
    assert seen == [ModelCall((), {"hidden": hidden})]
    assert "forward" not in vars(model)
