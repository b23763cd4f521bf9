"""A uvloop event loop for tests: it reports handles that were left open, instead of waiting for them forever.

uvloop warns of each open handle, and then closes it. If warnings are errors, as in many test suites, it raises instead
and leaves the handle open (`__uv_walk_close_all_handles_cb`), and `close` waits for the handle forever. A timeout of
pytest cannot end this wait, because no Python code runs any more.
"""

from __future__ import annotations

import warnings

import uvloop


class CheckedLoop(uvloop.Loop):
    def close(self) -> None:
        """Close the loop. Raises ResourceWarning for open handles, if warnings are errors, after everything is closed."""
        with warnings.catch_warnings(record=True) as unclosed:
            warnings.simplefilter("always", ResourceWarning)
            super().close()
        for warning in unclosed:
            warnings.warn(warning.message, stacklevel=2)
