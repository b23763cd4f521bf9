"""Users of the console: who is let in, what each role may do, and how sessions end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from rocketlet.client import AdminClient, ConfigError
from rocketlet.console.config import MAX_FAILING_LOGINS, MAX_SESSIONS, MIN_PASSWORD_CHARS
from rocketlet.console.login import Role, Sessions, TooManyLogins, User, read_users
from rocketlet.console.server import ConsoleServer
from rocketlet.protocol.names import Queue

from ..conftest import PATIENCE_S, Node
from .conftest import Site, plain, token_of

USERS = "# name role password\nanna operate long-secret\n\nben look other-secret\n"


@pytest.fixture
def users(tmp_path: Path) -> dict[str, User]:
    (tmp_path / "logins").write_text(USERS)
    return read_users(tmp_path / "logins")


@asynccontextmanager
async def site_of(node: Node, sessions: Sessions) -> AsyncIterator[Site]:
    async with (
        ConsoleServer(node.address, sessions=sessions) as server,
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
    ):
        yield Site(server.url, http)


@pytest.fixture
async def users_site(node: Node, users: dict[str, User]) -> AsyncIterator[Site]:
    async with site_of(node, Sessions(users, failed_login_s=0.0)) as site:
        yield site


async def log_in(site: Site, name: str, password: str, then: str = "/groups") -> httpx.Response:
    token = token_of(await site.get("/login"))
    return await site.post("/login", {"token": token, "name": name, "password": password, "then": then})


async def test_users_log_in_and_do_what_their_role_allows(users_site: Site) -> None:
    site = users_site
    for path, leads_to in {"/groups?q=a": "/login?then=%2Fgroups", "/": "/login?then=%2F"}.items():
        answer = await site.http.get(site.url + path)
        assert (answer.status_code, answer.headers["location"]) == (303, leads_to)
    assert (await site.http.get(f"{site.url}/static/console.css")).status_code == 200
    posted = await site.post("/new/topic", {"topic": "t", "confirmed": "yes"})
    assert (posted.status_code, posted.headers["location"]) == (303, "/login")
    assert (await site.http.get(f"{site.url}/loginX")).status_code == 303
    for name, password in {"anna": "other-secret", "nobody": "long-secret", "": ""}.items():
        answer = await log_in(site, name, password)
        assert (answer.status_code, "the name or the password is wrong" in answer.text) == (403, True)
    forged = await site.post("/login", {"token": "0" * 64, "name": "anna", "password": "long-secret"})
    assert forged.status_code == 403
    before = site.http.cookies["rocketlet-console"]
    assert (await log_in(site, "ben", "other-secret")).headers["location"] == "/groups"
    assert site.http.cookies["rocketlet-console"] != before
    for origin, is_secure in {f"https{site.url.removeprefix('http')}": True, site.url: False}.items():
        fields = {"token": token_of(await site.get("/login")), "name": "ben", "password": "other-secret"}
        cookie = (await site.post("/login", fields, origin=origin)).headers["set-cookie"]
        assert cookie.endswith("; Secure") is is_secure
    page = await site.get("/groups")
    assert "read-only" in page
    assert "/new/group" not in page
    fields = {"token": token_of(page), "topic": "t", "confirmed": "yes"}
    refused = await site.post("/new/topic", fields)
    assert (refused.status_code, refused.text) == (403, "The user ben may look, and not change anything.")
    assert (await log_in(site, "anna", "long-secret", "//evil.example")).headers["location"] == "/evil.example"
    _, done = await site.change("/new/topic", "/new/topic", topic="t")
    assert "The topic t was created" in done
    session = site.http.cookies["rocketlet-console"]
    left = await site.post("/logout", {"token": token_of(await site.get("/groups"))})
    assert left.headers["location"] == "/login"
    site.http.cookies.set("rocketlet-console", session)
    assert (await site.http.get(f"{site.url}/groups")).status_code == 303, "the session has ended"


async def test_updates_of_a_page_end_with_the_session_that_opened_it(users_site: Site) -> None:
    assert (await log_in(users_site, "ben", "other-secret")).status_code == 303
    updates = users_site.stream("/groups")
    assert await anext(updates)
    await users_site.post("/logout", {"token": token_of(await users_site.get("/groups"))})
    async with asyncio.timeout(PATIENCE_S):
        assert [name async for name, _ in updates if name == "live_groups"] == []


async def test_programs_authenticate_where_only_programs_go(
    users_site: Site, node: Node, users: dict[str, User], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    site = users_site
    assert (await site.http.get(f"{site.url}/metrics")).status_code == 401
    assert "console_login_failed" not in caplog.text
    for given, status in {("ben", "other-secret"): 200, ("ben", "wrong"): 401, ("ben", ""): 401}.items():
        assert (await site.http.get(f"{site.url}/metrics", auth=given)).status_code == status
    wrong = await site.http.get(f"{site.url}/metrics", headers={"authorization": "Basic ?"})
    assert wrong.status_code == 401
    assert caplog.text.count("console_login_failed peer='127.0.0.1'") == 3
    assert (await site.http.get(f"{site.url}/groups", auth=("anna", "long-secret"))).status_code == 303
    for given, status in {("ben", "other-secret"): 403, ("anna", "long-secret"): 400, ("anna", "wrong"): 401}.items():
        answer = await site.http.post(f"{site.url}/api/jobs", json={"group": "g"}, auth=given)
        assert answer.status_code == status, answer.text
    async with AdminClient(node.address) as admin:
        await admin.create_topic("%DLQ%g", queues=1)
        await admin.store(Queue("%DLQ%g", "broker-a", 0), b"x")
    order = {"group": "g", "at_ms": (int(time.time()) + 3600) * 1000}
    added = await site.http.post(f"{site.url}/api/jobs", json=order, auth=("anna", "long-secret"))
    place = f"/api/jobs/{added.json()['id']}/stop"
    assert (await site.http.post(site.url + place, json={}, auth=("anna", "long-secret"))).status_code == 200
    assert f"console_changed path='{place}' user='anna'" in caplog.text
    async with site_of(node, Sessions(users, max_failing=0)) as busy:
        answer = await log_in(busy, "anna", "long-secret")
        assert (answer.status_code, "too many logins have failed" in plain(answer.text)) == (429, True)
        assert (await busy.http.get(f"{busy.url}/metrics", auth=("ben", "other-secret"))).status_code == 429
    assert caplog.text.count("console_logins_refused") == 2


async def test_sessions_end_with_their_time_and_when_there_are_too_many(users: dict[str, User]) -> None:
    assert [(user.name, user.role) for user in users.values()] == [("anna", Role.OPERATE), ("ben", Role.LOOK)]
    sessions = Sessions(users, failed_login_s=PATIENCE_S)
    first, *_, last = [sessions.open(users["ben"]) for _ in range(MAX_SESSIONS)]
    assert sessions.user_of(first) is users["ben"]
    sessions.open(users["ben"])
    assert (sessions.user_of(first), sessions.user_of(last)) == (None, users["ben"])
    failing = [asyncio.create_task(sessions.user_with("ben", "wrong")) for _ in range(MAX_FAILING_LOGINS)]
    await asyncio.sleep(0)  # each checks its password, and waits
    with pytest.raises(TooManyLogins):
        await sessions.user_with("ben", "other-secret")
    for task in failing:
        task.cancel()
    short = Sessions(users, session_s=0.0)
    assert short.user_of(short.open(users["ben"])) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no user; add a line: NAME operate PASSWORD"),
        ("anna admin long-secret", "line 1 of FILE: expected NAME look PASSWORD or NAME operate PASSWORD"),
        ("anna look", "line 1 of FILE: expected NAME look PASSWORD"),
        (f"anna look {'x' * (MIN_PASSWORD_CHARS - 1)}", "the password has 7 characters; use 8 or more"),
        ("a look 12345678\na operate 12345678", "line 2 of FILE: a has two lines"),
        ("\udcff", "it is not UTF-8 text"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_of_users_that_is_invalid_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "logins"
    if text is not None:
        file.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read_users(file)
    assert reason.replace("FILE", str(file)) in str(caught.value)
