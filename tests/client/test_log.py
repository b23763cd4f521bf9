"""The library logs by the standard `logging`; the broker's process writes JSON lines."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import orjson
import pytest
from rocketlet.client.errors import get_logger

from ..conftest import PATIENCE_S

log = get_logger("rocketlet.some")


def test_a_record_has_the_fields_as_text_and_as_values(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("100% lost", message="4711", name="n", count=3)
    (record,) = caplog.records
    assert record.getMessage() == "100% lost message='4711' name='n' count=3"
    assert (record.event, record.fields) == ("100% lost", {"message": "4711", "name": "n", "count": 3})  # type: ignore[attr-defined]
    assert (record.name, record.levelname, record.funcName) == (
        "rocketlet.some", "WARNING", "test_a_record_has_the_fields_as_text_and_as_values",
    )  # fmt: skip


def test_an_application_sets_level_and_format() -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
    logger = logging.getLogger("rocketlet")
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    try:
        log.info("not this")
        log.error("this", queue="q")
        try:
            raise RuntimeError("why")
        except RuntimeError:
            log.exception("failed")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    first, second, *traceback = out.getvalue().splitlines()
    assert (first, second) == ("ERROR:rocketlet.some:this queue='q'", "ERROR:rocketlet.some:failed")
    assert traceback[0].startswith("Traceback")
    assert traceback[-1] == "RuntimeError: why"


def test_structlog_is_loaded_when_something_is_logged() -> None:
    program = """
import sys
import rocketlet.client.consumer
from rocketlet.client.errors import get_logger
get_logger("rocketlet.some").info("not this")
print("structlog" in sys.modules)
get_logger("rocketlet.some").warning("this")
print("structlog" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    assert done.stderr == "this\n"


def test_the_brokers_process_writes_what_libraries_log_as_its_own_lines() -> None:
    program = """
import logging
from rocketlet.command.plumbing import logs
from rocketlet.client.errors import get_logger
logs.configure("info")
get_logger("rocketlet.some").warning("lost", message="4711")
logging.getLogger("asyncio").error("slow %s", "callback")
logging.getLogger("asyncio").debug("not this")
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    ours, theirs = (orjson.loads(line) for line in found.stderr.splitlines())
    assert (ours["event"], ours["message"], ours["level"], ours["logger"]) == (
        "lost",
        "4711",
        "warning",
        "rocketlet.some",
    )
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("slow callback", "error", "asyncio")
