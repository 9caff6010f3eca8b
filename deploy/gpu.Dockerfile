# The inference service on NVIDIA GPUs: vLLM's own image and the packages of the service, without a model.
#
#     docker build -f deploy/gpu.Dockerfile -t residuum-inference-gpu .
#
# The build replaces no package of the base image. If the base's packages do not fit the service's (vLLM below 0.24,
# protobuf below 6.33.5), pip fails the build. The rows of version 0.32.0 were compared with those of transformers on
# GPUs (docs/models.md). Before you use another version, run `python -m bench.conformance` on a GPU.
ARG BASE=vllm/vllm-openai:v0.32.0

# ---------------------------------------------------------------- the project's two wheels; nothing of this stage is kept
FROM python:3.11-slim AS wheel
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
ENV PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1

# An unprivileged user with its own home folder. A named volume that is mounted there gets this owner. vLLM keeps
# compiled graphs in it, Triton its kernels, and Hugging Face its downloads.
RUN useradd --uid 10001 --no-create-home --home-dir /cache residuum \
    && install --directory --owner=residuum --mode=0700 /cache /run/residuum

# Packages of the base keep their versions. Missing packages get our pinned versions. If these do not fit the base (its
# protobuf decides which of gRPC's helpers fit), pip chooses versions that do. This layer comes before the sources, so it
# is rebuilt only if the base or the lock changes.
COPY requirements/store.lock /opt/residuum/
RUN --mount=type=cache,target=/root/.cache/pip \
    cd /opt/residuum \
    && python3 -m pip list --format=freeze --exclude-editable > base.txt \
    && awk -F '==' '{ name = tolower($1); gsub(/[_.]+/, "-", name) } \
                    NR == FNR { base[name]; next } /^#/ || name in base { next } { print }' \
        base.txt store.lock > pins.txt \
    && cut -d = -f 1 pins.txt > names.txt \
    && (python3 -m pip install --constraint base.txt --requirement pins.txt \
        || python3 -m pip install --constraint base.txt --requirement names.txt)

# Only the two wheels are left to install. pip fails here if packages do not fit together.
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    wheel=$(echo /wheel/residuum_server-*.whl) \
    && python3 -m pip install --no-cache-dir --no-index --find-links /wheel \
        --constraint /opt/residuum/base.txt "${wheel}[cuda]" \
    && python3 -m inference_svc --help > /dev/null

USER residuum
WORKDIR /cache
# torch loads the libraries that it compiles, and /tmp may be mounted noexec.
ENV HOME=/cache TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor
# All interfaces of the container. The published ports decide from where it can be reached.
ENV RESIDUUM_LISTEN=0.0.0.0:50051
EXPOSE 50051
# Docker stops the service with SIGTERM, which it handles cleanly. Set options as arguments or as RESIDUUM_... (--help).
ENTRYPOINT ["python3", "-m", "inference_svc"]
