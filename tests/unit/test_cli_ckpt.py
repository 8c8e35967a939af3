"""moe-ckpt: what it prints, writes and deletes, and its exit codes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_lightning.checkpoint.commit import prune
from moe_lightning.checkpoint.directory import checkpoints
from moe_lightning.checkpoint.inspect import resolve, scope_bytes, verify_all
from moe_lightning.checkpoint.loader import Checkpoint
from moe_lightning.checkpoint.names import MANIFEST, newest_first
from moe_lightning.cli import checkpoint_commands, ckpt
from moe_lightning.cli.ckpt import main
from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.cli.saved_model import open_saved
from tests.unit.checkpoint_state import node, whole_state


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Three checkpoints, of steps 1 (full), 2 and 3."""
    with node(tmp_path, keep_last=9) as made:
        made.save(1)
        for step in (2, 3):
            made.save(step, fresh=[step])
        yield made.root


def test_every_command_that_is_parsed_has_a_function() -> None:
    (commands,) = (action for action in ckpt._parser()._actions if isinstance(action.choices, dict))
    assert commands.choices is not None
    assert [*commands.choices] == [*checkpoint_commands._COMMANDS]


def test_inspect_shows_versions_and_sizes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(root)]) == 0
    text = capsys.readouterr().out
    assert "step-00000003" in text
    assert "exp_avg" in text
    assert any(line.split()[:5] == ["0", "1", "1", "2", "3"] for line in text.splitlines())
    manifest = resolve(root).manifest
    assert sum(scope_bytes(manifest).values()) == manifest.payload_bytes > manifest.new_bytes
    assert main(["inspect", str(root / "step-00000001")]) == 0
    assert "every expert is of this session's first checkpoint" in capsys.readouterr().out


def test_a_reader_that_ends_early_is_no_error(root: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "moe_lightning.cli.ckpt", "inspect", str(root)]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_names_of_a_checkpoint_control_no_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m"
    inside, outside = root / "step-00000001", root.parent / "moved" / "step-00000001"
    manifest = replace(resolve(inside).manifest, run=evil, session=evil, previous=evil)
    inside.joinpath(MANIFEST).write_bytes(manifest.dump())
    shutil.copytree(inside, outside)
    for path, code in ((outside, 0), (inside, 1), (root / evil, 2)):  # whole, of another run, missing
        assert main(["inspect", str(path)]) == code
        told = "".join(capsys.readouterr())
        assert "\\x1b[2J" in told
        assert told.replace("\n", "").isprintable()


