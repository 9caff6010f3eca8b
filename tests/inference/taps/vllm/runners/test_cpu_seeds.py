"""Seeds on a CPU: the workaround on a fake runner with real generators."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from inference_svc.taps.vllm.missing_names import IncompatibleEngineError
from inference_svc.taps.vllm.runners.cpu_seeds import attach


class Runner:
    """Like vLLM, it draws from the generator of each row, and then rewinds the generators of discarded rows."""

    def __init__(self):
        self.input_batch = SimpleNamespace(generators={})
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=bool))

    def sample_tokens(self, grammar_output):
        generators = self.input_batch.generators
        drawn = {row: torch.randint(0, 2**31, (1,), generator=made).item() for row, made in generators.items()}
        for row in np.nonzero(self.discard_request_mask.np)[0]:
            generator = generators.get(int(row))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return grammar_output, drawn


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def expected(seed, count):
    generator = seeded(seed)
    return [torch.randint(0, 2**31, (1,), generator=generator).item() for _ in range(count)]


def test_vllm_alone_cannot_discard_a_seeded_token():
    """If this test fails, CPU generators can be rewound, and cpu_seeds is no longer needed."""
    runner = Runner()
    runner.input_batch.generators[0] = seeded(1)
    runner.discard_request_mask.np[0] = True
    with pytest.raises(RuntimeError, match="does not use offset"):
        runner.sample_tokens(None)


def test_rows_that_are_discarded_draw_nothing():
    runner = Runner()
    attach(runner, "1.2.3")
    generators = runner.input_batch.generators
    generators |= {0: seeded(10), 2: seeded(12), 3: seeded(13)}
    drawn = {row: [] for row in generators}
    for discarded in [(1, 2, 3), (2,), ()]:  # row 1 has no seed
        runner.discard_request_mask.np[:] = False
        runner.discard_request_mask.np[list(discarded)] = True
        passed, step = runner.sample_tokens("grammar")
        assert passed == "grammar"
        assert set(step) == {0, 2, 3} - set(discarded)
        assert set(generators) == {0, 2, 3}
        for row, value in step.items():
            drawn[row].append(value)
    assert drawn == {0: expected(10, 3), 2: expected(12, 1), 3: expected(13, 2)}


def test_a_replaced_batch_is_handled():
    runner = Runner()
    attach(runner, "1.2.3")
    runner.input_batch = SimpleNamespace(generators={1: seeded(5)})
    runner.discard_request_mask.np[1] = True
    assert runner.sample_tokens(None) == (None, {})
    runner.discard_request_mask.np[1] = False
    assert runner.sample_tokens(None) == (None, {1: expected(5, 1)[0]})


def test_generators_are_put_back_after_a_failure():
    runner = Runner()
    runner.sample_tokens = lambda grammar_output: 1 / 0
    attach(runner, "1.2.3")
    generator = runner.input_batch.generators[4] = seeded(1)
    runner.discard_request_mask.np[4] = True
    with pytest.raises(ZeroDivisionError):
        runner.sample_tokens(None)
    assert runner.input_batch.generators == {4: generator}


def without(name):
    runner = Runner()
    owner, _, last = name.rpartition(".")
    delattr(getattr(runner, owner), last)
    return runner


@pytest.mark.parametrize(
    ("runner", "missing"),
    [
        (without("input_batch.generators"), "input_batch.generators"),
        (without("discard_request_mask.np"), "discard_request_mask.np"),
        (
            SimpleNamespace(),
            r"sample_tokens\(\) and no input_batch.generators and no discard_request_mask.np",
        ),
    ],
    ids=["generators", "mask", "everything"],
)
def test_a_missing_name_is_reported_with_the_version(runner, missing):
    with pytest.raises(IncompatibleEngineError, match=rf"vLLM 9\.8\.7: {type(runner).__name__} has no {missing},"):
        attach(runner, "9.8.7")
