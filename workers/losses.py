"""Losses of the policy, once, in torch: clipped surrogate (PPO) with token-level importance correction.

Per trained token, with A its advantage and every logprob taken at the sampled id:

    x = clamp(logprob - old, -30, 30)         r = exp(x)
    surrogate = -min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A)
    w = exp(clamp(old - rollout, -30, 30))    the trainer before the step against the engine that sampled
    coefficient: off 1 | mask  w if low <= w <= high else 0 | clip  clamp(w, low, high) | trunc  min(w, high)
    loss = sum over trained tokens of coefficient * surrogate / denominator

`logprob` is of the weights being trained, `old` of the trainer's weights before the step, `rollout` of the
engine. Without `old` it is the current logprob held constant: r is exactly 1 and the gradient is
REINFORCE's.

For a token sampled by the weights being trained, old - rollout is how far trainer and engine disagree
(`mismatch_*`); for a stale one it is also how far the policy has moved since (`drift_abs`). The loss makes no
difference between them.

Invariants
  1. The denominator comes from the controller and is the same for all micro-batches and ranks of a step.
     Tokens that the importance gate rejects stay in it.
  2. Values at masked positions have no effect, NaN included: where(mask, x, 0), never x * mask.
  3. A NaN at a trained position is not repaired: it reaches the loss, and the step is skipped and counted.
     (Upstream turns it into ratio 1, which trains on a lie. Infinite differences clamp to 30 as there.)
  4. What is reported are sums and maxima; a mean of means would depend on the split.
Callers: trainer.py. Elsewhere called policy loss, actor loss; importance correction = TIS, MIS.
"""

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 30.0  # exp(30) is far out of any band and far from overflow
IS_LEVELS = ("off", "token")
IS_MODES = ("mask", "clip", "trunc")


@dataclass(frozen=True)
class LossOptions:
    clip_low: float  # the ratio is clipped below 1 - clip_low
    clip_high: float  # and above 1 + clip_high
    is_level: str = "off"
    is_mode: str = "mask"
    is_low: float = 0.0
    is_high: float = 0.0

    def __post_init__(self):
        """Raises ValueError; args are (message, field)."""
        require(0 <= self.clip_low <= 1, "clip_low", self.clip_low, "a number from 0 to 1")
        require(self.clip_high >= 0, "clip_high", self.clip_high, "at least 0")
        require(self.is_level in IS_LEVELS, "is_level", self.is_level, " or ".join(IS_LEVELS))
        require(self.is_mode in IS_MODES, "is_mode", self.is_mode, ", ".join(IS_MODES))
        if self.is_level != "off":
            wanted = f"from 0 to is_high, {self.is_high}"
            require(0 <= self.is_low <= self.is_high, "is_low", self.is_low, wanted)
            require(self.is_high > 0, "is_high", self.is_high, "above 0")


def require(condition: bool, field: str, value: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"Loss option {field} is {value!r}, want {wanted}", field)


@dataclass(frozen=True)
class Numbers:
    """What a micro-batch adds to the report of a step."""

    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def log_ratio(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Masked before the subtraction: the gradient of where(mask, NaN - x, 0) would be 0 * NaN further down.
    difference = torch.where(mask, new, 0.0) - torch.where(mask, old, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def importance(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, options: LossOptions):
    """(coefficient, out of band), both (tokens,); constants of the gradient."""
    weight = log_ratio(old.detach(), rollout, mask).exp()
    if options.is_level == "off":
        return torch.ones_like(weight), torch.zeros_like(mask)
    above, below = weight > options.is_high, weight < options.is_low
    if options.is_mode == "mask":
        # Not where(inside, ...): a NaN weight is on neither side and must stay visible.
        return torch.where(above | below, 0.0, weight), (above | below) & mask
    if options.is_mode == "clip":
        return weight.clamp(options.is_low, options.is_high), (above | below) & mask
    return weight.clamp(max=options.is_high), above & mask


def policy_loss(
    logprobs: torch.Tensor,  # (tokens,), with gradient
    old_logprobs: torch.Tensor | None,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,  # bool
    denominator: float,  # trained tokens of the whole batch, all ranks
    options: LossOptions,
    stale: torch.Tensor | None = None,  # bool, sampled by an older version; None = no token is
) -> tuple[torch.Tensor, Numbers]:
    """This rank's share of the global loss (a scalar that always has a gradient path), and its numbers."""
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    advantages = torch.where(mask, advantages, 0.0)

    # Policy loss
    ratio = log_ratio(logprobs, old, mask).exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    coefficient, rejected = importance(old, rollout_logprobs, mask, options)
    per_token = torch.where(mask, coefficient * -torch.minimum(plain, clipped), 0.0)
    # max(): a batch without a trained token has loss 0, not 0 / 0
    loss = per_token.sum() / max(denominator, 1.0)

    # Numbers
    with torch.no_grad():
        gap = torch.where(mask, old, 0.0) - torch.where(mask, rollout_logprobs, 0.0)
        inside = log_ratio(old, rollout_logprobs, mask)
        fresh = mask if stale is None else mask & ~stale
        fresh_gap = torch.where(fresh, gap.abs(), 0.0)
        moved = torch.where(mask, old - logprobs, 0.0)
        sums = {
            "loss": loss.detach(),
            "tokens": mask.sum(),
            "clipped": ((clipped < plain) & mask).sum(),
            "is_filtered": rejected.sum(),
            "is_weight": torch.where(
                mask, inside.exp(), 0.0
            ).sum(),  # w before the gate, whatever is_level is
            "fresh_tokens": fresh.sum(),
            "mismatch_abs": fresh_gap.sum(),
            # >= 0, mean = KL(engine || trainer)
            "mismatch_k3": torch.where(fresh, inside.exp() - 1 - inside, 0.0).sum(),
            "drift_abs": torch.where(mask & ~fresh, gap.abs(), 0.0).sum(),
            "kl_old": moved.sum(),  # mean = KL(old || current), first order
        }
        maxima = {"mismatch_abs": fresh_gap.max() if len(gap) else gap.sum()}
    return loss, Numbers(sums, maxima)
