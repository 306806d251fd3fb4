"""Losses: hand-computed values, masks, the importance gate, finite differences, the global mean."""

import math

import pytest
import torch

from losses import LossOptions, policy_loss

PPO = LossOptions(clip_low=0.2, clip_high=0.2)
LN3, LN10 = math.log(3), math.log(10)


def gated(mode: str, low: float = 0.5, high: float = 2.0) -> LossOptions:
    return LossOptions(0.2, 0.2, is_level="token", is_mode=mode, is_low=low, is_high=high)


def call(
    logprobs,
    *,
    old=None,
    rollout=None,
    advantages=None,
    mask=None,
    denominator=None,
    options=PPO,
    stale=None,
):
    """policy_loss of lists; what is left out is 0 (old, rollout), 1 (advantages) or all trained (mask)."""
    logprobs = torch.as_tensor(logprobs, dtype=torch.float64)
    n = len(logprobs)
    fill = {"old": old, "rollout": rollout, "advantages": advantages}
    columns = {
        k: torch.zeros(n) if v is None else torch.as_tensor(v, dtype=torch.float64) for k, v in fill.items()
    }
    if advantages is None:
        columns["advantages"] = torch.ones(n)
    mask = torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    old_column = None if old == "absent" else columns["old"]
    denominator = float(mask.sum()) if denominator is None else denominator
    return policy_loss(
        logprobs, old_column, columns["rollout"], columns["advantages"], mask, denominator, options, stale
    )


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def absent(logprobs, **more):
    """The same without old logprobs."""
    logprobs = torch.as_tensor(logprobs)
    n = len(logprobs)
    columns = {
        "rollout": torch.zeros(n),
        "advantages": torch.ones(n),
        "mask": torch.ones(n, dtype=torch.bool),
    }
    columns |= {k: v for k, v in more.items() if k in columns}
    denominator = more.get("denominator", float(n))
    return policy_loss(
        logprobs,
        None,
        columns["rollout"],
        columns["advantages"],
        columns["mask"],
        denominator,
        more.get("options", PPO),
    )


# ---- Hand-computed values ----


def test_ppo_clips_the_ratio_on_the_side_where_it_would_gain():
    loss, numbers = call([1.0, -1.0])
    assert float(loss) == pytest.approx(-(1.2 + math.exp(-1)) / 2)
    assert int(numbers.sums["clipped"]) == 1


def test_ppo_clips_asymmetrically():
    options = LossOptions(clip_low=0.2, clip_high=0.28)
    assert float(call([1.0], options=options)[0]) == pytest.approx(-1.28)
    assert float(call([-1.0], advantages=[-1.0], options=options)[0]) == pytest.approx(0.8)


def test_ppo_leaves_the_pessimistic_side_unclipped():
    loss, numbers = call([1.0], advantages=[-1.0])
    assert float(loss) == pytest.approx(math.e)
    assert int(numbers.sums["clipped"]) == 0


def test_denominator_is_the_given_one():
    loss, numbers = call([0.0, 0.0, 0.0], denominator=100.0)
    assert float(loss) == pytest.approx(-0.03)
    assert int(numbers.sums["tokens"]) == 3


def test_importance_off_ignores_the_rollout():
    loss, numbers = call([0.0], rollout=[-5.0])
    assert float(loss) == pytest.approx(-1.0)
    assert int(numbers.sums["is_filtered"]) == 0


def test_importance_trunc_cuts_above_only():
    loss, numbers = call([0.0, 0.0], rollout=[LN10, -LN10], options=gated("trunc"))
    assert float(loss) == pytest.approx(-(0.1 + 2) / 2)
    assert int(numbers.sums["is_filtered"]) == 1


def test_importance_clip_cuts_on_both_sides():
    loss, numbers = call([0.0, 0.0], rollout=[-LN3, LN3], options=gated("clip"))
    assert float(loss) == pytest.approx(-(2 + 0.5) / 2)
    assert int(numbers.sums["is_filtered"]) == 2


def test_importance_mask_drops_out_of_band_tokens_and_keeps_the_denominator():
    loss, numbers = call([0.0, 0.0, 0.0], rollout=[-LN3, LN3, -math.log(1.5)], options=gated("mask"))
    assert float(loss) == pytest.approx(-1.5 / 3)
    assert int(numbers.sums["is_filtered"]) == 2


def test_importance_band_includes_its_ends():
    loss, numbers = call([0.0, 0.0], rollout=[0.0, 0.0], options=gated("mask", low=1.0, high=1.0))
    assert float(loss) == pytest.approx(-1.0)
    assert int(numbers.sums["is_filtered"]) == 0


def test_importance_weight_does_not_overflow():
    assert float(call([0.0], rollout=[-1000.0], options=gated("trunc"))[0]) == pytest.approx(-2.0)
    loss, numbers = call([0.0], rollout=[-1000.0], options=gated("mask"))
    assert float(loss) == 0.0 and int(numbers.sums["is_filtered"]) == 1


