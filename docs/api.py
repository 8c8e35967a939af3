"""Builds the API pages from the docstrings:  python docs/api.py OUT  (needs pdoc: pip install -e ".[docs]").

pdoc does not see names that load on first use, and leaves out submodules of a package that has an `__all__`: here the
first are loaded and the second listed. A warning makes the build fail.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

import moe_lightning

_LEFT_OUT = ("moe_lightning.conf",)  # data, no code


def modules() -> list[str]:
    """The package and the modules that pdoc does not find through it; what loads on first use is loaded."""
    for name in moe_lightning.__all__:
        vars(moe_lightning)[name] = getattr(moe_lightning, name)
    found = pkgutil.walk_packages(moe_lightning.__path__, "moe_lightning.")
    names = [module.name for module in found if not module.name.startswith(_LEFT_OUT)]
    public = [name for name in names if not any(part.startswith("_") for part in name.split("."))]
    loaded = {name: importlib.import_module(name) for name in public} | {"moe_lightning": moe_lightning}
    for module in loaded.values():
        _resolve_named_tuples(module)
    hidden = [name for name in public if hasattr(loaded[name.rpartition(".")[0]], "__all__")]
    return ["moe_lightning", *hidden]


def _resolve_named_tuples(module: ModuleType) -> None:
    """Their annotations are references that do not say which module to look in."""
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields"):
            cls.__annotations__ = cls.__new__.__annotations__ = typing.get_type_hints(cls)


def main() -> int:
    """Write the pages; 1 where a docstring or an import made pdoc warn."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "build/api")
    names = modules()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.render.configure(docformat="google", math=False)
        pdoc.pdoc(*names, output_directory=out)
    for warning in caught:
        print(warning.message, file=sys.stderr)
    print(f"{out}/index.html: {len(caught)} warnings")
    return 1 if caught else 0


if __name__ == "__main__":
    sys.exit(main())
