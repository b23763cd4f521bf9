"""A broker's page of metrics, fetched and read."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from ..conftest import PATIENCE_S, Node

PLACE = {"cluster": "DefaultCluster", "broker": "broker-a"}
NODE = {"cluster": PLACE["cluster"], "node_type": "broker", "node_id": PLACE["broker"]}  # of metrics of 5.1


async def page(port: int | None, path: str, accept: str = "*/*", host: str = "") -> tuple[int, str]:
    """The status and the text."""

    def fetch() -> tuple[int, str]:
        url = f"http://127.0.0.1:{port}{path}"
        try:
            request = urllib.request.Request(url, headers={"Accept": accept} | ({"Host": host} if host else {}))
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def fetched(node: Node, path: str, **wishes: str) -> tuple[int, str]:
    return await page(node.server.metrics_port, path, **wishes)


async def samples(node: Node) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample's value, by its name and labels other than those of the broker, which all of ours have."""
    _, text = await fetched(node, "/metrics")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(("process_", "python_")):
                assert PLACE.items() <= sample.labels.items() or NODE.items() <= sample.labels.items(), sample
            found[sample.name, frozenset(sample.labels.items() - PLACE.items() - NODE.items())] = sample.value
    return found