def test_ratio_does_not_overflow():
    loss, _ = call([1000.0, math.inf], old=[0.0, 0.0])
    assert float(loss) == pytest.approx(-1.2)
    loss, _ = call([1000.0], advantages=[-1.0])
    assert float(loss) == pytest.approx(math.exp(30))


def test_without_old_logprobs_the_gradient_is_reinforce():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss, numbers = absent(logprobs, advantages=advantages)
    loss.backward()
    assert torch.allclose(gradient(logprobs), -advantages / 3)
    assert int(numbers.sums["clipped"]) == 0 and float(numbers.sums["kl_old"]) == 0.0


def test_importance_weight_without_old_logprobs_is_taken_at_the_current_ones_and_constant():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _ = absent(logprobs, rollout=torch.tensor([-1.5]), options=gated("clip"))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-math.exp(0.5))
    assert float(gradient(logprobs)) == pytest.approx(-math.exp(0.5))


def test_mismatch_is_between_engine_and_trainer_before_the_step():
    _, numbers = call([5.0, 5.0], old=[-1.0, -2.0], rollout=[-1.1, -1.7])
    assert float(numbers.sums["mismatch_abs"]) == pytest.approx(0.4)
    assert float(numbers.maxima["mismatch_abs"]) == pytest.approx(0.3)
    k3 = (math.exp(0.1) - 1 - 0.1) + (math.exp(-0.3) - 1 + 0.3)
    assert float(numbers.sums["mismatch_k3"]) == pytest.approx(k3)


def test_of_stale_tokens_the_difference_is_drift_and_not_mismatch():
    stale = torch.tensor([False, True, True, False])
    loss, numbers = call(
        [-1.0, -2.0, -3.0, math.nan],
        old=[-1.0, -2.0, -3.0, math.nan],
        rollout=[-1.1, -2.0 - LN3, -2.5, math.nan],
        mask=[1, 1, 1, 0],
        options=gated("mask"),
        stale=stale,
    )
    sums = {key: float(value) for key, value in numbers.sums.items()}
    assert sums["fresh_tokens"] == 1 and sums["tokens"] == 3
    assert sums["mismatch_abs"] == pytest.approx(0.1)
    assert sums["mismatch_k3"] == pytest.approx(math.exp(0.1) - 1 - 0.1)
    assert float(numbers.maxima["mismatch_abs"]) == pytest.approx(0.1)
    assert sums["drift_abs"] == pytest.approx(LN3 + 0.5)
    assert sums["is_weight"] == pytest.approx(math.exp(0.1) + 3 + math.exp(-0.5))  # before the gate
    # Weighed as sampled, and the rejected one stays in the denominator of 3.
    assert float(loss) == pytest.approx(-(math.exp(0.1) + math.exp(-0.5)) / 3)
    assert sums["is_filtered"] == 1


def test_without_a_fresh_token_the_mismatch_is_zero_over_none():
    _, numbers = call([-1.0], rollout=[-4.0], stale=torch.tensor([True]))
    zeros = (numbers.sums["fresh_tokens"], numbers.sums["mismatch_abs"], numbers.sums["mismatch_k3"])
    assert [float(x) for x in (*zeros, numbers.maxima["mismatch_abs"])] == [0.0] * 4
    assert float(numbers.sums["drift_abs"]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("mode", "coefficients"), [("mask", [0, 0, 1.5]), ("clip", [2, 0.5, 1.5]), ("trunc", [2, 1 / 3, 1.5])]
)
def test_in_a_later_pass_stale_tokens_weigh_as_at_its_start_and_the_ratio_is_of_now(mode, coefficients):
    old = [-1.0, -2.0, -3.0]
    rollout = [-1.0 - LN3, -2.0 + LN3, -3.0 - math.log(1.5)]
    logprobs = torch.tensor([x + 0.1 for x in old], dtype=torch.float64, requires_grad=True)
    stale = torch.tensor([True, True, True])
    loss, numbers = call(logprobs, old=old, rollout=rollout, options=gated(mode), stale=stale)
    loss.backward()
    wanted = torch.tensor(coefficients, dtype=torch.float64) * -math.exp(0.1) / 3
    assert torch.allclose(gradient(logprobs), wanted)
    assert float(loss.detach()) == pytest.approx(float(wanted.sum()))
    assert float(numbers.sums["is_weight"]) == pytest.approx(3 + 1 / 3 + 1.5)


# ---- Masks ----


