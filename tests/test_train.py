"""The training script: what it refuses, one update against a plain one, and what a run leaves behind."""

import copy
import json
import math

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import masking_utils

import eval as evaluation
import train
from cppo import prune
from engine.model import loading
from engine.model.critic import Critic, estimate
from engine.model.networks import whole_networks
from engine.run import checkpoint, logs
from engine.run.config import Config, check
from engine.run.options import UserError
from engine.select import select
from engine.tasks import questions as questions_module
from family.gdpo import decoupled_advantages
from family.gfpo import retained_advantages
from grpo import group_advantages
from tests.examples import named
from train import ALGORITHMS, learning_rate, run_progress
from update import OF_UPDATES, Batch, accumulate, update

CPU = torch.device("cpu")


def config(**options):
    c = Config(model="toy", **options)
    check(c, ALGORITHMS)
    return c


def completions(tokenizer, n=6, seed=0):
    """Fixed completions of different lengths with advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [tokenizer.encode(text) for text in ["1+2=?", "7+8-3=?", "9-8=?"] * (n // 3)]
    lengths = torch.randint(1, 9, (n,), generator=generator)
    return Batch(prompts, torch.randint(2, 22, (n, 8), generator=generator), lengths, torch.randn(n, generator=generator))


def with_reference(parts, model):
    for part in parts:
        with torch.no_grad():
            part.ref_logp = part.logprobs(model, 1.0) - 0.1 * part.mask  # a reference that differs from the policy
    return parts


# ---- one update -----------------------------------------------------------------------------------------------------


PLAIN = {  # what a token counts (N sequences of n tokens, M tokens in all, L the longest allowed), clip, β, one ratio per sequence
    "grpo": (lambda n, N, M, L: 1 / (N * n), 0.8, 1.2, 0.04, False),
    "cppo": (lambda n, N, M, L: 1 / (N * n), 0.8, 1.2, 0.04, False),
    "drgrpo": (lambda n, N, M, L: 1 / (N * L), 0.8, 1.2, 0.0, False),
    "dapo": (lambda n, N, M, L: 1 / M, 0.8, 1.28, 0.0, False),
    "gspo": (lambda n, N, M, L: 1 / (N * n), 1 - 3e-4, 1 + 4e-4, 0.0, True),
    "gspo_token": (lambda n, N, M, L: 1 / (N * n), 1 - 3e-4, 1 + 4e-4, 0.0, True),
    "gfpo": (lambda n, N, M, L: 1 / M, 0.8, 1.2, 0.001, False),
    "gfpo_adaptive": (lambda n, N, M, L: 1 / M, 0.8, 1.2, 0.001, False),
    "gdpo": (lambda n, N, M, L: 1 / (N * n), 0.8, 1.2, 0.04, False),
    "pods": (lambda n, N, M, L: 1 / (N * n), 0.8, 1.2, 0.04, False),
}


@pytest.mark.parametrize("algorithm", list(PLAIN))
def test_updates_equal_those_of_a_plain_loop(small, algorithm):
    """μ=2 times through the mini-batches: AdamW on −Σ w (min(ρA, clip(ρ)A) − β k3), one completion and one token at a time."""
    c = config(algorithm=algorithm, mu=2, lr=1e-3, max_grad_norm=0.5)
    weight, low, high, beta, per_sequence = PLAIN[algorithm]
    model, tokenizer = loading.load_model(small, CPU)
    plain = copy.deepcopy(model)
    batch = completions(tokenizer)
    cut = [[0, 1], [2, 3], [4], [5]] if c.minibatches == 4 else [[0, 1, 2, 3, 4, 5]]
    minibatches = [with_reference(batch.rows(rows).cut_into(40), model) for rows in cut]
    for part in [part for parts in minibatches for part in parts]:
        part.old_logp = part.logprobs(model, 1.0).detach()
    stats = update(model, torch.optim.AdamW(model.parameters(), lr=c.lr, weight_decay=0.0), minibatches, ALGORITHMS[algorithm], c)

    def token_logps(net, i):
        sequence = batch.prompts[i] + batch.tokens[i, : batch.lengths[i]].tolist()
        logp = net(torch.tensor([sequence])).logits[0].log_softmax(-1)
        return [logp[t - 1, sequence[t]] for t in range(len(batch.prompts[i]), len(sequence))]

    optimizer = torch.optim.AdamW(plain.parameters(), lr=c.lr, weight_decay=0.0)
    with torch.no_grad():
        old = [[x.item() for x in token_logps(plain, i)] for i in range(6)]
    losses, norms = [], []
    for rows in cut * 2:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for i in rows:
            A, logps = batch.advantages[i].item(), token_logps(plain, i)
            mean = sum(logp - old_logp for logp, old_logp in zip(logps, old[i])) / len(logps)
            for logp, old_logp in zip(logps, old[i]):
                ratio, log_r = (mean if per_sequence else logp - old_logp).exp(), (old_logp - 0.1) - logp
                surrogate = min(ratio * A, ratio.clamp(low, high) * A)
                w = weight(len(logps), len(rows), sum(len(old[j]) for j in rows), 48)
                loss = loss - w * (surrogate - beta * (log_r.exp() - log_r - 1))
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        if norms[-1] > 0:  # GSPO's clip takes whole completions, here of one mini-batch all
            optimizer.step()
    assert stats["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-3, abs=1e-4)
    assert stats["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-3) and stats["skipped_updates"] == 0
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-5)


def test_the_update_does_not_depend_on_the_cut_into_micro_batches(small):
    weights = []
    for budget in (1, 30, 10**6):
        c = config(mu=1, lr=1e-3)
        model, tokenizer = loading.load_model(small, CPU)
        parts = with_reference(completions(tokenizer).cut_into(budget), model)
        update(model, torch.optim.SGD(model.parameters(), lr=1.0), [parts], ALGORITHMS["cppo"], c)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        assert len(parts) == {1: 6, 30: 3, 10**6: 1}[budget]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-5, atol=1e-6)


def test_the_first_ratio_is_1_and_the_first_loss_0_but_not_its_gradient(small):
    """Advantages of a group add up to 0, and every ratio is 1: so the loss is 0, while each token still has its gradient."""
    c = config(algorithm="grpo", mu=1, beta=0.0)
    model, tokenizer = loading.load_model(small, CPU)
    batch = completions(tokenizer)
    batch.advantages -= batch.advantages.mean()
    stats = update(model, torch.optim.SGD(model.parameters(), lr=0.0), [batch.cut_into(30)], ALGORITHMS["grpo"], c)
    assert stats["ratio_max"] == 1.0 and stats["ratio_mean"] == pytest.approx(1.0) and stats["clip_fraction"] == 0
    assert stats["loss"] == pytest.approx(0, abs=1e-6) and stats["grad_norm"] > 0.01


def test_kl_is_0_at_first_and_the_second_update_leaves_ratio_1(small):
    c = config(algorithm="grpo", mu=2)
    model, tokenizer = loading.load_model(small, CPU)
    parts = completions(tokenizer).cut_into(10**6)
    for part in parts:
        with torch.no_grad():
            part.ref_logp = part.logprobs(model, 1.0)
    assert update(copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0), [parts], ALGORITHMS["grpo"], c)["kl"] == 0
    stats = update(model, torch.optim.SGD(model.parameters(), lr=0.5), [parts], ALGORITHMS["grpo"], c)
    assert stats["ratio_max"] > 1.001 and stats["kl"] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "gspo_token", "ppo"])
def test_no_micro_batch_reads_anything_off_the_device(small, algorithm, monkeypatch):
    """On the device `meta` a tensor has no numbers: whoever asks for one gets an error."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)  # transformers' own question
    c, (model, tokenizer) = config(algorithm=algorithm, importance_cap=2.0), loading.load_model(small, CPU)
    batch, model = completions(tokenizer), model.to("meta")
    critic = Critic(model.base_model) if algorithm == "ppo" else None
    batch = Batch(batch.prompts, batch.tokens.to("meta"), batch.lengths, batch.advantages.to("meta"))
    parts = batch.cut_into(30)
    assert len(parts) == 3
    for part in parts:
        part.ref_logp = part.logprobs(model, 1.0).detach()
        if critic:
            part.old_logp = part.ref_logp
            monkeypatch.setattr(distributed, "all_sum", lambda sums, device: dict.fromkeys(sums, 1.0))
    if critic:
        estimate(critic, parts, model.device, beta=c.beta, lam=c.lam)
    sums, maxima = accumulate(model, parts, 6, 30, ALGORITHMS[algorithm], c, critic)
    assert all(x.is_meta for x in [*sums.values(), *maxima.values()])
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_skipped_and_counted(small, bad):
    model, tokenizer = loading.load_model(small, CPU)
    before = copy.deepcopy(model.state_dict())
    batch = completions(tokenizer)
    batch.advantages[2] = bad
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    stats = update(model, optimizer, [batch.cut_into(30)], ALGORITHMS["grpo"], config(algorithm="grpo", beta=0.0))
    assert stats["skipped_updates"] == 2 and stats["skipped"] == [True, True]
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def two_more_updates(small, algorithm, cut):
    """μ = 2 times through the mini-batches `cut` (lists of rows), of which rows 2 and 3 have no advantage: (weights, steps, stats)."""
    c = config(algorithm=algorithm, mu=2, lr=1e-5, clip_low=0.9, clip_high=9.0)  # the clip takes no gradient
    model, tokenizer = loading.load_model(small, CPU)
    batch = completions(tokenizer)
    batch.advantages[2:4] = 0
    minibatches = [with_reference(batch.rows(rows).cut_into(40), model) if rows else [] for rows in cut]
    for part in [part for parts in minibatches for part in parts]:
        part.old_logp = part.logprobs(model, 1.0).detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, weight_decay=0.0)
    stats = update(model, optimizer, minibatches, ALGORITHMS[algorithm], c)
    steps = next(iter(optimizer.state.values()))["step"].item() if optimizer.state else 0
    return torch.cat([p.detach().flatten() for p in model.parameters()]), steps, stats


