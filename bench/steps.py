"""Counts the interpreter's steps in our own code, which are the same on each machine, however busy it is.

A step is a line that runs, a function of ours that is called or resumed, or a call from our code into a function written in
C. Python's library and other packages do not count, and neither does how long a C function takes: `bench.cpu` measures that
as time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rocketlet import protocol

ROOT = Path(str(protocol.__file__)).parents[1]  # as the interpreter knows it, whatever links lead here
OURS = tuple(f"{ROOT}/{room}/" for room in ("broker", "client", "protocol", "spark"))


class Meter:
    """Counts what runs between `start` and `stop`, without `paused` blocks: `steps`, `thread_s`, and the functions of ours
    that are `entered`, in order."""

    def __init__(self) -> None:
        self.steps = 0
        self.thread_s = 0.0
        self.entered: list[CodeType] = []
        self._counts = False
        self._is_on = False
        self._began_s = 0.0
        self._others: tuple[Any, Any] = (None, None)
        self._is_ours: dict[CodeType, bool] = {}

    def start(self, *, counts: bool) -> None:
        """counts: True for steps and functions, which makes all of it slower by far, so that the time means nothing."""
        self.steps, self.thread_s, self.entered, self._counts = 0, 0.0, [], counts
        self._resume()

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.start(counts=True)
        try:
            yield
        finally:
            self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        was_on = self._is_on
        if was_on:
            self.stop()
        try:
            yield
        finally:
            if was_on:
                self._resume()

    def _resume(self) -> None:
        self._is_on = True
        self._began_s = time.thread_time()
        if self._counts:
            self._others = sys.getprofile(), sys.gettrace()  # such as coverage's
            sys.setprofile(self._called)
            sys.settrace(self._entered)

    def stop(self) -> None:
        if self._counts:
            profile, trace = self._others
            sys.settrace(trace)
            sys.setprofile(profile)
        self.thread_s += time.thread_time() - self._began_s
        self._is_on = False

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._counts_code(frame.f_code):
            return None
        self.steps += 1
        self.entered.append(frame.f_code)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.steps += 1
        return self._line

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and self._counts_code(frame.f_code):
            self.steps += 1

    def _counts_code(self, code: CodeType) -> bool:
        known = self._is_ours.get(code)
        if known is None:
            known = self._is_ours[code] = code.co_filename.startswith(OURS)
        return known
