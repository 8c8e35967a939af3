"""Types of the keywords of `moe_lightning.train`, for completion in editors and for type checkers.

Made from the classes of the configuration by `python docs/generated.py`; the classes check values when they are built.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

class Settings(TypedDict, total=False):
    run_name: str
    ranks: int | str
    module: Mapping[str, Any]
    run_dir: str
    seed: int
    resume: bool | str
    resume_overrides: bool
    task: Literal["train", "validate"]
    objective: str | None
    doctor: bool
    check_memory: bool
    depth: int | None
    data: DataKeys | str | Sequence[str]
    optimizer: OptimizerKeys | str | Sequence[str]
    model: ModelKeys | str | Sequence[str]
    strategy: StrategyKeys | str | Sequence[str]
    elastic: ElasticKeys
    callbacks: CallbacksKeys | str | Sequence[str]
    logger: LoggerKeys | str | Sequence[str]
    trainer: TrainerKeys | str | Sequence[str]

class ElasticKeys(TypedDict, total=False):
    enabled: bool | str
    rdzv_endpoint: str | None
    rdzv_id: str | None
    secret_file: str | None
    num_nodes: int
    node: str | None
    ranks_are_nodes: bool | str
    check_health: bool
    max_restarts: int
    cool_down_s: float
    settings: SettingsKeys

class DataKeys(TypedDict, total=False):
    source: str | Sequence[Any]
    text_field: str
    context_length: int
    global_batch_size: int
    num_workers: int
    val_fraction: float
    val_samples: int | None
    tokenizer: str | None
    cache_dir: str | None
    seed: int
    dtype: str | None
    packing: bool
    end_of_document: int | None
    path: str | None
    image_size: int
    crop_scale: Sequence[Any]
    flip: bool
    center_crop: float
    num_shapes: int
    end_token: str | None

class OptimizerKeys(TypedDict, total=False):
    name: Literal["adamw", "muon", "adafactor"]
    lr: float
    betas: Sequence[Any]
    eps: float
    weight_decay: float
    momentum: float
    fused: bool
    warmup_steps: int
    decay: Literal["cosine", "linear", "constant"]
    min_lr_ratio: float

class ModelKeys(TypedDict, total=False):
    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int | Sequence[Any] | None
    d_model: int
    num_kv_heads: int | None
    d_hidden: int | None
    num_experts: int
    d_expert: int | None
    moe_every: int
    num_dense_layers: int
    num_shared_experts: int
    router: RouterKeys | Mapping[str, Any]
    norm: Literal["layernorm", "rmsnorm"]
    position: Literal["learned", "rope"]
    activation: Literal["gelu", "swiglu", "gelu_tanh", "swiglu_clamped"]
    bias: bool
    qk_norm: bool
    tie_embeddings: bool
    dropout: float
    rope_theta: float
    init_std: float
    pretrained: str | None
    overrides: Mapping[str, Any]
    gradient_checkpointing: bool
    upcycling: UpcyclingKeys
    adapter: AdapterKeys
    num_classes: int
    image_size: int
    patch_size: int | None
    window_size: int | None
    embed_dim: int | None
    depths: Sequence[Any] | None
    mlp_ratio: float | None
    drop_path_rate: float | None

class RouterKeys(TypedDict, total=False):
    name: str
    top_k: int
    score: Literal["softmax", "sigmoid"]
    softmax_after_top_k: bool
    normalize_top_k: bool
    scale: float
    noisy_top_k: bool
    jitter: float
    weigh_inputs: bool
    num_groups: int
    top_groups: int
    group_top_k: int
    aux_loss_coef: float
    aux_loss_scope: Literal["global", "local"]
    z_loss_coef: float
    bias_update_rate: float
    capacity_factor: float | None
    drop_policy: Literal["probability", "position"]
    forced: ForcedRoutingKeys

class ForcedRoutingKeys(TypedDict, total=False):
    kind: Literal["uniform", "zipf", "drift", "trace"]
    exponent: float
    period: int
    path: str | None

class StrategyKeys(TypedDict, total=False):
    ep_size: int | None
    replicas: int | None
    placement: str | Sequence[Any] | None
    slots: int | None
    quota: Literal["balanced", "equal"]
    dispatch: str
    plan: Literal["host", "device"]
    kernels: Literal["auto", "torch", "triton", "grouped", "reference"] | None
    dense: str
    shard_size: int | None
    offload_optimizer: bool
    mesh: Mapping[str, Any] | None
    schedule: Literal["1f1b", "interleaved"]
    micro_batches: int | None
    seed: int | None
    timeout_s: float
    check_state_every: int | Literal["auto"]
    check_arithmetic_every: int | Literal["auto"]
    stop_on_nan: Literal["end", "skip"] | None
    hang_report_s: float | None
    resume_overrides: bool

class SettingsKeys(TypedDict, total=False):
    heartbeat_timeout_s: float
    silence_timeout_s: float
    rendezvous_timeout_s: float
    hang_timeout_s: float
    build_timeout_s: float
    join_timeout_s: float
    join_window_s: float
    start_timeout_s: float
    min_ranks: int
    notice_on_sigterm: bool
    notice_file: str | None
    notice_url: str | None
    notice_poll_s: float
    membership: str

class CallbacksKeys(TypedDict, total=False):
    compile_dense: CompileDenseKeys
    telemetry: TelemetryKeys
    console: ConsoleKeys
    summary: SummaryKeys
    checkpoint: CheckpointKeys
    early_stopping: EarlyStoppingKeys
    fault_injection: FaultInjectionKeys
    fault_recovery: FaultRecoveryKeys
    load_balancer: LoadBalancerKeys
    parity_doctor: ParityDoctorKeys
    partial_experts_checkpoint: PartialExpertsCheckpointKeys
    dynamic_k: DynamicKKeys
    recompute_dense: RecomputeDenseKeys
    routing_recorder: RoutingRecorderKeys
    routing_replay: RoutingReplayKeys
    spike_guard: SpikeGuardKeys

class CompileDenseKeys(TypedDict, total=False):
    backend: str
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    dynamic: bool | None

class TelemetryKeys(TypedDict, total=False):
    expert_load_path: str | None
    peak_flops_per_s: float | None
    placement_path: str | None

class ConsoleKeys(TypedDict, total=False):
    style: Literal["auto", "bar", "plain", "none"]

class SummaryKeys(TypedDict, total=False):
    path: str | None
    ngram_orders: Sequence[Any]

class CheckpointKeys(TypedDict, total=False):
    dirpath: str
    every_n_train_steps: int
    save_top_k: Literal[1, -1]

class EarlyStoppingKeys(TypedDict, total=False):
    monitor: str
    min_delta: float
    patience: int
    verbose: bool
    mode: str
    strict: bool
    check_finite: bool
    stopping_threshold: float | None
    divergence_threshold: float | None
    check_on_train_epoch_end: bool | None
    log_rank_zero_only: bool

class FaultInjectionKeys(TypedDict, total=False):
    dirpath: str
    kill: str | Sequence[Any] | None
    stop: str | Sequence[Any] | None
    slow: str | Sequence[Any] | None
    drop_node: str | Sequence[Any] | None
    corrupt_arena: str | Sequence[Any] | None
    fill_disk: str | Sequence[Any] | None
    trace: str | None
    trace_speed: float
    trace_start_s: float

class FaultRecoveryKeys(TypedDict, total=False):
    min_replicas: int
    protection: str
    failures: int
    optimizer_replay: bool
    verify_replay_every: int
    max_recoveries: int

class LoadBalancerKeys(TypedDict, total=False):
    rebalance_every: int
    placement_rule: str
    allocation: Literal["eq1", "waterfill"]
    min_replicas: int | None
    shadows: str
    calibrate: bool
    bytes_per_s: float
    flops_per_s: float
    speeds: Literal["measured", "even"] | Sequence[Any]
    max_samples_per_rank: int | None
    stragglers: Literal["adapt", "evict"]
    timeline_path: str | None

class ParityDoctorKeys(TypedDict, total=False):
    steps: int
    tolerance: float | None

class PartialExpertsCheckpointKeys(TypedDict, total=False):
    dirpath: str
    every_n_steps: int | Literal["auto"]
    k_snapshot: int | Literal["auto"] | None
    k_persist: int | None
    order: Literal["sequential", "load_aware", "load_aware_global"]
    scopes: Any
    keep_last: int
    failures_per_hour: float
    windows: Literal["any", "scheduled"]
    lossless: bool
    save_on_train_end: bool
    timeout_s: float

class DynamicKKeys(TypedDict, total=False):
    threshold: float

class RecomputeDenseKeys(TypedDict, total=False):
    pass

class RoutingRecorderKeys(TypedDict, total=False):
    path: str
    every_n_steps: int

class RoutingReplayKeys(TypedDict, total=False):
    path: str
    mode: Literal["record", "replay"]

class SpikeGuardKeys(TypedDict, total=False):
    every_n_steps: int
    threshold: float
    window: int
    max_rollbacks: int
    path: str | None

class LoggerKeys(TypedDict, total=False):
    csv: CsvKeys
    comet: CometKeys
    wandb: WandbKeys
    jsonl: JsonlKeys
    mlflow: MlflowKeys
    opentelemetry: OpentelemetryKeys
    prometheus: PrometheusKeys
    tensorboard: TensorboardKeys
    webhook: WebhookKeys

class CsvKeys(TypedDict, total=False):
    save_dir: str
    name: str
    version: int | str | None
    flush_logs_every_n_steps: int

class CometKeys(TypedDict, total=False):
    api_key: str | None
    workspace: str | None
    project: str | None
    experiment_key: str | None
    mode: Literal["get_or_create", "get", "create"] | None
    online: bool | None
    prefix: str | None

class WandbKeys(TypedDict, total=False):
    project: str
    name: str | None
    save_dir: str
    offline: bool | None
    log_model: bool | Literal["all"]
    group: str | None
    tags: Sequence[Any]

class JsonlKeys(TypedDict, total=False):
    path: str

class MlflowKeys(TypedDict, total=False):
    tracking_uri: str | None
    experiment_name: str
    run_name: str | None
    tags: Mapping[str, Any] | None
    log_model: bool | Literal["all"]
    prefix: str
    artifact_location: str | None
    run_id: str | None
    synchronous: bool | None

class OpentelemetryKeys(TypedDict, total=False):
    run: str
    endpoint: str
    interval_s: float

class PrometheusKeys(TypedDict, total=False):
    run: str
    port: int
    host: str

class TensorboardKeys(TypedDict, total=False):
    save_dir: str

class WebhookKeys(TypedDict, total=False):
    run: str

class UpcyclingKeys(TypedDict, total=False):
    num_experts: int
    moe_every: int
    num_dense_layers: int
    router: RouterKeys

class AdapterKeys(TypedDict, total=False):
    kind: Literal["lora", "qlora"]
    rank: int
    alpha: float
    targets: Sequence[Any]

class TrainerKeys(TypedDict, total=False):
    accelerator: Any
    strategy: Any
    devices: Sequence[Any] | str | int
    num_nodes: int
    precision: (
        Literal[64, 32, 16]
        | Literal[
            "transformer-engine",
            "transformer-engine-float16",
            "16-true",
            "16-mixed",
            "bf16-true",
            "bf16-mixed",
            "32-true",
            "64-true",
        ]
        | Literal["64", "32", "16", "bf16"]
        | None
    )
    logger: Any
    callbacks: Any
    fast_dev_run: int | bool
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: Any
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: int | float
    val_check_interval: Any
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | None
    log_every_n_steps: int | None
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    accumulate_grad_batches: int
    gradient_clip_val: int | float | None
    gradient_clip_algorithm: str | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    profiler: Any
    detect_anomaly: bool
    barebones: bool
    plugins: Any
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    default_root_dir: str | None
    enable_autolog_hparams: bool
    model_registry: str | None
