"""Archives that a user installs: sdist and wheel hold the linked folders, the recipes and the marker of types."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.programs import ROOT, run_program, users_environment

LINKS = {"moe_lightning/kernels": "kernels", "moe_lightning/conf": "conf", "moe_lightning/conf/recipes": "recipes"}
"""Folder of the wheel: folder of the checkout. A checkout has a symbolic link in each of these places."""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the unpacked sdist of this checkout."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, the build backend, is not installed")
    folder = tmp_path_factory.mktemp("sdist")
    build("sdist", ROOT, folder)
    (archive,) = folder.glob("moe_lightning-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later have one
        packed.extractall(folder)
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from the sdist, as `python -m build` and an installation from an index do it."""
    folder = tmp_path_factory.mktemp("wheel")
    build("wheel", sdist, folder)
    (built,) = folder.glob("moe_lightning-*.whl")
    return built


def build(target: str, source: Path, folder: Path) -> None:
    """Build without isolation, which would download the build backend."""
    done = run_program("-m", "hatchling", "build", "--target", target, "--directory", folder, folder=source)
    assert done.returncode == 0, done.stdout + done.stderr


def sources(folder: Path) -> Iterator[str]:
    """Names of the files below a folder that a run reads; links are followed."""
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            yield from (f"{path.name}/{name}" for name in sources(path))
        elif path.suffix in (".py", ".yaml", ".json", ".typed"):
            yield path.name


def test_the_links_of_the_checkout_point_to_its_folders() -> None:
    for link, target in LINKS.items():
        assert (ROOT / link).resolve() == ROOT / target
    assert {"py.typed", "kernels/tiles.json", "conf/recipes/quickstart.yaml"} <= set(sources(ROOT / "moe_lightning"))


def test_the_sdist_is_whole(sdist: Path) -> None:
    for folder in ("moe_lightning", "benchmarks", "conf", "kernels", "recipes", "tests", "docs"):
        assert set(sources(sdist / folder)) == set(sources(ROOT / folder)), folder
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md"):
        assert (sdist / name).read_text() == (ROOT / name).read_text()


def test_the_wheel_is_whole_and_holds_only_the_package(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert set(sources(tmp_path / "moe_lightning")) == set(sources(ROOT / "moe_lightning"))
    names = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert names == ["moe_lightning", "moe_lightning"], "the package and its metadata"


@pytest.mark.parametrize(
    ("package", "refused", "first"),
    [
        ("lightning", ["2.6.0", "2.6.2", "2.6.3", "2.6.5"], "2.6.6"),
        ("hydra-core", ["1.3.2", "1.3.7", "1.4.0"], "1.3.8"),
        ("wandb", ["0.25.0", "0.28.1"], "0.28.2"),
        ("pyarrow", ["14.0.0", "23.0.0"], "23.0.1"),
    ],
)
def test_no_release_with_a_known_vulnerability_is_installed(package: str, refused: list[str], first: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = [*project["dependencies"], *project["optional-dependencies"]["data"]]
    (required,) = (r for r in map(Requirement, given) if r.name == package)
    assert not any(version in required.specifier for version in refused)
    assert first in required.specifier
    assert f"`{package}>={first}`" in (ROOT / "SECURITY.md").read_text()


@pytest.mark.slow
def test_the_wheel_of_a_checkout_is_that_of_its_sdist(wheel: Path, tmp_path: Path) -> None:
    build("wheel", ROOT, tmp_path)
    (direct,) = tmp_path.glob("moe_lightning-*.whl")
    with zipfile.ZipFile(direct) as one, zipfile.ZipFile(wheel) as other:
        assert {info.filename: info.CRC for info in one.infolist()} == {
            info.filename: info.CRC for info in other.infolist()
        }


@pytest.mark.slow
def test_an_installed_wheel_trains_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "elsewhere"
    folder.mkdir()
    venv.create(environment, symlinks=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    # Dependencies are those of the tests, behind the installed wheel. Links (.pth) in their folder are not followed,
    # so an editable installation of the checkout is not found.
    installed = [folder for folder in sys.path if Path(folder).name.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(installed))
    variables = users_environment()
    variables.pop("PYTHONPATH", None)  # which may lead to the checkout

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [str(part) for part in command], cwd=folder, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(
        sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--no-deps", "--no-index", wheel
    )
    where = run(environment / "bin/python", "-c", "import moe_lightning as m; print(m.MoELayer, m.__file__)")
    assert str(packages) in where
    assert "quickstart" in run(environment / "bin/moe-train", "--help")
    run(environment / "bin/moe-train", "trainer.max_steps=2", "ranks=2", "run_name=installed", "logger=csv")
    assert (folder / "outputs/installed/checkpoints").is_dir()
    assert "moe-sim recipes=" in run(environment / "bin/moe-sim", "--help")
