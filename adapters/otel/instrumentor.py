"""`opentelemetry-instrument python service.py`, or `RocketletInstrumentor().instrument()`: every producer and consumer that
is created from then on records spans and metrics, before its own middleware, until `uninstrument()`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined] # it is not in __all__
from rocketlet.client import Consumer, LiteConsumer, Producer, SharedConsumer
from wrapt import wrap_function_wrapper

from .spans import TracedHandlers, TracedSends


class RocketletInstrumentor(BaseInstrumentor):  # type: ignore[misc] # it has no types
    """`instrument(tracer_provider=..., meter_provider=...)` and `uninstrument()`."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("rocketlet",)

    def _instrument(self, **options: Any) -> None:
        providers: dict[str, Any] = {name: options.get(name) for name in ("tracer_provider", "meter_provider")}

        def producing(
            init: Callable[..., None], producer: Producer, given: tuple[Any, ...], named: dict[str, Any]
        ) -> None:
            sends = TracedSends(**providers)
            init(*given, **named | {"middleware": [sends, *named.get("middleware", ())]})
            sends.client_id = producer.client_id

        def consuming(
            init: Callable[..., None],
            consumer: Consumer | SharedConsumer | LiteConsumer,
            given: tuple[Any, ...],
            named: dict[str, Any],
        ) -> None:
            group = given[1] if len(given) > 1 else named.get("group", "")
            handlers = TracedHandlers(group, broadcasting=bool(named.get("broadcasting")), **providers)
            init(*given, **named | {"middleware": [handlers, *named.get("middleware", ())]})
            handlers.client_id = consumer.client_id

        self._inits = {kind: kind.__init__ for kind in (Producer, Consumer, SharedConsumer, LiteConsumer)}
        wrap_function_wrapper("rocketlet.client.producer", "Producer.__init__", producing)
        wrap_function_wrapper("rocketlet.client.consumer", "Consumer.__init__", consuming)
        wrap_function_wrapper("rocketlet.client.shared_consumer", "SharedConsumer.__init__", consuming)
        wrap_function_wrapper("rocketlet.client.lite_consumer", "LiteConsumer.__init__", consuming)

    def _uninstrument(self, **options: Any) -> None:
        for kind, init in self._inits.items():
            kind.__init__ = init  # type: ignore[method-assign] # which is what instrumenting is
