# A replica with TensorRT-LLM 1.2.1 on NVIDIA's image, whose tritonserver, Python and tensorrt_llm it uses. From the
# repository root, with the registry of NVIDIA's image in front of its name:
#   docker build -f cluster/docker/trtllm.Dockerfile --build-arg BASE_IMAGE=<registry>/tritonserver:26.07-trtllm-python-py3 \
#       -t trident-trtllm:0.1.0 .
# Engines are in a volume at /trident/engines.
ARG BASE_IMAGE=tritonserver:26.07-trtllm-python-py3
FROM ${BASE_IMAGE}
USER 0
COPY constraints.txt requirements/serve.txt /requirements/
# Our pinned packages come first; tensorrt_llm and xgrammar are found in the image's environment behind them.
RUN image=/opt/venv-tritonserver \
    && "$image/bin/python" -m venv --without-pip /opt/trident \
    && sed '/^openvino/d' /requirements/serve.txt > /requirements/trtllm.txt \
    && "$image/bin/python" -m pip --python /opt/trident/bin/python install --no-cache-dir \
        -c /requirements/constraints.txt -r /requirements/trtllm.txt \
    && /opt/trident/bin/python -c "import site, sys; folder, = site.getsitepackages(); \
open(folder + '/image.pth', 'w').write(folder.replace('/opt/trident', sys.argv[1]))" "$image"
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
RUN python -m compileall -q . && install -d -o 10001 -g 10001 engines .cache /var/lib/trident
USER 10001:10001
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/ready', timeout=4)"]
# NVIDIA's entry point prints a banner and starts what follows it; the supervisor must be process 1 to get SIGTERM.
ENTRYPOINT []
CMD ["python", "-m", "server"]
