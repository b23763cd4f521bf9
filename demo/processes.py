"""Child processes, each ended by its own id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

PIPE_BYTES = 1 << 30  # kept of a child's unread output; a full pipe would block the child


class Child:
    """A child process. The parent reads each line of its stdout once; `log` has its stderr."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = log.stem
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        log: Path,
        *,
        reads: bool = True,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> Child:
        """Start a process.

        Args:
            command: The program and its arguments.
            log: The file to which the output is appended.
            reads: True if the parent reads stdout; otherwise stdout goes to the log, too.
            environment: Variables besides those of this process.
            prepare: A function that the child calls before it becomes the program, such as one that sets limits.
        """
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if reads else output,
                stderr=output,
                env={**os.environ, **(environment or {})},
                limit=PIPE_BYTES,
                preexec_fn=prepare,
            )
        return cls(process, log)

    async def lines(self) -> AsyncIterator[str]:
        """Yield the unread lines of stdout until the process closes it."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line.decode(errors="replace").rstrip()

    async def wait_for(self, text: str = "", timeout_s: float = 180.0) -> str:
        """Read up to the first line that contains the text, and return that line.

        Raises:
            RuntimeError: The process ended or the timeout expired before such a line; the message has the end of the log.
        """
        try:
            async with asyncio.timeout(timeout_s):
                async for line in self.lines():
                    if text in line:
                        return line
        except TimeoutError:
            late = f"{self.name} did not print {text!r} within {timeout_s:.0f} s; is the machine busy?"
            raise RuntimeError(f"{late} {self.last_words()}") from None
        raise RuntimeError(f"{self.name} ended early: {self.last_words()}")

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-2000:] or "(nothing in its log)"

    async def tell(self, line: str) -> None:
        """Write a line to stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        await self._process.stdin.drain()

    async def ask(self, line: str) -> str:
        """Write a line to stdin, and return the next line of stdout."""
        await self.tell(line)
        return await self.wait_for()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        return self._process.returncode

    def signal(self, number: int) -> None:
        """Send a signal to the process unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def wait(self, timeout_s: float) -> int:
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def close(self) -> int:
        """Close stdin, at which the program ends, and return the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return await self._process.wait()

    async def stop(self, timeout_s: float = 15.0) -> None:
        """Send SIGTERM, and SIGKILL if the process has not ended by the timeout."""
        if self._process.returncode is None:
            self.signal(signal.SIGTERM)
            try:
                await self.wait(timeout_s)
            except TimeoutError:
                self.kill()
                await self._process.wait()


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
