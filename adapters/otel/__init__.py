"""Spans and metrics of OpenTelemetry for producers and consumers, with the trace context in message properties.

    from rocketlet.otel import TracedHandlers, TracedSends

    Producer(name_server, middleware=[TracedSends()])
    Consumer(name_server, "shop", "orders", handle, middleware=[TracedHandlers("shop")])

Or run `opentelemetry-instrument python service.py` without these lines. By default, the context is W3C's, in the properties
`traceparent` and `tracestate`, which OpenTelemetry's agents for Java and Go read, too. Names follow OpenTelemetry's semantic
conventions for messaging systems and RocketMQ.

spans          spans and metrics around sends and handlers
instrumentor   adds it to every producer and consumer
"""

from .instrumentor import RocketletInstrumentor
from .spans import TracedHandlers, TracedSends

__all__ = ["RocketletInstrumentor", "TracedHandlers", "TracedSends"]
