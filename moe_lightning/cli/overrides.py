"""Overrides of the command line in other tools' names and spellings, and former names of keys.

Names of Hugging Face, torchrun, DeepSpeed, Megatron and nanoGPT are understood by moe-train and moe-sim. A name whose
meaning is certain is read as ours and one line says so; a name that means something else here is refused with a
one-line explanation.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.config import shown
from moe_lightning.errors import ConfigurationError
from moe_lightning.user_errors import suggestion

_WRITTEN_AS_YAML = re.compile(r"([A-Za-z_][\w.]*):(?!//)\s*(.*)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_][\w.]*")
_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Other names for a command's settings.

    Args:
        program: the command.
        names: key of the configuration by other key; applied where the other one is no key of the configuration. Of
            several, with | between them, the first that the configuration has.
        short: key by the group whose plain value it stands for, as in hardware=h100.
        beside: further override by key that was read from another name, unless its own key is given.
        settings: overrides by whole setting; they stand for it whatever the configuration has.
        explained: advice by key that means nothing certain here.
        further: by group, a test of names: True for an argument of its class that the configuration leaves out.
        nullable: keys that are null until a key below them is given, each with advice where the configuration has none.
        options: words that begin with a dash and are the command's own, with the number of words that follow each.
        words: advice by bare word.
    """

    program: str
    names: Mapping[str, str]
    short: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    explained: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, Callable[[str], bool]] = field(default_factory=dict)
    nullable: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """True if something is said of the key here."""
        return key in self.names or key in self.explained or any(key.startswith(f"{name}.") for name in self.nullable)


def read_settings(
    arguments: Sequence[str], vocabulary: Vocabulary, top: Collection[str], known_keys: Callable[[], Collection[str]]
) -> list[str]:
    """Return the command line as Hydra reads it; every change is told on stderr.

    Args:
        arguments: words of the command line.
        vocabulary: of the command.
        top: keys and groups of the top level.
        known_keys: all keys of the configuration, dotted; takes the time of a composition.

    Raises:
        ConfigurationError: a setting that is explained, or a word that is none.
    """
    reader = _Reader(vocabulary, top, known_keys)
    words, read, changed = list(arguments), list[str](), list[str]()
    while words:
        word = words.pop(0)
        if word in vocabulary.options or word.partition("=")[0] in vocabulary.options or re.match("-[a-z]+=?$", word):
            read += [word, *(words.pop(0) for _ in range(min(vocabulary.options.get(word, 0), len(words))))]
            continue
        typed, setting = _one_setting(word, words, reader)
        for override in reader.overrides(setting):
            if override not in (typed, f"++{typed}"):
                changed.append(override.partition("=")[0])
                _tell(f"{vocabulary.program}: {shown(typed)} is read as {override.lstrip('+')}")
            read.append(override)
    for key in changed:
        further = vocabulary.beside.get(key)
        if further and not any(word.startswith(further.partition("=")[0]) for word in read):
            _tell(f"{vocabulary.program}: with it goes {further}")
            read.append(further)
    return read


