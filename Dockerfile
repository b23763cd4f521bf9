FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rocketlet
COPY pyproject.toml README.md ./
COPY broker broker
COPY client client
COPY demo demo
COPY protocol protocol
COPY spark spark
RUN python -m pip install --no-cache-dir '.[spark,demo]'

RUN useradd --create-home --uid 10001 rocketlet && mkdir /data && chown rocketlet /data
USER rocketlet
WORKDIR /data
VOLUME /data
ENV PYTHONUNBUFFERED=1 PYSPARK_PYTHON=python3
EXPOSE 9876 19876 10911
CMD ["rocketlet", "start", "--data", "/data"]
