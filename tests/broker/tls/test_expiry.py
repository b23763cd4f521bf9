"""A certificate that expires is announced 14 days before, and named when clients refuse it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from rocketlet.broker.tls import Tls, TlsFiles, expires_s
from rocketlet.client import AdminClient
from rocketlet.client.admin.diagnosis import Harm, ObservationTimes, diagnose
from structlog.testing import capture_logs

from ...conftest import Nodes
from ...support.accounts import reload
from ...support.metrics import samples

DAY_S = 86_400


def certificate(folder: Path, days: float) -> TlsFiles:
    issued = trustme.CA().issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=days))
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return TlsFiles(folder / "server.pem")


@pytest.mark.parametrize("year", [2049, 2050, 2200])
def test_the_first_of_a_files_certificates_to_expire_counts(tmp_path: Path, year: int) -> None:
    authority = trustme.CA()
    pems = [
        authority.issue_cert("a", not_after=datetime(then, 3, 4, 5, 6, 7, tzinfo=UTC)).cert_chain_pems[0].bytes()
        for then in (year + 1, year)
    ]
    file = tmp_path / "chain.pem"
    file.write_bytes(b"a comment\n" + b"".join(pems))
    assert expires_s(file) == x509.load_pem_x509_certificate(pems[1]).not_valid_after_utc.timestamp()


def test_what_is_no_certificate_has_no_end(tmp_path: Path) -> None:
    file = tmp_path / "odd.pem"
    for odd in (b"", b"MAA=", b"MIID", b"!", b"MIIDMIID" * 3):
        file.write_bytes(b"-----BEGIN CERTIFICATE-----\n" + odd + b"\n-----END CERTIFICATE-----\n")
        assert expires_s(file) is None


async def test_it_is_announced_by_log_metric_and_doctor_until_it_is_renewed(nodes: Nodes, tmp_path: Path) -> None:
    tls = Tls("permissive", certificate(tmp_path, 13.5))
    node = await nodes.start(tls=tls, metrics_port=0)

    async def findings() -> list[tuple[Harm, str]]:
        async with AdminClient(node.address) as admin:
            return [
                (one.harm, one.subject)
                for one in await diagnose(admin, ObservationTimes(0, 0, 0))
                if one.kind == "certificate"
            ]

    (until_s,) = tls.expires_s.values()
    with capture_logs() as logs:
        for past_s in (0, 1, DAY_S + 1, 14 * DAY_S):
            tls.warn_of_expiry(until_s - 13.5 * DAY_S + past_s)
    assert [line["event"] for line in logs] == ["certificate_expires", "certificate_expires", "certificate_expired"]
    metric = "rocketlet_certificate_expires_timestamp_seconds", frozenset({("file", "server.pem")})
    assert (await samples(node))[metric] == until_s
    assert await findings() == [(Harm.RISK, "broker-a")]
    certificate(tmp_path, 15)
    reload(tls)
    assert await findings() == []
    certificate(tmp_path, -1)
    reload(tls)
    assert await findings() == [(Harm.STANDS, "broker-a")]
    with capture_logs() as logs:
        tls.failed("10.0.0.1:5", "the client did not finish in time")
    assert "server.pem expired on" in logs[0]["reason"]
