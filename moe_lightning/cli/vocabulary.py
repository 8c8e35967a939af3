"""Names that people bring from Hugging Face, torchrun, DeepSpeed, Megatron and nanoGPT, for moe-train and moe-sim."""

from __future__ import annotations

import inspect

from omegaconf import OmegaConf

from moe_lightning.cli.composition import CONFIG_DIR
from moe_lightning.cli.overrides import Vocabulary, with_groups

_BATCH = (
    "data.global_batch_size=N is the batch of one step, over all ranks and micro-batches; "
    "trainer.accumulate_grad_batches=M computes it in M micro-batches"
)
_WIDTHS = "model.d_hidden=N is the width of dense layers, model.d_expert=N that of each expert"
_MACHINES = (
    "start moe-train on each machine with torchrun or srun, or give elastic.num_nodes=N with "
    "elastic.lighthouse=HOST:PORT and callbacks=fault_recovery"
)
_PRETRAINED = "a pretrained model is a folder on this machine: give model=huggingface model.pretrained=FOLDER"
_ADAPTER = f"adapters train beside a pretrained model: give {_PRETRAINED.partition('give ')[2]} model.adapter.kind=lora"
_DENSE = "there is one strategy, expert_parallel; strategy.dense=ddp, zero1, fsdp or hsdp says how dense parameters lie"
_STOP = "callbacks=early_stopping ends training when val/loss no longer falls"
_PRECISION = "trainer.precision=bf16-mixed or 32-true; fp16 is not offered, its loss scaling would differ between ranks"
_RECIPE = "a recipe is DIR/recipes/NAME.yaml: give --config-dir DIR recipes=NAME"
_FILES = "moe-train reads files of this machine: give data.source=FILE, or data=instructions data.path=FILE.jsonl"
_SCHEDULE = "optimizer.decay=cosine, linear or constant, after optimizer.warmup_steps=N"

_TRAIN_NAMES = with_groups(
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
