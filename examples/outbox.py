"""The outbox: a message is sent if and only if its database transaction commits, without a transaction of two systems.

    python examples/outbox.py NAME_SERVER DATABASE_URL      # sqlite:///shop.db, postgresql+psycopg://...

A transaction that changes data also writes the message into the table `outbox`. A relay sends the rows, and deletes a
row when the broker has acknowledged it. If the relay dies in between, it resends the message with the same id. Consumers
that must not handle a message twice store the ids of handled messages.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

from rocketlet import Producer, stop_signal
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    insert,
    select,
)

metadata = MetaData()
orders = Table("orders", metadata, Column("number", String(40), primary_key=True), Column("dish", String(200)))
outbox = Table(
    "outbox",
    metadata,
    Column("place", Integer, primary_key=True, autoincrement=True),  # the order of sending
    Column("message_id", String(40), nullable=False),
    Column("topic", String(127), nullable=False),
    Column("queue_key", String(200)),
    Column("body", LargeBinary, nullable=False),
)


def place_order(engine: Engine, number: str, dish: str) -> None:
    """Store an order and its message in one transaction."""
    with engine.begin() as transaction:
        transaction.execute(insert(orders).values(number=number, dish=dish))
        message = {"message_id": uuid.uuid4().hex, "topic": "orders", "queue_key": number, "body": dish.encode()}
        transaction.execute(insert(outbox).values(message))


async def relay_once(engine: Engine, producer: Producer, limit: int = 100) -> int:
    """Send the waiting messages, oldest first. Return their number. Raises RocketletError; messages that were not sent
    stay."""
    with engine.connect() as connection:
        rows = connection.execute(select(outbox).order_by(outbox.c.place).limit(limit)).all()
    for row in rows:
        await producer.send(row.topic, row.body, queue_key=row.queue_key, message_id=row.message_id)
        with engine.begin() as transaction:
            transaction.execute(delete(outbox).where(outbox.c.place == row.place))
    return len(rows)


async def relay_forever(engine: Engine, producer: Producer) -> None:
    while True:
        if not await relay_once(engine, producer):
            await asyncio.sleep(0.1)


async def main(name_server: str, database: str) -> None:
    engine = create_engine(database)
    metadata.create_all(engine)
    try:
        async with Producer(name_server, "outbox", timeout_s=30) as producer:
            relay = asyncio.create_task(relay_forever(engine, producer))
            stop = asyncio.create_task(stop_signal())
            await asyncio.wait([relay, stop], return_when=asyncio.FIRST_COMPLETED)
            if relay.done():
                await relay  # raises why it ended, so that the caller gets the error
            relay.cancel()
    finally:
        engine.dispose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