def _tell(line: str) -> None:
    """Print a line on stderr, once for all ranks of torchrun and SLURM."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(line, file=sys.stderr)


def _one_setting(word: str, words: list[str], reader: _Reader) -> tuple[str, str]:
    """Return the typed words and the setting as key=value; remove further words of the setting from `words`."""
    option, yaml = _OPTION.fullmatch(word), _WRITTEN_AS_YAML.fullmatch(word)
    if option:
        key = option[1].replace("-", "_")
        if not reader.knows(key):
            return word, word  # for the parser to refuse
        if option[2] is not None:
            return word, f"{key}={option[2]}"
        value = words.pop(0) if words and "=" not in words[0] and not words[0].startswith("-") else "true"
        return f"{word} {value}" if value != "true" else word, f"{key}={value}"
    if yaml and "=" not in yaml[1] and reader.knows(yaml[1]):
        if yaml[2]:
            return word, f"{yaml[1]}={yaml[2]}"
        if words and "=" not in words[0]:
            value = words.pop(0)
            return f"{word} {value}", f"{yaml[1]}={value}"
    if _KEY.fullmatch(word) and words and words[0].startswith("="):  # key = value, in two words or three
        rest = words.pop(0)
        spaced = f"{word} {rest}"
        if rest == "=" and words:
            rest += words.pop(0)
            spaced += f" {rest[1:]}"
        return spaced, f"{word}{rest}"
    if word.endswith("=") and _KEY.fullmatch(word[:-1]) and words and not re.search("=|^-", words[0]):
        value = words.pop(0)
        return f"{word} {value}", f"{word}{value}"
    if _KEY.fullmatch(word) and reader.knows(word) and word not in reader.vocabulary.words:
        if words and re.fullmatch(r"[\d.eE+-]+", words[0]):
            value = words.pop(0)
            return f"{word} {value}", f"{word}={value}"
        reader.explain(word)
        raise ConfigurationError(f"{word} has no value: give {word}=VALUE")
    return word, word


class _Reader:
    """One command line's settings against the configuration, which is composed only where a name is not plain."""

    def __init__(self, vocabulary: Vocabulary, top: Collection[str], known_keys: Callable[[], Collection[str]]) -> None:
        self.vocabulary = vocabulary
        self._top = top
        self._known_keys = known_keys
        self._known: set[str] | None = None

    @property
    def known(self) -> set[str]:
        if self._known is None:
            self._known = set(self._known_keys())
        return self._known

    def knows(self, key: str) -> bool:
        """True if a setting of this key can be read."""
        return (
            key.split(".")[0] in self._top
            or self.vocabulary.has(key)
            or any(setting.startswith(f"{key}=") for setting in self.vocabulary.settings)
            or ("." not in key and self._by_ending(key) is not None)
        )

    def explain(self, key: str) -> None:
        """Raise the advice that there is on a key."""
        if key in self.vocabulary.explained:
            raise ConfigurationError(f"there is no key {shown(key)} here: {self.vocabulary.explained[key]}")

    def overrides(self, setting: str) -> list[str]:
        """The overrides that a setting stands for."""
        vocabulary = self.vocabulary
        key, has_value, value = setting.partition("=")
        if not has_value:
            if setting in vocabulary.words:
                raise ConfigurationError(f"{shown(setting)} is no setting: {vocabulary.words[setting]}")
            return [setting]
        if not key:
            raise ConfigurationError(f"{shown(setting)} names no key: write KEY=VALUE")
        if f"{key}={value.lower()}" in vocabulary.settings and not Path(value).exists():
            return [
                override
                for meant in vocabulary.settings[f"{key}={value.lower()}"]
                for override in ([meant] if meant in vocabulary.settings else self.overrides(meant))
            ]
        if key in vocabulary.short and not value.startswith(("{", "[")):
            return [f"{vocabulary.short[key]}={value}"]
        if not _KEY.fullmatch(key) or (key in self._top and not vocabulary.has(key)):
            return [setting]
        for name, advice in vocabulary.nullable.items():
            if key.startswith(f"{name}.") and key not in self.known:
                if name not in self.known:
                    raise ConfigurationError(f"{key} is no key of this configuration: {advice}")
                return [f"++{setting}"]
        if vocabulary.has(key) and key not in self.known:
            self.explain(key)
            targets = vocabulary.names[key].split("|")
            target = next((target for target in targets if target in self.known), targets[0])
            return self.overrides(f"{target}={value}")
        group, _, name = key.partition(".")
        if group in vocabulary.further and vocabulary.further[group](name):
            return [f"++{setting}"]
        if "." not in key and key not in self._top and key not in self.known:
            ending = self._by_ending(key)
            return [setting] if ending is None else [f"{ending}={value}"]
        return [setting]

    def _by_ending(self, key: str) -> str | None:
        """The one key of the configuration that ends in this word."""
        found = [name for name in self.known if name.endswith(f".{key}") and not name.startswith("callbacks.")]
        return found[0] if len(found) == 1 else None


