"""The process of `guided`: libFuzzer calls a target with inputs that reach code it has not seen (atheris).

`python -m campaigns._guided FOLDER SEED [options of libFuzzer]`; what was found is in FOLDER/found.json. An input is a
frame without its length, so that most changes of it still make a frame. It is served as one of `frames`, and what is a fault
there is one here.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import atheris
import orjson
import structlog

with atheris.instrument_imports(include=["rocketlet.broker", "rocketlet.protocol"]):
    from . import frames

from ._fuzz import Fuzz
from .common import Outcome

SEEDS = 1000  # frames to begin with
SAVE_EVERY = 200


def write_corpus(folder: Path, seed: int) -> None:
    fuzz = Fuzz(seed)
    folder.mkdir()
    for number in range(SEEDS):
        data = fuzz.frame(number)[4:]
        if len(data) < 20_000:
            (folder / str(number)).write_bytes(data)


def main() -> None:
    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    logging.disable(logging.CRITICAL)
    outcome = Outcome()
    structlog.configure(processors=[frames.faults_of(outcome)], logger_factory=structlog.ReturnLoggerFactory())
    attack = frames.Attack(outcome, frames.config_in(folder), seed)
    loop = asyncio.new_event_loop()
    serving = attack.serving()
    loop.run_until_complete(serving.__aenter__())  # libFuzzer ends the process, so nothing is closed

    def serve(data: bytes) -> None:
        frame = len(data).to_bytes(4, "big") + data
        loop.run_until_complete(attack.step(outcome.tried, frame))
        if outcome.tried % SAVE_EVERY == 0:
            (folder / "found.json").write_bytes(orjson.dumps({"tried": outcome.tried, "faults": outcome.faults}))

    write_corpus(folder / "corpus", seed)
    atheris.Setup([sys.argv[0], *sys.argv[3:], str(folder / "corpus")], serve)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
