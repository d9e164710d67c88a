"""Compiles the C code for the wheel, where there is a compiler; everything else is in pyproject.toml."""

import importlib.util
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

_FILE = Path(__file__).parent / "outpace" / "kernels" / "build.py"


class Build(build_py):
    """Puts one compiled file per kind of processor beside the sources."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)  # what an earlier build left would be packed
        super().run()
        spec = importlib.util.spec_from_file_location("outpace_kernels_build", _FILE)
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        made = build.ship(Path(self.build_lib) / "outpace" / "kernels" / "shipped")
        print(f"outpace: compiled code for {len(made)} kinds of processors")


class Wheel(bdist_wheel):
    """Any Python 3, but only this kind of system where there is compiled code."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        shipped = sorted((Path(self.bdist_dir) / "outpace" / "kernels" / "shipped").glob("*.so"))
        if not shipped:
            return tag
        return "py3", "none", f"manylinux_{_oldest_glibc(shipped)}_x86_64"


def _oldest_glibc(files: list[Path]) -> str:
    """Find the oldest C library that runs compiled files, as a tag has it: 2_17."""
    found = (re.findall(rb"\0GLIBC_(\d+)\.(\d+)", path.read_bytes()) for path in files)
    return "{}_{}".format(*max((int(major), int(minor)) for names in found for major, minor in names))


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})
