"""RocketMQ for Python: an asyncio client, a broker and a Spark source, wire-compatible with Apache RocketMQ.

    from rocketlet import Consumer, Producer

The names in `__all__` are the public API, and so are those of `rocketlet.sync`, `rocketlet.testing`, `rocketlet.otel`,
`rocketlet.taskiq`, `rocketlet.celery`, `rocketlet.dramatiq` and `rocketlet.testcontainers`, `rocketlet.spark` with its
options, and the `rocketlet` command. Everything else is private: it may change in any release.

Names load when they are first used. `import rocketlet` alone loads no more than their list, and the client
loads neither broker nor Spark.
"""

from typing import TYPE_CHECKING, Any

from . import client

if TYPE_CHECKING:
    from .client import *  # noqa: F403 (the names of its `__all__`)

__version__ = "0.2.0.dev0"

__all__ = ["__version__"]
__all__ += client.__all__


def __getattr__(name: str) -> Any:
    """Return a public name, after loading the part of the client that has it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(client, name)
    return found


def __dir__() -> list[str]:
    return sorted(set(__all__) | globals().keys())
