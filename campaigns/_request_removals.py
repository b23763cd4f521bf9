"""Fixes of what one request may cost, and may see."""

from __future__ import annotations

import re

from rocketlet.broker.access.accounts import Account
from rocketlet.broker.messages import sql_filter, sql_terms
from rocketlet.broker.running.turns import Line
from rocketlet.broker.sessions import clients
from rocketlet.broker.store import searching
from rocketlet.client.message import Message

from ._removal import Change, Lines, Removal

REQUESTS: dict[str, Removal] = {
    "inner-topics": Removal(
        "system topics are for administrators", "access", 1_000, [Change(Account, "may", Lines(
            "if kind is _Kind.INNER:", "if False:"
        ))], "ACL",
    ),
    "dead-letters": Removal(
        "dead letters need their group", "access", 1_000, [Change(Account, "may", Lines(
            "if kind is _Kind.DEAD_LETTERS:", "if False:"
        ))], "ACL",
    ),
    "asked": Removal(
        "a client that never answers takes nobody else's places", "exhaustion", 1, [
            Change(clients.Clients, "ask", [
                Lines("if len(self._asked.get(session, ())) >= self._limits.max_asked:", "if len(self._waiting) >= 10_000:"),
                Lines("if self._asking[by] >= self._limits.max_asked:", "if False:"),
            ])
        ], "H5", "replies",
    ),
    # The work of one request
    "search-steps": Removal(
        "a search looks once at each record", "cost", 400, [Change(searching.Search, "_found_in", Lines(
            "at = data.find(text, starts[index + 1])", "at = data.find(text, at + 1)"
        ))], "cost",
    ),
    "search-line": Removal(
        "a client has one search at a time", "cost", 400,
        [Change(Line, "join", lambda self, client, work: self._turns.do(work))], "cost",
    ),
    "filter-words": Removal(
        "a filter is read in time that grows with its words", "cost", 400,
        [Change(sql_filter, "_TOKENS", re.compile(
            sql_filter._TOKENS.pattern.replace("[0-9]++(?", "[0-9]+[0-9]*(?"), re.DOTALL
        ))], "cost",
    ),
    "filter-values": Removal(
        "a value is compared in time that grows with its length", "cost", 400, [Change(sql_terms, "_DOUBLE", re.compile(
            r"\s*[+-]?(?:NaN|Infinity|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fFdD]?)\s*", re.ASCII
        ).fullmatch)], "cost",
    ),
    "filter-faults": Removal(
        "what a filter raises is a message that does not match", "cost", 400, [
            Change(sql_terms, "_from_hex", Lines("except OverflowError:", "except ZeroDivisionError:")),
            Change(sql_filter.Filter, "__call__", Lines("except Exception as error:", "except ZeroDivisionError as error:")),
        ], "cost",
    ),
    "shown-bodies": Removal(
        "of a compressed body as much is inflated as is shown", "cost", 400, [Change(
            Message, "body_begin", lambda self, size: (self.body[:size], len(self.body) <= size)
        )], "cost",
    ),
}  # fmt: skip