def test_masked_positions_have_no_effect_even_when_nan():
    """verl #2377, SkyRL #1635: x * mask keeps a NaN."""
    nan = math.nan
    clean, clean_numbers = call([0.3, -0.1], rollout=[0.2, 0.1], options=gated("clip"))
    logprobs = torch.tensor([0.3, nan, -0.1], dtype=torch.float64, requires_grad=True)
    loss, numbers = call(
        logprobs,
        old=[0.0, nan, 0.0],
        rollout=[0.2, nan, 0.1],
        advantages=[1.0, nan, 1.0],
        mask=[1, 0, 1],
        options=gated("clip"),
    )
    loss.backward()
    assert loss.item() == pytest.approx(float(clean))
    assert float(gradient(logprobs)[1]) == 0.0 and torch.isfinite(gradient(logprobs)).all()
    for key, value in clean_numbers.sums.items():
        assert float(numbers.sums[key]) == pytest.approx(float(value)), key


def test_contaminated_masked_positions_change_nothing():
    """AReaL #1346: padding averaged into a sum."""
    inside = call([0.1, 0.2], denominator=7.0)[0]
    outside = call([0.1, 0.2, 9.0], advantages=[1.0, 1.0, 110.0], mask=[1, 1, 0], denominator=7.0)[0]
    assert float(inside) == float(outside)


def test_empty_mask_gives_zero_with_a_gradient_path():
    """TRL #6439: all masked means 0, no NaN, and still a backward."""
    logprobs = torch.tensor([0.5, 0.5], requires_grad=True)
    loss, numbers = absent(logprobs, mask=torch.zeros(2, dtype=torch.bool), denominator=0.0)
    loss.backward()
    assert loss.item() == 0.0 and torch.equal(gradient(logprobs), torch.zeros(2))
    assert all(float(v) == 0.0 for v in (*numbers.sums.values(), *numbers.maxima.values()))


def test_no_tokens_at_all_gives_zero():
    logprobs = torch.zeros(0, requires_grad=True)
    loss, _ = absent(logprobs, denominator=5.0)
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("column", ["logprobs", "old", "rollout", "advantages"])
@pytest.mark.parametrize("mode", ["mask", "clip", "trunc"])
def test_nan_at_a_trained_position_reaches_the_loss(column, mode):
    columns = {"logprobs": [0.0, 0.1], "old": [0.0, 0.0], "rollout": [0.0, 0.0], "advantages": [1.0, 1.0]}
    columns[column][0] = math.nan
    loss, _ = call(columns.pop("logprobs"), **columns, options=gated(mode))
    assert math.isnan(float(loss))


# ---- Global token mean ----


def micro_sum(parts: list[list[float]], denominator: float) -> float:
    """Per-token losses given as negative advantages at ratio 1."""
    return sum(
        float(call([0.0] * len(p), advantages=[-x for x in p], denominator=denominator)[0]) for p in parts
    )


def test_tokens_weigh_the_same_whatever_micro_batch_they_are_in():
    masked = call([0.0] * 3, advantages=[-1.0, -2.0, -3.0], mask=[1, 1, 0], denominator=5.0)[0]
    assert float(masked) + micro_sum([[4, 5], [6]], 5.0) == pytest.approx(18 / 5)
    assert micro_sum([[2, 2, 2], [10]], 4.0) == pytest.approx(4.0)  # the mean of means would be 6


def test_gradient_is_that_of_the_global_mean():
    w = torch.ones((), requires_grad=True)
    for x in ([2.0, 4.0, 6.0], [8.0]):
        n = len(x)
        loss, _ = absent(w * torch.tensor(x), advantages=-torch.ones(n), denominator=4.0)
        loss.backward()
    assert float(gradient(w)) == pytest.approx(5.0)


# ---- Gradients ----


@pytest.mark.parametrize("mode", ["off", "mask", "clip", "trunc"])
def test_gradient_equals_finite_differences(mode):
    generator = torch.Generator().manual_seed(0)
    n = 64
    draw = [torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(4)]
    logprobs, old, rollout = -1 + 0.3 * draw[0], -1 + 0.3 * draw[1], -1 + 0.8 * draw[2]
    mask = torch.rand(n, generator=generator) < 0.7
    options = PPO if mode == "off" else gated(mode)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return policy_loss(x, old, rollout, draw[3], mask, 50.0, options)[0]

    ratio = (logprobs - old).exp()
    kinks = torch.stack([(ratio - 0.8).abs(), (ratio - 1.2).abs()]).min()
    assert float(kinks) > 1e-5  # the loss has no derivative there
    assert torch.autograd.gradcheck(loss, logprobs.clone().requires_grad_(), eps=1e-7, atol=1e-8, rtol=1e-6)


# ---- Options ----


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": -1.0}, "clip_high"),
        ({"is_level": "seq"}, "is_level"),
        ({"is_mode": "drop"}, "is_mode"),
        ({"is_level": "token", "is_low": 3.0, "is_high": 2.0}, "is_low"),
        ({"is_level": "token", "is_low": 0.0, "is_high": 0.0}, "is_high"),
    ],
)
def test_wrong_options_name_the_field(options, field):
    with pytest.raises(ValueError) as error:
        LossOptions(**({"clip_low": 0.2, "clip_high": 0.2} | options))
    assert error.value.args[1] == field
