#!/usr/bin/env bash
# Builds the images, checks that the broker's is small, starts the compose file, waits until rows arrive in Spark's output and until a client on this host is
# served through the published ports, looks at the console, scales the consumers, runs the Spark job on a cluster of which a worker is killed, and
# takes everything down. Needs a Docker engine.
set -euo pipefail
cd "$(dirname "$0")/.."
compose() { if docker compose version >/dev/null 2>&1; then docker compose "$@"; else docker-compose "$@"; fi; }
python=${PYTHON:-.venv/bin/python}
trap 'compose logs --tail=20 || true; compose down --volumes || true' EXIT

compose config --quiet
compose build
size=$(docker image inspect --format '{{.Size}}' rocketlet)
[ "$size" -lt 100000000 ] || { echo "FAULT: the broker's image has $size bytes, 100 MB are allowed"; exit 1; }
echo "the broker's image has $((size / 1000000)) MB"
compose up -d
flights() { compose exec -T spark python3 -c '
import json, pathlib
rows = json.loads(pathlib.Path("/data/delays/delays.json").read_text())["rows"]
print(sum(row["flights"] for row in rows))' 2>/dev/null || echo 0; }

before=0
for _ in $(seq 90); do
  now=$(flights)
  if [ "$before" -gt 0 ] && [ "$now" -gt "$before" ]; then break; fi
  before=$now
  sleep 2
done
[ "$now" -gt "$before" ] || { echo "FAULT: no rows arrive in Spark's output ($now)"; exit 1; }
echo "Spark has $now flights, and more are coming"

"$python" - <<'PY'
import asyncio
from rocketlet.client import Consumer, Producer

async def main():
    async with Producer("localhost:9876") as producer:
        sent = [await producer.send("hosts", b"from the host") for _ in range(8)]
    done, seen = asyncio.Event(), []
    async def handle(message):
        seen.append(message)
        if len(seen) == len(sent):
            done.set()
    async with Consumer("localhost:9876", "hosts", "hosts", handle, start="first"):
        await asyncio.wait_for(done.wait(), 30)
    print(f"a client on the host sent and consumed {len(seen)} messages")

asyncio.run(main())
PY

"$python" - <<'PY'
import urllib.request

page = urllib.request.urlopen("http://localhost:9890/groups", timeout=30).read().decode()
assert "departures" in page, "FAULT: the console does not show the group of the consumers"
print("the console shows the consumers' group")
PY

compose up -d --scale consumer=4 --no-recreate
for _ in $(seq 30); do
  members=$("$python" -m rocketlet.command.cli groups show departures --nameserver localhost:9876 | sed -n 's/^group departures: \([0-9]*\) members.*/\1/p')
  [ "${members:-0}" -eq 4 ] && break
  sleep 1
done
[ "$members" -eq 4 ] || { echo "FAULT: ${members:-0} members of departures instead of 4"; exit 1; }
"$python" -m rocketlet.command.cli groups show departures --nameserver localhost:9876

# The cluster profile: a standalone master, two workers, the same job. A worker is killed in the midst; nothing is lost.
export COMPOSE_PROFILES=cluster
compose up -d --no-recreate
counted() { compose exec -T spark-job python3 -c '
import json, pathlib
rows = json.loads(pathlib.Path("/data/delays/delays.json").read_text())["rows"]
print(sum(row["flights"] for row in rows))' 2>/dev/null || echo 0; }
grown() { for _ in $(seq 120); do now=$(counted); [ "$now" -gt "$1" ] && return 0; sleep 1; done; echo "FAULT: stays at $now flights"; exit 1; }

grown 0
echo "the cluster's job has $now flights"
victim=$(compose ps -q spark-worker)
victim=${victim%%$'\n'*}
docker kill "$victim" >/dev/null
echo "killed a worker"
grown "$((now + 5000))"
echo "and it has $now"
compose stop producer
held() { "$python" - <<'PY'
import asyncio
from rocketlet.client.wire.cluster import Cluster
from rocketlet.client.member.offsets import begin_offset
from rocketlet.demo.replay import TOPIC
from rocketlet.protocol.allocation import subscribe_queues

async def main():
    cluster = Cluster("localhost:9876")
    queues = subscribe_queues(TOPIC, await cluster.find_route(TOPIC))
    ends = [await begin_offset(await cluster.broker(queue.broker_name), queue, "last") for queue in queues]
    await cluster.close()
    print(sum(ends))

asyncio.run(main())
PY
}
expected=$(held)
for _ in $(seq 120); do now=$(counted); [ "$now" -ge "$expected" ] && break; sleep 1; done
[ "$now" -eq "$expected" ] || { echo "FAULT: the cluster's job counted $now flights, the brokers hold $expected"; exit 1; }
echo "the cluster's job counted all $now flights once, though a worker was killed"
echo "compose works"
