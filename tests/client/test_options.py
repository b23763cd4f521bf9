"""An option of a client is declared in one line, from which its signature, help, default, check and reference are made."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import rocketlet
import rocketlet.sync
from rocketlet.client import Consumer, RetryPolicy
from rocketlet.client.config import (
    MAX_HANDLER_CONCURRENCY,
    MAX_NAME_SERVERS,
    Option,
    PullLimits,
    check_seconds,
    chosen,
    options_of,
    takes,
)
from rocketlet.client.errors import ConfigError
from rocketlet.client.options import ConsumerOptions, LiteOptions, SharedOptions
from rocketlet.client.sending.options import ProducerOptions
from rocketlet.client.shared_consumer import SharedConsumer

ROOT = Path(__file__).parents[2]
CLIENTS = [
    (rocketlet.Consumer, ConsumerOptions),
    (SharedConsumer, SharedOptions),
    (rocketlet.LiteConsumer, LiteOptions),
    (rocketlet.Producer, ProducerOptions),
    (rocketlet.sync.Consumer, ConsumerOptions),
    (rocketlet.sync.SharedConsumer, SharedOptions),
    (rocketlet.sync.Producer, ProducerOptions),
]
MANY = 5  # this many names of options in one signature are another list of them


class Planted(ConsumerOptions, total=False):
    patience_s: Annotated[float, Option("how long to wait for the others.", 3.0, check_seconds)]


@takes(Planted)
class Client:
    """Waits."""

    def __init__(self, name_server: str, **options: Any) -> None:
        self.options = chosen(Planted, options)


def test_a_planted_option_is_one_line() -> None:
    assert Client("h:1").options["patience_s"] == 3.0
    assert Client("h:1", patience_s=5).options["patience_s"] == 5
    with pytest.raises(ConfigError, match="patience_s: 0 is not a number of seconds above 0"):
        Client("h:1", patience_s=0)
    assert inspect.signature(Client).parameters["patience_s"].default == 3.0
    assert "- `patience_s`: how long to wait for the others.\n" in (Client.__doc__ or "")


def test_an_unknown_option_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'; the options are concurrency, "):
        Client("h:1", colour=5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'patience'; did you mean 'patience_s'"):
        Client("h:1", patience=5)


@pytest.mark.parametrize(("client", "kind"), CLIENTS)
def test_a_client_shows_all_its_options(client: type, kind: type) -> None:
    parameters = inspect.signature(client).parameters
    help_text = client.__doc__ or ""
    for name, option in options_of(kind).items():
        assert parameters[name].default == option.default
        assert f"- `{name}`: " in help_text


@pytest.mark.parametrize("kind", [ConsumerOptions, SharedOptions, LiteOptions, ProducerOptions])
def test_a_default_passes_its_own_check(kind: type) -> None:
    assert list(chosen(kind, {})) == list(options_of(kind))


def lists_of_options(text: str) -> Iterator[str]:
    """Functions and classes that name many options of a consumer again."""
    names = options_of(ConsumerOptions).keys()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = [item.arg for item in (*node.args.args, *node.args.kwonlyargs)]
        elif isinstance(node, ast.ClassDef):
            found = [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
        else:
            continue
        if len(names & set(found)) >= MANY:
            yield node.name


def test_no_other_place_lists_them() -> None:
    folders = ("adapters", "client", "demo", "spark", "sync", "testing")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): names for path in paths if (names := list(lists_of_options(path.read_text())))
    }
    assert found == {"client/options.py": ["MemberOptions", "ConsumerOptions"]}


def test_a_planted_list_is_found() -> None:
    text = "def consumer(*, concurrency, orderly, start, retry, drain_s): ..."
    assert list(lists_of_options(text)) == ["consumer"]


class Handled:
    def once(self, message_id: str) -> Any: ...


# A consumer's arguments are checked when it is made, and the error names the wrong one.


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
        ({"once": "sqlite"}, "once: 'sqlite' has no method `once`"),
        ({"once": Handled(), "handler": None}, "once: needs a handler"),
        ({"once": Handled(), "batch_size": 5, "handler": print}, "once: not supported with batch_size"),
        ({"once": Handled(), "broadcasting": True}, "once: not supported with broadcasting"),
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


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("key", "give keys= for tools to find the message, or queue_key= to keep the order"),
        ("headers", "give properties="),
        ("partition", "give queue=, or queue_key="),
        ("propertis", "did you mean 'properties'?"),
    ],
)
async def test_error_of_a_send_suggests_an_option_when_an_argument_is_unknown(name: str, advice: str) -> None:
    producer, arguments = rocketlet.Producer("127.0.0.1:1"), {name: "x"}
    calls: list[Any] = [producer.send, producer.send_oneway, producer.request]
    for call in calls:
        with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {name!r}; {advice}")):
            await call("t", b"", **arguments)
    transaction: Any = producer.transaction
    with pytest.raises(TypeError, match=re.escape(advice)):
        async with transaction("t", b"", **arguments):
            pass


def test_error_suggests_parameters_of_the_constructor_when_an_option_is_unknown() -> None:
    options: dict[str, Any] = {"batch_sise": 3}
    with pytest.raises(TypeError, match="did you mean 'batch_size'"):
        Consumer("127.0.0.1:1", "g", "t", **options)
