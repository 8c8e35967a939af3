"""What a user installs: the built wheel holds the linked folders, the recipes and the marker of types."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest

from tests.programs import ROOT, run_program


@pytest.mark.slow
def test_the_wheel_is_whole(tmp_path: Path) -> None:
    # Without isolation nothing is downloaded, so the build backend must be here already.
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, the build backend, is not installed")
    done = run_program("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("moe_lightning-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {"moe_lightning/py.typed"}
    for folder, link in (("kernels", "kernels"), ("conf", "conf"), ("recipes", "conf/recipes")):
        sources = [p for suffix in ("*.py", "*.yaml") for p in (ROOT / folder).rglob(suffix)]
        assert sources or folder == "recipes", f"{folder} is empty"
        expected |= {f"moe_lightning/{link}/{p.relative_to(ROOT / folder)}" for p in sources}
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "moe_lightning").rglob("*.py") if not p.is_symlink()}
    assert not sorted(expected - names)
    foreign = [name for name in names if not name.startswith("moe_lightning")]
    assert not foreign, "only the package may be installed"


def test_the_package_is_typed_and_linked() -> None:
    assert (ROOT / "moe_lightning" / "py.typed").is_file()
    for link, target in (
        ("moe_lightning/kernels", "kernels"),
        ("moe_lightning/conf", "conf"),
        ("conf/recipes", "recipes"),
    ):
        assert (ROOT / link).is_symlink()
        assert (ROOT / link).resolve() == ROOT / target
