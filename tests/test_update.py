"""update.py: μ updates of six completions against a plain loop, and the updates that are not
made."""

import copy
import inspect
import math
from dataclasses import replace

import pytest
import torch

import loop.update as update_module
from algorithms import ALGORITHMS, resolve
from engine.base import ranks
from engine.model.critic import Critic
from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.logprobs import Policy, computed_lengths
from engine.model.networks import Networks
from family.nat import prefix_factors
from grpo import grpo_loss
from loop import batches
from loop.batches import split_into_micro_batches
from loop.records import Batch
from loop.update import Limits, accumulate, forward_backward, map_micro_batches
from tests.helpers.training import (
    completions,
    logprobs,
    minibatches_of,
    updated,
    weights_of,
    with_reference,
)

# what a token counts (N sequences of n tokens, M tokens in all, L the longest allowed), clip, β,
# one ratio per sequence. The other rows have one of these losses
PLAIN = {
    "grpo": (lambda n, N, M, L: 1 / (N * n), 0.8, 1.2, 0.04, False),
    "cppo_published": (lambda n, N, M, L: 1 / M, 0.8, 1.2, 0.04, False),
    "drgrpo": (lambda n, N, M, L: 1 / (N * L), 0.8, 1.2, 0.0, False),
    "dapo": (lambda n, N, M, L: 1 / M, 0.8, 1.28, 0.0, False),
    "gspo": (lambda n, N, M, L: 1 / (N * n), 1 - 3e-4, 1 + 4e-4, 0.0, True),
}
# their mini-batches
CUT = {"gspo": [[0, 1], [2, 3], [4], [5]], "dapo": [[0, 1, 2], [3, 4, 5]]}


@pytest.fixture
def six(loaded):
    """(a model, six completions)"""
    return loaded[0], completions(loaded[1])


