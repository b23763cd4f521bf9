"""The compiled module, which is optional: without a compiler, or with ROCKETLET_PURE=1, pure Python is built and installed.

Everything else about the package is in pyproject.toml.
"""

import os

from setuptools import Extension, setup

MODULE = Extension(
    "rocketlet.protocol._fast",
    ["protocol/_fast.pyx"],
    depends=["protocol/crc32.h"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],  # one build for Python 3.11 and every later version
    # -O3 takes twice as long to compile, and `python -m bench cpu` measures no difference
    extra_compile_args=["-O1", "-g0"],
    py_limited_api=True,
    optional=True,
)
IS_PURE = os.environ.get("ROCKETLET_PURE") == "1"

setup(
    script_name="setup.py",  # the root is the package, and this file is no module of it
    ext_modules=[] if IS_PURE else [MODULE],
    options={} if IS_PURE else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
