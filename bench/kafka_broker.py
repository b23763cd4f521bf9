"""A Kafka broker as a process, with its defaults, from Maven Central."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rocketlet.testing.ports import free_port

from .peers import CACHE, Peer, listening, maven_jars, process

KAFKA_VERSION = "4.1.1"
FOLDER = Path(__file__).parent / "kafka"


async def kafka_jars(pom: str, version: str, needed: str, setting: str) -> Path:
    """The folder with the jars of one of Kafka's parts."""
    options = (f"-D{setting}={version}", "-DincludeScope=runtime")
    return await maven_jars(CACHE / f"{pom}-{version}", needed, FOLDER / f"{pom}.xml", *options)


def kafka_fault() -> str | None:
    """Why Kafka cannot be measured here; None if it can."""
    return None if shutil.which("mvn") and shutil.which("java") else "Java or Maven is missing, which fetches Kafka"


@asynccontextmanager
async def kafka(folder: Path) -> AsyncIterator[Peer]:
    """One broker that is its own controller."""
    jars = await kafka_jars("broker", KAFKA_VERSION, "kafka_*.jar", "kafka.version")
    port, controller = free_port(), free_port()
    settings = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": folder / "kafka",
        "offsets.topic.replication.factor": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
    }
    properties = folder / "kafka.properties"
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    java = ("java", "-Xms1g", "-Xmx1g", "-cp", f"{jars}/*")
    async with process(
        (*java, "kafka.tools.StorageTool", "format", "-t", str(uuid.uuid4()), "-c", str(properties)),
        folder / "kafka.log",
    ):
        async with asyncio.timeout(60):
            while not (folder / "kafka" / "meta.properties").exists():
                await asyncio.sleep(0.1)
    async with process((*java, "kafka.Kafka", str(properties)), folder / "kafka.log") as pid:
        await listening(port)
        yield Peer("kafka", f"127.0.0.1:{port}", pid)