@pytest.mark.parametrize("algorithm", ["gspo", "drgrpo"])
def test_a_mini_batch_without_signal_or_without_a_completion_makes_no_update(small, algorithm):
    """AdamW would still move the weights, by what it remembers of earlier gradients."""
    weights, steps, stats = two_more_updates(small, algorithm, [[0, 1], [2, 3], [4, 5], []])
    expected, _, expected_stats = two_more_updates(small, algorithm, [[0, 1], [4, 5]])
    assert steps == 4 and torch.equal(weights, expected)
    assert stats == expected_stats and stats["skipped"] == [False] * 4  # nor does it count in the means


def test_without_any_signal_there_is_no_update_to_speak_of(small):
    before = torch.cat([p.detach().flatten() for p in loading.load_model(small, CPU)[0].parameters()])
    weights, steps, stats = two_more_updates(small, "gspo", [[2, 3], []])
    assert steps == 0 and torch.equal(weights, before)
    assert stats == {**dict.fromkeys(OF_UPDATES), "skipped_updates": 0, "skipped": []}


def test_with_a_kl_term_completions_without_an_advantage_are_something_to_learn_from(small):
    weights, steps, _ = two_more_updates(small, "grpo", [[0, 1], [2, 3], []])
    assert steps == 4 and not torch.equal(weights, two_more_updates(small, "grpo", [[0, 1]])[0])


def test_an_update_whose_whole_gradient_the_clip_has_taken_leaves_the_weights_alone(small):
    c = config(algorithm="gspo", mu=1)

    def updated(*rows):
        model, tokenizer = loading.load_model(small, CPU)
        batch = completions(tokenizer)
        batch.advantages = batch.advantages.abs()
        minibatches = [batch.rows(own).cut_into(10**6) for own in rows]
        for (part,), gap in zip(minibatches, (0.0, 1.0)):  # those of the second are more likely than before: s = e, A > 0
            part.old_logp = part.logprobs(model, 1.0).detach() - gap * part.mask
        stats = update(model, torch.optim.AdamW(model.parameters(), lr=1e-3), minibatches, ALGORITHMS["gspo"], c)
        return torch.cat([p.detach().flatten() for p in model.parameters()]), stats

    (weights, stats), (expected, other) = updated([0, 1], [2, 3]), updated([0, 1])
    assert torch.equal(weights, expected)
    assert stats["clip_fraction"] == pytest.approx(0.5) and other["clip_fraction"] == 0  # it still counts in the means
    assert stats["skipped"] == [False, False]


# ---- which completions are kept, and when ---------------------------------------------------------------------------


