"""Findings as metrics in Prometheus' text format, which the console serves at `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from .console import Console
from .page import console_of


class FindingMetrics:
    """The console's last findings and the number of groups that it has examined, for one response."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def collect(self) -> Iterable[Metric]:
        findings = self._gauge(
            "rocketlet_finding",
            "Number of findings of `rocketlet doctor` of one kind about a subject; the series ends with the last one",
            "harm",
            "kind",
            "about",
            "subject",
        )
        counts = Counter(
            (finding.harm.name.lower(), finding.kind, finding.about, finding.subject)
            for finding in self._console.findings()
        )
        for labels, count in counts.items():
            findings.add_metric(labels, count)
        yield findings
        examined = self._gauge("rocketlet_groups_examined", "Number of groups whose findings are known")
        known = self._console.groups.found.values()
        examined.add_metric([], sum(sample.findings is not None for sample in known))
        yield examined

    def _gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=labels)


async def metrics(request: Request) -> Response:
    """Return the findings that the console has now, without querying a broker."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FindingMetrics(console_of(request)))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})
