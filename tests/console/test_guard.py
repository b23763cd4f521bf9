"""Requests that are let in, and the headers of every answer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from rocketlet.client import AdminClient
from rocketlet.console.config import MAX_FORM_BYTES, MAX_STREAMS

from ..conftest import PATIENCE_S, Node
from .conftest import Site, plain, token_of


async def test_every_answer_allows_nothing_but_our_own_scripts_and_styles(site: Site) -> None:
    for path in ("/groups", "/no/such/page", "/static/console.css"):
        answer = await site.http.get(site.url + path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = await site.get("/groups")
    assert "style=" not in page
    assert "onclick" not in page


async def test_the_cookie_is_not_for_scripts_nor_for_other_sites(site: Site) -> None:
    cookie = (await site.http.get(site.url + "/groups")).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert "set-cookie" not in (await site.http.get(site.url + "/groups")).headers


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:80", "", "[", "]", "[::1", "[v1.x]"])
async def test_a_name_that_is_not_ours_is_refused(site: Site, host: str) -> None:
    answer = await site.http.get(site.url + "/groups", headers={"host": host})
    assert answer.status_code == 421
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8080", "10.1.2.3:80"])
async def test_addresses_and_this_machine_are_known(site: Site, host: str) -> None:
    assert (await site.http.get(site.url + "/groups", headers={"host": host})).status_code == 200


async def test_a_form_needs_its_origin_its_cookie_and_its_token(site: Site, node: Node) -> None:
    fields = {"topic": "orders", "queues": "4", "perm": "6", "confirmed": "yes"}
    token = token_of(await site.get("/new/topic"))
    wrong = {
        "another site": ({"origin": "https://evil.example"}, token, 403),
        "a page without an origin": ({"origin": "null"}, token, 403),
        "a frame of another site": ({"origin": "", "sec-fetch-site": "cross-site"}, token, 403),
        "no token": ({}, "", 400),
        "another token": ({}, "0" * 64, 400),
        "a token that is no ASCII": ({}, "é", 400),
    }
    for reason, (headers, given, status) in wrong.items():
        answer = await site.post("/new/topic", fields | {"token": given}, **headers)
        assert answer.status_code == status, reason
    site.http.cookies.clear()
    assert (await site.post("/new/topic", fields | {"token": token})).status_code == 400, "no cookie"
    async with AdminClient(node.address) as admin:
        assert await admin.topics() == []
    token = token_of(await site.get("/new/topic"))
    headers = {"origin": "", "sec-fetch-site": "same-origin"}
    assert (await site.post("/new/topic", fields | {"token": token}, **headers)).status_code == 303
    async with AdminClient(node.address) as admin:
        assert await admin.topics() == ["orders"]


async def test_a_form_has_a_limit(site: Site) -> None:
    token = token_of(await site.get("/new/topic"))
    rest = len(f"token={token}&topic=")
    fits = await site.post("/new/topic", {"token": token, "topic": "x" * (MAX_FORM_BYTES - rest)})
    assert "characters; maximum 127" in plain(fits.text)
    beyond = await site.post("/new/topic", {"token": token, "topic": "x" * (MAX_FORM_BYTES - rest + 1)})
    assert f"more than {MAX_FORM_BYTES} bytes" in plain(beyond.text)


async def test_a_read_only_console_changes_nothing_and_offers_nothing(read_only_site: Site) -> None:
    page = await read_only_site.get("/groups")
    assert "read-only" in page
    assert "/new/group" not in page
    assert (await read_only_site.post("/new/topic", {"topic": "t", "confirmed": "yes"})).status_code == 403


async def test_open_pages_are_limited_and_given_back(site: Site) -> None:
    kept = []
    async with AsyncExitStack() as stack:
        headers = {"accept": "text/event-stream"}
        for _ in range(MAX_STREAMS):
            answer = await stack.enter_async_context(site.http.stream("GET", site.url + "/groups", headers=headers))
            assert answer.status_code == 200
            kept.append(answer.aiter_lines())
            await anext(kept[-1])
        beyond = await site.http.get(site.url + "/groups", headers=headers)
        assert beyond.status_code == 503
        assert str(MAX_STREAMS) in beyond.text
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with site.http.stream("GET", site.url + "/groups", headers=headers) as again:
                if again.status_code == 200:
                    break


async def test_what_is_not_served_is_refused(site: Site) -> None:
    assert (await site.http.request("DELETE", site.url + "/groups")).status_code == 405
    assert "There is no page /nothing" in await site.text("/nothing", 404)
