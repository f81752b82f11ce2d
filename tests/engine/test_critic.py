"""engine/model/critic.py against single rows and loops over tokens; and PPO's update, step and
run."""

import copy
import statistics
from copy import deepcopy

import pytest
import torch

from algorithms import resolve
from engine.model import loading, logprobs
from engine.model.critic import Critic, estimate
from engine.model.logprobs import Policy
from engine.model.networks import whole_networks
from records import Batch
from tests.training import CPU, completions, updated, with_reference
from update import Limits

F64 = torch.float64


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
    assert (
        values.dtype == torch.float32 and values.shape == batch.tokens.shape
        and len(set(map(len, batch.prompts))) > 1
    )
    for prompt, tokens, n, row in zip(
        batch.prompts, batch.tokens.tolist(), batch.lengths.tolist(), values
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
        states, _, places = logprobs.completion_states(
            critic.backbone, batch.prompts, batch.tokens, batch.lengths
        )
    exact = states.double() @ critic.head.weight.double().T + critic.head.bias.double()
    torch.testing.assert_close(
        critic(batch).flatten()[places].double(), exact.squeeze(-1), rtol=1e-5, atol=1e-6
    )


def test_the_critic_starts_as_a_copy_of_the_policys_backbone_with_weights_of_its_own(loaded):
    model, tokenizer = loaded
    critic = whole_networks(Policy(model), tokenizer, lr=1e-3, critic=True).critic
    torch.testing.assert_close(critic.backbone.state_dict(), model.base_model.state_dict())
    own = {p.data_ptr() for p in critic.parameters()}
    assert not own & {p.data_ptr() for p in model.parameters()}
    assert all(p.requires_grad for p in critic.parameters())


# --- advantages and returns ---


LENGTHS = [5, 1, 3, 9, 2, 4]
LOGP, REF_LOGP, VALUES = randn(3, 6, 9, seed=2, dtype=F64)
SCORES = randn(6, seed=3, dtype=F64)


class Oracle:
    """A critic whose values are known. The prompt of a completion is its number."""

    def __call__(self, batch):
        return rows_of(VALUES, batch)


def rows_of(values, batch):
    return values[[i for (i,) in batch.prompts], : batch.tokens.shape[1]]


def by_loop(beta, lam):
    """{(i, t): whitened advantage}, {(i, t): return}: from the last token to the first, in Python
    floats."""
    raw, returns = {}, {}
    for i, n in enumerate(LENGTHS):
        value_after = advantage_after = 0.0
        for t in reversed(range(n)):
            r = -beta * (LOGP[i, t] - REF_LOGP[i, t]).item() + (
                SCORES[i].item() if t == n - 1 else 0.0
            )
            value = VALUES[i, t].item()
            raw[i, t] = r + value_after - value + lam * advantage_after
            # of the raw advantages: whitened, they would be no target
            returns[i, t] = raw[i, t] + value
            value_after, advantage_after = value, raw[i, t]
    mean, std = statistics.fmean(raw.values()), statistics.pstdev(raw.values())
    return {at: (a - mean) / std for at, a in raw.items()}, returns


@pytest.mark.parametrize("max_tokens, cut", [(1, 6), (12, 3), (1000, 1)])
@pytest.mark.parametrize("beta, lam", [(0.3, 0.95), (0.3, 0.0), (0.0, 1.0)])
def test_estimate_equals_a_loop_however_the_completions_are_cut(beta, lam, max_tokens, cut):
    """Advantages are whitened over the tokens of all micro-batches; without β there is no
    reference."""
    batch = Batch(
        [[i] for i in range(6)], torch.zeros(6, 9, dtype=torch.int64), torch.tensor(LENGTHS),
        SCORES,
        scores=SCORES,
    )
    micro_batches = batch.micro_batches(max_tokens)
    assert len(micro_batches) == cut
    for micro_batch in micro_batches:
        micro_batch.old_logp, micro_batch.ref_logp = (
            rows_of(LOGP, micro_batch), rows_of(REF_LOGP, micro_batch) if beta else None,
        )
    estimate(Oracle(), micro_batches, CPU, beta=beta, lam=lam)
    advantages, returns = by_loop(beta, lam)
    for micro_batch in micro_batches:
        assert torch.equal(micro_batch.old_values, rows_of(VALUES, micro_batch))
        for row, (i,) in enumerate(micro_batch.prompts):
            n = LENGTHS[i]
            assert micro_batch.advantages[row, :n].tolist() == pytest.approx(
                [advantages[i, t] for t in range(n)], rel=1e-6
            )
            assert micro_batch.returns[row, :n].tolist() == pytest.approx(
                [returns[i, t] for t in range(n)], rel=1e-9
            )
        assert (micro_batch.advantages[~micro_batch.mask] == 0).all() and (
            micro_batch.returns[~micro_batch.mask] == 0
        ).all()


# --- one update ---


def test_updates_of_policy_and_critic_equal_those_of_a_plain_loop(small):
    """μ=4 times, over M tokens one at a time: AdamW on −1/M Σ min(ρA, clip(ρ)A) for the policy, and
    for the critic, with a learning rate and a gradient norm of its own, on ½/M Σ max((V − R)²,
    (clip(V, V_old ± 0.2) − R)²)."""
    model, tokenizer = loading.load_model(small, CPU)
    critic, batch = critic_of(model), completions(tokenizer)
    plain, plain_critic = copy.deepcopy(model), copy.deepcopy(critic)
    with torch.no_grad():  # far enough from the present ones that both clips act at once
        old_logp = batch.logprobs(Policy(model), 1.0) + 0.3 * randn(6, 8, seed=4)
        old_values = critic(batch) + 0.3 * randn(6, 8, seed=5)
    advantages, returns = randn(6, 8, seed=6), randn(6, 8, seed=7)

    batch.advantages = torch.arange(6)  # tells which rows a micro-batch was given
    micro_batches = with_reference(batch.micro_batches(40), model)
    for micro_batch in micro_batches:
        rows, width = micro_batch.advantages, micro_batch.tokens.shape[1]
        (
            micro_batch.advantages, micro_batch.returns, micro_batch.old_logp,
            micro_batch.old_values,
        ) = (x[rows, :width] for x in (advantages, returns, old_logp, old_values))
    groups = [
        {"params": model.parameters(), "lr": 1e-3}, {"params": critic.parameters(), "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    stats = updated(
        model, optimizer, [micro_batches], resolve("ppo"), critic=critic,
        limits=Limits(max_grad_norm=0.1),
    )

    optimizers = [torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0),
                  torch.optim.AdamW(plain_critic.parameters(), lr=3e-3, weight_decay=0.0)]
    sums, clipped, bounded = [0.0] * 3, 0, 0
    for _ in range(4):
        losses, M = [torch.zeros(()), torch.zeros(())], batch.lengths.sum().item()
        for i, (prompt, n) in enumerate(zip(batch.prompts, batch.lengths.tolist())):
            sequence = torch.tensor([prompt + batch.tokens[i, :n].tolist()])
            logp = plain(sequence).logits[0].log_softmax(-1)
            V = plain_critic.head(plain_critic.backbone(sequence).last_hidden_state)[0, :, 0]
            for t in range(n):
                at = len(prompt) + t
                A, R, V_old = advantages[i, t].item(), returns[i, t].item(), old_values[i, t].item()
                ratio = (logp[at - 1, sequence[0, at]] - old_logp[i, t].item()).exp()
                losses[0] = losses[0] - min(ratio * A, ratio.clamp(0.8, 1.2) * A) / M
                squares = (V[at - 1] - R) ** 2, (V[at - 1].clamp(V_old - 0.2, V_old + 0.2) - R) ** 2
                losses[1] = losses[1] + max(squares) / M / 2
                clipped, bounded = (
                    clipped + (ratio.clamp(0.8, 1.2) * A < ratio * A),
                    bounded + (squares[1] > squares[0]),
                )
        norms = []
        for network, optimizer, loss in zip((plain, plain_critic), optimizers, losses):
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1).item())
            optimizer.step()
        sums = [x + y for x, y in zip(sums, [losses[0].item(), losses[1].item(), norms[0]])]
    assert clipped > 4 and bounded > 4 and min(norms) > 0.1
    assert [4 * stats[name] for name in ("loss", "value_loss", "grad_norm")] == pytest.approx(
        sums, rel=1e-3, abs=4e-4
    )
    assert stats["kl"] > 0  # a reference is there, and reported, but not in the loss
    for ours, theirs in ((model, plain), (critic, plain_critic)):
        for p, q in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


def test_where_the_critics_update_is_not_finite_the_policys_is_skipped_too(loaded):
    model, tokenizer = loaded
    critic, (micro_batch,) = critic_of(model), completions(tokenizer).micro_batches(1000)
    before = copy.deepcopy([model.state_dict(), critic.state_dict()])
    micro_batch.old_logp = micro_batch.logprobs(Policy(model), 1.0).detach()
    estimate(critic, [micro_batch], CPU, beta=0.0, lam=0.95)
    assert not (micro_batch.advantages.requires_grad or micro_batch.old_values.requires_grad)
    micro_batch.returns[0, 0] = torch.nan
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=1.0)
    assert (
        updated(model, optimizer, [[micro_batch]], resolve("ppo"), critic=critic)["skipped"]
        == [True] * 4
    )
    torch.testing.assert_close([model.state_dict(), critic.state_dict()], before, rtol=0, atol=0)
