"""The demo's children: each a real process, ended by its own id."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class Child:
    """A process of this Python, its output kept in a file. `wait_for` finds a line of its stdout."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._lines: list[str] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read(), name=f"output of {name}")

    @classmethod
    async def start(cls, name: str, folder: Path, module: str, arguments: Sequence[str]) -> Child:
        log = folder / f"{name}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "PYSPARK_PYTHON": sys.executable},
            )
        return cls(name, process, log)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            async with self._news:
                self._lines.append(line.decode(errors="replace").rstrip())
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def wait_for(self, text: str, timeout_s: float = 180.0) -> str:
        """The first line that holds the text. Raises RuntimeError with the end of its log if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                while (line := next((line for line in self._lines if text in line), None)) is None:
                    if self._reader.done() or self._process.returncode is not None:
                        raise RuntimeError(f"{self.name} ended early: {self.last_words()}")
                    await self._news.wait()
                return line
        except TimeoutError:
            late = f"{self.name} did not say {text!r} within {timeout_s:.0f} s; is the machine busy?"
            raise RuntimeError(f"{late} {self.last_words()}") from None

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] or "(nothing in its log)"

    async def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        await self._process.stdin.drain()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    async def wait(self, timeout_s: float) -> int:
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def stop(self, timeout_s: float = 15.0) -> None:
        """SIGTERM; SIGKILL if that is not enough."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await self.wait(timeout_s)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        await asyncio.gather(self._reader, return_exceptions=True)


def java_fault() -> str | None:
    """Why Spark cannot use this machine's Java; None if it can."""
    advice = "install Java 17 or later, for example `apt install openjdk-17-jre-headless` or `brew install openjdk@17`"
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if java is None:
        return f"no Java was found; {advice}"
    found = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    try:
        release = int(found.split('"')[1].split(".")[0])
    except (IndexError, ValueError):
        return f"`java -version` said {found[:80]!r}; {advice}"
    return None if release >= 17 else f"Java {release} is too old for Spark 4; {advice}"
