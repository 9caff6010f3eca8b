# Ray's own image with the client: for deploy/kubernetes/ray.
#
#     docker build -f deploy/ray.Dockerfile -t residuum-ray .
#
# The same with the services for NVIDIA GPUs, in /opt/residuum: for nodes on which jobs start services (serve.yaml).
#
#     docker build -f deploy/ray.Dockerfile --target services --build-arg BASE=rayproject/ray:2.60.0-py311-gpu \
#         -t residuum-ray-services .
#
# The version of Ray is that of requirements/ray.lock.
ARG BASE=rayproject/ray:2.60.0-py311

FROM ${BASE} AS wheel
WORKDIR /tmp/src
COPY --chown=ray requirements/dev.lock requirements/
RUN pip install --no-cache-dir --constraint requirements/dev.lock hatchling
COPY --chown=ray LICENSE README.md pyproject.toml ./
COPY --chown=ray client client
COPY --chown=ray inference_svc inference_svc
COPY --chown=ray server server
COPY --chown=ray store_svc store_svc
COPY --chown=ray svc_common svc_common
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . ./server

FROM ${BASE} AS client
COPY requirements/ray.lock /tmp/requirements/
RUN pip install --no-cache-dir --no-deps --requirement /tmp/requirements/ray.lock
RUN --mount=from=wheel,source=/tmp/wheel,target=/tmp/wheel \
    pip install --no-cache-dir --no-deps /tmp/wheel/residuum-*.whl

# The services have an environment of their own: vLLM and Ray need not agree on versions.
FROM client AS services
ARG VLLM=0.32.0
RUN --mount=from=wheel,source=/tmp/wheel,target=/tmp/wheel \
    sudo install --directory --owner=ray /opt/residuum \
    && python -m venv /opt/residuum \
    && server=$(echo /tmp/wheel/residuum_server-*.whl) \
    && /opt/residuum/bin/pip install --no-cache-dir --find-links /tmp/wheel "${server}[cuda,store]" "vllm==${VLLM}" \
    && /opt/residuum/bin/python -m inference_svc --help > /dev/null

FROM client
