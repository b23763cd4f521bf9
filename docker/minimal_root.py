"""Copies a virtual environment and all that its Python needs to run into an empty folder: the root of a container image.

    /opt/rocketlet/bin/python minimal_root.py FOLDER

Works with the interpreter of the official image, below /usr/local, and with Debian's. Files keep their paths. Shared
libraries are found by asking `ldd` about every binary that is copied.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# parts of the standard library that no server uses
UNUSED_LIBRARY = ("config-*", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "tkinter", "turtledemo")
UNUSED_PACKAGES = ("pip", "pip-*", "setuptools*", "pkg_resources", "_distutils_hack", "distutils-precedence.pth")
SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/nsswitch.conf",
    "/etc/ssl/certs/ca-certificates.crt",
    "/usr/lib/ssl/openssl.cnf",
)
USERS = "root:x:0:0:root:/:/\nrocketlet:x:10001:10001:Rocketlet:/data:/\n"


def main(root: Path) -> None:
    environment, library = Path(sys.prefix), Path(sysconfig.get_path("stdlib"))
    interpreter = Path(sys.executable).resolve()
    copy_file(interpreter, root)
    copy_tree(library, root, (*UNUSED_LIBRARY, "site-packages", "dist-packages"))
    copy_tree(environment, root, UNUSED_PACKAGES)
    link_interpreter(environment, root, interpreter)
    for path in needed_libraries(root):
        copy_file(path, root)
    for name in SYSTEM_FILES:
        if Path(name).is_file():
            copy_file(Path(name), root)
    (root / "etc" / "passwd").write_text(USERS)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)


def place(path: Path, root: Path) -> Path:
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def copy_file(path: Path, root: Path) -> None:
    """The file itself, where the path is a symlink."""
    shutil.copy2(path, place(path, root))


def copy_tree(folder: Path, root: Path, left_out: tuple[str, ...]) -> None:
    ignored = shutil.ignore_patterns("__pycache__", *left_out)
    shutil.copytree(folder, place(folder, root), symlinks=True, ignore=ignored, dirs_exist_ok=True)


def link_interpreter(environment: Path, root: Path, interpreter: Path) -> None:
    """The environment's own links lead through others that are not copied."""
    for link in place(environment, root).glob("bin/python*"):
        link.unlink()
        link.symlink_to(interpreter)


def needed_libraries(root: Path) -> set[Path]:
    """What the dynamic loader would load for the interpreter and every extension module, and the loader."""
    needed: set[Path] = set()
    for path in binaries(root):
        said = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        needed |= {Path(name) for name in re.findall(r"(/\S+) \(0x", said)}
    return {path for path in needed if not path.is_relative_to(root)}


def binaries(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            if (
                not path.is_symlink()
                and (".so" in name or "/bin/" in str(path))
                and path.read_bytes()[:4] == b"\x7fELF"
            ):
                yield path


if __name__ == "__main__":
    main(Path(sys.argv[1]))
