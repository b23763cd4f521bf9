"""Child processes, each ended by its own id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

PIPE_BYTES = 1 << 30  # kept of a child's unread output; a full pipe would block the child
READY_S = 60.0  # maximum time until a server is ready, or has stopped


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


class ServerProcess:
    """A broker or a name server as a process: `async with` starts it, and kills it at the end if it still runs."""

    def __init__(
        self,
        folder: Path,
        port: int,
        *options: str,
        command: str = "start",
        limits: Mapping[int, int] | None = None,
    ) -> None:
        """Set what is started.

        Args:
            folder: The data folder of a broker; the log is beside it.
            port: The port of the server.
            options: More options of the command.
            command: `start`, `broker` or `nameserver`.
            limits: Limits of the process by their numbers (setrlimit).
        """
        self._command = command
        self._folder = folder
        self._options = options
        self._limits = dict(limits or {})
        self._child: Child | None = None
        self._log = folder.with_name(f"{folder.name}.log")
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        self.move(port)

    def move(self, port: int) -> None:
        """Set the port of the next start."""
        self._port = port
        self.address = f"127.0.0.1:{port}"

    @property
    def log(self) -> bytes:
        """The log of this server, without those of earlier servers on the folder."""
        return self._log.read_bytes()[self._log_begin :]

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    async def __aenter__(self) -> ServerProcess:
        data = () if self._command == "nameserver" else ("--no-vip", "--data", str(self._folder))
        command = (
            sys.executable, "-m", "rocketlet.command.cli", self._command, "--host", "127.0.0.1", "--port", str(self._port),
            *data, *self._options,
        )  # fmt: skip
        self._child = await Child.start(command, self._log, prepare=self._limit)
        await self._child.wait_for("ready", READY_S)
        return self

    def _limit(self) -> None:
        for kind, limit in self._limits.items():
            resource.setrlimit(kind, (limit, limit))

    async def __aexit__(self, *exception: object) -> None:
        if self._child is not None and self._child.exit_status is None:
            await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL, and wait for the end of the process."""
        self.child.kill()
        await self.child.wait(READY_S)

    async def end(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.child.signal(signal.SIGTERM)
        return await self.child.wait(READY_S)


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
