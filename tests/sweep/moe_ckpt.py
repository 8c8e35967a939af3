"""Every command of moe-ckpt on what is not a checkpoint, or no longer one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf

from moe_lightning.cli import ckpt, train
from tests.commands import write_words
from tests.sweep.cases import Case
from tests.sweep.files import common, unwritable
from tests.sweep.moe_train import composed
from tests.sweep.values import TEXTS

COMMANDS: dict[str, list[str]] = {
    "inspect": [],
    "verify": [],
    "export": ["out.safetensors"],
    "export-hf": ["out"],
    "prune": ["--keep=1"],
}


_DAMAGES = ("gone", "half", "flipped", "folder")
"""What happens to single files of a checkpoint directory."""


def looking(folder: Path) -> Iterator[Case]:
    """Wrong paths, damaged files and folders, wrong targets and options."""
    write_words(lines=3000)
    for path in common(folder, ".ckpt", _trained("text", folder)):
        yield from _each(path)
    for path in _foreign_files(folder):
        yield from _each(path)
    whole = _trained_folder(folder)
    for path in _damaged_folders(folder, whole):
        yield from _each(path, has_manifest=path.name.split("_")[0] in _DAMAGES and path.name[-1].isdigit())
    for command in ("export", "export-hf"):
        for target in unwritable(folder):
            yield _case([command, str(whole), str(target)], (str(target)[:40], "HuggingFaceModule"))
    for text in TEXTS.values():
        yield _case(["prune", str(whole), f"--keep={text}"], ("keep",), sensible=text == "100000000000000")
        yield _case(["export-hf", str(whole), "out", f"--dtype={text}"], ("dtype", "HuggingFaceModule"))
    for arguments in ([], ["nothing"], ["inspect"], ["prune", str(whole)], ["inspect", "a", "b"], ["--no-such-option"]):
        yield _case(arguments, (*arguments, "COMMAND", "DIR", "--keep"))


def _each(path: Path, *, has_manifest: bool = False) -> Iterator[Case]:
    """All commands; of what has a manifest, inspect may tell what it says: verify reads the files."""
    for command, rest in COMMANDS.items():
        sensible = command == "inspect" and (has_manifest or path.name == "flipped.ckpt")
        yield _case([command, str(path), *rest], (path.name[:50],), sensible=sensible)


def _case(arguments: list[str], subjects: tuple[str, ...], *, sensible: bool = False) -> Case:
    shown = " ".join(word if len(word) < 90 else f"{word[:80]}..." for word in arguments)
    return Case(label=f"moe-ckpt {shown}", run=partial(ckpt.main, arguments), subjects=subjects, sensible=sensible)


def _trained(base: str, folder: Path) -> bytes:
    """A checkpoint file of a run of two steps."""
    config = composed(base)
    config.run_dir = str(folder / "trained" / base)
    train.run_job(config)
    return next(Path(config.run_dir).glob("checkpoints/*.ckpt")).read_bytes()


def _trained_folder(folder: Path) -> Path:
    """A checkpoint directory of such a run."""
    config = composed("partial")
    config.run_dir = str(folder / "trained" / "partial")
    OmegaConf.update(config, "callbacks.partial_experts_checkpoint.every_n_steps", 1)
    train.run_job(config)
    return Path(config.run_dir) / "checkpoints"


def _foreign_files(folder: Path) -> Iterator[Path]:
    """Files of torch that Lightning did not write."""
    for name, content in (
        ("a_list", [1, 2]),
        ("a_tensor", torch.zeros(3)),
        ("no_state", {"global_step": 3}),
        ("state_null", {"global_step": 3, "state_dict": None}),
        ("state_list", {"global_step": 3, "state_dict": [1]}),
        ("step_text", {"global_step": "x", "state_dict": {}}),
        ("code", {"state_dict": {}, "global_step": Path("x")}),
    ):
        path = folder / f"{name}.ckpt"
        torch.save(content, path)
        yield path


def _damaged_folders(folder: Path, whole: Path) -> Iterator[Path]:
    """Checkpoint directories with one thing wrong."""
    good = max(path for path in whole.glob("step-*"))
    manifest = json.loads((good / "MANIFEST.json").read_text())
    texts: dict[str, str] = {
        "empty_manifest": "",
        "list_manifest": "[]",
        "null_manifest": "null",
        "no_keys": "{}",
        "half_manifest": json.dumps(manifest)[:200],
        "deep_manifest": "[" * 100_000,
        **{f"without_{key}": json.dumps({k: v for k, v in manifest.items() if k != key}) for key in manifest},
        **{f"null_{key}": json.dumps({**manifest, key: None}) for key in manifest},
        **{f"text_{key}": json.dumps({**manifest, key: "abc"}) for key in manifest},
    }
    for name, text in texts.items():
        path = folder / name
        shutil.copytree(good, path)
        (path / "MANIFEST.json").write_text(text)
        yield path
    for number, file in enumerate(sorted(path.name for path in good.iterdir() if path.name != "MANIFEST.json")):
        for damage in _DAMAGES:
            path = folder / f"{damage}_{number}"
            shutil.copytree(good, path)
            data = (path / file).read_bytes()
            (path / file).unlink()
            if damage == "folder":
                (path / file).mkdir()
            elif damage != "gone":
                (path / file).write_bytes(
                    data[: len(data) // 2] + (b"" if damage == "half" else bytes(len(data) - len(data) // 2))
                )
            yield path
    (folder / "nothing_in_it").mkdir()
    yield folder / "nothing_in_it"
