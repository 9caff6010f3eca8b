"""Captures and extractions as datasets of Ray Data, and extractions on a Ray cluster. It needs the extra `ray`.

`read_captures` and `read_extracted` read rows in parallel, as blocks of Arrow. `extract` sends the prompts of a dataset
to inference services, from actors on all nodes; `serve` starts such services for a job. On one machine, Ray starts
itself; `ray.init(address)` uses a cluster.

Example:
    >>> import ray, residuum.ray
    >>> prompts = ray.data.read_parquet("s3://bucket/prompts")
    >>> rows = residuum.ray.extract(
    ...     prompts, ["gpu-1:50051", "gpu-2:50051"], capture=residuum.Capture(layers=[12], positions="last_prompt")
    ... )
    >>> rows.write_parquet("s3://bucket/rows")
"""

from residuum.rpc.extras import install_extra

try:
    import ray.data  # noqa: F401 - to say what is missing
except ImportError:
    raise ImportError(f"residuum.ray needs the package ray: {install_extra('ray')}.") from None

from residuum.ray.captures import read_captures
from residuum.ray.extracting import extract
from residuum.ray.extractions import read_extracted
from residuum.ray.services import RayServices, serve

__all__ = ["RayServices", "extract", "read_captures", "read_extracted", "serve"]
