"""Prometheus with our configuration: it scrapes a broker, alerts fire when they should, the dashboard's queries have data."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer, Reject
from rocketlet.testing.ports import free_port

from bench.peers import listening, process, rocketlet

from ..conftest import FOREIGN_S, PATIENCE_S, eventually

OBSERVE = Path(__file__).parents[2] / "docker" / "observe"
RULES = OBSERVE / "alerts.yml"
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus is missing: `apt-get install prometheus`",
    ),
    pytest.mark.timeout(FOREIGN_S),
]


def test_each_alert_fires_when_it_should_and_none_when_all_is_well(tmp_path: Path) -> None:
    text = Path(__file__).with_name("alerts.yml").read_text()
    assert set(re.findall(r"alert: (\w+)", RULES.read_text())) == set(re.findall(r'alertname="(\w+)"', text))
    tests = tmp_path / "tests.yml"
    tests.write_text(text.replace("[RULES]", f"[{RULES}]"))
    done = subprocess.run(["promtool", "test", "rules", str(tests)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    async def get(self, path: str, **query: str) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with await asyncio.to_thread(urllib.request.urlopen, url) as answer:
            return json.load(answer)["data"]

    async def ready(self) -> None:
        """Returns when it has read its database; it listens before."""

        async def is_ready() -> bool:
            try:
                (await asyncio.to_thread(urllib.request.urlopen, f"http://{self._address}/-/ready")).close()
            except urllib.error.HTTPError as error:
                error.close()
                return False
            return True

        await eventually(is_ready)

    async def has_data(self, expression: str) -> bool:
        found = await self.get("query", query=expression)
        return any(series["value"][1] != "NaN" for series in found["result"])


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    """With the configuration of compose, but for the target and the pace."""
    config = (OBSERVE / "prometheus.yml").read_text().replace("${DOCS_URL}", "http://docs.example")
    config = re.sub(r"targets: .*", f'targets: ["{target}"]', re.sub(r"interval: \S+", "interval: 250ms", config))
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(RULES, folder)
    port = free_port()
    arguments = (
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    )  # fmt: skip
    async with process(arguments, folder / "prometheus.log") as pid:
        await listening(port, pid=pid)
        server = Prometheus(f"127.0.0.1:{port}")
        async with asyncio.timeout(PATIENCE_S):
            await server.ready()
        yield server


def expressions() -> list[str]:
    """The queries of all panels, for all clusters and brokers."""
    panels = json.loads((OBSERVE / "dashboard.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [re.sub(r"\$\w+", ".*", expression) for expression in found]


@asynccontextmanager
async def a_group_at_work(address: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A group with one member. It gives the broker a round of work: a member comes and goes, a message is given up.
    A rate needs a round after the first scrape."""
    handled: list[Message] = []

    async def handle(message: Message) -> Reject | None:
        handled.append(message)
        return Reject() if message.body == b"bad" else None

    async with Producer(address) as producer, Consumer(address, "shop", "orders", handle, start="first") as first:
        await first.assigned()

        async def work() -> None:
            async with Consumer(address, "shop", "orders", handle) as second:
                await second.assigned()
            wanted = len(handled) + 2
            for body in (b"good", b"bad"):
                await producer.send("orders", body)
            await eventually(lambda: len(handled) >= wanted)
            await first.commit()

        await work()
        yield work


async def test_the_dashboards_queries_have_data_and_the_rules_are_evaluated(tmp_path: Path) -> None:
    port = free_port()
    async with (
        rocketlet(tmp_path, "--metrics-port", str(port)) as broker,
        prometheus(tmp_path, f"127.0.0.1:{port}") as server,
        AdminClient(broker.address) as admin,
    ):
        await admin.create_topic("orders", queues=4)
        await eventually(lambda: server.has_data('up{job="rocketlet"} == 1'))
        async with a_group_at_work(broker.address) as work, asyncio.timeout(PATIENCE_S):
            missing, rounds = expressions(), 0
            while missing := [expression for expression in missing if not await server.has_data(expression)]:
                await work()
                more = f"sum(rocketlet_settle_seconds_count) > {rounds}"
                await eventually(partial(server.has_data, more))
                rounds += 1
            firing = 'ALERTS{alertname="RocketletDeadLetters", alertstate="firing", group="shop"}'
            await eventually(lambda: server.has_data(firing))
            alerts = (await server.get("alerts"))["alerts"]
            leads_to = {alert["labels"]["alertname"]: alert["annotations"]["runbook_url"] for alert in alerts}
            assert leads_to["RocketletDeadLetters"] == "http://docs.example/alerts/#rocketletdeadletters"
        (group,) = (await server.get("rules"))["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
