# Two images, both with the compiled module. The last stage is the default: name server and broker, without Java, shell or package manager.
#   docker build --tag rocketlet .
#   docker build --tag rocketlet-spark --target spark .      PySpark with Java, and the demo

FROM python:3.11-slim-bookworm AS wheel
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel /src

FROM python:3.11-slim-bookworm AS java
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*

FROM java AS spark
COPY --from=wheel /wheel /wheel
RUN python -m pip install --no-cache-dir "$(echo /wheel/*.whl)[spark,demo]" && rm -r /wheel
RUN useradd --create-home --uid 10001 rocketlet && mkdir /data && chown rocketlet /data
USER rocketlet
WORKDIR /data
VOLUME /data
ENV PYTHONUNBUFFERED=1 PYSPARK_PYTHON=python3

FROM python:3.11-slim-bookworm AS files
COPY --from=wheel /wheel /wheel
RUN python -m venv /opt/rocketlet \
    && /opt/rocketlet/bin/python -m pip install --no-cache-dir "$(echo /wheel/*.whl)[broker,acl,console,control]"
COPY docker/minimal_root.py /src/docker/
RUN /opt/rocketlet/bin/python /src/docker/minimal_root.py /minimal && mkdir /data

FROM scratch
COPY --from=files /minimal /
COPY --from=files --chown=10001:10001 /data /data
USER 10001:10001
WORKDIR /data
VOLUME /data
# --control-port and --console-port are off unless ROCKETLET_CONTROL_PORT or ROCKETLET_CONSOLE_PORT is set; then they are reached from outside as the broker is
ENV PATH=/opt/rocketlet/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/data ROCKETLET_CONTROL_HOST=0.0.0.0 ROCKETLET_CONSOLE_HOST=0.0.0.0
EXPOSE 9876 19876 10911 9880 9890
HEALTHCHECK --interval=2s --timeout=20s --start-period=10s --retries=5 CMD ["python3", "-ISc", \
    "import os, socket; socket.create_connection(('127.0.0.1', int(os.environ.get('ROCKETLET_PORT', 9876)))).close()"]
# A container is reached from outside only if it listens on all interfaces. Neighbours are told its own address, clients that
# come through a published port are told localhost and that port, or ROCKETLET_ADVERTISE_EXTERNAL.
CMD ["rocketlet", "start", "--host", "0.0.0.0", "--data", "/data", "--advertise", "auto"]
