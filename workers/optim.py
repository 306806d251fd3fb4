"""AdamW over the sharded weights, one gradient norm for all of them, and the decision to skip a step.

Invariants
  1. The norm is that of the whole gradient whatever the meshes: each mesh's share is summed over its ranks,
     then the squares are added. torch's own clip_grad_norm_ raises when meshes are mixed.
  2. All ranks step, or none does: a non-finite loss on one rank is known to all before anyone moves.
  3. A skipped step leaves weights and moments bit for bit as they were, and drops the gradients.
Callers: trainer.py; checkpoint.py reads the state. Elsewhere called optimizer, clip_grad_norm.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@dataclass(frozen=True)
class OptimSettings:
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0  # 0 = do not clip


@dataclass(frozen=True)
class StepReport:
    grad_norm: float  # before clipping, may be non-finite
    skipped: bool


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def by_mesh(parameters) -> dict[DeviceMesh | None, list[torch.Tensor]]:
    """Only tensors of one mesh go into one fused call."""
    groups: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(mesh_of(parameter), []).append(parameter)
    return groups


class Optimizer:
    """Lives as long as the model. The learning rate comes with every step."""

    def __init__(self, model, settings: OptimSettings):
        self.settings = settings
        # Names in the model's order: the keys of a checkpoint.
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.adamw = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(self.parameters.values()).values()],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,  # on two gloo ranks 12 ms against 33 (foreach) and 50 (loop) for 10 M parameters
        )
        # AdamW would make its state at the first step; made here, a checkpoint always finds all of it.
        for parameter in self.parameters.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, lr: float, loss_is_finite: bool = True) -> StepReport:
        """Clips, steps and drops the gradients; collective."""
        groups = by_mesh(p for p in self.parameters.values() if p.grad is not None)
        norm = total_norm(groups)
        finite = all_agree(loss_is_finite and math.isfinite(float(norm)), norm.device)
        if finite:
            if self.settings.max_norm > 0:
                for group in groups.values():
                    clip_grads_with_norm_(group, self.settings.max_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return StepReport(float(norm), skipped=not finite)


def total_norm(groups: dict[DeviceMesh | None, list[torch.Tensor]]) -> torch.Tensor:
    """Norm of all gradients over all ranks, a plain scalar that is equal on every rank."""
    squares = []
    for group in groups.values():
        norm = get_total_norm([p.grad for p in group if p.grad is not None])
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def all_agree(value: bool, device: torch.device) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    flag = torch.tensor([int(value)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())
