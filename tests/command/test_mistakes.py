"""Users mistype: one line names the mistake and says what to do."""

from __future__ import annotations

import errno
import os
import socket
import sys
from pathlib import Path

import pytest
from rocketlet.client import AdminClient, AnswerUnreadable, Consumer
from rocketlet.command.cli import hoisted, main
from rocketlet.command.plumbing import logs
from rocketlet.command.serving.listening import listening_fault

from ..conftest import Node
from .conftest import Run


@pytest.fixture(autouse=True)
def without_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCKETLET_SECRET_KEY", raising=False)
    monkeypatch.setattr(logs, "configure", lambda level: None)


@pytest.mark.parametrize(
    ("command", "status", "text"),
    [
        ("topics list --nameserver 127.0.0.1:1", 1, "nothing listens there; start the server, or correct the address"),
        ("topics list --nameserver localhost:1", 1, "nothing listens there"),
        ("topics list --nameserver 127.0.0.1", 1, "'127.0.0.1' is not host:port, such as 127.0.0.1:9876"),
        ("topics list --access-key a", 1, "its secret is not: use $ROCKETLET_SECRET_KEY or --secret-key-file"),
        ("topics list --access-key a --secret-key-file /none", 1, "--secret-key-file: /none cannot be read"),
        (f"topics list --access-key a --secret-key-file {sys.executable}", 1, "cannot be read: it is not UTF-8 text"),
        ("topics list --tls-ca /none", 1, "certificates are given, but no --tls; add it"),
        ("topics list --tls --tls-ca /none", 1, "ca_file: /none does not exist or is not readable"),
        ("broker --nameserver x", 1, "'x' is not host:port"),
        ("fsck /none", 1, "/none is not a data folder: it does not exist"),
        ("start --port x", 2, "argument --port: x is not a port; use 0 to 65535; `rocketlet start --help` lists"),
        ("start --port 99999", 2, "99999 is not a port; use 0 to 65535"),
        ("start --queues x", 2, "x is not a whole number from 1"),
        ("start --retain-hours -1", 2, "-1 is not a number of hours"),
        ("start --retain-hours nan", 2, "nan is not a number of hours"),
        ("start --advertise foo:bar", 2, "'foo:bar' is not HOST or HOST:PORT"),
        ("start --retain-bytes much", 2, "not a size"),
        ("start --flush never", 2, "invalid choice"),
        ("start --port 0 --data data --tls enforcing", 1, "give --tls-cert"),
        ("start --port 0 --data data --tls-key x.key", 1, "--tls-cert is not"),
        ("start --port 0 --data data --tls-cert /no/such.pem", 1, "cannot be used"),
        ("start --port 0 --data data --acl /no/such.yml", 1, "cannot read /no/such.yml"),
        ("broker", 2, "--nameserver"),
        ("dance", 2, "invalid choice"),
        ("console --port -1", 2, "argument --port: -1 is not a port; use 0 to 65535"),
        ("start --console-port 65536", 2, "argument --console-port: 65536 is not a port; use 0 to 65535"),
        (
            "console --host 0.0.0.0",
            1,
            "--host: other machines reach 0.0.0.0, and the console has no users; give --logins FILE",
        ),
        ("console --logins /none", 1, "logins: /none cannot be read: No such file"),
        ("console --logins /none --no-login", 1, "--no-login: --logins is given, too; remove one of them"),
        ("start --console-port 0 --console-host ::", 1, "--console-host: other machines reach ::"),
        ("dump 65536", 2, "65536 is not a port; use 0 to 65535"),
        ("messages find t --limit 0", 2, "argument --limit: 0 is not a whole number from 1"),
        ("messages tail t --last -1", 2, "argument --last: -1 is not a whole number from 0"),
        ("messages dead g --limit x", 2, "argument --limit: x is not a whole number from 1"),
        ("mirror --from a:1 --to b:1 --last -1", 2, "argument --last: -1 is not a whole number from 0"),
        ("doctor --watch nan", 2, "argument --watch: nan is not a number of seconds from 0"),
        ("doctor --watch inf", 2, "inf is not a number of seconds from 0"),
        ("doctor --watch x", 2, "x is not a number of seconds from 0"),
        (
            "messages send t body --queue 3",
            2,
            "unrecognized arguments: --queue 3; did you mean --queue-key?; `rocketlet mess",
        ),
        ("messages send t body --queue 3", 2, "`rocketlet messages send --help` lists the options"),
        (
            "messages send t body --delay-levle=3",
            2,
            "unrecognized arguments: --delay-levle=3; did you mean --delay-level?",
        ),
        ("asyncapi :app", 1, "MODULE:APP: got ':app'; expected a module and a name in it"),
        ("asyncapi nothing", 1, "MODULE:APP: got 'nothing'; expected a module and a name in it, such as service:app"),
        (
            "asyncapi no_such_module:app",
            1,
            "No module named 'no_such_module'; run the command in the folder of the module",
        ),
        ("asyncapi json:dumps", 1, "MODULE:APP: dumps of json is function; expected a Rocketlet application"),
        ("topics lst", 2, "invalid choice 'lst'; did you mean list?; `rocketlet topics --help` lists"),
        ("grups list", 2, "invalid choice 'grups'; did you mean groups?"),
        ("acl put k --perm xyz", 2, "`rocketlet acl put --help` lists the options"),
        ("restore /none /none2", 1, "FOLDER: there is no folder /none; give the folder that `rocketlet backup` wrote"),
        ("--nameserver 127.0.0.1:1 topics list", 1, "nothing listens there"),
        ("topics --nameserver=127.0.0.1:1 list", 1, "nothing listens there"),
        ("--tls --tls-ca /none topics list", 1, "ca_file: /none does not exist or is not readable"),
        ("topics", 2, "the following arguments are required: VERB; `rocketlet topics --help` lists the options"),
    ],
)
def test_a_mistake_is_reported_in_one_line(
    command: str,
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # servers make their folder before they listen
    try:
        ended = main(command.split())
    except SystemExit as end:
        ended = int(end.code or 0)
    lines = capsys.readouterr().err.splitlines()
    assert (ended, len(lines), text in lines[-1]) == (status, 1, True), lines
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("command", ["dump PORT", "nameserver --port PORT", "console --port PORT"])
def test_a_port_that_is_taken_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(command.replace("PORT", port).split()) == 1
    text = f"rocketlet: cannot listen on 127.0.0.1:{port}: Address already in use; stop what listens there"
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL)),
            "h:7: Cannot assign requested address; no network interface of this machine has this address",
        ),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), "h:7: Permission denied; ports below 1024 are for root"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "h:7: the host name is not known"),
        (
            OSError(errno.EADDRINUSE, "attempting to bind on address ('::1', 8, 0, 0): taken"),
            "::1:8: Address already in use",
        ),
        (
            OSError(errno.EADDRINUSE, "the metrics port h:9: taken"),
            "the metrics port h:9: taken; stop what listens there",
        ),
    ],
)
def test_why_a_server_cannot_listen(error: OSError, text: str) -> None:
    assert listening_fault(error, "h", 7).startswith(f"cannot listen on {text}")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("topics show nobody", "no name server knows the topic nobody; `rocketlet topics list` shows all"),
        ("messages find nobody --key k", "no name server knows the topic nobody"),
        ("groups show nobody", "no broker knows the group nobody; `rocketlet groups list` shows all"),
        ("groups delete nobody --yes", "no broker knows the group nobody"),
        ("offsets show nobody", "`rocketlet groups list` shows all"),
        ("messages dead nobody", "no broker knows the group nobody"),
        ("messages replay nobody", "no broker knows the group nobody"),
    ],
)
async def test_a_name_that_nobody_knows_is_not_taken_for_nothing_to_do(
    run: Run, node: Node, command: str, text: str
) -> None:
    ran = await run(*command.split())
    assert (ran.status, text in ran.out + ran.err) == (1, True), ran


