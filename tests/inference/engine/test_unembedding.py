"""Unembed over gRPC, with a scripted engine. tests/conformance/test_lens.py compares its tokens with transformers."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from inference_svc.engine import unembedding
from residuum.rpc.errors import Failure, Reason
from residuum.v1 import capture_pb2, inference_pb2, sae_pb2
from residuum.wire.limits import MAX_UNEMBEDDED
from residuum.wire.sae import LAYER_NORM, NO_ACTIVATION, RELU
from tests.encoding_cases import encoder
from tests.inference.resources.test_sae_memory import engine, header_of, messages
from tests.inference.service_support import FACTS, HIDDEN, failure_of, running_service, until


def ask(rows, num_top=2, tokens=()):
    data = np.asarray(rows, dtype="<f4").tobytes()
    return inference_pb2.UnembedRequest(rows=data, num_top=num_top, token_ids=tokens)


async def test_each_row_gets_its_tokens():
    async with running_service() as service:
        answer = await service.stub.Unembed(ask([[0, 5, 1, 0], [9, 0, 0, 7]], tokens=[2, 0]))
    assert list(answer.logprobs.top_token_ids) == [1, 2, 0, 3]
    assert answer.logprobs.num_top == 2
    exact = np.array([5.0, 1.0]) - np.log(np.exp([0.0, 5.0, 1.0, 0.0]).sum())
    assert list(answer.logprobs.top[:2]) == pytest.approx(exact.tolist(), abs=1e-5)
    assert list(answer.logprobs.tokens) == pytest.approx([exact[1], -np.log1p(2 * np.exp(-9) + np.exp(-2))], abs=1e-5)
    assert list(answer.ranks) == [2, 1]
    assert [(item.token_id, item.text) for item in answer.texts] == [(0, "t0"), (1, "t1"), (2, "t2"), (3, "t3")]


async def test_rows_alone_are_enough():
    async with running_service() as service:
        answer = await service.stub.Unembed(ask([[1, 2, 3, 4]], num_top=1))
        nothing = await service.stub.Unembed(ask([[1, 2, 3, 4]], num_top=0, tokens=[3]))
    assert (list(answer.logprobs.top_token_ids), list(answer.logprobs.tokens), list(answer.ranks)) == ([3], [], [])
    assert (list(nothing.logprobs.top), list(nothing.ranks), list(nothing.texts)) == ([], [1], [])


async def test_many_rows_reach_the_engine_in_parts(monkeypatch):
    """Its steps go on between two parts, also if several calls are waiting."""
    monkeypatch.setattr(unembedding, "_LOGITS_AT_A_TIME", 3 * FACTS.vocab_size)
    rows = np.random.default_rng(0).standard_normal((8, HIDDEN))
    async with running_service() as service:
        answers = await asyncio.gather(*(service.stub.Unembed(ask(rows, 1, [5] * 8)) for _ in range(3)))
        assert service.engine.unembedded == [3, 3, 2] * 3
    assert all(list(answer.logprobs.top_token_ids) == rows.argmax(axis=1).tolist() for answer in answers)
    assert all(len(answer.ranks) == 8 for answer in answers)


async def test_only_so_many_calls_wait(monkeypatch):
    monkeypatch.setattr(unembedding, "_MAX_CALLS", 3)
    async with running_service() as service:
        unembed, go = service.engine.unembed, asyncio.Event()

        async def waiting(*arguments):
            await go.wait()
            return await unembed(*arguments)

        service.engine.unembed = waiting
        calls = [asyncio.ensure_future(wait_for(service.stub.Unembed(ask([[1, 2, 3, 4]])))) for _ in range(3)]
        await until(lambda: service.parts.unembedding.calls == 3)
        failure = await failure_of(service.stub.Unembed(ask([[1, 2, 3, 4]])))
        assert (failure.reason, failure.metadata["limit"]) == (Reason.ERROR_REASON_LIMIT_REACHED, "unembed")
        go.set()
        assert all(answer.logprobs.num_top == 2 for answer in await asyncio.gather(*calls))
        await service.stub.Unembed(ask([[1, 2, 3, 4]]))  # the others have ended


async def wait_for(call):
    return await call


@pytest.mark.parametrize(
    ("request_", "field", "told"),
    [
        (ask([[1, 2, 3]]), "rows", "12 bytes. Send one or more rows of 4 float32 elements, 16 bytes each"),
        (ask([]), "rows", "0 bytes"),
        (ask([[1, 2, np.nan, 4]]), "rows", "infinity or NaN"),
        (ask([[1, 2, np.inf, 4]]), "rows", "infinity or NaN"),
        (ask([[0] * 4], num_top=101), "num_top", "only 100 tokens"),
        (ask([[0] * 4], num_top=(1 << 32) - 1), "num_top", "only 100 tokens"),
        (ask(np.zeros((MAX_UNEMBEDDED // 2, 4)), num_top=2), "rows", f"at most {MAX_UNEMBEDDED // 3} rows"),
        (ask([[0] * 4], tokens=[1, 2]), "token_ids", "2 tokens for 1 rows"),
        (ask([[0] * 4, [1] * 4], tokens=[1]), "token_ids", "1 tokens for 2 rows"),
        (ask([[0] * 4], tokens=[100]), "token_ids", "100 is not in the vocabulary of 100"),
    ],
)
async def test_bad_requests_are_refused(request_, field, told):
    async with running_service() as service:
        failure = await failure_of(service.stub.Unembed(request_))
        assert service.engine.unembedded == []
    assert (failure.reason, failure.code) == (Reason.ERROR_REASON_INVALID_FIELD, grpc.StatusCode.INVALID_ARGUMENT)
    assert failure.metadata["field"] == field
    assert told in failure.message


MAP_BYTES = 4 * HIDDEN * (HIDDEN + 1)


def lens_map(seed=0, features=HIDDEN, **options):
    return encoder(features, HIDDEN, seed=seed, **{"activation": NO_ACTIVATION, **options})


def ask_mapped(rows, one, *, is_added=False, **options):
    request = ask(rows, **options)
    request.map.CopyFrom(inference_pb2.LensMap(digest=header_of(one).digest, is_added=is_added))
    return request


@pytest.mark.parametrize("is_added", [False, True])
async def test_a_map_changes_rows_first(is_added):
    one, rows = lens_map(), np.random.default_rng(1).standard_normal((5, HIDDEN)).astype(np.float32)
    expected = rows * is_added + rows.astype(np.float64) @ one.weights.T + one.biases
    async with running_service(engine=engine(MAP_BYTES)) as service:
        await service.stub.PutSAE(messages(one))
        answer = await service.stub.Unembed(ask_mapped(rows, one, is_added=is_added, num_top=1, tokens=[2] * 5))
        plain = await service.stub.Unembed(ask(expected.astype(np.float32), num_top=1, tokens=[2] * 5))
    assert list(answer.logprobs.top_token_ids) == expected.argmax(axis=1).tolist()
    assert list(answer.logprobs.tokens) == pytest.approx(list(plain.logprobs.tokens), abs=1e-5)


async def test_a_map_is_kept_while_a_call_needs_it_and_dropped_later():
    """Its memory is that of encoders, and counted with them."""
    one, other = lens_map(), lens_map(1)
    async with running_service(engine=engine(MAP_BYTES)) as service:
        assert (await service.stub.PutSAE(messages(one))).free_bytes == MAP_BYTES
        unembed, go, started = service.engine.unembed, asyncio.Event(), asyncio.Event()

        async def waiting(*arguments):
            started.set()
            await go.wait()
            return await unembed(*arguments)

        service.engine.unembed = waiting
        call = asyncio.ensure_future(wait_for(service.stub.Unembed(ask_mapped([[1, 2, 3, 4]], one))))
        await started.wait()
        failure = await failure_of(service.stub.PutSAE(messages(other)))
        assert (failure.reason_name, failure.metadata) == ("LIMIT_REACHED", {"limit": "sae_bytes"})
        go.set()
        await call
        assert not (await service.stub.PutSAE(messages(other))).existed
        failure = await failure_of(service.stub.Unembed(ask_mapped([[1, 2, 3, 4]], one)))
        assert (failure.reason_name, failure.metadata) == ("MISSING_SAE", {"digest": header_of(one).digest.hex()})


async def test_a_map_of_another_tenant_does_not_exist():
    one = lens_map()
    async with running_service(engine=engine(MAP_BYTES)) as service:
        await service.stub.PutSAE(messages(one))  # of the default tenant
        with pytest.raises(Failure, match="is not on the server"):
            await service.parts.unembedding.answer(ask_mapped([[1, 2, 3, 4]], one), "alice")


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (lens_map(activation=RELU), "has an activation or a normalization"),
        (lens_map(norm=LAYER_NORM), "has an activation or a normalization"),
        (lens_map(features=HIDDEN + 1), "rows of 4 elements into rows of 5, but the residual stream has 4"),
    ],
)
async def test_encoders_that_are_no_maps_are_refused(one, told):
    async with running_service(engine=engine()) as service:
        await service.stub.PutSAE(messages(one))
        failure = await failure_of(service.stub.Unembed(ask_mapped([[1, 2, 3, 4]], one)))
        assert service.engine.unembedded == []
    assert (failure.reason_name, failure.metadata, told in failure.message) == ("INVALID_FIELD", {"field": "map"}, True)


async def test_a_map_that_overflows_is_reported():
    one = lens_map()
    async with running_service(engine=engine()) as service:
        await service.stub.PutSAE(messages(one))
        failure = await failure_of(service.stub.Unembed(ask_mapped([[3e38] * 4, [0] * 4], one, is_added=True)))
        assert service.engine.unembedded == []
    assert (failure.reason_name, "infinity or NaN" in failure.message) == ("INVALID_FIELD", True)


async def test_captures_refuse_a_map():
    one = lens_map()
    features = sae_pb2.SAEFeatures(digest=header_of(one).digest, features=HIDDEN)
    spec = capture_pb2.CaptureSpec(encoding_options=capture_pb2.EncodingOptions(sae=features))
    async with running_service(engine=engine()) as service:
        await service.stub.PutSAE(messages(one))
        with pytest.raises(Failure, match="has no activation: it is the map of a lens"):
            service.parts.saes.check("", spec, [HIDDEN])
