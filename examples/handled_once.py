"""Handle each message id once, with a table of handled ids in SQLite.

    python examples/handled_once.py [NAME_SERVER] [FILE]

The handler stores its effect in the transaction that stores the id, so that effect and id are stored together, or neither is.
An effect elsewhere, such as a mail, may happen again if the process dies between the effect and the commit. Ids are those of
the sender: a send that its producer retried has the same id, and a program that sends the same order twice should give both
the same `message_id`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rocketlet import Consumer, Message, stop_signal


class Ledger:
    """A database with the payments, and the ids of the messages that were handled."""

    def __init__(self, file: Path | str) -> None:
        self.database = sqlite3.connect(file, isolation_level=None)
        self.database.execute("create table if not exists handled (id text primary key)")
        self.database.execute("create table if not exists payments (body text)")

    @asynccontextmanager
    async def once(self, message_id: str) -> AsyncIterator[bool]:
        self.database.execute("begin immediate")
        try:
            cursor = self.database.execute("insert or ignore into handled values (?)", (message_id,))
            yield cursor.rowcount == 1
        except BaseException:
            self.database.execute("rollback")
            raise
        self.database.execute("commit")

    async def pay(self, message: Message) -> None:
        self.database.execute("insert into payments values (?)", (message.body.decode(),))


async def main(name_server: str = "127.0.0.1:9876", file: str = "payments.db") -> None:
    ledger = Ledger(file)
    # one connection of SQLite has one transaction, so one handler runs at a time
    async with Consumer(name_server, "ledger", "payments", ledger.pay, once=ledger, concurrency=1, start="first"):
        print("ready", flush=True)
        await stop_signal()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
