# A server on an NVIDIA GPU; CUDA's libraries come with JAX, the driver from the host. From the
# repository's root:
#   docker build -f docker/cuda.Dockerfile -t medusa-jax:cuda .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v /models:/models:ro medusa-jax:cuda \
#       --model /models/vicuna --drafter /models/vicuna-heads
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY medusa_jax medusa_jax
RUN pip install --no-cache-dir '.[serve,cuda,gguf]'

RUN useradd --create-home medusa
USER medusa
WORKDIR /home/medusa
# Compiled programs: a volume here keeps them between containers.
ENV XDG_CACHE_HOME=/home/medusa/cache XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
RUN mkdir cache
VOLUME /home/medusa/cache
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD \
    ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["medusa-serve", "--host", "0.0.0.0"]