def refuse_option(program: str, word: str, options: Collection[str]) -> ConfigurationError:
    """The error for an option that there is not."""
    near = suggestion(word.partition("=")[0], options)
    return ConfigurationError(
        f"there is no option {shown(word)}{near}: settings are written key=value, {program} --help lists both"
    )


def with_groups(names: Mapping[str, str]) -> dict[str, str]:
    """Key by other key, from words that stand for it: alone, and below the first part of the key.

    Args:
        names: words between spaces, by key.
    """
    found: dict[str, str] = {}
    for key, words in names.items():
        group = key.split(".")[0]
        for word in words.split():
            found[word] = key
            if "." in key and "." not in word:
                found[f"{group}.{word}"] = key
    targets = {key.split("|")[0] for key in names}
    return {word: key for word, key in found.items() if word not in targets}


_BATCH = (
    "data.global_batch_size=N is the batch of one step, over all ranks and micro-batches; "
    "trainer.accumulate_grad_batches=M computes it in M micro-batches"
)
_WIDTHS = "model.d_hidden=N is the width of dense layers, model.d_expert=N that of each expert"
_MACHINES = (
    "start moe-train on each machine with torchrun or srun, or give elastic.num_nodes=N with "
    "elastic.rdzv_endpoint=HOST:PORT and callbacks=fault_recovery"
)
_PRETRAINED = "a pretrained model is a folder on this machine: give model=huggingface model.pretrained=FOLDER"
_ADAPTER = f"adapters train beside a pretrained model: give {_PRETRAINED.partition('give ')[2]} model.adapter.kind=lora"
_DENSE = "there is one strategy, expert_parallel; strategy.dense=ddp, zero1, fsdp or hsdp says how dense parameters lie"
_STOP = "callbacks=early_stopping ends training when val/loss no longer falls"
_PRECISION = "trainer.precision=bf16-mixed or 32-true; fp16 is not offered, its loss scaling would differ between ranks"
_RECIPE = "a recipe is DIR/recipes/NAME.yaml: give --config-dir DIR recipes=NAME"
_FILES = "moe-train reads files of this machine: give data.source=FILE, or data=instructions data.path=FILE.jsonl"

RENAMED_KEYS = {
    "elastic.lighthouse": "elastic.rdzv_endpoint",
    "callbacks.load_balancer.placement": "callbacks.load_balancer.placement_rule",
}
"""Present keys by former ones, which recipes, command lines and recorded configurations may use for one release."""


def rename_former_keys(config: DictConfig, source: str) -> None:
    """Move values below former keys to the present ones and print a line for each.

    Args:
        config: composed or recorded configuration, changed in place.
        source: where the configuration comes from, for the printed lines.

    Raises:
        ConfigurationError: a former and the present key have different values.
    """
    for former, present in RENAMED_KEYS.items():
        group, _, old = former.rpartition(".")
        new = present.rpartition(".")[2]
        node = OmegaConf.select(config, group, throw_on_resolution_failure=False)
        if not isinstance(node, DictConfig) or old not in (values := dict(node.items_ex(resolve=False))):
            continue
        if values.get(new) not in (None, "auto", values[old]):
            raise ConfigurationError(
                f"{former}={shown(values[old])} and {present}={shown(values[new])} are the same key: drop {former}, "
                "its former name"
            )
        with open_dict(config):
            del node[old]
            node[new] = values[old]
        _tell(f"{source}: {former} is read as {present}")


