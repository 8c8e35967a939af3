"""Model card: the README.md of an exported folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_lightning.hub import local_folder
from moe_lightning.models.gpt_module import OptimizerConfig
from moe_lightning.models.huggingface.module import HuggingFaceConfig

_LOSSES = {"val/loss": "validation loss", "train/loss": "training loss of the last step"}

_CARD = """\
---
library_name: {library}
{base_model}tags:
- mixture-of-experts
- moe-lightning
---

# {name}, trained with moe-lightning

The training began with the weights of {name}{change}.

| | |
|---|---|
{rows}

{use}
"""

_GENERATE = """\
To generate text, in this folder:

```bash
moe-generate . {prompt}
```"""

_LOAD = """\
To load {name} with it, in this folder:

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained(".")
```"""


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """Facts of a training that its configuration does not have.

    Attributes:
        steps: number of optimizer steps.
        source: path of the data; empty: not known.
        global_batch_size: samples of a step; None: not known.
        context_length: most tokens of a sample; None: those of the model's configuration.
        metrics: last values by name.
    """

    steps: int
    source: str = ""
    global_batch_size: int | None = None
    context_length: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def write_card(
    folder: Path,
    config: HuggingFaceConfig,
    optimizer: OptimizerConfig,
    training: TrainingFacts,
    *,
    is_adapter: bool = False,
) -> None:
    """Write the card of an exported model.

    Args:
        folder: of the export.
        config, optimizer: of the training.
        training: its other facts.
        is_adapter: the folder holds adapters alone.
    """
    original, change = local_folder(config.pretrained), ""
    name = _hub_id(original) or original.resolve().name
    if config.upcycling is not None:
        change = f", whose feed-forward layers became layers of {config.upcycling.num_experts} experts"
    elif config.adapter is not None:
        result = "this folder has nothing else" if is_adapter else "they are merged into the weights"
        if is_adapter and config.adapter.kind == "qlora":
            result += f". Beside them, experts were rounded to four bits: with those of {name} the model is another one"
        change = (
            f", which stayed as they were. Low-rank adapters ({config.adapter.kind}, rank {config.adapter.rank}) on "
            f"{', '.join(config.adapter.targets)} were trained; {result}"
        )
    prompt = "--chat" if (folder / "chat_template.jinja").is_file() else '"PROMPT"'
    text = _CARD.format(
        library="peft" if is_adapter else "transformers",
        base_model=f"base_model: {name}\n" if "/" in name else "",
        name=name,
        change=change,
        use=(_LOAD if is_adapter else _GENERATE).format(name=name, prompt=prompt),
        rows="\n".join(f"| {title} | {value} |" for title, value in _rows(config, optimizer, training)),
    )
    (folder / "README.md").write_text(text)


def _rows(config: HuggingFaceConfig, optimizer: OptimizerConfig, training: TrainingFacts) -> Iterator[tuple[str, str]]:
    if training.source:
        source = Path(training.source).name  # the folders above it say something of the machine alone
        yield "data", " ".join(source.split()).replace("|", "&#124;")
    yield "steps", f"{training.steps:,}"
    if training.global_batch_size is not None:
        yield "samples of a step", f"{training.global_batch_size:,}"
    yield "most tokens of a sample", f"{training.context_length or config.context_length:,}"
    yield "optimizer", f"{optimizer.name}, peak learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"
    for name, title in _LOSSES.items():
        if name in training.metrics:
            yield title, f"{training.metrics[name]:.4f} nats per token"


def _hub_id(folder: Path) -> str:
    """ORG/NAME of a model that lies in a Hugging Face cache; empty for any other folder."""
    *_, home, snapshots, _ = ("", "", "", *folder.resolve().parts)
    is_cached = snapshots == "snapshots" and home.startswith("models--")
    return home.removeprefix("models--").replace("--", "/", 1) if is_cached else ""
