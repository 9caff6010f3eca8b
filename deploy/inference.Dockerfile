# The inference service on a CPU: vLLM with torch's CPU build, and a small model.
#
#     docker build -f deploy/inference.Dockerfile -t residuum-inference .                      with SmolLM2-135M-Instruct
#     docker build -f deploy/inference.Dockerfile --build-arg MODEL=none -t residuum-inference .              without one
#
# The locks are for Python 3.11 on x86-64, so another base must have that version.
ARG BASE=python:3.11-slim
ARG MODEL=smollm2

# ------------------------------------------------------------------------- packages: rebuilt only if the locks change
FROM ${BASE} AS packages
ENV PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# libnuma1: vLLM's kernels link to it. g++: torch compiles the model's graph in the container.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
# PyPI does not have this build of torch. It comes from pip's configured sources, otherwise from PyTorch's index.
COPY requirements/torch.lock requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --requirement requirements/torch.lock \
    || pip install --no-deps --requirement requirements/torch.lock --index-url https://download.pytorch.org/whl/cpu
COPY requirements/cpu.lock requirements/
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps --requirement requirements/cpu.lock

# ------------------------------------------------------------------------------------------------- the model, or none
FROM packages AS model-smollm2
COPY scripts/fetch_model.py /tmp/
RUN RESIDUUM_CACHE=/tmp python /tmp/fetch_model.py && mv /tmp/models /models

FROM packages AS model-none
RUN mkdir /models

FROM model-${MODEL} AS model

# ---------------------------------------------------------------- the project's two wheels; nothing of this stage is kept
FROM ${BASE} AS wheel
ENV PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/dev.lock requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint requirements/dev.lock hatchling
COPY LICENSE README.md pyproject.toml ./
COPY client client
COPY inference_svc inference_svc
COPY server server
COPY store_svc store_svc
COPY svc_common svc_common
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheel . ./server

# ------------------------------------------------------------------------------------------------------------- the image
FROM packages
# An unprivileged user with its own home folder. A named volume that is mounted there gets this owner. vLLM keeps
# compiled graphs in it, so that the next start is faster, and Hugging Face its downloads.
RUN useradd --uid 10001 --no-create-home --home-dir /cache residuum \
    && install --directory --owner=residuum --mode=0700 /cache /run/residuum
COPY --from=model /models /models
RUN --mount=from=wheel,source=/wheel,target=/wheel pip install --no-cache-dir --no-deps /wheel/*.whl

USER residuum
WORKDIR /cache
# torch loads the libraries that it compiles, and /tmp may be mounted noexec.
ENV HOME=/cache TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor
# All interfaces of the container. The published ports decide from where it can be reached.
ENV RESIDUUM_LISTEN=0.0.0.0:50051 RESIDUUM_MODEL=/models/SmolLM2-135M-Instruct
EXPOSE 50051
# Docker stops the service with SIGTERM, which it handles cleanly. Set options as arguments or as RESIDUUM_... (--help).
ENTRYPOINT ["python", "-m", "inference_svc"]