_TRAIN_NAMES = RENAMED_KEYS | with_groups(
    {
        "model.d_model": "hidden_size n_embd embed_dim embedding_dim d_embed model_dim hidden_dim",
        "model.num_layers": "n_layer n_layers num_hidden_layers layers",
        "model.num_heads": "n_head n_heads num_attention_heads heads",
        "model.num_kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
        "model.num_experts": "num_local_experts n_experts n_routed_experts experts model.moe.num_experts",
        "model.num_shared_experts": "n_shared_experts",
        "model.router.top_k": "top_k topk num_experts_per_tok moe_top_k moe_router_topk",
        "model.context_length": "seq_len seq_length sequence_length max_length max_seq_len max_seq_length block_size "
        "context_length context_len max_position_embeddings n_positions n_ctx data.seq_len data.seq_length "
        "data.max_length data.block_size data.max_seq_len data.max_seq_length data.sequence_length",
        "model.vocab_size": "vocab n_vocab",
        "model.d_expert": "moe_intermediate_size moe_ffn_hidden_size expert_dim",
        "optimizer.lr": "learning_rate lr max_lr peak_lr",
        "optimizer.weight_decay": "wd",
        "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_iters",
        "optimizer.decay": "lr_scheduler lr_scheduler_type scheduler lr_decay_style schedule_type",
        "data.global_batch_size": "train_batch_size total_batch_size",
        "data.num_workers": "workers dataloader_num_workers",
        "data.source|data.path": "file files path train_file data_path text_file train_files corpus source",
        "trainer.accumulate_grad_batches": "gradient_accumulation_steps grad_accum gradient_accumulation accumulation "
        "accumulation_steps",
        "trainer.max_steps": "steps train_iters max_iters num_steps total_steps num_train_steps train_steps",
        "trainer.max_epochs": "epochs num_epochs num_train_epochs",
        "trainer.gradient_clip_val": "max_grad_norm clip_grad grad_clip gradient_clip gradient_clipping clip_grad_norm",
        "trainer.log_every_n_steps": "logging_steps log_every log_interval steps_per_print log_every_steps",
        "trainer.val_check_interval": "eval_steps eval_interval eval_every val_every val_interval",
        "trainer.accelerator": "device",
        "trainer.max_time": "max_time",
        "trainer.limit_train_batches": "limit_train_batches",
        "trainer.fast_dev_run": "fast_dev_run",
        "callbacks.checkpoint.every_n_train_steps": "save_steps save_interval save_every checkpoint_every "
        "callbacks.checkpoint.every_n_steps callbacks.checkpoint.every",
        "strategy.ep_size": "ep expert_parallel_size expert_model_parallel_size moe_ep_size",
        "elastic.rdzv_endpoint": "lighthouse",
        "elastic.num_nodes": "elastic.nnodes elastic.nodes",
        "strategy.copies": "replicas num_replicas",
        "strategy.stop_on_nan": "trainer.stop_on_nan stop_on_nan",
        "strategy.mesh.tp": "tp tp_size tensor_parallel_size tensor_model_parallel_size",
        "strategy.mesh.pp": "pp pp_size pipeline_parallel_size pipeline_model_parallel_size",
        "strategy.mesh.cp": "cp cp_size context_parallel_size",
        "ranks": "gpus num_gpus n_gpus ngpus devices num_devices num_ranks nproc nproc_per_node trainer.gpus "
        "trainer.num_gpus",
        "run_name": "name experiment_name exp_name",
        "hydra.run.dir": "output_dir out_dir save_dir run_folder output",
        "recipes": "recipe",
        "resume": "resume_from resume_from_checkpoint ckpt_path checkpoint_path load trainer.ckpt_path "
        "trainer.resume_from_checkpoint",
        "logger.wandb.project": "wandb.project wandb_project",
        "logger.wandb.group": "wandb.group wandb_group",
        "seed": "random_seed manual_seed trainer.seed",
    }
)

_NO_WORDS = ("false", "none", "null", "no", "off", "[]")
_YES_WORDS = ("true", "yes", "on")

