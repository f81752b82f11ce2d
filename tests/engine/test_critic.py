"""PPO's critic: its values, what is made of them, and its update."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from algorithms import resolve
from engine.model.critic import Critic, compute_advantages
from engine.model.logprobs import Policy, completion_states
from engine.model.networks import networks_around
from family.ppo import gae, token_rewards, whiten
from loop.batches import split_into_micro_batches
from loop.update import Limits
from tests.helpers.examples import seeded
from tests.helpers.training import CPU, completions, logprobs, updated, weights_of, with_reference


def randn(*shape, seed):
    return torch.randn(shape, generator=seeded(seed))


@pytest.fixture
def three(loaded):
    """(policy, critic, six completions). The critic has something to say: its head is not 0."""
    model, tokenizer = loaded
    critic = Critic(copy.deepcopy(model.base_model))
    with torch.no_grad():
        critic.head.weight.copy_(0.1 * randn(*critic.head.weight.shape, seed=1))
        critic.head.bias.fill_(0.3)
    return model, critic, completions(tokenizer)


# --- values ---


def test_the_value_before_a_token_is_the_heads_of_the_hidden_state_one_column_before_it(three):
    """One unpadded row at a time, through the policy's own backbone, of which the critic's starts
    as a copy."""
    model, critic, batch = three
    values = critic(batch)
    assert values.dtype == torch.float32 and len(set(map(len, batch.prompts))) > 1
    for prompt, tokens, mask, row in zip(batch.prompts, batch.tokens, batch.mask, values):
        whole = torch.tensor([prompt + tokens[mask].tolist()])
        states = model(whole, output_hidden_states=True).hidden_states[-1][0]
        expected = states[len(prompt) - 1 : -1] @ critic.head.weight[0] + 0.3
        assert_close(row[mask], expected, rtol=1e-4, atol=1e-5)
        assert not row[~mask].any()


def test_the_head_is_computed_in_float32_whatever_the_backbone_is(three):
    """If the backbone's products are bfloat16, a value that is rounded to 8 bits is off by up to
    0.4 %."""
    _, critic, batch = three
    critic.backbone.bfloat16()
    states, _, places = completion_states(critic.backbone, batch)
    exact = states.double() @ critic.head.weight[0].double() + critic.head.bias.double()
    found = critic(batch).flatten()[places].double()
    assert_close(found, exact, rtol=1e-5, atol=1e-6)


def test_the_critic_starts_as_a_copy_of_the_policys_backbone_with_weights_of_its_own(loaded):
    model, tokenizer = loaded
    critic = networks_around(Policy(model), tokenizer, critic=True).critic
    assert not weights_of(critic.head).any()  # V is 0 at first
    assert_close(critic.backbone.state_dict(), model.base_model.state_dict())
    of_policy, own = ({p.data_ptr() for p in network.parameters()} for network in (model, critic))
    assert not own & of_policy and all(p.requires_grad for p in critic.parameters())


# --- advantages and returns ---


@pytest.mark.parametrize("beta", [0.3, 0.0])
def test_estimate_is_that_of_the_whole_batch_although_it_is_cut(three, beta):
    """Advantages are whitened over the tokens of all mini-batches; without β there is no
    reference."""
    cut, (_, _, batch) = [[4], [1, 3, 0], [], [5, 2]], three
    logp, ref_logp, values = randn(3, *batch.tokens.shape, seed=2).double()
    batch = replace(batch, old_logp=logp, ref_logp=ref_logp if beta else None, old_values=values)
    minibatches = [batch.select(rows) for rows in cut]
    compute_advantages(minibatches, CPU, beta=beta, lam=0.9)
    rewards = token_rewards(batch.scores, logp, ref_logp, batch.mask, beta=beta)
    raw, returns = gae(rewards, values, batch.mask, lam=0.9)
    advantages = whiten(raw, batch.mask)
    for rows, found in zip(cut, minibatches):
        longest = found.tokens.shape[1]
        expected = advantages[rows, :longest], returns[rows, :longest]
        assert_close((found.advantages, found.returns), expected)


# --- one update ---


def adamw(model, critic):
    groups = [
        {"params": model.parameters(), "lr": 1e-3}, {"params": critic.parameters(), "lr": 3e-3}]
    return torch.optim.AdamW(groups, weight_decay=0.0)


def test_updates_of_policy_and_critic_equal_those_of_a_plain_loop(three):
    """μ=4 times AdamW, over M tokens: −1/M Σ min(ρA, clip(ρ)A) for the policy, and for the critic,
    with a learning rate and a gradient norm of its own, ½/M Σ max((V − R)², (clip(V, V_old ± 0.2) −
    R)²)."""
    model, critic, batch = three
    plain, plain_critic = copy.deepcopy((model, critic))
    A, R, *noise = randn(4, *batch.tokens.shape, seed=6)
    with torch.no_grad():  # far enough from the present ones that both clips act at once
        old_logp = logprobs(model, batch) + 0.3 * noise[0]
        V_old = critic(batch) + 0.3 * noise[1]
    given = replace(batch, advantages=A, returns=R, old_logp=old_logp, old_values=V_old)
    limits = Limits(micro_batch_tokens=40, max_grad_norm=0.1)
    assert len(split_into_micro_batches(given, 40, Policy(model))) > 1
    stats = updated(model, adamw(model, critic), [with_reference(given, model)], resolve("ppo"),
                    critic=critic, limits=limits)

    optimizer = adamw(plain, plain_critic)
    seen = []
    for _ in range(4):
        ratio = (Policy(plain).logprobs(batch) - old_logp).exp()
        V = plain_critic(batch)
        gains = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        near = V.clamp(V_old - 0.2, V_old + 0.2)
        errors = torch.maximum((V - R) ** 2, (near - R) ** 2)
        assert (gains < ratio * A).any() and (errors > (V - R) ** 2).any()
        loss = -gains[batch.mask].mean()
        value_loss = errors[batch.mask].mean() / 2
        optimizer.zero_grad()
        (loss + value_loss).backward()  # they share no weights
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(plain_critic.parameters(), 0.1)
        optimizer.step()
        seen.append(torch.stack([loss, value_loss, norm]).detach())
    found = torch.tensor([stats[name] for name in ("loss", "value_loss", "grad_norm")])
    assert_close(found, torch.stack(seen).mean(0), rtol=1e-3, atol=1e-4)
    assert stats["kl"] > 0  # a reference is there, and reported, but not in the loss
    for ours, theirs in ((model, plain), (critic, plain_critic)):
        assert_close(weights_of(ours), weights_of(theirs), rtol=1e-3, atol=2e-5)


def test_where_the_critics_update_is_not_finite_the_policys_is_skipped_too(three):
    model, critic, batch = three
    before = [weights_of(each) for each in (model, critic)]
    batch.old_logp, batch.old_values = logprobs(model, batch), critic(batch)
    compute_advantages([batch], CPU, beta=0.0, lam=0.95)
    assert not batch.advantages.requires_grad
    batch.returns[0, 0] = torch.nan
    stats = updated(model, adamw(model, critic), [batch], resolve("ppo"), critic=critic)
    assert stats["skipped"] == [True] * 4
    assert_close([weights_of(each) for each in (model, critic)], before, rtol=0, atol=0)
