"""Process every message exactly once in a SQL database: one transaction stores its effect and the next offset.

    python examples/exactly_once.py NAME_SERVER DATABASE_URL      # sqlite:///payments.db, postgresql+psycopg://...

Two columns of the table `places` make that safe. `next_offset`: messages with lower offsets have taken effect already, so a
redelivered message changes nothing. `epoch`: it grows with each owner of a queue, so a member that was suspended beyond
its lease, and whose queue another member owns now, changes nothing either. The consumer starts at the offsets of the
database, not of the group. Messages must be handled in order (`orderly=True`), because `next_offset` covers all messages
before it.

A message that is stored twice because its producer retried a send counts as two messages here; to detect that, store
`message.message_id`, too. Run brokers with `--flush sync`: without it, a power cut can give the offsets of lost messages to
others. If you delete a topic, delete its rows of `places`.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from rocketlet import Consumer, Message, Queue
from sqlalchemy import BigInteger, Column, Engine, MetaData, String, Table, create_engine, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

metadata = MetaData()
places = Table(
    "places",
    metadata,
    Column("queue", String(400), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("next_offset", BigInteger, nullable=False),
)
payments = Table(
    "payments", metadata, Column("queue", String(400)), Column("offset", BigInteger), Column("body", String)
)


class Ledger:
    """The database. Its methods run in threads, because they block."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        make_tables(engine)

    def pay(self, message: Message) -> None:
        """The handler: effect and offset in one transaction, or neither."""
        place = {"epoch": message.epoch, "next_offset": message.queue_offset + 1}
        with self._engine.begin() as database:
            moved = database.execute(
                update(places)
                .where(
                    places.c.queue == str(message.queue),
                    places.c.epoch <= message.epoch,
                    places.c.next_offset <= message.queue_offset,
                )
                .values(place)
            )
            if moved.rowcount == 1:
                row = {"queue": str(message.queue), "offset": message.queue_offset, "body": message.body.decode()}
                database.execute(insert(payments).values(row))

    def next_offset(self, queue: Queue) -> int:
        with self._engine.begin() as database:
            found = database.execute(select(places.c.next_offset).where(places.c.queue == str(queue))).scalar()
        if found is not None:
            return int(found)
        try:
            with self._engine.begin() as database:
                database.execute(insert(places).values(queue=str(queue), epoch=0, next_offset=0))
        except IntegrityError:  # another member has inserted the row first
            return self.next_offset(queue)
        return 0


def make_tables(engine: Engine) -> None:
    """Create the tables. If members start concurrently and another one is creating a table, retry."""
    for tries_left in reversed(range(len(metadata.tables) + 1)):
        try:
            metadata.create_all(engine)
            return
        except DBAPIError:
            if not tries_left:
                raise


async def main(
    name_server: str = "127.0.0.1:9876", url: str = "sqlite:///payments.db", topic: str = "payments"
) -> None:
    ledger = Ledger(create_engine(url))

    async def begin(queues: set[Queue]) -> dict[Queue, int]:
        return {queue: await asyncio.to_thread(ledger.next_offset, queue) for queue in queues}

    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    async with Consumer(name_server, "ledger", topic, ledger.pay, start="first", orderly=True, on_assigned=begin):
        print("ready", flush=True)
        await over.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
