"""Expert MLPs (SwiGLU) with given routing, ours and others', behind one call for the kernel benchmark.

A public kernel takes part where its package can be imported; where not, the reason is reported instead of a time.

Shapes: T tokens, K choices, E experts, D model width, F expert width.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.race import reason
from moe_lightning import kernels as ops
from moe_lightning.moe.layer import MoELayer

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, D], expert ids [T, K], weights [T, K]) -> y [T, D]."""


SIZES = ("tokens", "d_model", "d_expert", "experts", "top_k")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One benchmark shape."""

    name: str
    tokens: int
    d_model: int
    d_expert: int
    experts: int
    top_k: int

    def __str__(self) -> str:
        return f"T={self.tokens} D={self.d_model} F={self.d_expert} E={self.experts} K={self.top_k}"

    @property
    def forward_flops(self) -> int:
        """Multiply-adds counted as two, over the three matrices of a SwiGLU expert; a backward needs twice as many."""
        return 6 * self.tokens * self.top_k * self.d_model * self.d_expert


@dataclass(frozen=True, kw_only=True)
class Contender:
    """An MLP ready to run: its forward and the parameters whose gradients a backward computes.

    Attributes:
        is_routed: it takes the routing that it is given, so that its values can be compared.
    """

    forward: Forward
    parameters: tuple[Tensor, ...]
    is_routed: bool = True


def ours(up_EDH: Tensor, down_EFD: Tensor) -> Contender:
    """The kernels of this project."""

    def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sort = ops.sort_by_expert(ids_TK, len(up_EDH), num_rows=ids_TK.numel())
        counts_E = sort.tokens_per_expert_E
        return ops.expert_mlp(x_TD, up_EDH, down_EFD, counts_E, "swiglu", sort=sort, weights_TK=weights_TK)

    return Contender(forward=forward, parameters=(up_EDH, down_EFD))


def ours_grouped(up_EDH: Tensor, down_EFD: Tensor) -> Contender:
    """The same, but torch's own grouped matmul for the experts."""
    own = ours(up_EDH, down_EFD)
    return replace(own, forward=ops.backend("grouped")(own.forward))


def loop(up_EDH: Tensor, down_EFD: Tensor) -> Contender:
    """What a tutorial does: for each expert select its tokens, compute, add the results up."""

    def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TD = torch.zeros_like(x_TD)
        for expert, (up_DH, down_FD) in enumerate(zip(up_EDH.unbind(), down_EFD.unbind(), strict=True)):
            token, choice = (ids_TK == expert).nonzero(as_tuple=True)
            y_MD = swiglu(x_TD[token] @ up_DH) @ down_FD
            y_TD = y_TD.index_add(0, token, y_MD * weights_TK[token, choice, None].to(y_MD.dtype))
        return y_TD

    return Contender(forward=forward, parameters=(up_EDH, down_EFD))


def torch_grouped(up_EDH: Tensor, down_EFD: Tensor) -> Contender:
    """torch's own grouped matmul between a sort and an index_add."""

    def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        order_M = ids_TK.reshape(-1).argsort(stable=True)
        ends_E = torch.bincount(ids_TK.reshape(-1), minlength=len(up_EDH)).cumsum(0).to(torch.int32)
        token_M = order_M // ids_TK.shape[1]
        h_MH = F.grouped_mm(x_TD[token_M], up_EDH, offs=ends_E)
        y_MD = F.grouped_mm(swiglu(h_MH), down_EFD, offs=ends_E)
        y_MD = y_MD * weights_TK.reshape(-1)[order_M].unsqueeze(1).to(y_MD.dtype)
        return torch.zeros_like(x_TD).index_add(0, token_M, y_MD)

    return Contender(forward=forward, parameters=(up_EDH, down_EFD))


def hugging_face(up_EDH: Tensor, down_EFD: Tensor) -> Contender:
    """transformers' experts with its "grouped_mm" implementation."""
    mixtral = _module("transformers.models.mixtral.modeling_mixtral", "transformers")
    config = mixtral.MixtralConfig(
        hidden_size=up_EDH.shape[1],
        intermediate_size=down_EFD.shape[1],
        num_local_experts=len(up_EDH),
        experts_implementation="grouped_mm",
    )
    experts = mixtral.MixtralExperts(config).to(up_EDH.device, up_EDH.dtype)
    with torch.no_grad():
        experts.gate_up_proj.copy_(up_EDH.transpose(1, 2))
        experts.down_proj.copy_(down_EFD.transpose(1, 2))
    return Contender(forward=experts, parameters=(experts.gate_up_proj, experts.down_proj))


def liger(up_EDH: Tensor, down_EFD: Tensor) -> Contender:
    """Liger's fused MoE function."""
    function: Any = _module("liger_kernel.ops.fused_moe", "liger-kernel").LigerFusedMoEFunction
    up_EHD, down_EDF = (_leaf(weight.transpose(1, 2)) for weight in (up_EDH, down_EFD))

    def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        result: Tensor = function.apply(x_TD, up_EHD, down_EDF, ids_TK.to(torch.int32), weights_TK)
        return result

    return Contender(forward=forward, parameters=(up_EHD, down_EDF))


