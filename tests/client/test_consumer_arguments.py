"""A consumer's arguments are checked when it is made, and the error names the wrong one."""

from __future__ import annotations

from typing import Any

import pytest
from rocketlet.client import ConfigError, Consumer, RetryPolicy
from rocketlet.client.config import MAX_HANDLER_CONCURRENCY, MAX_NAME_SERVERS, PullLimits


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"group": "a b"}, "group"),
        ({"subscriptions": {}}, "subscriptions"),
        ({"subscriptions": "a b"}, "characters"),
        ({"subscriptions": {"t": "||"}}, "names no tag"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": "10"}, "batch_size: '10' is not a whole number"),
        ({"concurrency": 0}, "concurrency"),
        ({"group": None}, "group: None is not a text"),
        ({"start": "earliest"}, "neither 'last' nor 'first'"),
        ({"start": -5}, "start: -5"),
        ({"start": True}, "start: True"),
        ({"subscriptions": {"t": "a | b"}}, "'a | b' is not a tag; separate tags by '||'"),
        ({"subscriptions": {"t": "a,b"}}, "'a,b' is not a tag"),
        ({"subscriptions": {"t": "a b"}}, "'a b' is not a tag"),
        ({"subscriptions": {"t": "a && b"}}, "is not a tag"),
        ({"subscriptions": {"t": "a || *"}}, "'\\*' is not a tag"),
        ({"subscriptions": {"t": None}}, "None is not an expression"),
        ({"subscriptions": {"t": ["a"]}}, "is not an expression"),
        ({"subscriptions": ["t", "u"]}, "expected a topic, or filters by topic"),
        ({"subscriptions": {1: "*"}}, "1 is not a text"),
        ({"strategy": "AVG"}, "strategy: 'AVG' is not a strategy; import AVG"),
        ({"strategy": type("Mine", (), {"name": "MINE", "allocate": print})}, "strategy"),
        ({"handler": "print"}, "handler: 'print' cannot be called"),
        ({"on_assigned": 5}, "on_assigned: 5 cannot be called"),
        ({"commit_interval_s": 5000}, "commit_interval_s: 5000 is more than 300 seconds; for milliseconds give 5"),
        ({"drain_s": 30_000}, "drain_s: 30000 is more than 3600 seconds; for milliseconds give 30"),
        ({"orderly": True, "suspend_queue_s": 1000}, "more than 300 seconds; for milliseconds give 1"),
        ({"suspend_queue_s": 2}, "suspend_queue_s: needs orderly=True"),
        ({"broadcasting": True, "max_reconsume_times": 3}, "max_reconsume_times: not supported with broadcasting"),
        ({"broadcasting": True, "retry": RetryPolicy()}, "retry: not supported with broadcasting"),
        ({"orderly": True, "retry": RetryPolicy(delays_s=(1,))}, "retry: delays_s: not supported with orderly=True"),
        ({"handler": None, "retry": RetryPolicy()}, "retry: needs a handler"),
        ({"max_reconsume_times": -5}, "max_reconsume_times: -5 is not a whole number from 0"),
        ({"max_reconsume_times": 2**31}, "max_reconsume_times: 2147483648 is not a whole number from 0 to 2147483647"),
        ({"pull": PullLimits(batch_size=0)}, "pull.batch_size: 0 is not a whole number from 1"),
        ({"pull": PullLimits(batch_size=2**31)}, "pull.batch_size"),
        ({"pull": PullLimits(messages=0)}, "pull.messages"),
        ({"pull": PullLimits(size_bytes=0)}, "pull.size_bytes"),
        ({"pull": PullLimits(span=0)}, "pull.span"),
        ({"pull": 32}, "pull: 32 is not a PullLimits"),
        ({"commit_interval_s": 0}, "commit_interval_s"),
        ({"drain_s": -1}, "drain_s"),
        ({"name_server": "http://127.0.0.1:9876"}, "is not host:port"),
        ({"name_server": "localhost"}, "'localhost' is not host:port"),
        ({"name_server": "h:0"}, "is not host:port"),
        ({"name_server": "h:99999"}, "is not host:port"),
        ({"name_server": "my host:9876"}, "is not host:port"),
        ({"name_server": None}, "None is not a text"),
        ({"name_server": ""}, "expected 1 to 64 addresses, got 0"),
        ({"name_server": ";".join(["h:1"] * (MAX_NAME_SERVERS + 1))}, "expected 1 to 64 addresses, got 65"),
        ({"concurrency": MAX_HANDLER_CONCURRENCY + 1}, "concurrency: 10001 is not a whole number from 1 to 10000"),
        ({"start": 2**63}, "start: 9223372036854775808"),
        ({"max_reconsume_times": 2**31}, "max_reconsume_times: 2147483648 is not a whole number from 0 to 2147483647"),
        ({"access": "key"}, r"access: 'key' is a str; give Access\(...\)"),
        ({"middleware": print}, r"middleware: .* is not a list; give \[print\]"),
        ({"offsets_file": 5, "broadcasting": True}, "offsets_file: 5 is not a path"),
    ],
)
async def test_wrong_arguments_name_themselves(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Consumer(**{"name_server": "h:1", "group": "g", "subscriptions": "t", **arguments})
