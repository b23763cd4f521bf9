"""A taskiq broker on RocketMQ: tasks are messages of one topic, workers the members of one group.

    from rocketlet.taskiq import RocketletBroker

    broker = RocketletBroker("127.0.0.1:9876")

    @broker.task
    async def cook(dish: str) -> None: ...

`taskiq worker tasks:broker` runs workers. taskiq decides when a task is acknowledged, by default after it has run, so
that the task of a worker that dies is redelivered. Labels of a task: `delay` (seconds), `at` (a datetime with a time zone,
or its ISO text) or `delay_level` (1 to 18) delay it, `priority` counts in topics of the type PRIORITY, and `queue_key` sends
tasks with the same key to the same queue.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from datetime import datetime
from functools import partial
from typing import Any

try:
    from taskiq import AckableMessage, AsyncBroker, BrokerMessage
except ModuleNotFoundError as missing:
    raise ImportError("rocketlet.taskiq needs taskiq: pip install '.[taskiq]'") from missing

from rocketlet.client import Access, Consumer, Producer, SharedConsumer


class RocketletBroker(AsyncBroker):
    """A taskiq broker that sends tasks to a topic and receives them as a member of a group.

    - `topic`: the topic of the tasks.
    - `group`: the consumer group of the workers. A new group starts at the first task, unless `start` is an option.
    - `sharing`: True for workers that share tasks as a `rocketlet.SharedConsumer` does: a group may have more workers than
      queues, and a slow task delays no other.
    - `options`: further options of `rocketlet.Consumer` or `rocketlet.SharedConsumer`.

    Results are stored in the backend that `with_result_backend` sets. A broker object can be started only once.
    """

    def __init__(
        self,
        name_server: str,
        *,
        topic: str = "taskiq",
        group: str = "taskiq",
        access: Access | None = None,
        sharing: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._topic = topic
        self._producer = Producer(name_server, f"{group}-senders", access=access)
        kind: Callable[..., Consumer | SharedConsumer] = SharedConsumer if sharing else Consumer
        self._consumer = kind(name_server, group, topic, access=access, **{"start": "first", **options})

    async def startup(self) -> None:
        await super().startup()
        await self._producer.start()

    async def shutdown(self) -> None:
        await self._consumer.stop()
        await self._producer.stop()
        await super().shutdown()

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task. Raises what `rocketlet.Producer.send` raises."""
        labels = message.labels
        key, delay, at, priority = (labels.get(name) for name in ("queue_key", "delay", "at", "priority"))
        await self._producer.send(
            self._topic,
            message.message,
            tag=message.task_name,
            keys=message.task_id,
            delay_level=int(labels.get("delay_level", 0)),
            delay=None if delay is None else float(delay),
            at=at if at is None or isinstance(at, datetime) else datetime.fromisoformat(str(at)),
            priority=None if priority is None else int(priority),
            queue_key=None if key is None else str(key),
        )

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Join the group and yield the tasks of this worker."""
        await self._consumer.start()
        while True:
            message = await self._consumer.receive()
            yield AckableMessage(data=message.body, ack=partial(self._consumer.ack, message))


__all__ = ["RocketletBroker"]
