"""Text of `moe-train --help`: usage, recipes, the keys that matter most, examples."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from moe_lightning.cli.composition import CONFIG_DIR

_WIDTH = 110  # of the recipes' lines
_TEXT = """\
moe-train: train a Mixture-of-Experts model with expert parallelism

usage: moe-train [recipes=NAME] [key=value ...] [-m] [--config-dir DIR]

recipes{own}
{recipes}

keys (all of them: moe-train --cfg job)
  ranks=auto                    local ranks: every GPU, or 2 on the CPU
  data.source=stdlib            text file, folder, glob, or .bin/.npy tokens
  data.tokenizer=bytes          bpe:8192, or the path of a tokenizer.json
  data.global_batch_size=N      samples of one step, over all ranks
  model=NAME                    {models}
  model.num_experts=N           and d_model, num_layers, router.top_k, ...
  optimizer.lr=X                peak learning rate
  trainer.max_steps=N           length of the run
  trainer.precision=32-true     bf16-mixed
  strategy.copies=null          replicas of each expert
  run_name=NAME                 files go to outputs/NAME
  resume=true                   false: start anew; or a checkpoint's path
  task=train                    validate: measure the last checkpoint

options
  -m, --multirun                one run for every combination: optimizer.lr=1e-3,3e-3
  -c, --cfg job                 print the configuration instead of training
  --config-dir DIR              your recipes: DIR/recipes/NAME.yaml
  --info searchpath             where configurations are looked for (also: defaults, plugins)
  -sc install=bash              completion: eval "$(moe-train -sc install=bash)"
  --version

examples
  moe-train                                          train the quickstart, about two minutes
  moe-train recipes=text data.source=~/books         train on your own text
  moe-train recipes=swinv2_moe data.path=photos/     or images: a folder for each class
  moe-train model.num_experts=16 run_name=wide       change anything, keep it apart
  moe-train -m optimizer.lr=1e-3,3e-3                two runs, one after the other
  torchrun --nproc-per-node=8 --no-python moe-train  let torchrun start the ranks
"""


def help_text(config_dir: str | None = None) -> str:
    """Return the text of `moe-train --help`.

    Args:
        config_dir: the user's own folder of recipes.
    """
    folders = [CONFIG_DIR / "recipes", *([Path(config_dir).expanduser() / "recipes"] if config_dir else [])]
    recipes = {path.stem: _description(path) for folder in folders for path in sorted(folder.glob("*.yaml"))}
    width = max(map(len, recipes), default=0)
    room = _WIDTH - width - 4
    lines = (
        f"  {name:<{width}}  {textwrap.shorten(about, room, placeholder=' ...')}" for name, about in recipes.items()
    )
    models = _wrapped(sorted(path.stem for path in (CONFIG_DIR / "model").glob("*.yaml")), indent=32, width=100)
    return _TEXT.format(recipes="\n".join(lines), own=f" (also in {config_dir})" if config_dir else "", models=models)


def _description(path: Path) -> str:
    """The first comment of a recipe that is not Hydra's."""
    for line in path.read_text().splitlines():
        comment = re.fullmatch(r"#\s*(.+)", line)
        if comment and not comment[1].startswith("@"):
            return comment[1]
    return ""


def _wrapped(words: Iterable[str], *, indent: int, width: int) -> str:
    lines, line = [], ""
    for word in words:
        if line and indent + len(line) + len(word) + 1 > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return ("\n" + " " * indent).join([*lines, line])
