import pytest
import torch

from bench.host.copies import HEAD, Run, Way, main, rows


def test_steps_are_compared_with_those_before_the_copies_in_the_same_process():
    found = [
        Run(way, "gpu", before, before * after, before * 1.01, wait)
        for way, after, before, wait in (
            (Way.NONE, 1.0, 2000.0, 20.0),
            (Way.COPY_ENGINE, 1.001, 2000.0, 300.0),
            (Way.KERNEL, 1.06, 2000.0, 60.0),
            (Way.NONE, 1.0, 1000.0, 20.0),
            (Way.COPY_ENGINE, 1.003, 1000.0, 100.0),
            (Way.KERNEL, 1.08, 1000.0, 60.0),
        )
    ]
    printed = rows(found)
    assert [row[0] for row in printed] == ["none", "copy engine", "kernel"]
    assert printed[2][1:3] == ("+7.0 %", "+6.0 %, +8.0 %")
    assert printed[1][1:] == ("+0.2 %", "+0.1 %, +0.3 %", "+1.0 %", "+1.0 %, +1.0 %", "200")
    assert all(len(row) == len(HEAD) for row in printed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="There is no GPU"):
        main(["--rounds", "1"])
