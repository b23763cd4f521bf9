from __future__ import annotations

import pytest

pytest.importorskip("pyspark")
from rocketlet.spark.share import Patience


def test_it_counts_from_the_first_failure_not_from_the_last_success() -> None:
    now_s = 0.0
    patience = Patience(30.0, lambda: now_s)
    patience.renew()
    now_s = 33.0  # a batch that ran for long
    assert not patience.is_over()
    now_s = 39.0
    assert not patience.is_over()
    patience.renew()
    looks = 0
    while not patience.is_over():
        now_s += 1.0
        looks += 1
    assert looks == 30


def test_a_process_that_was_stopped_has_not_waited() -> None:
    now_s = 0.0
    patience = Patience(30.0, lambda: now_s)
    assert not patience.is_over()
    now_s = 40.0
    assert not patience.is_over(), "nothing was tried in these 40 s"
