"""Warnings that repeat are written once a minute."""

from __future__ import annotations

import logging

import pytest
import structlog
from rocketlet.command.plumbing.repeats import RepeatedEvents


class Time:
    def __init__(self) -> None:
        self.s = 0.0

    def now_s(self) -> float:
        return self.s


def test_a_line_is_written_once_and_then_each_minute_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Time()
    repeats = RepeatedEvents(clock.now_s)

    def written(method: str = "warning", **fields: object) -> dict[str, object] | None:
        try:
            return dict(repeats.process(None, method, {"event": "name_server_unreachable", **fields}))
        except structlog.DropEvent:
            return None

    line = {"event": "name_server_unreachable", "address": "a"}
    assert written(address="a") == line
    for clock.s in range(1, 60):
        assert written(address="a") is None
    assert written(address="b") == line | {"address": "b"}, "a line that differs is another"
    assert written("info", address="a") == line, "only warnings and errors count"
    clock.s = 60.0
    assert written(address="a") == line | {"repeated": 59}
    clock.s = 120.0
    assert written(address="a") == line
    monkeypatch.setattr("rocketlet.command.plumbing.repeats.REPEATS_KNOWN", 2)
    written(address="c")
    written(address="d")
    assert written(address="a") == line, "it was forgotten"


def test_lines_of_logging_are_left_out_too() -> None:
    repeats = RepeatedEvents(Time().now_s)

    def record(**fields: object) -> logging.LogRecord:
        made = logging.LogRecord("rocketlet.cluster", logging.WARNING, "f", 1, "text", (), None)
        made.event, made.fields = "route_not_refreshed", fields
        return made

    assert [repeats.filter(record(topic=topic)) for topic in ("t", "t", "u")] == [True, False, True]
