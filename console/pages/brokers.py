"""Brokers: their state and their settings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from ...client.admin.diagnosis import diagnose
from ...client.admin.findings import HEADINGS
from ...client.errors import ConfigError, ConnectionFailed, RequestTimeout, RocketletError
from ...protocol import names
from ...protocol.bodies import BrokerData
from .. import charts
from ..console import Console
from ..form import query_of
from ..page import Page, console_of, is_load
from ..samples import rate_of

_SECRET = re.compile("secret|password|passwd|token|accesskey|credential", re.IGNORECASE)
HIDDEN = "(not shown)"


@dataclass(frozen=True, slots=True)
class Row:
    """A broker. `status` is empty if it does not respond; `reason` has the error then."""

    broker: BrokerData
    address: str
    status: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    is_away: bool = True

    @property
    def state(self) -> str:
        if self.status:
            return "up"
        return "away" if self.is_away else "unknown"

    @property
    def put_rate(self) -> float:
        return rate_of(self.status, "putTps")

    @property
    def get_rate(self) -> float:
        return rate_of(self.status, "getTransferedTps")  # Apache's spelling

    @property
    def disk_ratio(self) -> float:
        return _float(self.status.get("commitLogDiskRatio") or "0")

    @property
    def log_bytes(self) -> int:
        return self._int("commitLogMaxOffset") - self._int("commitLogMinOffset")

    @property
    def memory_bytes(self) -> int:
        return self._int("residentBytes")

    @property
    def leases(self) -> int | None:
        return self._int("leases") if "leases" in self.status else None

    @property
    def version(self) -> str:
        """Return Rocketlet's version if it is a Rocketlet broker, and that of RocketMQ."""
        own, of_rocketmq = self.status.get("rocketletVersion"), self.status.get("brokerVersionDesc", "")
        as_written = of_rocketmq.removeprefix("V").replace("_", ".")
        return f"Rocketlet {own}, as RocketMQ {as_written}" if own else f"RocketMQ {as_written}"

    @property
    def started_ms(self) -> int:
        return self._int("bootTimestamp")

    def _int(self, name: str) -> int:
        return int(_float(self.status.get(name) or "0"))


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


async def listed(request: Request) -> Page:
    return Page("brokers.html", {"rows": await rows_of_brokers(console_of(request))})


async def rows_of_brokers(console: Console) -> list[Row]:
    brokers = await console.admin.brokers()
    return await asyncio.gather(*(_row(console, broker) for broker in brokers))


async def _row(console: Console, broker: BrokerData) -> Row:
    address = broker.addresses.get(0, "")
    if not address:
        return Row(broker, "", reason="it has no master")
    try:
        return Row(broker, address, await console.admin.broker_status(address))
    except RocketletError as error:
        return Row(broker, address, reason=str(error), is_away=isinstance(error, ConnectionFailed | RequestTimeout))


async def shown(request: Request) -> Page:
    console, name = console_of(request), request.path_params["broker"]
    found = next((broker for broker in await console.admin.brokers() if broker.name == name), None)
    if found is None:
        raise ConfigError(f"no broker knows the name {name}: the name server has no broker of this name")
    row = await _row(console, found)
    settings: Mapping[str, str] = {}
    if row.status:
        settings = await console.admin.broker_config(row.address)
    return Page(
        "broker.html",
        {
            "row": row,
            "written": console.written_per_s(name),
            "sent": charts.lines_of(console.throughput(name, sent=True), what="messages/s"),
            "read": charts.lines_of(console.throughput(name, sent=False), what="messages/s"),
            "settings": {key: HIDDEN if _SECRET.search(key) else value for key, value in sorted(settings.items())},
        },
    )


async def doctor(request: Request) -> Page:
    """Return the page with the findings about the cluster: the console's last ones, or with the parameter `look` those of a
    new examination."""
    console = console_of(request)
    groups = [name for name in await console.groups.list(now=is_load(request)) if not names.is_system_group(name)]
    known = (console.groups.found.get(name) for name in groups)
    checked = sum(sample is not None and sample.findings is not None for sample in known)
    findings = console.findings()
    if query_of(request).text("look") and is_load(request):
        async with console.examining:
            findings, checked = await diagnose(console.admin), len(groups)
    found = [(heading, [finding for finding in findings if finding.harm is harm]) for harm, heading in HEADINGS.items()]
    values = {"found": [item for item in found if item[1]], "checked": checked, "unchecked": len(groups) - checked}
    return Page("doctor.html", values)
