"""uvloop's loop for tests: it names handles that were left open instead of waiting for them for ever.

uvloop warns of each handle that nobody has closed, and then closes it. Where warnings are errors, as in many tests, it raises
instead and leaves the handle open (`__uv_walk_close_all_handles_cb`), and `close` waits until it is closed. No time limit of
pytest ends that, because no Python code runs any more.
"""

from __future__ import annotations

import warnings

import uvloop


class CheckedLoop(uvloop.Loop):
    def close(self) -> None:
        """Raises ResourceWarning, where warnings are errors, once everything is closed."""
        with warnings.catch_warnings(record=True) as unclosed:
            warnings.simplefilter("always", ResourceWarning)
            super().close()
        for warning in unclosed:
            warnings.warn(warning.message, stacklevel=2)
