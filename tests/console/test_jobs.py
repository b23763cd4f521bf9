"""Replays as jobs of the console: over a restart, at a time, with a limit, stopped, and from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from rocketlet.client import (
    AdminClient,
    ConfigError,
    ConnectionFailed,
    Consumer,
    Message,
    MessageIllegal,
    Producer,
    Reject,
    RequestTimeout,
    rebalanced,
)
from rocketlet.client.admin.dead_letters import dead_letters
from rocketlet.command.cli import main
from rocketlet.console.config import MAX_JOB_AHEAD_S, MAX_JOBS
from rocketlet.console.jobs import DeadLetterPlace, Jobs, JobState, ReplayJob, ReplayOrder
from rocketlet.console.server import ConsoleServer
from rocketlet.protocol.admin_bodies import decode_mark
from rocketlet.protocol.bodies import GroupConfig
from rocketlet.protocol.names import Queue

from ..conftest import PATIENCE_S, Node, eventually
from ..support.handlers import Inbox
from .conftest import Site, text_with


@asynccontextmanager
async def rejected(node: Node, count: int) -> AsyncIterator[Inbox]:
    """A group g with dead letters, whose member handles what is sent to it from now on."""
    is_broken, inbox = True, Inbox()

    async def handle(message: Message) -> Reject | None:
        if is_broken:
            return Reject("no such customer")
        await inbox(message)
        return None

    async with Consumer(node.address, "g", "orders", handle, start="first"), Producer(node.address) as producer:
        for number in range(count):
            await producer.send("orders", b"%d" % number, queue_key="k")
        await rebalanced(node.address, "g", members=1)
        async with AdminClient(node.address) as admin:

            async def are_dead() -> bool:
                return (await dead_letters(admin, "g")).new == count

            await eventually(are_dead)
        is_broken = False
        yield inbox


@asynccontextmanager
async def console(node: Node, folder: Path) -> AsyncIterator[Site]:
    async with ConsoleServer(node.address, folder=folder) as server, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        yield Site(server.url, http)


async def test_a_replay_continues_after_a_restart_and_is_stopped(node: Node, tmp_path: Path) -> None:
    async with rejected(node, 3) as inbox:
        async with console(node, tmp_path / "console") as site:
            fields = {"which": "all", "to": "group", "rate": "0.001", "stop_after": "2"}
            _, done = await site.change("/groups/g/dead", "/groups/g/replay", **fields)
            assert "The replay of 3 messages to the retry topic of g has started" in done
            await text_with(site, "/jobs", "g running 1 0 2 immediately")
        file, lock = sorted((tmp_path / "console").iterdir())
        assert (file.name, file.stat().st_mode & 0o777, lock.name) == ("jobs.json", 0o600, "jobs.json.lock")
        async with console(node, tmp_path / "console") as site:
            await text_with(site, "/jobs", "g running 2 0 1 immediately")
            await eventually(lambda: inbox.bodies == [b"0", b"1"])
            (job,) = json.loads((await site.http.get(f"{site.url}/api/jobs")).text)
            asked, done = await site.change(f"/jobs/{job['id']}", f"/jobs/{job['id']}/stop")
            assert "2 of 3 messages have been sent" in asked
            assert done == "The replay is stopped. It has sent 2 of 3 messages."
            page = await site.text(f"/jobs/{job['id']}")
            assert "stopped" in page
            assert "at most 0.0 messages/s" in page
            assert "2 failed messages" in page
            assert "Stop…" not in page
            again = await site.http.post(f"{site.url}/api/jobs/{job['id']}/stop", json={})
            assert (again.status_code, "has ended already: it is stopped" in again.text) == (400, True)
            assert "no job has the id" in await site.text("/jobs/x", 404)
        async with console(node, tmp_path / "console") as site, AdminClient(node.address) as admin:
            await text_with(site, "/jobs", "g stopped 2 0 1 immediately")
            assert (await dead_letters(admin, "g")).new == 1


async def test_a_replay_waits_for_its_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ms = 0
    monkeypatch.setattr("rocketlet.console.jobs.now_ms", lambda: int(time.time() * 1000) + ahead_ms)
    async with rejected(node, 2) as inbox, AdminClient(node.address) as admin:
        waiting = Jobs(admin, poll_s=0.01)
        job = await waiting.plan(
            ReplayOrder(group="g", to="topic", topics=["orders"], at_ms=int(time.time() * 1000) + 3_600_000)
        )
        await waiting.add(job)
        await asyncio.sleep(0)
        assert job.state is JobState.WAITING
        ahead_ms = 3_700_000
        await eventually(lambda: sorted(inbox.bodies) == [b"0", b"1"])
        await eventually(lambda: job.state is JobState.DONE)
        await waiting.close()


async def test_a_replay_is_given_to_a_console_on_the_command_line(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rocketlet.command.plumbing.logs.configure", lambda level: None)

    async def run(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, arguments)
        return status, *capsys.readouterr()

    async with rejected(node, 2) as inbox, console(node, tmp_path) as site:
        url, where = ("--console", site.url), ("--nameserver", node.address)
        assert "the console has no replay\n" in (await run("jobs", "list", *url))[1]
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
        command = ("messages", "replay", "g", "--yes", *url, *where)
        status, out, _ = await run(*command, "--to", "topic", "--at", moment)
        assert (status, "`rocketlet jobs list` shows it" in out) == (0, True)
        status, out, _ = await run("jobs", "list", "--json", *url)
        (job,) = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
        assert (job["state"], job["total"], job["sent"], job["to"]) == ("waiting", 2, 0, "topic")
        assert "stopped" in (await run("jobs", "stop", job["id"], *url))[1]
        assert inbox.messages == []
        await run(*command, "--detach")
        while "done" not in (await run("jobs", "list", *url))[1]:
            pass
        assert sorted(inbox.bodies) == [b"0", b"1"]
        assert "no job has the id" in (await run("jobs", "stop", "x", *url))[2]
        _, _, said = await run("jobs", "list", "--console", "http://127.0.0.1:1")
        assert "the console at http://127.0.0.1:1 does not respond" in said
        _, _, said = await run("jobs", "list", "--console", "localhost")
        assert "use http://HOST:PORT" in said


async def test_requests_of_programs_come_from_no_page_of_another_site(site: Site) -> None:
    url, order = f"{site.url}/api/jobs", {"group": "g"}
    for headers, status in (
        ({"origin": "https://evil.example", "content-type": "application/json"}, 403),
        ({"sec-fetch-site": "cross-site", "content-type": "application/json"}, 403),
        ({"content-type": "text/plain"}, 403),
        ({"content-type": "application/json"}, 400),
    ):
        answer = await site.http.post(url, content=json.dumps(order), headers=headers)
        assert answer.status_code == status, headers
    assert "the group g has no new dead letters" in answer.text
    latest_ms = int(time.time() + MAX_JOB_AHEAD_S) * 1000
    for wrong, reason in {
        "{}": "missing required field `group`",
        '{"group": "g", "unknown": 1}': "unknown field `unknown`",
        '{"group": "g", "to": "moon"}': "to: expected group or topic, got 'moon'",
        '{"group": "g", "to": "topic"}': "topics: got none",
        '{"group": "g", "rate_per_s": 0}': "rate_per_s: expected a number above 0",
        '{"group": "g", "stop_after": 0}': "stop_after",
        f'{{"group": "g", "at_ms": {latest_ms}}}': "the group g has no new dead letters",
        f'{{"group": "g", "at_ms": {latest_ms + 600_000}}}': "expected ms since the epoch, at most 366 days from now",
        '{"group": "g", "at_ms": -1}': "at_ms: got -1",
    }.items():
        answer = await site.http.post(url, content=wrong, headers={"content-type": "application/json"})
        assert (answer.status_code, reason in answer.text) == (400, True), answer.text


async def _store_dead_letter(admin: AdminClient, group: str) -> None:
    await admin.create_group(GroupConfig(group))
    await admin.create_topic(f"%DLQ%{group}", queues=1)
    await admin.store(Queue(f"%DLQ%{group}", "broker-a", 0), b"x")


async def test_job_is_retried_until_its_queues_have_a_route(node: Node) -> None:
    async with AdminClient(node.address) as admin:
        running = Jobs(admin, retry_s=0.01)
        for group, places in {"g": [], "h": [DeadLetterPlace("broker-a", 0, 0)]}.items():
            order = ReplayOrder(group=group, places=places)
            job = ReplayJob(id=group, order=order, ends={"broker-a:0": 1, "broker-a:1": 0}, total=1, created_ms=1)
            await running.add(job)
            waits = f"no route to the queues broker-a:0 of %DLQ%{group}; retried"
            await eventually(lambda job=job, waits=waits: waits in job.reason)  # type: ignore[misc]
            await _store_dead_letter(admin, group)
            await eventually(lambda job=job: job.has_ended)  # type: ignore[misc]
            assert (job.state, job.sent, job.failed, job.reason) == (JobState.DONE, 1, 0, "")
        await running.close()


async def test_job_whose_broker_is_away_fails_and_sends_no_message_twice(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AdminClient(node.address) as admin:
        await _store_dead_letter(admin, "g")
        await admin.store(Queue("%DLQ%g", "broker-a", 0), b"y")
        send_again, store = admin.send_again, admin.store
        errors_of_sends = [ConnectionFailed("away"), RequestTimeout("slow")]
        errors_of_marks = [ConnectionFailed("away"), RequestTimeout("slow")]

        async def sending(message: Message, *, group: str | None) -> None:
            if message.body == b"x":
                raise MessageIllegal("too large")
            if errors_of_sends:
                raise errors_of_sends.pop()
            await send_again(message, group=group)

        async def storing(queue: Queue, body: bytes) -> None:
            if decode_mark(body).ranges and errors_of_marks:
                raise errors_of_marks.pop()
            await store(queue, body)

        monkeypatch.setattr(admin, "send_again", sending)
        monkeypatch.setattr(admin, "store", storing)
        running = Jobs(admin, retry_s=0.01)
        job = await running.plan(ReplayOrder(group="g", stop_after=2))
        await running.add(job)
        await eventually(lambda: job.has_ended)
        assert (job.state, job.sent, job.failed) == (JobState.DONE, 1, 1)
        assert (errors_of_sends, errors_of_marks) == ([], [])
        assert (await dead_letters(admin, "g")).new == 1
        assert node.broker.store.queue("%RETRY%g", 0).next == 1
        await running.close()


async def test_job_stops_when_its_marks_cannot_be_stored(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    is_stuck = False

    async def storing(queue: Queue, body: bytes) -> None:
        if not decode_mark(body).ranges:
            return
        if is_stuck:
            await asyncio.Event().wait()
        raise ConnectionFailed("away")

    async with AdminClient(node.address) as admin, asyncio.timeout(PATIENCE_S):
        await _store_dead_letter(admin, "g")
        await admin.store(Queue("%DLQ%g", "broker-a", 0), b"y")
        running = Jobs(admin, stop_s=0.01)
        stopped, left = [await running.plan(ReplayOrder(group="g", rate_per_s=0.001)) for _ in range(2)]
        monkeypatch.setattr(admin, "store", storing)
        for job in (stopped, left):
            await running.add(job)
            await eventually(lambda job=job: job.sent == 1)  # type: ignore[misc]
        await running.stop(stopped.id)
        assert (stopped.state, "away" in stopped.reason) == (JobState.STOPPED, True)
        is_stuck = True
        await running.close()
        assert left.state is JobState.RUNNING


async def test_jobs_of_another_cluster_do_not_run_and_a_folder_has_one_console(node: Node, tmp_path: Path) -> None:
    async with AdminClient(node.address) as admin:
        await _store_dead_letter(admin, "g")
        planned = await Jobs(admin).plan(ReplayOrder(group="g"))
        assert planned.clusters == [node.config.cluster]
        planned.clusters = ["elsewhere"]
        (tmp_path / "jobs.json").write_bytes(msgspec.json.encode([planned]))
        async with console(node, tmp_path) as site:
            await text_with(site, "/jobs", "g waiting of the cluster elsewhere 0 0 1")
            page = await site.text(f"/jobs/{planned.id}")
            assert f"belongs to the cluster elsewhere, and the name server has {node.config.cluster}" in page
            with pytest.raises(ConfigError, match="another console uses this folder"):
                Jobs(admin, tmp_path).start()
            with pytest.raises(ConfigError, match="another console uses this folder"):
                await Jobs(admin, tmp_path).add(planned)
            Jobs(admin, tmp_path).start(is_read_only=True)
            _, done = await site.change(f"/jobs/{planned.id}", f"/jobs/{planned.id}/stop")
            assert "The replay is stopped" in done
        with pytest.raises(ConfigError, match="another console has written it; restart this console"):
            await Jobs(admin, tmp_path).add(planned)
        assert (await dead_letters(admin, "g")).new == 1


async def test_a_job_sends_only_to_confirmed_topics_and_counts_what_is_gone(node: Node, tmp_path: Path) -> None:
    async with rejected(node, 1), AdminClient(node.address) as admin:
        running = Jobs(admin)
        for order, reason in (
            (ReplayOrder(group="g", to="topic", topics=["bills"]), "which was not confirmed"),
            (
                ReplayOrder(group="g", places=[DeadLetterPlace("broker-a", 0, 9)]),
                "there is no message at %DLQ%g@broker-a:0 9",
            ),
        ):
            job = await running.plan(order)
            await running.add(job)
            await eventually(lambda job=job: job.has_ended)  # type: ignore[misc]
            assert (job.state, job.sent, job.failed) == (JobState.DONE, 0, 1)
            assert reason in job.reason
        assert (await dead_letters(admin, "g")).new == 1
        await running.close()


async def test_a_read_only_console_shows_jobs_and_runs_none(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "console"
    folder.mkdir()
    job = ReplayJob(id="1", order=ReplayOrder(group="g"), ends={}, total=1, created_ms=1)
    (folder / "jobs.json").write_bytes(msgspec.json.encode([job]))
    async with (
        ConsoleServer(node.address, folder=folder, read_only=True) as server,
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
    ):
        assert "g waiting 0 0 1" in await Site(server.url, http).text("/jobs")
    async with console(node, folder) as site:
        await text_with(site, "/jobs", "g done 0 0 1")


async def test_jobs_are_limited_and_a_damaged_file_is_set_aside(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, writers = os.replace, set[threading.Thread]()

    def replacing(source: Path, target: Path) -> None:
        if Path(target).name == "jobs.json":
            writers.add(threading.current_thread())
        replace(source, target)

    monkeypatch.setattr("os.replace", replacing)

    def waiting(number: int) -> ReplayJob:
        order = ReplayOrder(group="g", at_ms=1 << 60)
        return ReplayJob(id=str(number), order=order, ends={}, total=1, created_ms=number)

    async with AdminClient(node.address) as admin:
        kept = Jobs(admin, tmp_path)
        for number in range(MAX_JOBS):
            await kept.add(waiting(number))
        with pytest.raises(ConfigError, match="100 jobs have not ended"):
            await kept.add(waiting(MAX_JOBS))
        await kept.stop("7")
        await kept.add(waiting(MAX_JOBS))
        assert writers
        assert threading.main_thread() not in writers, "the event loop waited for the disk"
        assert len(kept.all()) == MAX_JOBS
        assert kept.all()[0].id == str(MAX_JOBS)
        with pytest.raises(ConfigError, match="no job has the id '7'"):
            kept.find("7")
        await kept.close()
        again = Jobs(admin, tmp_path)
        again.start()
        assert [job.id for job in again.all()] == [job.id for job in kept.all()]
        await again.close()
        (tmp_path / "jobs.json").write_text("[{]")
        for is_read_only, file in ((True, "jobs.json"), (False, "jobs.json.bad")):
            started = Jobs(admin, tmp_path)
            started.start(is_read_only=is_read_only)
            assert f"jobs_unreadable file='{tmp_path / file}' " in caplog.text
            assert (started.all(), (tmp_path / file).read_text()) == ([], "[{]")
            await started.close()
        (tmp_path / "file").write_text("")
        elsewhere = Jobs(admin, tmp_path / "file")
        with pytest.raises(ConfigError, match="cannot be written"):
            await elsewhere.add(waiting(0))
        assert elsewhere.all() == []
