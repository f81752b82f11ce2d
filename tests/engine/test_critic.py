"""PPO's critic: its values, what is made of them, and its update."""

import copy
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from algorithms import resolve
from engine.model import loading
from engine.model.critic import Critic, estimate
from engine.model.logprobs import Policy, completion_mask, completion_states
from engine.model.networks import first_critic
from family.ppo import gae, token_rewards, whiten
from records import Batch
from tests.training import CPU, completions, logprobs, updated, with_reference
from update import Limits, cut_into_micro_batches


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def critic_of(model):
    """A critic that has something to say: its head is not 0."""
    critic = Critic(deepcopy(model.base_model))
    with torch.no_grad():
        critic.head.weight.copy_(0.1 * randn(*critic.head.weight.shape, seed=1))
        critic.head.bias.fill_(0.3)
    return critic


# --- values ---


def test_the_value_before_a_token_is_the_heads_of_the_hidden_state_one_column_before_it(loaded):
    """One unpadded row at a time, through the policy's own backbone, of which the critic's starts
    as a copy."""
    model, tokenizer = loaded
    critic, batch = critic_of(model), completions(tokenizer)
    values = critic(batch)
    assert values.dtype == torch.float32 and len(set(map(len, batch.prompts))) > 1
    for prompt, tokens, n, row in zip(
        batch.prompts, batch.tokens.tolist(), batch.mask.sum(1).tolist(), values
    ):
        states = model(
            torch.tensor([prompt + tokens[:n]]), output_hidden_states=True
        ).hidden_states[-1][0]
        for t in range(n):
            expected = critic.head.weight[0] @ states[len(prompt) + t - 1] + 0.3
            torch.testing.assert_close(row[t], expected, rtol=1e-4, atol=1e-5)
        assert (row[n:] == 0).all()


def test_the_head_is_computed_in_float32_whatever_the_backbone_is(loaded):
    """If the backbone's products are bfloat16, a value that is rounded to 8 bits is off by up to
    0.4 %."""
    model, tokenizer = loaded
    critic, batch = critic_of(model), completions(tokenizer)
    critic.dtype = torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        states, _, places = completion_states(critic.backbone, batch)
    exact = states.double() @ critic.head.weight.double().T + critic.head.bias.double()
    torch.testing.assert_close(
        critic(batch).flatten()[places].double(), exact.squeeze(-1), rtol=1e-5, atol=1e-6
    )


def test_the_critic_starts_as_a_copy_of_the_policys_backbone_with_weights_of_its_own(loaded):
    model, tokenizer = loaded
    critic = first_critic(Policy(model))
    torch.testing.assert_close(critic.backbone.state_dict(), model.base_model.state_dict())
    own = {p.data_ptr() for p in critic.parameters()}
    assert not own & {p.data_ptr() for p in model.parameters()}
    assert all(p.requires_grad for p in critic.parameters())


# --- advantages and returns ---


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3, 4, 5]], [[4], [1, 3, 0], [], [5, 2]]], ids=str)
@pytest.mark.parametrize("beta", [0.3, 0.0])
def test_estimate_is_that_of_the_whole_batch_however_the_completions_are_cut(beta, cut):
    """Advantages are whitened over the tokens of all mini-batches; without β there is no
    reference."""
    logp, ref_logp, values = randn(3, 6, 9, seed=2, dtype=torch.float64)
    scores, tokens = randn(6, seed=3, dtype=torch.float64), torch.zeros(6, 9, dtype=torch.int64)
    mask = completion_mask(tokens, torch.tensor([5, 1, 3, 9, 2, 4]))
    batch = Batch(
        [[i] for i in range(6)], tokens, mask, scores, scores=scores, old_logp=logp,
        ref_logp=ref_logp if beta else None, old_values=values,
    )
    minibatches = [batch.rows(rows) for rows in cut]
    estimate(minibatches, CPU, beta=beta, lam=0.9)
    rewards = token_rewards(scores, logp, ref_logp, mask, beta=beta)
    raw, returns = gae(rewards, values, mask, lam=0.9)
    advantages = whiten(raw, mask)
    for rows, minibatch in zip(cut, minibatches):
        longest = minibatch.tokens.shape[1]
        for name, expected in (("advantages", advantages), ("returns", returns)):
            torch.testing.assert_close(getattr(minibatch, name), expected[rows, :longest])


