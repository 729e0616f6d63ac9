# A replica on CPUs: the supervisor, tritonserver from its wheel, and what builds CPU engines. From the repository root:
#   docker build -f cluster/docker/cpu.Dockerfile -t trident-cpu:0.1.0 .
# Engines are in a volume at /trident/engines. BASE_IMAGE: Python 3.10 to 3.12 with its shared library, glibc 2.35 or newer.
ARG BASE_IMAGE=python:3.12-slim-bookworm
FROM ${BASE_IMAGE} AS packages
COPY constraints.txt requirements/serve.txt /requirements/
RUN python -m venv /opt/trident \
    && /opt/trident/bin/pip install --no-cache-dir -c /requirements/constraints.txt -r /requirements/serve.txt \
    && /opt/trident/bin/pip install --no-cache-dir -c /requirements/constraints.txt --no-deps nvidia-pytriton

FROM ${BASE_IMAGE}
COPY --from=packages /opt/trident /opt/trident
ENV PATH=/opt/trident/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TRIDENT_HOST=0.0.0.0 \
    TRIDENT_STATE_DIR=/var/lib/trident
WORKDIR /trident
COPY pyproject.toml ./
COPY requirements/build.txt requirements/
COPY contract contract
COPY clients clients
COPY python_backends python_backends
COPY build build
COPY server server
COPY model_repository model_repository
# Volumes that are made from the image belong to its user.
RUN python -m compileall -q . && install -d -o 10001 -g 10001 engines .cache /var/lib/trident
USER 10001:10001
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
CMD ["python", "-m", "server"]
