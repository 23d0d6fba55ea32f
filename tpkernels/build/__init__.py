"""Compiling the native extension ``tpkernels/_C`` against the torch that is there.

``setup.py`` and ``tpkernels build`` share this code. Standard library only, and torch is never
imported: its version and paths are read from its files, so that nothing here is slow.

========================  =========================================================================
module                    holds
========================  =========================================================================
:mod:`.torch_install`     which torch is installed, read from its files
:mod:`.toolchain`         C++ compiler, Python headers, ninja
:mod:`.cuda`              whether CUDA sources are compiled, why not, and for which architectures
:mod:`.sources`           where the C++ sources are: beside the package, or inside it
:mod:`.compile`           the commands, run by ninja
:mod:`.record`            what was built and why not, kept beside the extension
:mod:`.command`           ``tpkernels build``
========================  =========================================================================
"""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """``tpkernels build``: see :mod:`tpkernels.build.command`."""
    from tpkernels.build import command

    return command.main(argv)
