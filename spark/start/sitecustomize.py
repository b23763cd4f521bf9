"""Start-up code of Spark's Python processes for the format. `fast_start` in `worker.py` puts this folder on their path,
and Python runs the module when it starts.

Spark puts its own pyspark.zip first on the path. The zip contains sources without bytecode, which each process compiles
again: 0.5 s of its 0.8 s of CPU time. In a PySpark that pip has installed, the zip lies inside of the package, which
has the same sources and keeps their bytecode. The module therefore moves zips of that folder to the end of the path.

NumPy loads OpenBLAS, which starts a thread for each core. The format does no linear algebra, so these threads are
overhead. The module limits OpenBLAS to one thread, unless the environment sets another number.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _with_zips_last(path: list[str]) -> list[str]:
    zips = tuple(os.path.join(os.path.realpath(entry), "pyspark", "python", "lib", "") for entry in path)
    return sorted(path, key=lambda entry: os.path.realpath(entry).startswith(zips))


def _run_next() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = _with_zips_last([entry for entry in sys.path if os.path.abspath(entry) != _HERE])
_run_next()