def test_verify_names_the_bad_file(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root)]) == 0
    assert capsys.readouterr().out.count("whole") == 3
    victim = next((root / "step-00000003").glob("dense*"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    assert main(["verify", str(root)]) == 1
    text = capsys.readouterr().out
    assert text.count("whole") == 2
    assert str(victim) in text
    assert main(["verify", str(root / "step-00000002")]) == 0


def test_a_checkpoint_that_is_pruned_meanwhile_is_not_damaged(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_file = Checkpoint._check_file

    def pruned_first(self: Checkpoint, name: str) -> str | None:
        if self.step == 1:
            prune(root, 2)
        return check_file(self, name)

    monkeypatch.setattr(Checkpoint, "_check_file", pruned_first)
    assert main(["verify", str(root)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step-00000003: whole",
        "step-00000002: whole",
        "step-00000001: pruned meanwhile",
    ]


@pytest.mark.slow
def test_a_fast_live_run_gives_no_false_alarm(tmp_path: Path) -> None:
    with node(tmp_path, keep_last=2) as made:
        made.save(1)

        def save() -> None:
            for step in range(2, 200):
                made.save(step, fresh=[step % 4])

        run, looks, pruned = threading.Thread(target=save), 0, 0
        run.start()
        while run.is_alive():
            verdicts = verify_all(made.root)
            assert not [verdict for verdict in verdicts if verdict.problem is not None]
            assert any(verdict.is_whole for verdict in verdicts)
            looks, pruned = looks + 1, pruned + sum(verdict.is_pruned for verdict in verdicts)
        run.join()
    assert looks > 20
    assert pruned > 0, "no verification met a deletion"


def test_a_run_whose_last_checkpoint_is_damaged_has_not_finished(root: Path) -> None:
    directory = RunDirectory(root.parent)
    assert directory.has_reached(3) is not None
    victim = next((root / "step-00000003").glob("dense*"))
    victim.write_bytes(b"x" * victim.stat().st_size)
    assert directory.has_reached(3) is None
    again = root / "step-00000003-2"  # saved once more
    again.mkdir()
    for path in (root / "step-00000002").iterdir():
        (again / path.name).write_bytes(path.read_bytes())
    assert directory.has_reached(3) is None, "its manifest is that of another step"
    assert directory.has_reached(2) is not None


def test_export_writes_one_file(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.safetensors"
    assert main(["export", str(root), str(target)]) == 0
    tensors = load_file(target)
    assert set(tensors) == set(whole_state(0))
    assert torch.equal(tensors["expert/1/2/weight/w1"], whole_state(2)["expert/1/2/weight/w1"])
    assert torch.equal(tensors["dense/norm/weight"], whole_state(3)["dense/norm/weight"])
    assert main(["export", str(root), str(target)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_prune_keeps_what_is_asked_for(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(root), "--keep", "0"]) == 2
    assert main(["prune", str(root), "--keep", "2"]) == 0
    assert "deleted 1: step-00000001" in capsys.readouterr().out
    assert [path.name for path, _ in checkpoints(root)] == ["step-00000003", "step-00000002"]
    assert main(["verify", str(root)]) == 0
    victim = next((root / "step-00000003").glob("dense*"))
    victim.unlink()
    assert main(["prune", str(root), "--keep", "1"]) == 1
    assert f"in {root} is whole, so nothing is deleted: raise --keep" in capsys.readouterr().err
    assert len(checkpoints(root)) == 2, "the whole one is kept as long as the newer one is damaged"


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "verify"):
        assert main([command, str(tmp_path / "nowhere")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert main([command, str(tmp_path)]) == 2
        assert "holds no checkpoint" in capsys.readouterr().err
    (tmp_path / "outputs/mine/checkpoints/step-0000004").mkdir(parents=True)
    assert main(["inspect", str(tmp_path / "outputs")]) == 2
    run = tmp_path / "outputs/mine"
    assert f"outputs holds no checkpoint: give a run in it, such as {run}\n" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0


def test_nothing_whole_is_damage_not_a_mistake(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in root.glob("step-*"):
        (path / ".metadata").unlink()
    assert main(["inspect", str(root)]) == 1
    said = capsys.readouterr().err
    assert "holds no complete checkpoint" in said
    assert said.endswith("; restore one from a copy, or name another directory\n")


def lightning_file(path: Path, step: int) -> dict[str, torch.Tensor]:
    """A file as Lightning writes it; returns its model."""
    weight = torch.arange(600.0) + step
    model = {"model.w": weight, "model.tied": weight, "head": torch.ones(3, dtype=torch.bfloat16)}
    optimizer = {"state": {0: {"exp_avg": torch.zeros(600)}}, "param_groups": [{"lr": 0.1}]}
    torch.save(
        {
            "state_dict": model,
            "optimizer_states": [optimizer],
            "global_step": step,
            "pytorch-lightning_version": "2.5",
        },
        path,
    )
    return model


@pytest.mark.parametrize("named", ["file", "directory"])
def test_files_are_inspected_verified_and_exported(
    tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step-0000007.ckpt"
    model = lightning_file(path, 7)
    meant = str(path if named == "file" else tmp_path)
    assert main(["inspect", meant]) == 0
    text = capsys.readouterr().out
    assert "taken after step" in text
    assert "4.69 KiB in 3 tensors" in text
    assert main(["verify", meant]) == 0
    assert capsys.readouterr().out == "step-0000007.ckpt: whole\n"
    assert main(["export", meant, str(tmp_path / "all.safetensors")]) == 0
    loaded = load_file(tmp_path / "all.safetensors")
    assert loaded.keys() == model.keys()
    assert all(torch.equal(loaded[name], model[name]) for name in model)
    assert main(["prune", meant, "--keep", "1"]) == 2
    assert main(["export-hf", meant, str(tmp_path / "hf")]) == 2
    assert "not a checkpoint of a HuggingFaceModule" in capsys.readouterr().err


@pytest.mark.parametrize(("step", "expected"), [(12, "step-0000012.ckpt"), (2, "step-00000003")])
def test_of_files_beside_directories_the_highest_step_is_meant(
    root: Path, step: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `RunDirectory.newest_checkpoint` does, from which a run goes on."""
    file = root / f"step-{step:07}.ckpt"
    lightning_file(file, step)
    assert newest_first(root)[0][1] == root / expected
    assert main(["inspect", str(root)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[1] == expected
    assert main(["export", str(root), str(root.parent / "all.safetensors")]) == 0
    assert expected in capsys.readouterr().out
    assert main(["verify", str(root)]) == 0
    directories = [f"step-0000000{number}" for number in (3, 2, 1)]
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [file.name, *directories]
    assert main(["prune", str(root), "--keep", "1"]) == 0
    assert file.exists(), "only directories are counted and deleted"
    if step == 12:
        assert open_saved(root).path == file
        file.write_bytes(file.read_bytes()[:-40])
        problems = list[str]()
        assert open_saved(root, report=problems.append).path == root / "step-00000003"
        assert "step-0000012.ckpt is damaged" in problems[0]


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "export-hf", "export-gguf", "edit", "prune"])
def test_a_path_that_is_not_there_is_a_mistake_and_no_damage(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"prune": ["--keep", "1"], "edit": ["out.ckpt", "--prune", "0"]}.get(command, [])
    more = [str(tmp_path / "target.gguf")] if command.startswith("export") else more
    assert main([command, str(tmp_path / "gone.ckpt"), *more]) == 2
    assert "gone.ckpt" in capsys.readouterr().err


def _damaged(folder: Path, kind: str) -> Path:
    """A checkpoint file or directory with one thing wrong."""
    path = folder / "one.ckpt"
    if kind == "object":
        torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6", "global_step": Path("x")}, path)
    elif kind in ("no archive", "cut"):
        lightning_file(path, 1)
        path.write_bytes(path.read_bytes()[:-9] if kind == "cut" else b"these are words")
    elif kind == "below a file":
        path.write_text("")
        return path / "x"
    else:
        with node(folder, keep_last=9) as made:
            made.save(1)
            path = made.root / "step-00000001"
        if kind == "manifest":
            path.joinpath(MANIFEST).write_text("{}")
        else:
            next(path.glob("dense*")).unlink()
    return path


@pytest.mark.parametrize("kind", ["no archive", "cut", "object", "below a file", "manifest", "part"])
@pytest.mark.parametrize("command", ["inspect", "verify", "export", "export-hf", "export-gguf", "edit", "prune"])
def test_damage_is_told_with_one_cure(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path is cut in a message
    path = _damaged(tmp_path, kind).relative_to(tmp_path)
    more = {"prune": ["--keep", "1"], "edit": ["out.ckpt", "--prune", "0"]}.get(command, [])
    more = [str(tmp_path / "target.gguf")] if command.startswith("export") else more
    code = main([command, str(path), *more])
    said = capsys.readouterr().err
    if (command, kind) == ("inspect", "part"):  # it reads the manifest alone
        assert (code, said) == (0, "")
        return
    assert code in (1, 2)
    assert said.count("\n") == 1
    assert path.name in said
    cures = ("name another checkpoint", "name a checkpoint", "give ", "raise --keep", "resume with fit(")
    assert sum(said.count(cure) for cure in cures) == 1, said
    assert "File is not" not in said


def test_every_damage_to_a_files_tensors_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "last.ckpt"
    weight = lightning_file(path, 1)["model.w"].numpy().tobytes()
    whole = path.read_bytes()
    start = whole.index(weight)
    for position in range(start, start + len(weight), 53):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        assert main(["verify", str(path)]) == 1
        assert f"{path} is damaged: the checksum of" in capsys.readouterr().out
    assert main(["export", str(path), str(tmp_path / "x.safetensors")]) == 1
    assert not (tmp_path / "x.safetensors").exists()
    path.write_bytes(whole[:-100])
    assert main(["verify", str(path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_tokenizer_of_the_run_is_exported_beside_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"state_dict": {"w": torch.ones(2)}, "pytorch-lightning_version": "2.6", "global_step": 1}
    torch.save({**values, "TextData": {"trained_tokenizer": "{}"}}, tmp_path / "step-0000001.ckpt")
    target = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path / "step-0000001.ckpt"), str(target)]) == 0
    assert (tmp_path / "model.tokenizer.json").read_text() == "{}"
    assert "its tokenizer in" in capsys.readouterr().out
    target.unlink()
    assert main(["export", str(tmp_path / "step-0000001.ckpt"), str(target)]) == 2
    assert "model.tokenizer.json exists already" in capsys.readouterr().err
    assert not target.exists()
    (tmp_path / "model.tokenizer.json").unlink()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("moe_lightning.checkpoint.inspect.save_safetensors", killed)
        with pytest.raises(KeyboardInterrupt):
            main(["export", str(tmp_path / "step-0000001.ckpt"), str(target)])
    assert main(["export", str(tmp_path / "step-0000001.ckpt"), str(target)]) == 0
