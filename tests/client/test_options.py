"""An option of a client is declared in one line, from which its signature, help, default, check and reference are made."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import rocketlet
import rocketlet.sync
from rocketlet.client.config import Option, check_seconds, chosen, options_of, takes
from rocketlet.client.errors import ConfigError
from rocketlet.client.options import ConsumerOptions, SharedOptions
from rocketlet.client.sending.options import ProducerOptions
from rocketlet.client.shared_consumer import SharedConsumer

ROOT = Path(__file__).parents[2]
CLIENTS = [
    (rocketlet.Consumer, ConsumerOptions),
    (SharedConsumer, SharedOptions),
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


@pytest.mark.parametrize("kind", [ConsumerOptions, SharedOptions, ProducerOptions])
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
