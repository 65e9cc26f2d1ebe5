# The GPU image:  docker build --tag tfgpu:gpu .
# The CPU image:  docker build --tag tfgpu:cpu --build-arg DEVICE=cpu .
ARG DEVICE=gpu

FROM python:3.11-slim-bookworm AS cpu-base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

# The CUDA libraries come with TensorFlow's wheels, which name the versions that fit; the base knows the driver.
FROM nvidia/cuda:12.6.3-base-ubuntu24.04 AS gpu-base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

FROM cpu-base AS cpu-build
ENV EXTRAS=arrow

FROM gpu-base AS gpu-build
ENV EXTRAS=arrow,gpu

FROM ${DEVICE}-build AS build
RUN python3 -m venv /opt/tfgpu
WORKDIR /build
COPY pyproject.toml setup.cfg README.md LICENSE ./
# What setup.cfg asks for, in a layer that a change of the code does not touch.
RUN /opt/tfgpu/bin/pip install --no-cache-dir ".[${EXTRAS}]"
COPY tfgpu tfgpu
RUN /opt/tfgpu/bin/pip install --no-cache-dir --no-deps --force-reinstall .

FROM ${DEVICE}-base
RUN groupadd --gid 10001 tfgpu \
    && useradd --uid 10001 --gid 10001 --create-home tfgpu \
    && install --directory --owner=tfgpu --group=tfgpu /work
COPY --from=build /opt/tfgpu /opt/tfgpu
ENV PATH=/opt/tfgpu/bin:$PATH \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /work
# As process 1 Python would not get a TERM that nothing handles; tini hands it on, and takes in what is left behind.
ENTRYPOINT ["tini", "--"]
CMD ["tfgpu", "doctor"]
