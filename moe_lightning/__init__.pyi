# The public names of moe_lightning with their modules: the one list, from which __init__.py loads them on first use.
from moe_lightning.callbacks.checkpoint import PartialExpertsCheckpoint as PartialExpertsCheckpoint
from moe_lightning.callbacks.dense_blocks import CompileDense as CompileDense
from moe_lightning.callbacks.dense_blocks import RecomputeDense as RecomputeDense
from moe_lightning.callbacks.fault_recovery import FaultRecovery as FaultRecovery
from moe_lightning.callbacks.load_balancer import LoadBalancer as LoadBalancer
from moe_lightning.callbacks.lost_tokens import DynamicK as DynamicK
from moe_lightning.callbacks.routing import RoutingReplay as RoutingReplay
from moe_lightning.callbacks.spike_guard import SpikeGuard as SpikeGuard
from moe_lightning.callbacks.telemetry import ExpertModelSummary as ExpertModelSummary
from moe_lightning.cli.call import train as train
from moe_lightning.data.loader import StepLoader as StepLoader
from moe_lightning.data.sampler import StepSampler as StepSampler
from moe_lightning.doctor.parity_doctor import ParityDoctor as ParityDoctor
from moe_lightning.errors import CheckpointError as CheckpointError
from moe_lightning.errors import ConfigurationError as ConfigurationError
from moe_lightning.errors import ParityError as ParityError
from moe_lightning.models.gpt import GPT as GPT
from moe_lightning.models.gpt import GPTConfig as GPTConfig
from moe_lightning.models.gpt_module import GPTModule as GPTModule
from moe_lightning.models.gpt_module import OptimizerConfig as OptimizerConfig
from moe_lightning.models.huggingface.module import HuggingFaceConfig as HuggingFaceConfig
from moe_lightning.models.huggingface.module import HuggingFaceModule as HuggingFaceModule
from moe_lightning.models.swin import SwinConfig as SwinConfig
from moe_lightning.models.swin import SwinModule as SwinModule
from moe_lightning.models.upcycling import UpcyclingConfig as UpcyclingConfig
from moe_lightning.moe.forced_routing import ForcedRouting as ForcedRouting
from moe_lightning.moe.layer import MoELayer as MoELayer
from moe_lightning.moe.losses import auxiliary_loss as auxiliary_loss
from moe_lightning.moe.losses import global_mean as global_mean
from moe_lightning.moe.losses import global_sum as global_sum
from moe_lightning.moe.replayed_routing import record_routing as record_routing
from moe_lightning.moe.replayed_routing import replay_routing as replay_routing
from moe_lightning.moe.router import RouterConfig as RouterConfig
from moe_lightning.parallel.sequence import ContextParallel as ContextParallel
from moe_lightning.strategies.expert_parallel import ExpertParallelStrategy as ExpertParallelStrategy
from moe_lightning.strategies.gradients import gradient_norms as gradient_norms
from moe_lightning.strategies.worlds import ExpertParallelCallback as ExpertParallelCallback

__all__: list[str]
__version__: str
