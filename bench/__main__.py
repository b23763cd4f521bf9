"""All programs, one after the other: `make bench`."""

from __future__ import annotations

import subprocess
import sys

PROGRAMS = ("sends", "drain", "start", "java", "spark")

if __name__ == "__main__":
    sys.exit(max(subprocess.call([sys.executable, "-m", f"bench.{name}", *sys.argv[1:]]) for name in PROGRAMS))
