"""Optimizer: AdamW by its formula, one norm over mixed meshes, clipping, and skipped steps."""

import math

import pytest
import torch
from tiny_models import join_group_of_one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim import Optimizer, OptimSettings, by_mesh, total_norm

join_group_of_one()


class Mixed(nn.Module):
    """Weights on two meshes and one on none, as under expert or tensor parallelism."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=(name,)) for name in ("fsdp", "efsdp")]
        self.a = nn.Parameter(distribute_tensor(torch.randn(3, 4), meshes[0], [Shard(0)]))
        self.b = nn.Parameter(distribute_tensor(torch.randn(5), meshes[1], [Shard(0)]))
        self.c = nn.Parameter(torch.randn(2, 2))

    def set_gradients(self, scale: float = 1.0) -> torch.Tensor:
        """Fixed gradients; returns all of them in one line."""
        generator = torch.Generator().manual_seed(1)
        flat = []
        for p in self.parameters():
            grad = scale * torch.randn(p.shape, generator=generator)
            flat.append(grad.flatten())
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        return torch.cat(flat)

    def flat(self) -> torch.Tensor:
        return torch.cat([whole(p.detach()).flatten() for p in self.parameters()]).clone()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def adamw_by_hand(weights, gradients, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0):
    m = v = torch.zeros_like(weights)
    for t, g in enumerate(gradients, start=1):
        weights = weights * (1 - lr * weight_decay)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        weights = weights - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return weights


def test_norm_of_mixed_meshes_is_that_of_the_whole_gradient():
    model = Mixed()
    flat = model.set_gradients()
    assert len(by_mesh(model.parameters())) == 3
    assert float(total_norm(by_mesh(model.parameters()))) == pytest.approx(float(flat.norm()), rel=1e-6)


def test_steps_follow_the_formula_on_mixed_meshes():
    model = Mixed()
    before = model.flat()
    optimizer = Optimizer(model, OptimSettings(weight_decay=0.1, max_norm=0.0))
    gradients = []
    for scale in (1.0, -2.0, 0.5):
        gradients.append(model.set_gradients(scale))
        optimizer.step(lr=0.01)
    assert torch.allclose(model.flat(), adamw_by_hand(before, gradients, 0.01, weight_decay=0.1), atol=1e-6)


def test_gradient_is_clipped_as_a_whole_and_reported_before_clipping():
    model = Mixed()
    before = model.flat()
    optimizer = Optimizer(model, OptimSettings(max_norm=0.5))
    flat = model.set_gradients()
    report = optimizer.step(lr=0.01)
    norm = float(flat.norm())
    assert report.grad_norm == pytest.approx(norm, rel=1e-6) and not report.skipped
    # torch divides by norm + 1e-6; Adam's first step hides the scale, so look at the first moment
    first = torch.cat([whole(s["exp_avg"]).flatten() for s in optimizer.adamw.state.values()])
    assert torch.allclose(first, 0.1 * flat * 0.5 / (norm + 1e-6), atol=1e-7)
    assert not torch.equal(model.flat(), before)


def test_gradient_below_the_limit_is_not_scaled():
    model = Mixed()
    optimizer = Optimizer(model, OptimSettings(max_norm=1000.0))
    flat = model.set_gradients()
    optimizer.step(lr=0.01)
    first = torch.cat([whole(s["exp_avg"]).flatten() for s in optimizer.adamw.state.values()])
    assert torch.allclose(first, 0.1 * flat, atol=1e-7)


def test_learning_rate_is_that_of_the_step():
    model = Mixed()
    before = model.flat()
    optimizer = Optimizer(model, OptimSettings(lr=123.0))
    model.set_gradients()
    optimizer.step(lr=0.0)
    assert torch.equal(model.flat(), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, "loss"])
def test_non_finite_step_is_skipped_and_leaves_no_trace(bad):
    model, twin = Mixed(), Mixed()
    optimizer, other = Optimizer(model, OptimSettings()), Optimizer(twin, OptimSettings())
    model.set_gradients()
    if bad != "loss":
        assert model.c.grad is not None
        model.c.grad[0, 0] = bad
    report = optimizer.step(lr=0.01, loss_is_finite=bad != "loss")
    assert report.skipped and torch.equal(model.flat(), twin.flat())
    assert all(p.grad is None for p in model.parameters())
    # and the next step is as if nothing had happened
    for m, o in ((model, optimizer), (twin, other)):
        m.set_gradients(0.7)
        assert not o.step(lr=0.01).skipped
    assert torch.equal(model.flat(), twin.flat())
