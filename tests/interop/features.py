"""The marks that make docs/compatibility.md: each names what a passed test proves."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def area(name: str, **shown_by: str) -> Callable[..., pytest.MarkDecorator]:
    """`feature(text)` for the tests of one area of the table; `client` says who shows it, if the test does not."""

    def feature(text: str, **other: str) -> pytest.MarkDecorator:
        return pytest.mark.feature(name, text, **{**shown_by, **other})

    return feature
