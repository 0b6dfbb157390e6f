# A server on a CPU. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t medusa-jax .
#   docker run -p 127.0.0.1:8000:8000 -e MEDUSA_API_KEY=secret medusa-jax
FROM python:3.12-slim

# The compiler makes the kernels for the processor that the container runs on, at first use.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY medusa_jax medusa_jax
RUN pip install --no-cache-dir '.[serve,gguf]'

RUN useradd --create-home medusa
USER medusa
WORKDIR /home/medusa
# Compiled programs and kernels: a volume here keeps them between containers.
ENV JAX_PLATFORMS=cpu XDG_CACHE_HOME=/home/medusa/cache
RUN mkdir cache
VOLUME /home/medusa/cache
EXPOSE 8000
HEALTHCHECK --start-period=300s CMD \
    ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["medusa-serve", "--host", "0.0.0.0"]
