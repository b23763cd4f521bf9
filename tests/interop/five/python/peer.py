"""The unmodified official Python client of 5.x, driven by the tests: `peer.py MODE name=value...`. Prints what happens, a
line each, and ends when stdin does."""

import os
import sys
import time

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
    TransactionResolution,
)

MODE = sys.argv[1]
OPTIONS = dict(argument.split("=", 1) for argument in sys.argv[2:])
TOPIC, GROUP = OPTIONS.get("topic", "t"), OPTIONS.get("group", "g")


def say(*words):
    """In one piece: handlers run in threads."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def configuration():
    keys = (OPTIONS["access"], OPTIONS["secret"]) if "access" in OPTIONS else ()
    return ClientConfiguration(OPTIONS["endpoint"], Credentials(*keys))


def message(body):
    found = Message()
    found.topic, found.body = TOPIC, body.encode()
    return found


def got(view):
    keys = ",".join(sorted(view.keys or ())) or "-"
    color = (view.properties or {}).get("farbe", "")
    say("GOT", view.topic, view.tag or "-", keys, view.delivery_attempt, view.body.decode(), color)


def is_bad(view):
    """The first time, or always."""
    return view.body == b"worse" or (view.body == b"bad" and view.delivery_attempt == 1)


class Checker(TransactionChecker):
    def check(self, view):
        say("ASKED", view.body.decode())
        return TransactionResolution.COMMIT


def produce():
    producer = Producer(configuration(), (TOPIC,), checker=Checker(), tls_enable="tls" in OPTIONS)
    producer.startup()
    say("STARTED")

    def send(sent):
        receipt = producer.send(sent)
        say("SENT", receipt.message_id, sent.body.decode())
        return receipt

    for number in range(5):
        sent = message(f"normal-{number}")
        sent.tag, sent.keys = "TagA", f"key-{number}"
        sent.add_property("farbe", "grün")
        send(sent)
    for number in range(5):
        sent = message(f"fifo-{number}")
        sent.message_group = "mg"
        send(sent)
    for body in ("delayed", "recalled"):
        sent = message(body)
        sent.delivery_timestamp = int(time.time()) + 2
        receipt = send(sent)
        if body == "recalled":
            producer.recall_message(TOPIC, receipt.recall_handle)
    for body in ("committed", "rolled-back", "unknown"):
        transaction = producer.begin_transaction()
        producer.send(message(body), transaction)
        if body == "committed":
            transaction.commit()
        elif body == "rolled-back":
            transaction.rollback()
    say("DONE")
    sys.stdin.read()
    producer.shutdown()


def urgent():
    """Send messages with priorities, the least urgent first."""
    producer = Producer(configuration(), (TOPIC,), tls_enable="tls" in OPTIONS)
    producer.startup()
    for priority in range(1, 4):
        sent = message(f"priority-{priority}")
        sent.priority = priority
        producer.send(sent)
    say("DONE")
    sys.stdin.read()
    producer.shutdown()


class Listener(MessageListener):
    def consume(self, view):
        got(view)
        return ConsumeResult.FAILURE if is_bad(view) else ConsumeResult.SUCCESS


def filters():
    return {TOPIC: FilterExpression(OPTIONS.get("tags", "*"))}


def push():
    consumer = PushConsumer(configuration(), GROUP, Listener(), filters(), tls_enable="tls" in OPTIONS)
    consumer.startup()
    say("STARTED")
    sys.stdin.read()
    consumer.shutdown()


def simple():
    consumer = SimpleConsumer(configuration(), GROUP, filters(), 5, tls_enable="tls" in OPTIONS)
    consumer.startup()
    say("STARTED")
    import threading

    def receive():
        while True:
            for view in consumer.receive(16, 15) or ():
                got(view)
                if is_bad(view):
                    consumer.change_invisible_duration(view, 10)
                else:
                    consumer.ack(view)

    threading.Thread(target=receive, daemon=True).start()
    sys.stdin.read()


def lite():
    """Do what each line of stdin says: `send NAME BODY`, `subscribe NAME`, `unsubscribe NAME`."""
    from rocketmq import LitePushConsumer

    failed = set()

    class LiteListener(MessageListener):
        def consume(self, view):
            say("GOT", view.topic, view.lite_topic, "-", view.delivery_attempt, view.body.decode(), "")
            # An ordered group's client retries on its own, and the attempt does not change
            if view.body != b"bad" or view.message_id in failed:
                return ConsumeResult.SUCCESS
            failed.add(view.message_id)
            return ConsumeResult.FAILURE

    consumer = LitePushConsumer(configuration(), GROUP, TOPIC, LiteListener(), tls_enable="tls" in OPTIONS)
    consumer.startup()
    producer = Producer(configuration(), (TOPIC,), tls_enable="tls" in OPTIONS)
    producer.startup()
    say("STARTED")

    def send(name, body):
        sent = message(body)
        sent.lite_topic = name
        producer.send(sent)

    commands = {"send": send, "subscribe": consumer.subscribe_lite, "unsubscribe": consumer.unsubscribe_lite}
    for line in sys.stdin:
        command, *words = line.split()
        try:
            commands[command](*words)
            say("DID", line.strip())
        except Exception as error:
            say("REFUSED", type(error).__name__, error)
    consumer.shutdown()
    producer.shutdown()


try:
    {"produce": produce, "urgent": urgent, "lite": lite, "push": push, "simple": simple}[MODE]()
except Exception as error:
    say("FAILED", repr(error))
os._exit(0)  # its threads would continue
