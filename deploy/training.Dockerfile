# An image for jobs: torch, regrow and its commands on clusters; nobody's root. Add a script to it, or mount one.
#   docker build -f deploy/training.Dockerfile -t train .                                         for NVIDIA's GPUs
#   docker build ... --build-arg TORCH_FROM="..." -t train-cpu .                                  for CPUs
# CUDA's libraries come with torch's usual wheels; the driver is the host's, which NVIDIA's container toolkit brings in.
# TORCH_FROM: options of pip's for torch alone, as pytorch.org names them for CPUs.
ARG BASE=python:3.12-slim
FROM ${BASE} AS build
RUN python -m venv /opt/build
WORKDIR /src
COPY packages packages
COPY examples examples
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./packages/regrow ./packages/regrow-clusters ./packages/regrow-guests

FROM ${BASE}
ARG TORCH=torch==2.13.0
ARG TORCH_FROM=
# A layer of its own, so that another version of regrow leaves it as it is.
RUN python -m venv /opt/regrow && /opt/regrow/bin/pip install --no-cache-dir $TORCH_FROM "$TORCH"
COPY --from=build /wheels /opt/wheels
RUN /opt/regrow/bin/pip install --no-cache-dir /opt/wheels/*.whl nvidia-ml-py
ENV PATH=/opt/regrow/bin:$PATH PYTHONDONTWRITEBYTECODE=1 REGROW_HOME=/tmp/regrow
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
ENTRYPOINT []
CMD ["regrow", "demo"]
