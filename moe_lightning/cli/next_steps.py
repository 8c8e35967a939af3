"""Next steps after a training: only those that work with the files in its directory."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from moe_lightning.cli.run_directory import RunDirectory
from moe_lightning.config import TARGET

_LONGEST = 64  # columns of a step with which the purposes of others are aligned


def next_steps(directory: RunDirectory, config: Mapping[str, Any]) -> str:
    """Return a line for each step, indented like the headline of a run; "" for a run that has left nothing.

    Args:
        directory: of the run.
        config: as composed.
    """
    steps = list(_steps(directory, config))
    width = max((len(step) for step, _ in steps if len(step) <= _LONGEST), default=0)
    lines = [f"{step:<{width}}  # {purpose}" for step, purpose in steps]
    return "\n".join(f"{'' if index else 'next':<7}{line}" for index, line in enumerate(lines))


def _steps(directory: RunDirectory, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Steps with their purpose."""
    place, newest = shlex.quote(str(directory)), directory.newest_checkpoint()
    max_steps, talk = config["trainer"].get("max_steps", -1), _talk(config.get("data") or {})
    if newest is not None and talk:
        yield f"moe-generate {place} {talk}", "talk to the model" if talk == "--chat" else "continue a text"
    if newest is not None and newest.step >= max_steps > 0:
        again = " resume=true" if config.get("resume") is False else ""
        yield f"the same command with trainer.max_steps={2 * newest.step}{again}", "train on"
    if directory.config.is_file():
        install = "" if importlib.util.find_spec("matplotlib") else 'pip install "moe-lightning[plots]" && '
        yield f"{install}moe-bench report {place}", "charts and facts of the run as one HTML page"
    if newest is not None:
        model = config["module"].get("config") or {}
        if str(model.get(TARGET)).endswith(".HuggingFaceConfig") and not model.get("upcycling"):
            yield f"moe-ckpt export-hf {place} huggingface", "the model, for from_pretrained of transformers"
        else:
            yield f"moe-ckpt export {place} model.safetensors", "the weights in one file"
    if any(directory.path.glob("wandb/offline-run-*")):
        yield f"wandb sync {place}/wandb/offline-run-*", "upload the curves, after wandb login"


def _talk(data: Mapping[str, Any]) -> str:
    """Return the arguments with which a model of this data generates text; empty for one of images or other data."""
    kind = str(data.get(TARGET)).rpartition(".")[2]
    if kind == "InstructionData":
        return "--chat"
    if kind != "TextData" or (data.get("tokenizer") is None and _has_only_tokens(data.get("source"))):
        return ""
    return '"def "' if data.get("source") == "stdlib" else '"The "'


def _has_only_tokens(source: Any) -> bool:
    """True if no source says what its tokens mean: all are files of tokens."""
    given = [source] if isinstance(source, str) else source or []
    paths = [one if isinstance(one, str) else str(one.get("path")) for one in given]
    return bool(paths) and all(path.lower().endswith((".bin", ".npy")) for path in paths)