_TRAIN_SETTINGS = {
    **{f"{name}={word}": ("logger=none",) for name in ("logger", "report_to", "loggers") for word in _NO_WORDS},
    **{f"{name}=wandb": ("logger=default",) for name in ("logger", "report_to", "loggers")},
    **{f"report_to={name}": (f"logger={name}",) for name in ("tensorboard", "mlflow", "comet", "csv")},
    "logger=[csv,wandb]": ("logger=default",),
    "logger=[wandb]": ("logger=default",),
    "logger=[wandb,csv]": ("logger=default",),
    **{f"callbacks={word}": ("callbacks=[]",) for word in ("false", "none", "null", "no")},
    **{f"{name}={word}": ("logger=csv",) for name in ("wandb", "use_wandb") for word in _NO_WORDS},
    **{f"{name}={word}": ("logger=default",) for name in ("wandb", "use_wandb") for word in _YES_WORDS},
    "tensorboard=true": ("logger=tensorboard",),
    **{f"resume={word}": ("resume=true",) for word in ("last", "latest", "auto", "yes", "on")},
    **{f"resume={word}": ("resume=false",) for word in ("none", "null", "no", "off", "never")},
    **{f"early_stopping={word}": ("callbacks=early_stopping",) for word in _YES_WORDS},
    **{f"{name}={word}": ("callbacks=compile",) for name in ("compile", "torch_compile") for word in _YES_WORDS},
    **{f"{name}={word}": ("trainer.precision=bf16-mixed",) for name in ("bf16", "trainer.bf16") for word in _YES_WORDS},
    **{f"{name}=bf16": ("trainer.precision=bf16-mixed",) for name in ("precision", "dtype", "mixed_precision")},
    **{f"model.adapter={kind}": (f"model.adapter.kind={kind}",) for kind in ("lora", "qlora")},
    **{f"task={word}": ("task=validate",) for word in ("eval", "evaluate", "val", "validation")},
    **{f"optimizer={word}": ("optimizer=adamw",) for word in ("adamw_torch", "adam_w")},
}

_PASSED = ("callbacks", "logger", "plugins", "strategy", "profiler")
"""Arguments of the Trainer that moe-train gives itself, or that no text can be."""


def _is_further_trainer_argument(name: str) -> bool:
    """True for what the Trainer takes and conf/trainer leaves out."""
    if not name.isidentifier() or name in OmegaConf.load(CONFIG_DIR / "trainer" / "default.yaml") or name in _PASSED:
        return False
    from lightning.pytorch import Trainer  # seconds, and only for such a name

    return name in inspect.signature(Trainer).parameters