# --- one update ---


def test_updates_of_policy_and_critic_equal_those_of_a_plain_loop(small):
    """μ=4 times AdamW, over M tokens: −1/M Σ min(ρA, clip(ρ)A) for the policy, and for the critic,
    with a learning rate and a gradient norm of its own, ½/M Σ max((V − R)², (clip(V, V_old ± 0.2) −
    R)²)."""
    model, tokenizer = loading.load_model(small, CPU)
    critic, batch = critic_of(model), completions(tokenizer)
    plain, plain_critic = copy.deepcopy(model), copy.deepcopy(critic)
    shape, M = batch.tokens.shape, batch.mask.sum()
    A, R = randn(*shape, seed=6), randn(*shape, seed=7)
    with torch.no_grad():  # far enough from the present ones that both clips act at once
        old_logp = logprobs(model, batch) + 0.3 * randn(*shape, seed=4)
        V_old = critic(batch) + 0.3 * randn(*shape, seed=5)
    given = replace(batch, advantages=A, returns=R, old_logp=old_logp, old_values=V_old)
    with_reference(given, model)
    limits = Limits(micro_batch_tokens=40, max_grad_norm=0.1)
    assert len(cut_into_micro_batches(given, limits.micro_batch_tokens, Policy(model))) > 1
    groups = [
        {"params": model.parameters(), "lr": 1e-3}, {"params": critic.parameters(), "lr": 3e-3},
    ]
    stats = updated(
        model, torch.optim.AdamW(groups, weight_decay=0.0), [given], resolve("ppo"),
        critic=critic, limits=limits,
    )

    optimizers = [torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0),
                  torch.optim.AdamW(plain_critic.parameters(), lr=3e-3, weight_decay=0.0)]
    seen = []
    for _ in range(4):
        ratio, V = (Policy(plain).logprobs(batch) - old_logp).exp(), plain_critic(batch)
        gains = torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        near = torch.maximum(torch.minimum(V, V_old + 0.2), V_old - 0.2)
        errors = torch.maximum((V - R) ** 2, (near - R) ** 2)
        assert (gains < ratio * A).any() and (errors > (V - R) ** 2).any()
        losses = [-(gains * batch.mask).sum() / M, (errors * batch.mask).sum() / M / 2]
        norms = []
        for network, optimizer, loss in zip((plain, plain_critic), optimizers, losses):
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1))
            optimizer.step()
        seen.append(torch.stack([*losses, norms[0]]).detach())
    found = torch.tensor([stats[name] for name in ("loss", "value_loss", "grad_norm")])
    torch.testing.assert_close(found, torch.stack(seen).mean(0), rtol=1e-3, atol=1e-4)
    assert stats["kl"] > 0  # a reference is there, and reported, but not in the loss
    for ours, theirs in ((model, plain), (critic, plain_critic)):
        for p, q in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


def test_where_the_critics_update_is_not_finite_the_policys_is_skipped_too(loaded):
    model, tokenizer = loaded
    critic, batch = critic_of(model), completions(tokenizer)
    before = copy.deepcopy([model.state_dict(), critic.state_dict()])
    batch.old_logp = logprobs(model, batch)
    batch.old_values = critic(batch)
    estimate([batch], CPU, beta=0.0, lam=0.95)
    assert not batch.advantages.requires_grad
    batch.returns[0, 0] = torch.nan
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=1.0)
    assert (
        updated(model, optimizer, [batch], resolve("ppo"), critic=critic)["skipped"]
        == [True] * 4
    )
    torch.testing.assert_close([model.state_dict(), critic.state_dict()], before, rtol=0, atol=0)
