"""The command `residuum vllm-serve` (no engine)."""

from __future__ import annotations

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from inference_svc.vllm_serve.command import cpu_memory, main


def test_on_a_cpu_vllm_gets_the_kv_cache_of_residuum_serve():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    flags = cpu_memory(["model", "--max-model-len", "2048"], {})
    assert parser.parse_args(flags).kv_cache_memory_bytes == 2 << 30


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--gpu-memory-utilization", "0.25"], {}),
        (["--gpu_memory_utilization=0.25"], {}),
        (["--kv-cache-memory-bytes=1G"], {}),
        (["--config", "file.yaml"], {}),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "4"}),
    ],
)
def test_a_size_that_the_user_chose_is_kept(arguments, environment):
    assert cpu_memory(["model", *arguments], environment) == []


def test_the_worker_class_cannot_be_chosen(capsys):
    assert main(["model", "--worker-cls=other"]) == 2
    assert "vllm-serve sets --worker-cls itself" in capsys.readouterr().err
