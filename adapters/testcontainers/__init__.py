"""A broker in a container, for tests with Testcontainers.

from rocketlet.testcontainers import RocketletContainer

with RocketletContainer("rocketlet") as container:
    async with Producer(container.address) as producer: ...
    container.broker.clock.advance(hours=2)
"""

from __future__ import annotations

from typing import Any, Final, Self

try:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.testcontainers needs Testcontainers: pip install '.[testcontainers]'") from missing

from rocketlet.testing import RemoteBroker

BROKER_PORT: Final = 9876
CONTROL_PORT: Final = 9880


class RocketletContainer(DockerContainer):
    """A name server and broker in a container, on ports that Docker chooses.

    - `image`: the image that `make image` builds, or its name in a registry.
    - `options`: those of Testcontainers' `DockerContainer`. Environment variables such as `ROCKETLET_QUEUES` are options of
      `rocketlet start`.
    """

    def __init__(self, image: str = "rocketlet", **options: Any) -> None:
        super().__init__(image, **options)
        self._broker: RemoteBroker | None = None
        self.with_exposed_ports(BROKER_PORT, CONTROL_PORT)
        self.with_env("ROCKETLET_CONTROL_PORT", str(CONTROL_PORT))
        self.waiting_for(LogMessageWaitStrategy("rocketlet is ready"))

    @property
    def address(self) -> str:
        """The name server's address for clients in this process, once the container runs."""
        return self._published(BROKER_PORT)

    @property
    def broker(self) -> RemoteBroker:
        """The broker: its clock, messages, groups and faults. Raises RuntimeError unless the container is running."""
        if self._broker is None:
            raise RuntimeError("the container is not running; use it in a `with` block, or call start()")
        return self._broker

    def start(self) -> Self:
        """Start the container, and return when clients can use it."""
        super().start()
        self._broker = RemoteBroker(self._published(CONTROL_PORT), address=self.address)
        self._broker.advertise(external=self.address)  # clients get the published port in their routes
        return self

    def stop(self, *arguments: Any, **options: Any) -> None:
        """Remove the container."""
        if self._broker is not None:
            self._broker.close()
            self._broker = None
        super().stop(*arguments, **options)

    def _published(self, port: int) -> str:
        return f"{self.get_container_host_ip()}:{self.get_exposed_port(port)}"


__all__ = ["RocketletContainer"]
