# Images of the worker. The build targets are cpu and cuda:
#
#     docker build --file deploy/docker/worker.Dockerfile --target cpu --tag stepwell/worker .
#
# BASE is Debian with Python 3.11 to 3.13, apt, TLS authorities and libstdc++6. It also needs pip,
# unless deploy/docker/wheelhouse has pip's wheel, and Python's headers for the target cuda.
# docs/deploying.md explains how to build without the package index.
ARG BASE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

# hadolint ignore=DL3006
FROM ${BASE} AS python
# Debian's minimal Python package has no command python3.
RUN command -v python3 || ln -s "$(ls /usr/bin/python3.[0-9]*)" /usr/bin/python3
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

# Compiles the kernels for each kind of processor, so that the image needs no compiler.
FROM python AS kernels
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY services/worker/backends/native/cpp services/worker/backends/native/cpp
COPY services/worker/backends/native/build.py services/worker/backends/native/cached_library.py \
     services/worker/backends/native/prebuilt.py services/worker/backends/native/tiles.py \
     services/worker/backends/native/
COPY services/common/process/processors.py services/common/process/
RUN python3 -m services.worker.backends.native.prebuilt /kernels

FROM python AS packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY pyproject.toml requirements.lock deploy/docker/packages.py ./

FROM packages AS cpu-site
# The index of torch's builds without CUDA. The builds with CUDA in PyPI are 4 GB larger.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=deploy/docker/wheelhouse,target=/wheelhouse \
    --mount=type=cache,target=/root/.cache/pip \
    PIP_EXTRA_INDEX_URL=${TORCH_INDEX} python3 packages.py install /site services worker tls \
    && rm -rf /site/torch/include /site/torch/share /site/torch/lib/*.a \
    && python3 -m compileall -q -x /torch/testing/ --invalidation-mode unchecked-hash /site

FROM packages AS cuda-site
RUN --mount=type=bind,source=deploy/docker/wheelhouse,target=/wheelhouse \
    --mount=type=cache,target=/root/.cache/pip \
    python3 packages.py install /site services worker gpu tls \
    && python3 -m compileall -q -x /torch/testing/ --invalidation-mode unchecked-hash /site

# The wheel of Stepwell, with the code that is generated from protos/.
FROM packages AS code
RUN --mount=type=bind,source=deploy/docker/wheelhouse,target=/wheelhouse \
    --mount=type=cache,target=/root/.cache/pip \
    python3 packages.py install /tools build
ENV PYTHONPATH=/tools
COPY protos protos
RUN mkdir gen \
    && find protos -name '*.proto' -exec python3 -m grpc_tools.protoc \
       -I protos --python_out=gen --grpc_python_out=gen {} +
COPY README.md LICENSE ./
COPY services services
# services/gateway/options/viewer/rules is a link to this directory.
COPY deploy/prometheus/rules deploy/prometheus/rules
RUN python3 -m hatchling build --target wheel \
    && python3 -m zipfile -e dist/*.whl /code \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /code
COPY --from=kernels /kernels /code/services/worker/backends/native/prebuilt

FROM python AS service
LABEL org.opencontainers.image.title="Stepwell worker" \
      org.opencontainers.image.description="Runs a model for Stepwell" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PYTHONPATH=/site HOME=/tmp STEPWELL_WORKER_ADDRESS=0.0.0.0:9003 \
    STEPWELL_WORKER_HEALTH_FILE=/tmp/health
COPY deploy/docker/probe.sh /
WORKDIR /
EXPOSE 9003
# Loading a large model takes minutes. Failed probes in this start period do not count.
HEALTHCHECK --interval=15s --timeout=60s --start-period=600s --retries=3 CMD ["sh", "/probe.sh"]
ENTRYPOINT ["python3", "-m", "services.worker"]

FROM service AS cuda
# Triton uses a C compiler for the code that launches its kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc=4:12.2.0-3 libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-site /site /site
COPY --from=code /code /site
# The GPUs and capabilities that the NVIDIA Container Toolkit adds to the container, and the volume
# for compiled kernels.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    STEPWELL_WORKER_DEVICE=cuda TRITON_CACHE_DIR=/cache/triton
RUN mkdir /cache && chown 10001:10001 /cache
VOLUME /cache
USER 10001:10001

FROM service AS cpu
COPY --from=cpu-site /site /site
COPY --from=code /code /site
ENV STEPWELL_WORKER_DEVICE=cpu
USER 10001:10001
