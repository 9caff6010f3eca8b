# Ray's own image with the client: for deploy/kubernetes/ray.
#
#     docker build -f deploy/ray.Dockerfile -t residuum-ray .
#
# The version of Ray is that of requirements/ray.lock.
ARG BASE=rayproject/ray:2.60.0-py311

FROM ${BASE} AS wheel
WORKDIR /tmp/src
COPY --chown=ray requirements/dev.lock requirements/
RUN pip install --no-cache-dir --constraint requirements/dev.lock hatchling
COPY --chown=ray LICENSE README.md pyproject.toml ./
COPY --chown=ray client client
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel .

FROM ${BASE}
COPY requirements/ray.lock /tmp/requirements/
RUN pip install --no-cache-dir --no-deps --requirement /tmp/requirements/ray.lock
RUN --mount=from=wheel,source=/tmp/wheel,target=/tmp/wheel pip install --no-cache-dir --no-deps /tmp/wheel/*.whl
