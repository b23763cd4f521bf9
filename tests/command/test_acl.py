"""`rocketlet acl` and `rocketlet version` on a broker with accounts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ..conftest import Node, Nodes
from ..support.accounts import ACCOUNTS, ADMIN, SECRETS, AccountsFile
from .conftest import Ran, Run


@pytest.fixture
def file(tmp_path: Path) -> AccountsFile:
    return AccountsFile(tmp_path / "plain_acl.yml")


async def test_accounts_are_listed_made_changed_and_deleted(
    nodes: Nodes, file: AccountsFile, monkeypatch: pytest.MonkeyPatch, run_on: Callable[[Node], Run]
) -> None:
    node = await nodes.start(acl=file.acl)
    monkeypatch.setenv("ROCKETLET_SECRET_KEY", SECRETS[ADMIN])

    async def acl(*arguments: str) -> Ran:
        return await run_on(node)("acl", *arguments, "--access-key", ADMIN)

    assert {record["account"] for record in (await acl("list", "--json")).records} == {
        entry["accessKey"] for entry in ACCOUNTS
    }
    shown = (await acl("list")).out
    assert not any(secret in shown for secret in SECRETS.values())
    refused = await acl("put", "new-key", "--new-secret")
    assert (refused.status, "ROCKETLET_NEW_SECRET_KEY" in refused.err) == (1, True)
    monkeypatch.setenv("ROCKETLET_NEW_SECRET_KEY", "a-new-secret")
    assert (await acl("put", "new-key", "--new-secret", "--topics", "orders=PUB|SUB,secrets=DENY")).status == 0
    assert (await acl("put", "new-key", "--default-groups", "SUB")).status == 0
    (stored,) = [
        entry for entry in yaml.safe_load(file.path.read_text())["accounts"] if entry["accessKey"] == "new-key"
    ]
    assert stored["secretKey"] == "a-new-secret"
    assert stored["topicPerms"] == ["orders=PUB|SUB", "secrets=DENY"]
    assert stored["defaultGroupPerm"] == "SUB"
    wrong = await acl("put", "new-key", "--topics", "orders=EVERYTHING")
    assert (wrong.status, "EVERYTHING" in wrong.err) == (1, True)
    assert (await acl("white", "10.0.0.{1,2}", "--yes")).out == "no account is needed from 10.0.0.{1,2}\n"
    assert "10.0.0.{1,2}" in (await acl("list")).out
    assert (await acl("delete", "new-key", "--yes")).status == 0
    assert "new-key" not in (await acl("list")).out


async def test_the_versions_of_all_parts_are_shown(run: Run) -> None:
    parts = {str(record["part"]): record["version"] for record in (await run("version", "--json")).records}
    assert parts.keys() == {"rocketlet", "module", "python", "broker-a"}
    assert all(parts.values())
