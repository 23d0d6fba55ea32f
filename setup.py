"""The product's build: `pip install .` copies Python and C++ sources; beside a torch, i.e. with
`--no-build-isolation`, it also compiles the native extension, by the code of `tpkernels build`.
"""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# A stand-in for the package, so that its build code is imported and nothing else of it is.
package = types.ModuleType("tpkernels")
package.__path__ = [str(ROOT / "tpkernels")]
sys.modules["tpkernels"] = package

from tpkernels.build import cuda, record  # noqa: E402
from tpkernels.build.extension import build, require_torch  # noqa: E402
from tpkernels.build.sources import source_files  # noqa: E402
from tpkernels.build.toolchain import (  # noqa: E402
    Unavailable,
    find_compiler,
    find_python_include,
)


def missing_for_native() -> Unavailable | None:
    """What native code lacks here, or None."""
    try:
        require_torch(), find_compiler(), find_python_include()
    except Unavailable as missing:
        cuda.refuse_if_demanded(missing)
        return missing
    return None


class BuildPy(build_py):
    """Puts the C++ sources into the package, for `tpkernels build` where it is installed."""

    def run(self) -> None:
        """Copy the Python files, the C++ sources, and why there is no native code if so."""
        target = Path(self.build_lib, "tpkernels")
        if not self.editable_mode:  # what an earlier build left, modules now gone among it
            shutil.rmtree(target, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for source in source_files(ROOT):
            copy = target / "_sources" / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        if MISSING is not None:
            print(f"tpkernels: no native code is built: {MISSING}")
            record.write(target, record.without_native(MISSING))


class BuildExtension(build_ext):
    """Compiles by `tpkernels.build`: ninja, and the flags that `tpkernels build` uses."""

    def run(self) -> None:
        """Compile into the build directory, or in place for an editable install."""
        in_place = self.inplace or self.editable_mode
        build(ROOT / "tpkernels" if in_place else Path(self.build_lib, "tpkernels"))

    def get_outputs(self) -> list[str]:
        """The extension and its record."""
        target = Path(self.build_lib, "tpkernels")
        return [str(record.extension_path(target)), str(target / record.RECORD_NAME)]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing: an editable install finds what was built in place."""
        return {}


MISSING = missing_for_native()
setup(
    # Names the extension, so that the wheel is one of this platform; BuildExtension compiles it.
    ext_modules=[Extension("tpkernels._C", sources=[])] if MISSING is None else [],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExtension},
)
