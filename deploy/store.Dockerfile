# The store service: gRPC, LMDB and numpy. No torch, no vLLM.
#
#     docker build -f deploy/store.Dockerfile -t residuum-store .
#
# The locks are for Python 3.11, so another base must have that version.
ARG BASE=python:3.11-slim

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
FROM ${BASE}
ENV PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# An unprivileged user with its own folder. A named volume that is mounted there gets this owner.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent residuum \
    && install --directory --owner=residuum --mode=0700 /data /run/residuum

# This layer comes before the sources, so it is rebuilt only if the lock changes.
COPY requirements/store.lock requirements/
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps --requirement requirements/store.lock

RUN --mount=from=wheel,source=/wheel,target=/wheel pip install --no-cache-dir --no-deps /wheel/*.whl

USER residuum
WORKDIR /data
# All interfaces of the container. The published ports decide from where it can be reached.
ENV RESIDUUM_LISTEN=0.0.0.0:50052 RESIDUUM_PATH=/data
EXPOSE 50052
# Docker stops the service with SIGTERM, which it handles cleanly. Set options as arguments or as RESIDUUM_... (--help).
ENTRYPOINT ["python", "-m", "store_svc"]