def chosen(k, rewards, lengths=None, **options):
    """(advantages, kept) of rewards (Q, G), or several (R, Q, G), under a configuration."""
    rewards = torch.as_tensor(rewards)
    rewards = rewards.view(-1, *rewards.shape[-2:])
    c = config(group_size=rewards.shape[2], **options)
    lengths = torch.as_tensor(lengths) if lengths is not None else torch.ones_like(rewards[0])
    advantages, kept = select(rewards, [1.0] * len(rewards), lengths, k, ALGORITHMS[c.algorithm], c, torch.Generator().manual_seed(0))
    return advantages, kept.tolist()


def test_what_each_rule_keeps():
    rewards = [[0.1, -3.0, 2.0, 0.0], [0.2, 0.0, -0.15, 0.3]]  # A has the signs and the order of r − mean; the means are −0.225, 0.0875

    def kept(k, **options):
        return chosen(k, rewards, **options)[1]

    assert kept(2, algorithm="grpo") == list(range(8))
    assert kept(2) == [1, 2, 6, 7]
    assert kept(1) == [1, 6]
    assert chosen(2, [[1.0, -1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]])[1] == [0, 1, 4, 5]
    assert chosen(2, [[1.0, -1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]], prune_pooled=True)[1] == [0, 1, 2, 4]
    assert kept(2, keep="largest") == [0, 2, 4, 7]
    assert kept(2, keep="smallest_abs") == [0, 3, 4, 5]
    assert kept(2, keep="random") == kept(2, keep="random")  # the same draw when a step is run again
    assert [i // 4 for i in kept(2, keep="random")] == [0, 0, 1, 1]
    for algorithm in ("grpo", "drgrpo", "dapo", "gspo", "gdpo"):  # CPPO's pruning combined with the others
        assert kept(1, algorithm=algorithm, keep="largest_abs")[0] == 1


def test_gfpo_and_pods_take_the_advantages_over_those_they_keep():
    rewards, lengths = [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]], [[9, 2, 4, 8], [5, 6, 7, 1]]
    advantages, kept = chosen(2, rewards, lengths, algorithm="gfpo")
    assert kept == [1, 2, 4, 7]  # the shortest
    torch.testing.assert_close(advantages, retained_advantages(torch.tensor(rewards), torch.tensor([[1, 2], [0, 3]])))
    torch.testing.assert_close(advantages[0], torch.tensor([0.0, -1.0, 1.0, 0.0]), atol=1e-3, rtol=0)
    assert chosen(2, rewards, lengths, algorithm="gfpo", keep="efficiency")[1] == [0, 2, 4, 7]  # reward per token
    advantages, kept = chosen(2, rewards, lengths, algorithm="pods", pruning_rate=0.5)
    assert kept == [1, 2, 4, 6]  # one right and one wrong answer of each question
    torch.testing.assert_close(advantages.abs().sum(1), torch.full((2,), 2 / 2**0.5), atol=1e-3, rtol=0)


def test_weights_count_in_the_sum_and_for_gdpo_after_each_reward_is_normalised():
    rewards = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    for algorithm, expected in [("grpo", group_advantages(2 * rewards[0] + 0.5 * rewards[1])),
                                ("gdpo", decoupled_advantages(rewards, weights=[2.0, 0.5]))]:
        advantages, _ = select(rewards, [2.0, 0.5], torch.ones(3, 4), 4, ALGORITHMS[algorithm], config(algorithm=algorithm, group_size=4))
        torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("keep", ["shortest", "efficiency"])
def test_gfpos_adaptive_k_keeps_its_own_number_of_each_question(keep):
    both = torch.randint(0, 3, (2, 3, 10), generator=torch.Generator().manual_seed(0)).float()
    lengths = torch.randint(1, 9, (3, 10), generator=torch.Generator().manual_seed(1))
    advantages, kept = chosen(torch.tensor([4, 8, 6]), both, lengths, algorithm="gfpo_adaptive", keep=keep)
    rewards = both[0] + both[1]
    metric = (lengths if keep == "shortest" else -rewards / lengths).tolist()
    own = [sorted(sorted(range(10), key=lambda i: metric[q][i])[:k]) for q, k in enumerate([4, 8, 6])]
    assert kept == [10 * q + i for q in range(3) for i in own[q]]
    for q in range(3):
        of_kept = rewards[q, own[q]]
        expected = torch.zeros(10).scatter(0, torch.tensor(own[q]), (of_kept - of_kept.mean()) / (of_kept.std(correction=0) + 1e-4))
        torch.testing.assert_close(advantages[q], expected)


@pytest.fixture
def step_inputs(small):
    model, tokenizer = loading.load_model(small, CPU)
    questions, _ = questions_module.load_questions("toy", tokenizer, limit=4)
    return model, tokenizer, questions


def steps_of(step_inputs, c, functions, reference=None, history=None):
    """Step number → (metrics, samples): makes this step, on the same questions each time."""
    model, tokenizer, questions = step_inputs
    k = check(c, ALGORITHMS)
    networks = whole_networks(model, tokenizer, c, reference=reference, critic=ALGORITHMS[c.algorithm].critic)
    rest = (lambda missing: questions, networks, named(*functions), train.Sampling(c.max_new_tokens), k, c,
            [] if history is None else history)
    return lambda step: train.train_step(step, *rest)


def run_step(step_inputs, c, functions, step=1):
    return steps_of(step_inputs, c, functions)(step)


