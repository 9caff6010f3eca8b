# The inference service on NVIDIA GPUs: vLLM's own image, and beside it what the service needs. No model is inside.
#
#     docker build -f deploy/gpu.Dockerfile -t residuum-inference-gpu .
#
# Nothing that the base has is replaced: vLLM stays as it was released. A base whose packages do not go with the service's
# (vLLM below 0.24, protobuf below 6.33.5) ends the build with pip's own words. 0.24.0 is the version whose rows were
# compared with transformers' on GPUs (README.md); for another one, run `python -m bench.conformance` there first.
ARG BASE=vllm/vllm-openai:v0.24.0

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

# An ordinary user, and a home of its own: a named volume that is mounted there starts with this owner. vLLM keeps
# compiled graphs in it, Triton its kernels, and Hugging Face what it downloads.
RUN useradd --uid 10001 --no-create-home --home-dir /cache residuum \
    && install --directory --owner=residuum --mode=0700 /cache /run/residuum

# What the base has stays, to the version. What it lacks comes by our own pins; where these do not go with the base (its
# protobuf decides which of gRPC's helpers do), by those that do. Before the sources: this layer changes with the base and
# the lock alone.
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

# Nothing is left to install but the two wheels; what would not go together is refused here.
RUN --mount=from=wheel,source=/wheel,target=/wheel \
    wheel=$(echo /wheel/residuum_server-*.whl) \
    && python3 -m pip install --no-cache-dir --no-index --find-links /wheel \
        --constraint /opt/residuum/base.txt "${wheel}[cuda]" \
    && python3 -m inference_svc --help > /dev/null

USER residuum
WORKDIR /cache
# torch loads what it compiles, and /tmp may be mounted so that nothing in it can be run.
ENV HOME=/cache TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor
# All interfaces of the container; which of them the world can reach is decided where its ports are published.
ENV RESIDUUM_LISTEN=0.0.0.0:50051
EXPOSE 50051
# SIGTERM, Docker's own, is what the service stops cleanly on. Further settings: as arguments, or RESIDUUM_... (--help).
ENTRYPOINT ["python3", "-m", "inference_svc"]
