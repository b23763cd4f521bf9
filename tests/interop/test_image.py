"""The image as a service of CI and with Testcontainers. It needs a Docker engine that has it: `make image`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rocketlet.client import AdminClient, Consumer, Message, Producer
from rocketlet.testing import RemoteBroker
from rocketlet.testing.ports import free_port

from ..conftest import eventually

MAX_BYTES = 100_000_000
Start = Callable[..., str]


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def fault() -> str:
    if shutil.which("docker") is None:
        return "docker is missing"
    done = subprocess.run(["docker", "image", "inspect", "rocketlet"], capture_output=True, timeout=60)
    return "Docker has no image `rocketlet`; `make image` builds it" if done.returncode else ""


pytestmark = [pytest.mark.skipif(bool(fault()), reason=fault()), pytest.mark.timeout(180)]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start("--publish", "1:2", ...)`: the id of a container of the image with its default command."""
    begun: list[str] = []

    def starting(*options: str, command: tuple[str, ...] = ()) -> str:
        begun.append(docker("run", "--detach", *options, "rocketlet", *command))
        return begun[-1]

    yield starting
    for container in begun:
        docker("rm", "--force", "--volumes", container)


def inspected(container: str) -> Any:
    return json.loads(docker("inspect", container))[0]


async def healthy(container: str) -> None:
    await eventually(lambda: inspected(container)["State"]["Health"]["Status"] == "healthy")


async def test_it_is_small_runs_as_a_user_and_says_when_it_is_ready(start: Start) -> None:
    image = json.loads(docker("image", "inspect", "rocketlet"))[0]
    assert image["Size"] < MAX_BYTES
    assert image["Config"]["User"] == "10001:10001"
    container = start()
    await healthy(container)
    assert "rocketlet is ready" in docker("logs", container)
    docker("stop", "--time", "10", container)
    assert inspected(container)["State"]["ExitCode"] == 0


async def test_a_client_on_the_host_is_served_through_the_published_port(start: Start) -> None:
    """Without a setting: the container cannot know the host's names, so it returns `localhost` to clients from outside."""
    port = free_port()
    container = start("--publish", f"127.0.0.1:{port}:9876", command=())
    await healthy(container)
    inside = inspected(container)["NetworkSettings"]["IPAddress"]
    async with AdminClient(f"127.0.0.1:{port}") as admin:
        assert [broker.addresses[0] for broker in await admin.brokers()] == ["localhost:9876"]
    neighbour = (
        "import asyncio, sys\\n"
        "from rocketlet.client import AdminClient, Producer\\n"
        "async def main():\\n"
        "    async with AdminClient(sys.argv[1]) as admin, Producer(sys.argv[1]) as producer:\\n"
        "        await producer.send('t', b'x')\\n"
        "        print([broker.addresses[0] for broker in await admin.brokers()])\\n"
        "asyncio.run(main())"
    ).replace("\\n", "\n")
    assert docker("run", "--rm", "rocketlet", "python3", "-c", neighbour, f"{inside}:9876") == f"['{inside}:9876']"


async def test_a_port_that_is_known_after_the_start_is_settled_without_a_restart(start: Start) -> None:
    """As Testcontainers does it: Docker chooses the ports, then the test asks for them."""
    options = ("--env", "ROCKETLET_CONTROL_PORT=9880", "--publish", "127.0.0.1::9876", "--publish", "127.0.0.1::9880")
    container = start(*options)
    await healthy(container)
    broker_port, control_port = (docker("port", container, port).rpartition(":")[2] for port in ("9876", "9880"))
    address = f"127.0.0.1:{broker_port}"
    seen: list[Message] = []
    with RemoteBroker(f"127.0.0.1:{control_port}", address=address) as broker:
        broker.advertise(external=address)
        async with Producer(address) as producer, Consumer(address, "g", "t", seen.append, start="first"):
            await producer.send("t", b"x", delay_level=18)
            broker.clock.advance(hours=2)
            await broker.until(lambda: len(seen) == 1)
        broker.clear()
        assert broker.messages("t") == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the ports of a process")
async def test_without_the_setting_there_is_no_control_port(start: Start) -> None:
    container = start("--publish", "127.0.0.1::9880")
    await healthy(container)
    port = docker("port", container, "9880").rpartition(":")[2]
    with pytest.raises(ConnectionError), RemoteBroker(f"127.0.0.1:{port}") as broker:
        broker.messages("t")


async def test_container_of_testcontainers_serves_clients_and_has_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("testcontainers", reason="needs Testcontainers")
    from rocketlet.testcontainers import RocketletContainer
    from testcontainers.core.config import testcontainers_config

    monkeypatch.setattr(testcontainers_config, "ryuk_disabled", True)  # another image, which this machine may not have
    seen: list[Message] = []
    container = RocketletContainer("rocketlet").with_env("ROCKETLET_QUEUES", "3")
    with pytest.raises(RuntimeError, match="the container is not running"):
        _ = container.broker
    with container:
        async with Producer(container.address) as producer:
            await producer.send("t", b"x", delay=7200)
        async with Consumer(container.address, "g", "t", seen.append, start="first") as consumer:
            assert sum(queue.topic == "t" for queue in await consumer.assigned()) == 3
            container.broker.clock.advance(hours=2)
            await container.broker.until(lambda: len(seen) == 1)
        identity = container.get_container_id()
    with pytest.raises(subprocess.CalledProcessError):
        docker("inspect", identity)