async def test_a_topic_of_more_queues_than_a_route_may_have_is_refused(run: Run, node: Node) -> None:
    ran = await run("topics", "create", "orders", "--queues", "65537")
    assert (ran.status, ran.err) == (1, "rocketlet: queues: got '65537'; expected 1 to 65536\n")


async def test_an_answer_that_cannot_be_read_is_one_line(run: Run, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unreadable(admin: AdminClient, **options: object) -> list[str]:
        raise AnswerUnreadable("the route body cannot be read")

    monkeypatch.setattr(AdminClient, "topics", unreadable)
    ran = await run("topics", "list")
    assert (ran.status, ran.err) == (1, "rocketlet: the route body cannot be read\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--json doctor --watch 0", "doctor --json --watch 0"),
        ("--nameserver h:1 --json brokers --tls list --x", "brokers list --nameserver h:1 --json --tls --x"),
        ("start --tls permissive", "start --tls permissive"),
        ("--version", "--version"),
        ("--nameserver", "--nameserver"),
    ],
)
def test_options_are_hoisted_behind_the_verb_when_they_stand_before_it(typed: str, meant: str) -> None:
    assert hoisted(typed.split()) == meant.split()


@pytest.mark.parametrize("spelling", ["--tag", "--tags"])
async def test_tag_and_tags_are_accepted_when_messages_are_sent_and_followed(
    node: Node, run: Run, spelling: str
) -> None:
    for tag in ("new", "old"):
        assert (await run("messages", "send", "t", tag, spelling, tag)).status == 0
    shown = await run("messages", "tail", "t", spelling, "new", "--no-follow", "--json")
    assert [record["body"] for record in shown.records] == ["new"]


def test_option_of_a_client_is_suggested_when_it_is_mistyped() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'orderley'; did you mean 'orderly'\?"):
        Consumer("127.0.0.1:1", "g", "t", lambda message: None, orderley=True)  # type: ignore[call-overload]
