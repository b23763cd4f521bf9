"""Apache's proxy 5.3 with its broker inside (local mode), and its name server: what official clients of 5.x talk to."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

from rocketlet.testing.ports import free_port

from .peers import APACHE_START_S, CACHE, LOGGING, POM, Apache, _registered, listening, maven_jars, process

PROXY_VERSION = "5.3.3"
HEAP = ("-Xms512m", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxDirectMemorySize=1g")


class Proxy(Apache):
    """`endpoint` is what clients of 5.x are given; `pid` the process of proxy and broker."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = ""
        super().__init__(folder, PROXY_VERSION, HEAP, recallMessageEnable="true")

    async def jars(self) -> Path:
        pom = POM.parent / "proxy.xml"
        version = f"-Drocketmq.version={PROXY_VERSION}"
        return await maven_jars(CACHE / f"apache-proxy-{PROXY_VERSION}", "rocketmq-proxy-*.jar", pom, version)

    def _configure(self) -> None:
        super()._configure()
        port = free_port()
        self.endpoint = f"127.0.0.1:{port}"
        (self.home / "conf" / "rmq.proxy.logback.xml").write_text(LOGGING)
        settings = {
            "rocketMQClusterName": "DefaultCluster",
            "grpcServerPort": port,
            "remotingListenPort": free_port(),
            "namesrvAddr": self.address,
        }
        (self.home / "rmq-proxy.json").write_text(json.dumps(settings))

    async def _start_broker(self) -> None:
        home = self.home
        arguments = (
            *self._java("proxy.ProxyStartup", "unused", *self._heap)[:-2], "-pm", "local",
            "-bc", str(home / "broker.properties"), "-pc", str(home / "rmq-proxy.json"), "-n", self.address,
        )  # fmt: skip
        self._broker = AsyncExitStack()
        environment = {"ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)}
        self.pid = await self._broker.enter_async_context(process(arguments, home / "log", **environment))
        await listening(int(self.endpoint.rpartition(":")[2]), APACHE_START_S, pid=self.pid)
        await _registered(self.address)