TRAIN = Vocabulary(
    program="moe-train",
    names=_TRAIN_NAMES,
    beside={"trainer.max_epochs": "trainer.max_steps=-1"},
    settings=_TRAIN_SETTINGS,
    explained={
        **dict.fromkeys(
            (
                "batch_size", "data.batch_size", "trainer.batch_size", "micro_batch_size", "per_gpu_batch_size",
                "per_device_train_batch_size", "per_device_batch_size", "data.micro_batch_size", "mbs", "bs",
            ),
            _BATCH,
        ),
        **dict.fromkeys(
            ("intermediate_size", "d_ff", "ffn_hidden_size", "n_inner", "model.intermediate_size", "model.d_ff",
             "model.ffn_hidden_size", "ffn_dim", "model.ffn_dim"),
            _WIDTHS,
        ),
        **dict.fromkeys(("nodes", "num_nodes", "nnodes", "world_size", "node_rank", "master_addr"), _MACHINES),
        **dict.fromkeys(
            ("model_name_or_path", "pretrained", "model_name", "model_id", "model.pretrained", "model.name",
             "pretrained_model_name_or_path", "model.path"),
            _PRETRAINED,
        ),
        **dict.fromkeys(("lora", "peft", "lora_r", "lora_rank", "qlora", "use_peft", "lora_alpha"), _ADAPTER),
        **dict.fromkeys(
            ("trainer.strategy", "zero_stage", "strategy.zero_stage", "deepspeed", "fsdp", "ddp", "zero"), _DENSE
        ),
        **dict.fromkeys(("early_stopping", "callbacks.early_stopping", "patience"), _STOP),
        **dict.fromkeys(("fp16", "trainer.fp16", "amp", "half"), _PRECISION),
        **dict.fromkeys(("config", "config_file", "cfg", "yaml"), _RECIPE),
        **dict.fromkeys(("dataset", "dataset_name", "data.name", "datasets", "data.dataset"), _FILES),
        **dict.fromkeys(("warmup_ratio", "optimizer.warmup_ratio"), "optimizer.warmup_steps=N counts steps"),
        **dict.fromkeys(
            ("beta1", "beta2", "adam_beta1", "adam_beta2", "optimizer.beta1", "optimizer.beta2"),
            "give both, optimizer.betas=[0.9,0.95]",
        ),
        "optimizer.type": "optimizer=adamw, muon or adafactor chooses one",
        "verbose": "callbacks.console.style=bar, plain or none says what is shown",
        "debug": "recipes=debug trains on four batches",
        "multirun": "give -m, with commas between the values: optimizer.lr=1e-3,3e-3",
        "chaos.kill": "choose recipes=chaos with it",
        "checkpoint": "callbacks.checkpoint=null leaves full checkpoints out, "
        "callbacks.checkpoint.every_n_train_steps=N says when",
        "eval_only": "give task=validate",
        "gradient_checkpointing": "callbacks=recompute computes dense layers again; a Hugging Face model has "
        "model.gradient_checkpointing=true",
    },
    further={"trainer": _is_further_trainer_argument},
    nullable={
        "model.adapter": _ADAPTER,
        "model.upcycling": f"experts are made of a dense pretrained model: {_PRETRAINED.partition(': ')[2]}",
        "model.router.forced": "choose recipes=trace_routing, or a model with experts",
    },
    options={
        **dict.fromkeys(
            ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m", "-sc",
             "--shell-completion"),
            0,
        ),
        **dict.fromkeys(
            ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
             "--experimental-rerun"),
            1,
        ),
        "--info": 0,
        "-i": 0,
    },
    words={
        "help": "moe-train --help shows the settings",
        "train": "moe-train trains as it is, with settings such as recipes=text data.source=FILE after it",
        "validate": "give task=validate",
        "early_stopping": _STOP,
        "resume": "resume=true is the default, resume=false starts anew, resume=CHECKPOINT goes on from one",
        "wandb": "give logger=default for W&B and CSV, logger=csv without W&B",
    },
)  # fmt: skip

_SIM_GROUPS = {
    "hardware": "hardware.preset",
    "policy": "policy.name",
    "failures": "failures.kind",
    "routing": "routing.kind",
}

SIM = Vocabulary(
    program="moe-sim",
    names=with_groups(
        {
            "nodes": "node num_nodes nnodes machines n_nodes",
            "hours": "hour duration_hours time_hours",
            "hardware.preset": "preset gpu gpu_type hardware.name hardware.gpu",
            "hardware.ranks_per_node": "gpus_per_node ranks_per_node nproc_per_node",
            "failures.node_mtbf_hours": "mtbf mtbf_hours node_mtbf_hours",
            "mesh.pp": "pp pipeline pipeline_parallel_size",
            "mesh.tp": "tp tensor tensor_parallel_size",
            "mesh.cp": "cp context_parallel_size",
            "rank_batch": "micro_batch_size batch_size_per_rank per_device_train_batch_size",
            "global_batch": "global_batch_size train_batch_size",
            "policy.slots": "slots",
        }
    ),
    short=_SIM_GROUPS,
    explained={
        "batch_size": "give rank_batch=N samples of each rank, or rank_batch=null global_batch=N",
        **dict.fromkeys(
            ("gpus", "num_gpus", "ranks", "world_size"), "nodes=N with hardware.ranks_per_node=M makes N times M ranks"
        ),
        **dict.fromkeys(("duration", "time", "days"), "give hours=N"),
    },
    options={"--cfg": 0, "-c": 0},
    words={
        "help": "moe-sim --help shows the settings",
        "simulate": "moe-sim simulates as it is, with settings such as nodes=4 after it",
        "job": "moe-sim --cfg alone prints the configuration",
    },
)
