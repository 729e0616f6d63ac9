# The gateway, and the external scaler for KEDA. From the repository root:
#   docker build -f cluster/docker/gateway.Dockerfile -t trident-gateway:0.1.0 .
# Give BASE_IMAGE with your registry in front where yours is not the default one.
ARG BASE_IMAGE=python:3.12-slim-bookworm
FROM ${BASE_IMAGE} AS packages
COPY constraints.txt requirements/gateway.txt /requirements/
RUN python -m venv /opt/trident \
    && /opt/trident/bin/pip install --no-cache-dir -c /requirements/constraints.txt -r /requirements/gateway.txt \
    && /opt/trident/bin/pip uninstall --quiet --yes pip

FROM ${BASE_IMAGE}
COPY --from=packages /opt/trident /opt/trident
ENV PATH=/opt/trident/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TRIDENT_GATEWAY_HOST=0.0.0.0 \
    TRIDENT_GATEWAY_MONITORING_HOST=0.0.0.0
WORKDIR /trident
COPY contract contract
COPY clients clients
COPY python_backends python_backends
COPY gateway gateway
COPY cluster cluster
RUN python -m compileall -q .
USER 10001:10001
EXPOSE 9000 9001 9002
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9002/health/live', timeout=4)"]
CMD ["python", "-m", "gateway"]