def adamw(model, lr):
    """With AdamW's usual eps the rounding of a gradient of almost 0 would move a weight."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, eps=1e-6)


def sgd(model, lr):
    return torch.optim.SGD(model.parameters(), lr=lr)


def after_update(six, algorithm, *, lr=1.0, limits=None, **changed):
    """(a copy of the model after SGD on the six, the metrics). changed: fields of the batch."""
    model, batch = copy.deepcopy(six[0]), replace(six[1], **changed)
    stats = updated(model, sgd(model, lr), [batch], algorithm, limits=limits)
    return model, stats


@pytest.mark.parametrize("name", list(PLAIN))
def test_updates_equal_those_of_a_plain_loop(six, name):
    """μ=2 times through all mini-batches, one pass after the other: AdamW on
    −Σ w (min(ρA, clip(ρ)A) − β k3), one completion at a time. Two tokens in the middle of the
    longest completion are a tool's."""
    algorithm = resolve(name, mu=2)
    weight, low, high, beta, per_sequence = PLAIN[name]
    model, batch = six
    batch.mask[batch.mask.sum(1).argmax(), 3:5] = False
    plain, losses, norms = copy.deepcopy(model), [], []
    cut = CUT.get(name, [[0, 1, 2, 3, 4, 5]])
    minibatches = [with_reference(batch.select(rows), model) for rows in cut]
    for minibatch in minibatches:
        minibatch.old_logp = logprobs(model, minibatch)
    limits = Limits(micro_batch_tokens=40, max_grad_norm=0.5)
    stats = updated(model, adamw(model, 1e-3), minibatches, algorithm, limits=limits)

    def token_logps(i):
        prompt, tokens = batch.prompts[i], batch.tokens[i]
        read = torch.cat([torch.tensor(prompt), tokens])
        logp = plain(read[None]).logits[0].log_softmax(-1)
        own = batch.mask[i].nonzero()[:, 0]
        return logp[len(prompt) - 1 + own, tokens[own]]

    optimizer, old = adamw(plain, 1e-3), [token_logps(i).detach() for i in range(6)]
    for rows in cut * 2:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for i in rows:
            A, logp = batch.advantages[i], token_logps(i)
            w = weight(len(logp), len(rows), sum(len(old[j]) for j in rows), 48)
            log_ratio = logp - old[i]
            ratio = (log_ratio.mean() if per_sequence else log_ratio).exp()
            log_r = old[i] - 0.1 - logp  # π_ref / π
            surrogate = torch.minimum(ratio * A, ratio.clamp(low, high) * A)
            loss = loss - w * (surrogate - beta * (log_r.exp() - log_r - 1)).sum()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        if norms[-1] > 0:  # GSPO's clip takes whole completions, here of one mini-batch all
            optimizer.step()
    assert stats["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3, abs=1e-4)
    assert stats["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3)
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=1e-3, atol=2e-5)


def test_the_first_ratio_is_1_and_the_first_loss_0_but_not_its_gradient(six):
    """Advantages of a group add up to 0, and every ratio is 1: so the loss of equally long
    completions is 0, while each token still has its gradient. The means in the logs are means,
    also for Dr. GRPO, whose weights add up to less than 1."""
    model, batch = six
    batch.mask.fill_(True)
    batch.advantages -= batch.advantages.mean()
    limits = Limits(micro_batch_tokens=30)
    stats = updated(model, sgd(model, 0.0), [batch], resolve("drgrpo", mu=1), limits=limits)
    assert stats["loss"] == pytest.approx(0, abs=1e-6) and stats["grad_norm"] > 1e-3
    assert stats["ratio_max"] == 1 and stats["ratio_mean"] == pytest.approx(1)
    assert stats["clip_fraction"] == stats["sampler_logp_diff"] == stats["approx_kl"] == 0
    # neither gradients nor graphs take up memory
    assert all(p.grad is None for p in model.parameters())
    assert not batch.old_logp.requires_grad


@pytest.mark.parametrize("name, correction", [
    ("grpo", "token_truncate"), ("gspo_token", "sequence_mask"), ("deepseek_v32", "token_mask"),
])
def test_no_micro_batch_reads_anything_off_the_device(six, name, correction, monkeypatch):
    """On the device `meta` a tensor has no numbers: whoever asks for one gets an error."""
    monkeypatch.setitem(DEVICE_DEFAULTS, "meta", DEVICE_DEFAULTS["cuda"])
    model, batch = six
    model.to("meta")
    on_device = {name: x.to("meta") for name, x in batch.tensors.items()}
    minibatch = Batch(batch.prompts, mask=batch.mask, **on_device)
    minibatch.ref_logp = minibatch.weights = torch.zeros(batch.tokens.shape, device="meta")
    sums = accumulate(
        Networks(Policy(model), None), minibatch, resolve(name, sampler_correction=correction),
        Limits(micro_batch_tokens=30))
    assert all(x.is_meta for x in [*sums.sums.values(), *sums.maxima.values()])
    assert all(p.grad is not None for p in model.parameters())


def test_the_largest_ratio_is_that_of_all_updates_and_not_their_mean(six):
    model, batch = six
    minibatches = [batch, copy.copy(batch)]
    for ratio, minibatch in zip((3.0, 1.0), minibatches):
        minibatch.old_logp = logprobs(model, batch) - math.log(ratio) * batch.mask
    stats = updated(model, sgd(model, 0.0), minibatches, resolve("dapo", mu=1))
    assert stats["ratio_max"] == pytest.approx(3) and stats["ratio_mean"] == pytest.approx(2)


def test_the_updates_end_when_the_policy_is_too_far_from_the_one_that_sampled(six):
    """After one update its KL to π_old is d: a limit below d lets no second one be made. How far
    the reference is does not matter."""
    model, batch = six
    with_reference(batch, model)

    def after(**options):
        return after_update(six, resolve("grpo", **options), lr=2e-4)

    one, stats = after(mu=1)
    log_r = logprobs(one, batch) - logprobs(model, batch)
    k3 = log_r.exp() - 1 - log_r
    d = (k3.sum(1) / batch.mask.sum(1)).mean().item()
    assert 0 < 2 * d < stats["kl"]
    for limit, updates in ((0.8 * d, 1), (1.2 * d, 2)):
        found, _ = after(mu=2, target_kl=limit)
        expected, _ = after(mu=updates)
        assert torch.equal(weights_of(found), weights_of(expected))


def test_a_completion_without_a_token_that_fills_up_a_device_counts_nowhere(six, monkeypatch):
    """Devices with shards need equally many micro-batches. Here another device has one more."""
    model, batch = six
    with_reference(batch, model)

    def results():
        after, stats = after_update(six, resolve("grpo", mu=2))
        cut = split_into_micro_batches(replace(batch, micro_batch_plan=None), 10**6, Policy(model))
        return weights_of(after), stats, len(cut)

    monkeypatch.setattr(Policy, "sharded", property(lambda policy: True, lambda *_: None))
    *expected, count = results()
    own = ranks.all_reduce

    def more(device, sums=(), maxima=()):
        found = own(device, sums, maxima)
        return found | {"count": found["count"] + 1} if "count" in found else found

    monkeypatch.setattr(ranks, "all_reduce", more)
    *found, filled = results()
    torch.testing.assert_close(found, expected)
    assert filled == count + 1


def test_devices_with_shards_make_equally_many_passes(six):
    """In each micro-batch, too. These prompts are too short for a second pass to pay."""
    def passes(can_share_prefix, sharded=False):
        policy = Policy(six[0], can_share_prefix=can_share_prefix, sharded=sharded)
        cut = split_into_micro_batches(replace(six[1], micro_batch_plan=None), 30, policy)
        return {micro_batch.shares_prefix for _, micro_batch in cut}

    assert passes(True) == passes(False) == {False}
    assert passes(True, sharded=True) == {True} and passes(False, sharded=True) == {False}


def test_a_device_without_a_completion_has_an_empty_micro_batch(six):
    [(rows, batch)] = split_into_micro_batches(six[1].select([]), 30, Policy(six[0]))
    assert len(rows) == 0 and batch.tokens.shape == batch.mask.shape == (1, 0)


def test_a_mini_batch_is_cut_once_until_the_limit_changes(six, monkeypatch):
    """Once for the reference, π_old and all μ passes, each of which computes as the cut says."""
    model, batch = six
    own, cuts = batches.plan_micro_batches, []

    def counted(batch, max_tokens, policy):
        cuts.append(max_tokens)
        return own(batch, max_tokens, policy)

    monkeypatch.setattr(batches, "plan_micro_batches", counted)
    policy, limits = Policy(model), Limits(micro_batch_tokens=30)
    with torch.no_grad():
        batch.ref_logp = map_micro_batches(policy.logprobs, batch, policy, limits)
    for limits.micro_batch_tokens in (30, 60):
        updated(model, sgd(model, 0.1), [batch], resolve("grpo", mu=3), limits=limits)
    assert cuts == [30, 60]


def test_an_empty_completion_counts_in_n(six):
    """vLLM may return it."""
    model, batch = six
    batch.mask[2] = False
    [minibatch] = minibatches_of(batch, resolve("grpo"))
    assert minibatch.weights.sum(1).tolist() == pytest.approx([1 / 6, 1 / 6, 0, *[1 / 6] * 3])


def test_the_logs_tell_the_distances_and_the_entropy_as_means_over_completions(six):
    """π_θ is e^−½ as likely as π_old at each token, and the sampler e^¼ times as likely."""
    model, batch = six
    with torch.no_grad():
        logp, entropies = Policy(model).logprobs(batch, with_entropy=True)
    _, stats = after_update(
        six, resolve("grpo", mu=1, beta=0.0), limits=Limits(micro_batch_tokens=30),
        old_logp=logp + 0.5 * batch.mask, sampled_logp=logp + 0.75 * batch.mask)
    # r = π_θ / π_old, samples of π_old
    assert stats["approx_kl"] == pytest.approx(math.exp(-0.5) + 0.5 - 1, rel=1e-5)
    for name in ("sampler_logp_diff", "sampler_logp_diff_max"):
        assert stats[name] == pytest.approx(0.25)
    entropy = ((entropies * batch.mask).sum(1) / batch.mask.sum(1)).mean().item()
    assert stats["entropy_trained"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("correction, factor", [
    ("token_truncate", lambda n: 2.0),
    ("token_mask", lambda n: math.exp(0.9)),
    ("sequence_truncate", lambda n: min(math.exp(0.9 * n), 3.0)),
    ("sequence_mask", lambda n: math.exp(0.9) if n == 1 else 0.0),
])
def test_a_sampler_that_computes_otherwise_is_corrected_in_the_weights(six, correction, factor):
    """π_old / π_sampler is e^0.9 = 2.46 at every token, and its product over n tokens is e^0.9n.
    The gradient is the one of the advantages times these factors."""
    model, batch = six
    lengths, old_logp = batch.mask.sum(1).tolist(), logprobs(model, batch)
    assert 1 in lengths and max(lengths) > 1
    factors = torch.tensor([factor(n) for n in lengths])

    def weights(advantages, correction):
        algorithm = resolve("grpo", mu=1, beta=0.0, sampler_correction=correction)
        after, _ = after_update(
            six, algorithm, advantages=advantages, old_logp=old_logp,
            sampled_logp=old_logp - 0.9 * batch.mask)
        return weights_of(after)

    expected = weights(batch.advantages * factors, None)
    torch.testing.assert_close(weights(batch.advantages, correction), expected)


@pytest.mark.parametrize("name", ["grpo", "dapo", "drgrpo"])
def test_a_mini_batch_of_prefixes_is_the_whole_one_with_its_weights_times_the_factors(six, name):
    """NAT: the factors are 0 after each prefix, and these tokens are not computed. On average the
    factors are 1 (tests/concepts/test_nat.py), and the loss is linear in the weights. So the
    average gradient is the whole one."""
    model, batch = six
    algorithm = resolve(name, mu=1, beta=0.0, minibatches=1)
    u = torch.tensor([[0.1], [0.3], [0.5], [0.2], [0.6], [0.4]])
    factors = prefix_factors(batch.mask, u)
    [whole] = minibatches_of(batch, algorithm)
    [found] = minibatches_of(batch, algorithm, prefix_weights=factors)
    width = found.tokens.shape[1]
    assert width == computed_lengths(factors > 0).max() < computed_lengths(batch.mask).max()
    assert torch.equal(found.mask, factors[:, :width] > 0)
    whole.weights = whole.weights * factors
    torch.testing.assert_close(found.weights, whole.weights[:, :width])

    def gradient(minibatch):
        model.zero_grad()
        accumulate(Networks(Policy(model), None), minibatch, algorithm, Limits())
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    torch.testing.assert_close(gradient(found), gradient(whole), rtol=1e-3, atol=1e-6)


def test_deepseeks_mask_looks_at_the_samplers_own_probabilities(six):
    """π_old is π_θ, but the sampler's probability of each token is e times as large: A < 0 does not
    count. Without the argument `sampled_logp` the update would not see it."""
    model, batch = six
    A, old_logp = batch.advantages, logprobs(model, batch)

    def moved(advantages, name):
        after, _ = after_update(
            six, resolve(name, mu=1, beta=0.0), advantages=advantages, old_logp=old_logp,
            sampled_logp=old_logp + 1.0 * batch.mask)
        return weights_of(after) - weights_of(model)

    torch.testing.assert_close(moved(A, "deepseek_v32"), moved(A.clamp(min=0.0), "grpo"))
    assert (A < 0).any() and (A > 0).any()


# --- updates that are not made ---


@pytest.mark.parametrize("poisoned", ["loss", "grad_norm"])
def test_an_update_that_is_not_finite_is_skipped_and_counted(six, poisoned):
    model, batch = six
    before = weights_of(model)
    batch.ref_logp = logprobs(model, batch)
    if poisoned == "loss":  # a token is excluded: k3 is infinite, and its gradient, 1 − r = 1, not
        batch.ref_logp.fill_(-math.inf)
    else:
        next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    stats = updated(model, adamw(model, 1.0), [batch], resolve("grpo", mu=2))
    assert [x for x in ("loss", "grad_norm") if not math.isfinite(stats[x])] == [poisoned]
    assert stats["skipped_updates"] == 2 and stats["skipped"] == [True, True]
    assert torch.equal(weights_of(model), before)


def test_a_mini_batch_without_signal_or_without_a_completion_makes_no_update(six):
    """AdamW would still move the weights, by what it remembers of earlier gradients. A KL term
    alone is no reason for an update. Here rows 2 and 3 have no advantage."""
    six[1].advantages[2:4] = 0

    def updates(rows, count):
        algorithm, model = resolve("grpo", mu=2, minibatches=count), copy.deepcopy(six[0])
        optimizer = adamw(model, 1e-5)
        minibatches = minibatches_of(six[1].select(rows), algorithm)
        for minibatch in minibatches:
            with_reference(minibatch, model).old_logp = logprobs(model, minibatch)
        stats = updated(model, optimizer, minibatches, algorithm)  # nor does it count in the means
        return weights_of(model), next(iter(optimizer.state.values()))["step"], stats

    pairs = updates([0, 1, 2, 3, 4, 5], 3)
    torch.testing.assert_close(pairs, updates([0, 1, 4, 5], 2), rtol=0, atol=0)
    single = updates([0, 1, 2, 3, 4, 5], 7)  # the last one has no completion
    torch.testing.assert_close(single, updates([0, 1, 4, 5], 4), rtol=0, atol=0)
    assert (pairs[1], single[1]) == (4, 8)


def test_without_any_signal_there_is_nothing_to_update_with_unless_a_critic_learns(six):
    """Two completions for three mini-batches: the last one has none. With GRPO's β the KL term has
    a gradient: to leave it out is a choice (docs/questions.md)."""
    batch = six[1].select([2, 3])
    batch.advantages.zero_()
    assert minibatches_of(batch, resolve("grpo", minibatches=3)) == []
    assert len(minibatches_of(batch, resolve("ppo", minibatches=3))) == 2


def test_if_the_clip_takes_the_policys_gradient_the_critics_update_leaves_the_policy_alone(six):
    """One optimizer holds both. It would move the policy by what it remembers of the first
    update."""
    def weights(*gaps):
        model, batch = copy.deepcopy(six[0]), six[1]
        critic, ones = Critic(copy.deepcopy(model.base_model)), torch.ones(batch.tokens.shape)
        minibatches = [  # s = e^gap, and A > 0
            replace(batch, old_logp=logprobs(model, batch) - gap * batch.mask, returns=ones,
                    advantages=ones, old_values=0 * ones)
            for gap in gaps]
        optimizer = torch.optim.AdamW([*model.parameters(), *critic.parameters()], lr=1e-3)
        updated(model, optimizer, minibatches, resolve("ppo", mu=1), critic=critic)
        return weights_of(model), critic.head.bias.item()

    (policy, bias), (expected, before) = weights(0.0, 1.0), weights(0.0)
    assert torch.equal(policy, expected) and bias > before


def test_a_gradient_that_is_only_rounding_moves_nothing(six):
    """Also not by what AdamW remembers of the first update."""
    def weights(*sizes):
        model, batch = copy.deepcopy(six[0]), six[1]
        minibatches = [replace(batch, advantages=size * batch.advantages) for size in sizes]
        stats = updated(model, adamw(model, 1e-3), minibatches, resolve("grpo", beta=0.0, mu=1))
        return weights_of(model), stats["grad_norm"]

    (whole, _), (after, mean) = weights(1.0), weights(1.0, 1e-10)
    assert torch.equal(whole, after) and mean > 0


def test_a_small_gradient_is_not_only_rounding(six):
    """It moves the weights by lr times its norm."""
    small, algorithm = 1e-8 * six[1].advantages, resolve("grpo", beta=0.0, mu=1)
    model, stats = after_update(six, algorithm, lr=1e4, advantages=small)
    moved = (weights_of(model) - weights_of(six[0])).norm().item()
    assert 0 < stats["grad_norm"] < 3e-7
    assert moved == pytest.approx(1e4 * stats["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("sharded, tries", [(False, 3), (True, 1)])
def test_where_even_the_smallest_micro_batch_is_too_large_the_run_ends(
    six, monkeypatch, sharded, tries
):
    """1000, 500, 256 tokens. With shards no device may repeat alone."""
    made = []

    def full(networks, minibatch, algorithm, limits):
        made.append(limits.micro_batch_tokens)
        assert len(made) < 9
        raise torch.OutOfMemoryError

    monkeypatch.setattr(update_module, "accumulate", full)
    model, batch = six
    networks = Networks(Policy(model, sharded=sharded), None, optimizer=sgd(model, 0.0))
    with pytest.raises(torch.OutOfMemoryError):
        forward_backward(networks, batch, resolve("grpo"), Limits(micro_batch_tokens=1000))
    assert made == [1000, 500, 256][:tries]


# --- a loss of one's own ---


def reinforce(
    logp, old_logp, advantages, mask,
    *, ref_logp=None, beta=0.0, clip_low=0.5, clip_high=None, weights=None,
):
    """−Σ w A log π, with a statistic of its own."""
    loss = -(weights * advantages.unsqueeze(1) * logp).sum()
    return loss, {"likelihood": (weights * logp.detach()).sum() / weights.sum()}


# of each row whose β is not that of its loss: GFPO's and PPO's are their papers', and 0 has who
# takes GRPO's loss with one update
BETAS = {"gfpo": 0.001, "gfpo_adaptive": 0.001, "ppo": 0.02, "rloo": 0.0, "lite_ppo": 0.0,
         "maxrl": 0.0}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_row_has_the_numbers_of_its_own_loss(name):
    """No row keeps those of another loss."""
    row, numbers = ALGORITHMS[name], {}
    for function in (grpo_loss, getattr(row.loss, "func", row.loss)):  # the rest is grpo_loss's
        numbers |= {k: p.default for k, p in inspect.signature(function).parameters.items()}
    numbers["clip_high"] = numbers["clip_high"] or numbers["clip_low"]
    assert row.clip_low == numbers["clip_low"] and row.clip_high == numbers["clip_high"]
    assert row.beta == BETAS.get(name, numbers["beta"]), (
        f"Is the row {name} new? Then add {name} to BETAS in this file.")


def test_what_a_loss_of_ones_own_tells_reaches_the_logs(six, monkeypatch):
    model, batch = six
    monkeypatch.setitem(ALGORITHMS, "mine", replace(ALGORITHMS["grpo"], loss=reinforce))
    likelihood = (logprobs(model, batch).sum(1) / batch.mask.sum(1)).mean().item()
    _, stats = after_update(six, resolve("mine", mu=1), limits=Limits(micro_batch_tokens=30))
    assert stats["custom/likelihood"] == pytest.approx(likelihood, rel=1e-5)
    assert stats["grad_norm"] > 0.01
    assert stats["clip_fraction"] == 0 == stats["ratio_max"]  # it tells nothing of these
