"""Ten jobs for three workers that share messages: one job is slow, one fails once, one is rejected. Needs a broker:
`rocketlet start`."""

from __future__ import annotations

import asyncio
import sys

from rocketlet import Message, Producer, Reject, RetryLater, SharedConsumer


async def main(name_server: str = "127.0.0.1:9876") -> None:
    done: set[int] = set()
    all_done = asyncio.Event()

    def worker(name: str) -> SharedConsumer:
        async def work(message: Message) -> RetryLater | Reject | None:
            job = int(message.body)
            if job == 3:
                await asyncio.sleep(1)
            if job == 5 and message.attempt == 1:
                return RetryLater(delay=0.3)
            print(f"{name}: job {job}, attempt {message.attempt}")
            done.add(job)
            if len(done) == 10:
                all_done.set()
            return Reject("there is no job 7") if job == 7 else None

        return SharedConsumer(name_server, "workers", "jobs", work, concurrency=2)

    async with worker("Ann"), worker("Bob"), worker("Cid"), Producer(name_server) as producer:
        for job in range(10):
            await producer.send("jobs", b"%d" % job)
        await asyncio.wait_for(all_done.wait(), 20)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