def sonic(up_EDH: Tensor, down_EFD: Tensor, top_k: int) -> Contender:
    """SonicMoE's layer. It routes for itself: the given ids and weights are not used, and the router's time counts."""
    package = _module("sonicmoe", "sonic-moe")
    enums = _module("sonicmoe.enums", "sonic-moe")
    layer = package.MoE(
        num_experts=len(up_EDH),
        num_experts_per_tok=top_k,
        hidden_size=up_EDH.shape[1],
        intermediate_size=down_EFD.shape[1],
        activation_function=enums.ActivationType.SWIGLU,
        add_bias=False,
        std=0.02,
    ).to(device=up_EDH.device, dtype=up_EDH.dtype)

    def forward(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        result: Tensor = layer(x_TD, kernel_backend_moe=package.KernelBackendMoE.sonicmoe)[0]
        return result

    return Contender(forward=forward, parameters=tuple(layer.parameters()), is_routed=False)


def contenders(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Contender], dict[str, str]]:
    """All contenders that can be built for a shape, and the reasons of the others."""
    generator = torch.Generator(device=device).manual_seed(0)
    up_EDH = _weight(shape.experts, shape.d_model, 2 * shape.d_expert, device, dtype, generator)
    down_EFD = _weight(shape.experts, shape.d_expert, shape.d_model, device, dtype, generator)
    return _built(_builders(up_EDH, down_EFD, shape.top_k))


def _builders(up_EDH: Tensor, down_EFD: Tensor, top_k: int) -> dict[str, Callable[[], Contender]]:
    builders: dict[str, Callable[[], Contender]] = {
        "ours": lambda: ours(up_EDH, down_EFD),
        "ours, grouped": lambda: ours_grouped(up_EDH, down_EFD),
        "loop": lambda: loop(up_EDH, down_EFD),
        "torch grouped_mm": lambda: torch_grouped(up_EDH, down_EFD),
        "hf grouped_mm": lambda: hugging_face(up_EDH, down_EFD),
    }
    if up_EDH.is_cuda:
        builders["liger-kernel"] = lambda: liger(up_EDH, down_EFD)
        builders["sonic-moe"] = lambda: sonic(up_EDH, down_EFD, top_k)
    return builders


def _built(builders: Mapping[str, Callable[[], Contender]]) -> tuple[dict[str, Contender], dict[str, str]]:
    """What can be built here, and the reasons of the others, whatever a stranger's package raises."""
    built: dict[str, Contender] = {}
    absent: dict[str, str] = {}
    for name, builder in builders.items():
        try:
            built[name] = builder()
        except ImportError as error:
            absent[name] = str(error)
        except Exception as error:
            absent[name] = reason(error)
    return built, absent


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A whole layer ready to run, with its router, and weights in fp32 that it casts.

    Attributes:
        forward: x [T, D] -> y [T, D].
        backward: (y, x, gradient of y) -> the gradients of x and, in fp32, of all weights.
        is_comparable: it has the same weights as the others.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], list[Tensor]]
    is_comparable: bool = True


def layer_contenders(shape: Shape, device: torch.device) -> tuple[dict[str, Layer], dict[str, str]]:
    """Ours, and the others behind a plain router and a cast; and the reasons of those that are missing."""
    torch.manual_seed(0)
    ours = MoELayer(
        shape.d_model, shape.d_expert, shape.experts, {"top_k": shape.top_k, "aux_loss_coef": 0.0}, activation="swiglu"
    ).to(device)

    def forward(x_TD: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y_TD: Tensor = ours(x_TD)
        return y_TD

    def backward(y_TD: Tensor, x_TD: Tensor, grad_TD: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(y_TD, [x_TD, own_router_ED, *weights], grad_TD))

    own_router_ED = ours.get_parameter("router.weight")
    weights = (ours.experts.w_up, ours.experts.w_down)
    up_EDH, down_EFD = (weight.detach().to(torch.bfloat16).requires_grad_() for weight in weights)
    built, absent = _built(_builders(up_EDH, down_EFD, shape.top_k))
    router_ED = own_router_ED.detach().clone().requires_grad_()
    layers = {name: _behind_a_router(one, router_ED, shape.top_k) for name, one in built.items() if name != "ours"}
    return {"ours": Layer(forward=forward, backward=backward), **layers}, absent


def _behind_a_router(contender: Contender, router_ED: Tensor, top_k: int) -> Layer:
    """Every forward routes in fp32 and casts fp32 weights to the contender's; every backward casts gradients back."""
    masters = [parameter.detach().float() for parameter in contender.parameters]

    def forward(x_TD: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter, master in zip(contender.parameters, masters, strict=True):
                parameter.copy_(master)
        scores_TE = F.linear(x_TD.float(), router_ED).softmax(-1)
        weights_TK, ids_TK = scores_TE.topk(top_k)
        return contender.forward(x_TD, ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True))

    def backward(y_TD: Tensor, x_TD: Tensor, grad_TD: Tensor) -> list[Tensor]:
        leaves = [x_TD, router_ED, *contender.parameters]
        grad_x, *grads = torch.autograd.grad(y_TD, leaves, grad_TD, allow_unused=True)
        return [grad_x, *(grad.float() for grad in grads if grad is not None)]

    return Layer(forward=forward, backward=backward, is_comparable=contender.is_routed)


def _module(name: str, package: str) -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ImportError(f"{package} is not installed")
    return importlib.import_module(name)


def _weight(
    experts: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    weight = torch.empty(experts, rows, columns, device=device, dtype=dtype)
    return weight.normal_(std=rows**-0.5, generator=generator).requires_grad_()


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().requires_grad_()


def swiglu(h: Tensor) -> Tensor:
    """As plain torch computes it."""
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up