def number_of_digits(completions, **columns):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def test_every_forward_pass_of_an_update_is_made_for_the_kept_only(step_inputs, monkeypatch):
    scored, real = [], Batch.logprobs
    monkeypatch.setattr(Batch, "logprobs", lambda self, *args, **options: scored.append(len(self.prompts)) or real(self, *args, **options))
    c = config(group_size=8, pruning_rate=0.75, mu=2, micro_batch_tokens=100)
    metrics, samples = run_step(step_inputs, c, [number_of_digits])
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (4, 32, 8)
    assert sum(scored) == 3 * 8  # the reference once, the policy μ=2 times, none of them for a pruned completion
    # the advantages are those of all 8 completions of a question, and the kept are its largest
    rewards = torch.tensor([[row["reward"] for row in samples["completions"]]])
    advantages = torch.tensor([[row["advantage"] for row in samples["completions"]]])
    torch.testing.assert_close(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
    assert [i for i, row in enumerate(samples["completions"]) if row["kept"]] == prune(advantages, 2)[0].tolist()
    assert metrics["tokens_trained"] < metrics["tokens_generated"] == pytest.approx(metrics["length"] * 32)


def test_the_freed_places_are_filled_for_cppo_but_not_for_gfpo_and_pods():
    def allocation(**options):
        c = Config(**options)
        check(c, ALGORITHMS)
        return c.allocation

    assert allocation() and allocation(algorithm="gspo", keep="largest_abs") and not allocation(allocation=False)
    assert not allocation(algorithm="gfpo") and not allocation(algorithm="pods") and allocation(algorithm="pods", allocation=True)


def test_the_settings_of_ppo_and_of_gfpos_adaptive_k():
    c = config(algorithm="ppo")
    assert (c.mu, c.lam, c.beta, c.critic_lr, c.clip_low, c.clip_high, c.allocation) == (4, 0.95, 0.02, 1e-3, 0.2, 0.2, False)
    assert config(algorithm="ppo", dataset="gsm8k").critic_lr == 1e-5
    c = Config(algorithm="gfpo_adaptive")
    assert check(c, ALGORITHMS) == 8 and (c.mu, c.pruning_rate, c.allocation, c.keep) == (2, 0.0, False, "shortest")


def test_dynamic_sampling_replaces_groups_without_signal_until_the_step_is_full(step_inputs, monkeypatch, capsys):
    model, tokenizer, questions = step_inputs
    c = config(algorithm="dapo", group_size=4, max_rollouts=5)
    asked, trained = [], []
    monkeypatch.setattr(train, "update", lambda model, optimizer, minibatches, *_: trained.extend(minibatches) or {})

    def supply(missing):  # 4 questions in all at first, then as many as are missing; the supply ends after 9
        asked.append(missing)
        left = 9 - sum(n or 4 for n in asked[:-1])
        return (questions * 3)[: min(missing or 4, left)] if left > 0 else None

    def signal_in_every_second_group(completions, **columns):
        return [float(i // 4 % 2 and i % 4) for i in range(len(completions))]

    sampling, rewards = train.Sampling(c.max_new_tokens), named(signal_in_every_second_group)
    networks = whole_networks(model, tokenizer, c)
    metrics, _ = train.train_step(1, supply, networks, rewards, sampling, 4, c)
    assert asked == [None, 2, 1, 1, 1] and metrics["rollouts"] == 5  # 4 gave 2, then 2 gave 1, then one question at a time gave none
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (9, 36, 12)
    assert metrics["no_signal"] == pytest.approx(6 / 9) and sum(len(part.prompts) for part in trained[0]) == 12
    assert all(len(set(part.advantages.tolist())) > 1 for part in trained[0])
    asked.clear()
    assert "step 1: 1 groups short after sampling 5 times" in capsys.readouterr().out
    c.max_rollouts = 2
    assert train.train_step(1, supply, networks, rewards, sampling, 4, c)[0]["rollouts"] == 2


def of_two(even, odd):
    """A reward: of every question the first, third, … completion earns `even`, the others `odd`."""
    return lambda completions, **columns: [float(odd if i % 2 else even) for i in range(len(completions))]


def rewarded(*values):
    """Functions as rewards with names of their own, each the values of two completions in turn."""
    functions = [of_two(*pair) for pair in values]
    for i, function in enumerate(functions):
        function.__name__ = f"reward_{i}"
    return functions


def test_no_signal_is_the_share_of_groups_whose_advantages_are_all_0(step_inputs):
    step_inputs = (*step_inputs[:2], step_inputs[2][:1])  # one question, whose group is in the samples

    def no_signal(functions, **options):
        metrics, samples = run_step(step_inputs, config(group_size=4, lr=0.0, **options), functions)
        advantages = [row["advantage"] for row in samples["completions"]]
        assert metrics["no_signal"] == (not any(advantages))
        return metrics["no_signal"]

    # the sums are equal, but GDPO normalises each reward by itself: 0.87 + 0.87 − 0.87
    assert no_signal(rewarded((1, 0), (1, 0), (0, 2)), algorithm="gdpo") == 0
    assert no_signal(rewarded((1, 0), (1, 0), (0, 2)), algorithm="grpo") == 1
    # all are right, and some are too long
    assert no_signal([ones], algorithm="grpo", max_new_tokens=8, overlong_cache=7) == 0
    assert no_signal([ones], algorithm="grpo", max_new_tokens=8) == 1
    # the two that GFPO keeps are right
    assert no_signal(rewarded((1, 0)), algorithm="gfpo", keep="efficiency") == 1


def test_no_signal_counts_a_gdpo_group_of_equal_rewards_beside_others(step_inputs):
    """The mean over the batch is 0, and its rounding is not."""
    def equal_in_the_first(completions, **columns):
        return [i // 4 and i * i % 7 / 10 for i in range(len(completions))]

    metrics, samples = run_step(step_inputs, config(algorithm="gdpo", group_size=4), [equal_in_the_first])
    assert metrics["no_signal"] == 0.25 and [row["advantage"] for row in samples["completions"]] == [0.0] * 4


def test_ppos_no_signal_is_the_share_of_groups_whose_scores_are_equal(step_inputs):
    def no_signal(functions, **options):
        return run_step(step_inputs, config(algorithm="ppo", group_size=4, lr=0.0, **options), functions)[0]["no_signal"]

    assert no_signal(rewarded((1, 0), (0, 1))) == 1 and no_signal(rewarded((1, 0), (0, 2))) == 0


def test_dynamic_sampling_goes_by_the_rewards_before_the_overlong_penalty(step_inputs):
    step_inputs = (*step_inputs[:2], step_inputs[2][:1])
    c = config(algorithm="dapo", group_size=4, max_new_tokens=8, overlong_cache=7, max_rollouts=2)
    metrics, samples = run_step(step_inputs, c, [ones])
    assert any(row["advantage"] for row in samples["completions"])  # of right answers that differ in length alone
    assert metrics["rollouts"] == 2 and metrics["kept"] == 0 and metrics["loss"] is None


def test_truncated_completions_are_left_out_but_count_in_their_group(step_inputs, monkeypatch):
    trained = []
    monkeypatch.setattr(train, "update", lambda model, optimizer, minibatches, *_: trained.extend(minibatches) or {})
    c = config(algorithm="grpo", group_size=8, max_new_tokens=8, mask_truncated=True, overlong_cache=4)
    metrics, samples = run_step(step_inputs, c, [number_of_digits])
    assert 0 < metrics["truncated"] < 1 and metrics["kept"] == round(32 * (1 - metrics["truncated"]))
    assert sum(len(part.prompts) for part in trained[0]) == metrics["kept"]
    assert all(n < 8 or part.tokens[i, 7] == 1 for part in trained[0] for i, n in enumerate(part.lengths.tolist()))  # 1 is EOS
    assert metrics["reward/overlong"] < 0 and metrics["reward"] == pytest.approx(
        metrics["reward/number_of_digits"] + metrics["reward/overlong"])
    torch.testing.assert_close(sum(row["advantage"] for row in samples["completions"]), 0.0, atol=1e-4, rtol=0)


def test_mini_batches_cover_the_kept_once_and_know_the_old_policy(step_inputs, monkeypatch):
    seen = []
    real = train.update
    monkeypatch.setattr(train, "update", lambda model, optimizer, minibatches, *rest: seen.append(minibatches) or real(
        model, optimizer, minibatches, *rest))
    c = config(algorithm="gspo", group_size=8, mu=1, lr=1e-2)
    model = copy.deepcopy(step_inputs[0])  # π_old
    metrics, _ = run_step(step_inputs, c, [number_of_digits])
    parts = [part for parts in seen[0] for part in parts]
    assert len(seen[0]) == 4 and sum(len(part.prompts) for part in parts) == 32
    for part in parts:
        with torch.no_grad():
            torch.testing.assert_close(part.old_logp, part.logprobs(model, 1.0), atol=1e-5, rtol=1e-5)
    assert metrics["clip_fraction"] > 0 and metrics["kl_old"] > 0  # with μ = 1, and without mini-batches, both would be 0


def test_the_updates_end_when_the_policy_is_too_far_from_the_old_one(step_inputs):
    free, _ = run_step(step_inputs, config(algorithm="grpo", group_size=8, mu=6, lr=1e-3), [number_of_digits])
    step_inputs = (loading.load_model(step_inputs[0].name_or_path, CPU)[0], *step_inputs[1:])
    bound, _ = run_step(step_inputs, config(algorithm="grpo", group_size=8, mu=6, lr=1e-3, target_kl=1e-3), [number_of_digits])
    assert free["kl_old"] > 1e-3 and 0 < bound["kl_old"] < free["kl_old"]


def few_digits(completions, **columns):
    return [-float(sum(c.isdigit() for c in text)) for text in completions]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_raises_its_reward(step_inputs, algorithm):
    make = steps_of(step_inputs, config(algorithm=algorithm, group_size=8, lr=1e-3), [few_digits])
    rewards = [make(step)[0]["reward"] for step in range(12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5


def test_a_random_choice_of_the_kept_follows_from_seed_and_step(step_inputs):
    c = config(group_size=16, pruning_rate=0.5, keep="random", lr=0.0)
    flags = [[row["kept"] for row in run_step(step_inputs, c, [number_of_digits], step)[1]["completions"]] for step in (1, 1, 2)]
    assert flags[0] == flags[1] != flags[2]


def test_the_random_choice_draws_other_numbers_than_the_sampler(step_inputs, monkeypatch):
    seeds, real = {}, train.select
    monkeypatch.setattr(train, "select", lambda *rest: seeds.update(kept=rest[-1].initial_seed()) or real(*rest))
    sample = rollout.Own.sample
    monkeypatch.setattr(rollout.Own, "sample", lambda self, *rest: seeds.update(sampled=rest[-1]) or sample(self, *rest))
    run_step(step_inputs, config(group_size=16, keep="random", lr=0.0), [number_of_digits])
    kept, sampled = (torch.rand(4, 16, generator=torch.Generator().manual_seed(seeds[name])) for name in ("kept", "sampled"))
    assert not torch.equal(kept, sampled)


def test_a_step_without_signal_makes_no_update(step_inputs):
    model = step_inputs[0]
    before = copy.deepcopy(model.state_dict())
    metrics, _ = run_step(step_inputs, config(group_size=4), [ones])
    assert metrics["no_signal"] == 1 and metrics["loss"] is None and metrics["skipped_updates"] == 0
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def ones(completions, **columns):
    return [1.0] * len(completions)


@pytest.mark.parametrize("score", [0.0, 2.0])
def test_ppo_has_an_update_to_make_where_all_rewards_are_equal(step_inputs, score):
    """V is 0 and, with λ = 1, the return of every token is the score: the critic's loss is ½ (0 − score)²."""
    c = config(algorithm="ppo", group_size=4, lam=1.0, lr=0.0)
    metrics, _ = run_step(step_inputs, c, [lambda completions, **columns: [score] * len(completions)])
    assert metrics["no_signal"] == 1 and metrics["value_loss"] == pytest.approx(score**2 / 2)


def test_ppo_learns_from_equal_rewards_what_its_critic_did_not_foresee(step_inputs):
    before = step_inputs[0].lm_head.weight.clone()
    make = steps_of(step_inputs, config(algorithm="ppo", group_size=4, lr=1e-3), [ones])
    losses = [make(step)[0]["value_loss"] for step in range(6)]
    assert losses[-1] < losses[0] / 2 and not torch.equal(step_inputs[0].lm_head.weight, before)


def test_ppos_kl_is_in_the_rewards(step_inputs):
    """A policy that was moved away from its reference: a large β brings it back, a tiny one lets it go where the reward is."""
    model, kls = step_inputs[0], {}
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    for beta in (1e-6, 100.0):
        c = config(algorithm="ppo", group_size=8, lr=1e-3, beta=beta)
        make = steps_of((copy.deepcopy(model), *step_inputs[1:]), c, [number_of_digits], reference)
        kls[beta] = [make(step)[0]["kl"] for step in range(6)]
    assert sum(kls[100.0][3:]) < sum(kls[1e-6][3:]) / 2
    assert run_step(step_inputs, config(algorithm="ppo", group_size=4, beta=0.0), [number_of_digits])[0]["kl"] == 0  # no reference


def test_gfpos_adaptive_k_goes_by_the_mean_rewards_of_the_questions_so_far(step_inputs):
    """Question q of four earns q for each of its 16 completions, in the third step 3 − q; and 1 for no reason."""
    history, kept = [], []
    for step, reward in enumerate([lambda i: i // 16, lambda i: i // 16, lambda i: 3 - i // 16]):
        mine = lambda completions, reward=reward, **columns: [float(reward(i)) for i in range(len(completions))]
        metrics, samples = steps_of(step_inputs, config(algorithm="gfpo_adaptive"), [mine, ones], history=history)(step)
        kept.append((metrics["kept"], sum(row["kept"] for row in samples["completions"])))
    assert history == [1, 2, 3, 4, 1, 2, 3, 4, 4, 3, 2, 1]
    assert kept == [(4 * 8, 8), (8 + 8 + 6 + 4, 8), (4 + 6 + 8 + 8, 4)]  # of all, and of the first question


def test_a_step_is_a_function_of_its_number_and_the_seed(step_inputs):
    c = config(group_size=4)
    texts = [[row["completion"] for row in run_step(step_inputs, c, [number_of_digits], step)[1]["completions"]] for step in (3, 4)]
    assert texts[0] != texts[1]
    fresh = config(group_size=4, lr=0.0)
    first, again = (run_step(step_inputs, fresh, [number_of_digits], 3)[1] for _ in range(2))
    assert first == again


@pytest.mark.parametrize("values, message", [([1.0], "returned 1 values for"), ([math.nan] * 16, "returned nan for the completion")])
def test_a_reward_that_misbehaves_is_named(step_inputs, values, message):
    def my_reward(completions, **columns):
        return values

    with pytest.raises(UserError, match=f"the reward my_reward {message}"):
        run_step(step_inputs, config(group_size=4), [my_reward])


def test_learning_rate_rises_over_the_warm_up_and_falls_to_0():
    assert learning_rate(0.05, 2.0, 0.1) == pytest.approx(1.0) and learning_rate(0.1, 2.0, 0.1) == pytest.approx(2.0)
    assert learning_rate(0.55, 2.0, 0.1) == pytest.approx(1.0) and learning_rate(1.0, 2.0, 0.1) == pytest.approx(0.0)
    assert learning_rate(0.001, 2.0, 0.1) > 0 and learning_rate(0.5, 1.0, 0.0) == pytest.approx(0.5)


# ---- a run ----------------------------------------------------------------------------------------------------------


def go(small, folder, *options, steps=3):
    argv = ["--model", small, "--output_dir", str(folder), "--lr", "1e-3", "--questions_per_step", "2", "--max_new_tokens", "48",
            "--group_size", "8", "--eval_questions", "8", "--steps", str(steps), *options]
    return train.main(argv)


def go_in_two(small, folder, monkeypatch, *options, killed_in, save_every, steps):
    """A run that dies in a step, and its resumption."""
    real = train.train_step

    def killed(step, *rest):
        if step == killed_in:
            raise RuntimeError("killed")
        return real(step, *rest)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(train, "train_step", killed)
        go(small, folder, *options, "--save_every", str(save_every), steps=steps)
    train.main(["--output_dir", str(folder), "--resume"])


def test_stop_kl_ends_the_run_with_a_checkpoint_and_a_sentence(small, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "choose", lambda *_: named(number_of_digits))
    assert go(small, tmp_path / "run", "--stop_kl", "1e-7", steps=5) == 0
    assert "the KL to the reference is" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["step"] < 5 and summary["checkpoint"].endswith(f"checkpoint-{summary['step']:06d}")


def test_the_reference_is_refreshed_and_survives_a_resume(small, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "choose", lambda *_: named(number_of_digits))
    kls = {}
    for name, options in [("kept", []), ("refreshed", ["--refresh_reference", "2"])]:
        go(small, tmp_path / name, "--mu", "1", *options, steps=5)
        kls[name] = [row["kl"] for row in logs.read(tmp_path / name / "metrics.jsonl")]
    rounding = 1e-3 if torch.cuda.is_available() else 0  # there the reference is computed in bfloat16
    assert max(kls["refreshed"][0::2]) <= rounding  # in steps 1, 3 and 5 the reference is the policy again
    assert kls["kept"][2] > 0 and kls["refreshed"][3] > 0
    go_in_two(small, tmp_path / "resumed", monkeypatch, "--mu", "1", "--refresh_reference", "2", killed_in=4, save_every=3, steps=5)
    # step 4 is measured against the reference of step 2
    assert [row["kl"] for row in logs.read(tmp_path / "resumed/metrics.jsonl")] == pytest.approx(kls["refreshed"], abs=rounding, rel=0)


def run_of(folder):
    """What a run has come to: its metrics without the seconds, GFPO's history, and the networks and moments of its checkpoint."""
    rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in logs.read(folder / "metrics.jsonl")]
    newest = checkpoint.newest(folder)
    dcp_to_torch_save(newest / "networks", folder / "networks.pt")
    saved = torch.load(folder / "networks.pt")
    del saved["optimizer"]["param_groups"]  # names and rates: the rates are in the metrics
    return rows, json.loads((newest / "state.json").read_text())["history"], saved


@pytest.mark.parametrize("options", [
    ["--algorithm", "ppo"],
    ["--algorithm", "ppo", "--group_size", "1", "--questions_per_step", "16"],
    ["--algorithm", "gfpo_adaptive", "--group_size", "16", "--keep", "efficiency"],
], ids=["ppo", "ppo, one completion of a question", "gfpo_adaptive"])  # fmt: skip
def test_the_critic_and_the_history_survive_a_resume(small, tmp_path, monkeypatch, options):
    monkeypatch.setattr(train, "choose", lambda *_: named(number_of_digits))
    go(small, tmp_path / "straight", *options, steps=4)
    go_in_two(small, tmp_path / "resumed", monkeypatch, *options, killed_in=4, save_every=2, steps=4)
    (rows, history, saved), resumed = run_of(tmp_path / "straight"), run_of(tmp_path / "resumed")
    assert (rows, history) == resumed[:2] and [row["step"] for row in rows] == [1, 2, 3, 4]
    torch.testing.assert_close(saved, resumed[2], rtol=0, atol=0)
    if "ppo" in options:
        assert saved["critic"]["head.bias"] != 0 and all(row["value_loss"] > 0 for row in rows)
    else:
        assert len(history) == 8 and rows[0]["kept"] == 2 * 8 > min(row["kept"] for row in rows)


def test_policy_and_critic_follow_the_schedule_each_from_its_own_peak(small, tmp_path, monkeypatch):
    real, rates = train.train_step, []

    def noted(step, supply, networks, *rest):
        for group, network in zip(networks.optimizer.param_groups, (networks.model, networks.critic), strict=True):
            assert [id(p) for p in group["params"]] == [id(p) for p in network.parameters()]
        rates.append([group["lr"] for group in networks.optimizer.param_groups])
        return real(step, supply, networks, *rest)

    monkeypatch.setattr(train, "train_step", noted)
    go(small, tmp_path / "run", "--algorithm", "ppo", "--critic_lr", "5e-3", "--warmup", "0.5", steps=4)
    assert rates == [pytest.approx([share * 1e-3, share * 5e-3]) for share in (0.25, 0.75, 0.5 + 0.125**0.5, 0.5 - 0.125**0.5)]


def test_a_run_that_is_through_its_questions_early_is_at_the_end_of_the_schedule_then(small, tmp_path, monkeypatch):
    """DAPO, whose steps take 5 questions here: 2, of which the second has a signal, and 1, 1, 1 for the first, which has none."""
    signal_in_every_second_group = lambda completions, **columns: [float(i // 8 % 2 and i % 2) for i in range(len(completions))]
    signal_in_every_second_group.__name__ = "second"
    monkeypatch.setattr(train, "choose", lambda *_: named(signal_in_every_second_group))
    options = ["--algorithm", "dapo", "--epochs", str(24 / 2048), "--warmup", "0"]
    go_in_two(small, tmp_path / "run", monkeypatch, *options, killed_in=4, save_every=2, steps=99)
    rows = logs.read(tmp_path / "run/metrics.jsonl")
    assert [row["questions"] for row in rows] == [5, 5, 5, 5, 4]
    middles = [2.5, 7.5, 12.5, 17.5, 22]  # of 24 questions
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * middle / 24)) for middle in middles]
    assert [row["lr"] for row in rows[1:]] == pytest.approx(expected[1:])
    assert rows[0]["lr"] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 1 / 24)))  # before the first step 2 are expected
    go(small, tmp_path / "steps", *options, steps=2)  # where the steps end first, they count
    assert [row["lr"] for row in logs.read(tmp_path / "steps/metrics.jsonl")] == pytest.approx(
        [1e-3 * 0.5 * (1 + math.cos(math.pi * share)) for share in (0.25, 0.75)])


@pytest.mark.parametrize("questions, per_step", [(2048, 8), (1024, 4), (7473, 16), (10, 3), (5, 7), (1, 1)])
@pytest.mark.parametrize("most", [math.inf, 3, 100])
def test_steps_that_all_take_the_same_number_of_questions_lie_evenly_in_the_schedule(questions, per_step, most):
    """The last step, which may be shorter, too."""
    steps = min(most, math.ceil(questions / per_step))
    found = [run_progress(done, steps, done * per_step, questions, per_step) for done in range(steps)]
    assert found == [(done + 0.5) / steps for done in range(steps)]


def test_a_run_that_was_through_its_questions_goes_on_with_more_of_them():
    """10 questions in steps of 4, 4 and 2; then twice as many."""
    found = [run_progress(done, 5, seen, 20, 4) for done, seen in [(3, 10), (4, 14)]]
    assert found == [3.5 / 5, 4.5 / 5] and run_progress(40, 99, 399, 400, 4) <= 1


def test_a_run_leaves_its_files_and_metrics(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert go(small, "run") == 0
    rows = logs.read("run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    # dynamic allocation: B·G = 16 places, k = 2 of 8 kept, so 8 questions a step
    assert {(row["questions"], row["completions"], row["kept"]) for row in rows} == {(8, 64, 16)}
    named = {"accuracy", "reward", "reward/toy_accuracy", "length", "truncated", "no_signal", "loss", "kl", "clip_fraction", "ratio_max",
             "grad_norm", "lr", "entropy", "tokens_generated", "tokens_trained", "seconds/generate", "seconds/score",
             "seconds/logprobs", "seconds/update", "seconds/total"}
    assert named <= set(rows[0]) and all(math.isfinite(x) for row in rows for x in row.values())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["questions"] == 24 and {"before", "after"} <= set(summary)
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    assert len(logs.read("run/samples.jsonl")) == 3
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["pruning_rate"] == 0.75 and saved["beta"] == 0.04 and saved["lr"] == 1e-3
    out = capsys.readouterr().out
    assert "accuracy, sampled" in out and "before" in out

    # the checkpoint is a Hugging Face folder, and eval.py finds it by the run's name
    evaluation.main(["--model", "run", "--questions", "8", "--samples", "2", "--output_dir", "scores"])
    scores, (_, *answers) = json.loads((tmp_path / "scores/eval-toy.json").read_text()), logs.read("scores/eval-toy.jsonl")
    assert scores["questions"] == 8 and len(answers) == 8 + 16
    for part in ("greedy", "sampled"):
        verdicts = [row["correct"] for row in answers if row["part"] == part]
        assert scores[part]["accuracy"] == sum(verdicts) / len(verdicts)
    assert [row["index"] for row in answers if row["part"] == "sampled"] == [i for i in range(8) for _ in range(2)]

    with pytest.raises(UserError, match="already holds a run: add --resume"):
        go(small, "run")
    with pytest.raises(UserError, match="has finished its 3 steps"):
        go(small, "run", "--resume")
    with pytest.raises(UserError, match="was started with --algorithm cppo"):
        go(small, "run", "--resume", "--algorithm", "grpo")
    with pytest.raises(UserError, match="was started without --lora: resume it like that"):
        go(small, "run", "--resume", "--lora", "4", steps=9)
    with pytest.raises(UserError, match="was started with --questions_per_step 2"):
        go(small, "run", "--resume", "--questions_per_step", "3", steps=9)
    other = tmp_path / "other"
    with pytest.raises(UserError, match="was started with --model"):
        train.main(["--output_dir", "run", "--resume", "--model", str(other)])


def test_without_allocation_and_with_grpo_a_step_takes_b_questions(small, tmp_path):
    go(small, tmp_path / "a", "--allocation", "false", steps=1)
    go(small, tmp_path / "b", "--algorithm", "grpo", steps=1)
    counts = [[logs.read(tmp_path / name / "metrics.jsonl")[0][key] for key in ("questions", "completions", "kept")] for name in "ab"]
    assert counts == [[2, 16, 4], [2, 16, 16]]


def test_runs_without_a_name_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [logs.new_folder("toy-cppo") for _ in range(2)] == ["runs/toy-cppo-1", "runs/toy-cppo-2"]


def test_five_updates_in_a_row_that_are_not_finite_end_the_run(small, tmp_path, monkeypatch):
    real = train.update

    def poisoned(model, optimizer, minibatches, *rest):
        for part in minibatches[0]:
            part.advantages *= math.nan
        return real(model, optimizer, minibatches, *rest)

    go(small, tmp_path / "run", "--save_every", "1", steps=2)
    monkeypatch.setattr(train, "update", poisoned)
    with pytest.raises(UserError, match="6 updates in a row had a loss or a gradient that is not finite") as error:
        go(small, tmp_path / "run", "--resume", steps=9)
    assert "--resume" in str(error.value)
    assert checkpoint.newest(tmp_path / "run").name == "checkpoint-000002"


BAD = [
    (["--pruning_rate", "1"], "must lie in [0, 1), not 1.0"),
    (["--pruning_rate", "-0.1"], "must lie in [0, 1)"),
    (["--pruning_rate", "nan"], "must lie in [0, 1)"),
    (["--pruning_rate", "0.95"], "keeps none of 16 completions"),
    (["--algorithm", "grpo", "--pruning_rate", "0.5"], "grpo keeps every completion"),
    (["--algorithm", "gfpo", "--keep", "largest_abs"], "gfpo keeps completions by shortest: it cannot be combined with pruning by |A|"),
    (["--algorithm", "cppo", "--keep", "shortest"], "cppo prunes by |A|"),
    (["--algorithm", "grpo", "--max_rollouts", "8"], "--max_rollouts does not fit grpo: leave it out"),
    (["--algorithm", "grpo", "--lam", "0.9"], "--lam does not fit grpo: leave it out, or take an algorithm that it belongs to (ppo)"),
    (["--algorithm", "grpo", "--lam", "0"], "--lam does not fit grpo"),
    (["--algorithm", "grpo", "--critic_lr", "1e-3"], "--critic_lr does not fit grpo: leave it out"),
    (["--algorithm", "ppo", "--keep", "random"], "--keep does not fit ppo: leave it out, or take an algorithm that it belongs to (grpo, "),
    (["--algorithm", "ppo", "--pruning_rate", "0.5"], "--pruning_rate does not fit ppo: leave it out"),
    (["--algorithm", "ppo", "--prune_pooled"], "--prune_pooled does not fit ppo: leave it out"),
    (["--algorithm", "ppo", "--allocation", "true"], "--allocation does not fit ppo: leave it out"),
    (["--algorithm", "ppo", "--lam", "1.5"], "--lam must lie in [0, 1], not 1.5"),
    (["--algorithm", "ppo", "--lam", "-0.5"], "--lam must be at least 0, not -0.5"),
    (["--algorithm", "ppo", "--critic_lr", "-1"], "--critic_lr must be at least 0, not -1"),
    (["--algorithm", "ppo", "--group_size", "0"], "--group_size must be at least 1, not 0"),
    (["--algorithm", "gfpo_adaptive", "--pruning_rate", "0.5"], "--pruning_rate does not fit gfpo_adaptive: leave it out"),
    (["--algorithm", "gfpo_adaptive", "--allocation", "true"], "--allocation does not fit gfpo_adaptive: leave it out"),
    (["--algorithm", "gfpo_adaptive", "--group_size", "4"], "keeps up to 8 completions of a question: --group_size 4 is too small"),
    (["--algorithm", "gfpo_adaptive", "--keep", "max_variance"], "by --keep shortest or efficiency, not by max_variance"),
    (["--algorithm", "gfpo_adaptive", "--keep", "largest_abs"], "it cannot be combined with pruning by |A|"),
    (["--algorithm", "pods", "--pruning_rate", "0.9375"], "max_variance keeps 1 completion of a question, which has nothing"),
    (["--rewards", "x.py:f"], "the file x.py does not exist"),
    (["--algorithm", "dapo", "--stop_kl", "1"], "--stop_kl needs a reference model: set --beta above 0 (dapo's is 0.0)"),
    (["--overlong_cache", "49"], "--overlong_cache must lie in 1 … --max_new_tokens (48), not 49"),
    (["--minibatches", "0"], "--minibatches must be at least 1"),
    (["--target_kl", "0"], "--target_kl must be above 0"),
    (["--keep", "best"], "rule must be largest_abs, smallest_abs, largest or random, not 'best'"),
    (["--keep", "random", "--prune_pooled"], "--prune_pooled is a rule of its own"),
    (["--group_size", "1"], "--group_size must be at least 2"),
    (["--algorithm", "gppo"], "unknown algorithm 'gppo': there are grpo, cppo"),
    (["--dataset", "gsm9k"], "unknown data set 'gsm9k'"),
    (["--dataset", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    (["--model", "./nowhere"], "the model folder ./nowhere does not exist"),
    (["--resume"], "--output_dir"),
    (["--resume", "--output_dir", "nowhere"], "nothing to resume: nowhere holds no run"),
    (["--epochs", "inf"], "--epochs must be at least 0"),
    (["--steps", "0"], "--steps must be at least 1"),
    (["--steps", "many"], "invalid int value: 'many'"),
    (["--lr", "nan"], "--lr must be at least 0"),
    (["--top_p", "0"], "--top_p must lie in (0, 1]"),
    (["--temperature", "0"], "--temperature must be above 0"),
    (["--prunning_rate", "0.5"], "unknown option --prunning_rate: did you mean --pruning_rate?"),
    (["--recipe", "nowhere.yaml"], "the recipe nowhere.yaml does not exist"),
]


@pytest.mark.parametrize("argv, message", BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_is_refused_in_one_sentence_before_any_work(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("it was not refused"))
    with pytest.raises(UserError) as error:
        train.main(argv)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_bad_data_file_is_refused_before_the_model_is_loaded(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policy, "load", lambda *_: pytest.fail("the model was loaded"))
    for content, message in [("", "is empty"), ("{}\n", "no column 'question'"), ('{"question": "a", "answer": "b"}\nno\n', "line 2")]:
        (tmp_path / "x.jsonl").write_text(content)
        with pytest.raises(UserError, match=message):
            train.main(["--model", small, "--dataset", "x.jsonl"])


def test_prompts_longer_than_the_context_are_skipped_and_reported(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "1+2=?", "answer": "3"}] * 3 + [{"question": "1+" * 100 + "1=?", "answer": "101"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train.main(["--model", small, "--dataset", "x.jsonl", "--max_new_tokens", "8", "--output_dir", "run"]) == 0
    assert "skipped 1 of 4 questions of x.jsonl" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["questions"] == 3 and "skipped 1 of 4" in summary["notes"][0]
