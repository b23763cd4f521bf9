"""TLS and accounts from the command line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rocketlet.client import Access, Producer
from rocketlet.testing.ports import free_port

from ..conftest import PATIENCE_S
from ..support.certificates import Certificates
from .conftest import Start


async def run(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    """Status, output and errors of a command."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rocketlet.command.cli", *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    async with asyncio.timeout(PATIENCE_S):
        out, err = await child.communicate()
    return child.returncode, out.decode(), err.decode()


async def test_tls_is_set_up_by_options(start: Start, certificates: Certificates) -> None:
    folder = certificates.folder
    options = (
        "--tls-cert",
        f"{folder}/server.pem",
        "--tls-key",
        f"{folder}/server.key",
        "--tls-ca",
        f"{folder}/ca.pem",
    )
    broker = await start("--tls", "enforcing", *options)
    secured = Access(tls=True, ca_file=f"{folder}/ca.pem", cert_file=f"{folder}/client.pem")
    async with Producer(broker.address, access=secured) as producer:
        await producer.send("t", b"x")
    shown = ("--tls", "--tls-ca", f"{folder}/ca.pem", "--tls-cert", f"{folder}/client.pem")
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address, *shown)
    assert (status, "no broker knows the group g" in err) == (1, True)
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address)
    assert status == 1
    assert "turn TLS on" in err


async def test_accounts_are_set_up_by_options(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "plain_acl.yml"
    file.write_text("accounts: [{accessKey: admin-key, secretKey: its-secret, admin: true}]")
    file.chmod(0o600)
    broker = await start("--acl", str(file))
    async with Producer(broker.address, access=Access(access_key="admin-key", secret_key="its-secret")) as producer:
        await producer.send("t", b"x")
    keys = {"ROCKETLET_ACCESS_KEY": "admin-key", "ROCKETLET_SECRET_KEY": "its-secret"}
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address, **keys)
    assert (status, "no broker knows the group g" in err) == (1, True)
    secret = tmp_path / "secret"
    secret.write_text("its-secret\n")
    shown = ("--access-key", "admin-key", "--secret-key-file", str(secret))
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address, *shown)
    assert (status, "no broker knows the group g" in err) == (1, True)
    status, _, err = await run("groups", "show", "g", "--nameserver", broker.address)
    assert (status, "No accessKey is configured" in err) == (1, True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tls", "enforcing"], "give --tls-cert"),
        (["--tls-key", "x.key"], "--tls-cert is not"),
        (["--tls-cert", "/no/such.pem"], "cannot be used"),
        (["--acl", "/no/such.yml"], "cannot read /no/such.yml"),
    ],
)
async def test_options_that_contradict_each_other_are_refused(options: list[str], reason: str, tmp_path: Path) -> None:
    arguments = ["start", "--host", "127.0.0.1", "--port", str(free_port()), "--data", str(tmp_path / "data"), *options]
    status, _, err = await run(*arguments)
    assert (status, reason in err) == (1, True), err
    assert not (tmp_path / "data").exists()
