"""algorithms.py: the table and its settings, what each rule keeps, and the advantages of several
rewards."""

from collections import Counter
from dataclasses import replace
from operator import eq
from types import SimpleNamespace

import pytest
import torch

from algorithms import ALGORITHMS, KEEP, advantages_over_kept, resolve
from engine.base import ranks
from engine.model.logprobs import Policy
from engine.options.config import config_of
from experiments.library.rules import half_of_each_sign
from family.gdpo import decoupled_advantages
from family.gfpo import retained_advantages
from family.lite_ppo import batch_std_advantages
from grpo import group_advantages
from loop.batches import split_into_micro_batches, split_into_mini_batches
from loop.keep import smallest
from loop.records import join
from tests.helpers.training import a_rollout


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chosen(k, rewards, lengths=None, name="cppo", **options):
    """(advantages, rows) that an algorithm makes of rewards if it keeps k of each question."""
    rollout = a_rollout(rewards, lengths)
    algorithm = resolve(name, group_size=rollout.lengths.shape[1], **options)
    advantages = algorithm.advantages(rollout)
    rows = algorithm.keep.function(rollout, advantages, k)
    if algorithm.keep.normalize_kept_only:
        advantages = advantages_over_kept(algorithm, rollout, rows)
    return advantages, rows.tolist()


def by_rule(function):
    """The rows that a rule of one's own keeps of two questions with four completions."""
    algorithm = resolve("cppo", keep=function, group_size=4)
    rows, _ = algorithm.keep_completions(a_rollout(torch.zeros(2, 4)), torch.zeros(2, 4))
    return rows


# --- the settings ---


REWARDS = torch.tensor([[2.0, 0.0, 1.0, 1.0]])  # mean 1, unbiased std √⅔, the population's √½
GRPO = (REWARDS - 1) / ((2 / 3) ** 0.5 + 1e-4)
ADVANTAGES = {  # those of REWARDS, of each row whose advantages are not GRPO's
    "drgrpo": REWARDS - 1, "deepseek_v32": REWARDS - 1, "ppo": REWARDS,
    "gdpo": GRPO / (GRPO.std() + 1e-4),  # with one reward: GRPO's over their std
    "gfpo": (REWARDS - 1) / (0.5**0.5 + 1e-4), "gfpo_adaptive": (REWARDS - 1) / (0.5**0.5 + 1e-4),
    "rloo": 4 / 3 * (REWARDS - 1), "maxrl": REWARDS - 1,  # the mean is 1
}
TOKEN_WEIGHTS = {  # of each row whose token weights are not GRPO's
    **dict.fromkeys("dapo cispo lite_ppo maxrl cppo_published gfpo gfpo_adaptive ppo".split(),
                    "token_mean"),
    "drgrpo": "constant", "rloo": "constant",
}
OVER_ALL_DEVICES = ("gdpo", "lite_ppo")  # rows whose advantages compare the groups of all devices


def is_new(name, table):
    """A message for a new row that is not yet in a table of this file."""
    return lambda said: f"Is the row {name} new? Then add {name} to {table} in this file.\n{said}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_advantages_of_each_algorithm(name):
    found = resolve(name).advantages(a_rollout(REWARDS))
    torch.testing.assert_close(found, ADVANTAGES.get(name, GRPO), msg=is_new(name, "ADVANTAGES"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_token_weights_of_each_algorithm(name):
    """Of completions with 3 and 1 tokens, of 4 tokens at most: those of the first token of each."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = resolve(name).token_weights(mask, 2, 4, 4)[:, 0]
    expected = {"sequence_mean": [1 / 6, 1 / 2], "token_mean": [1 / 4, 1 / 4],
                "constant": [1 / 8, 1 / 8]}[TOKEN_WEIGHTS.get(name, "sequence_mean")]
    torch.testing.assert_close(found, torch.tensor(expected), msg=is_new(name, "TOKEN_WEIGHTS"))


def test_an_option_that_is_given_wins_over_the_row_and_a_row_over_the_default():
    given = resolve("gspo", beta=0.1, clip_low=0.3, mu=5, minibatches=None)
    assert (given.beta, given.clip_low, given.clip_high) == (0.1, 0.3, 4e-4)
    assert (given.mu, given.minibatches) == (5, 4)
    assert given.loss.keywords == {"clip_low": 0.3, "clip_high": 4e-4, "beta": 0.1}
    assert (resolve("grpo").mu, resolve("ppo").mu, resolve("rloo").mu) == (2, 4, 1)


def test_k_and_the_questions_of_a_step_follow_from_the_pruning_rate():
    cppo = resolve("cppo", questions_per_step=2)
    assert (cppo.k, cppo.questions_per_step) == (4, 8)  # ⌊2·16/4⌋
    assert resolve("cppo", allocation=False).questions_per_step == 1
    # pruning on top of another algorithm is as strong as CPPO's, if nothing else is said
    assert [resolve("gspo", keep="largest_abs", pruning_rate=P).k for P in (None, 0.5)] == [4, 8]
    # CPPO takes more questions in place of the pruned completions, GFPO and PODS do not
    filled = [name for name in ALGORITHMS if resolve(name).questions_per_step > 1]
    assert filled == ["cppo", "cppo_published"]
    assert resolve("pods", allocation=True).questions_per_step == 4


# --- which completions are kept ---


def test_what_each_rule_keeps():
    # A has the signs and the order of r − mean; the means are −0.225, 0.0875
    rewards = [[0.1, -3.0, 2.0, 0.0], [0.2, 0.0, -0.15, 0.3]]

    def kept(k, **options):
        return chosen(k, rewards, **options)[1]

    assert kept(2, name="grpo") == list(range(8))
    assert kept(2) == [1, 2, 6, 7]
    assert kept(1) == [1, 6]
    assert kept(2, keep="largest") == [0, 2, 4, 7]
    assert kept(2, keep="smallest_abs") == [0, 3, 4, 5]
    rewards = [[1.0, -1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]]
    assert kept(2) == [0, 1, 4, 5]
    assert kept(2, keep="pooled") == [0, 1, 2, 4]
    # of equal ones the lower index
    assert kept(2, keep="largest") == [0, 2, 4, 5]
    assert kept(2, keep="smallest_abs") == [0, 1, 5, 6]


def test_the_random_rule_takes_every_subset_about_equally_often():
    """4 completions have 6 subsets of 2. Of 6,000 questions, each subset gets about 1,000."""
    kept = KEEP["random"].function(a_rollout(torch.zeros(6000, 4)), torch.zeros(6000, 4), 2)
    subsets = Counter(map(tuple, (kept.view(6000, 2) % 4).tolist()))
    assert len(subsets) == 6 and min(subsets.values()) > 850 and max(subsets.values()) < 1150


def test_the_random_rule_draws_k_of_each_question_by_the_rollouts_seed():
    A = torch.zeros(8, 8)
    rule = KEEP["random"].function
    draws = [rule(a_rollout(A, seed=seed), A, 4).tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert [row // 8 for row in draws[0]] == [q for q in range(8) for _ in range(4)]


def test_gfpo_and_pods_take_the_advantages_over_kept_completions():
    rewards, lengths = [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]], [[9, 2, 4, 8], [5, 6, 7, 1]]
    advantages, kept = chosen(2, rewards, lengths, name="gfpo")
    assert kept == [1, 2, 4, 7]  # the shortest
    expected = retained_advantages(torch.tensor(rewards), torch.tensor([[1, 2], [0, 3]]))
    torch.testing.assert_close(advantages, expected)
    # reward per token
    assert chosen(2, rewards, lengths, name="gfpo", keep="efficiency")[1] == [0, 2, 4, 7]
    advantages, kept = chosen(2, rewards, lengths, name="pods", pruning_rate=0.5)
    assert kept == [1, 2, 4, 6]  # one right and one wrong answer of each question
    expected = torch.full((2,), 2 / 2**0.5)
    torch.testing.assert_close(advantages.abs().sum(1), expected, atol=1e-3, rtol=0)


def test_weights_count_in_the_sum_and_for_gdpo_after_each_reward_is_normalised():
    rewards = seeded(2, 3, 4)
    rollout = a_rollout(rewards, reward_weights=[2.0, 0.5])
    total = 2 * rewards[0] + 0.5 * rewards[1]
    for name, expected in {
        "grpo": group_advantages(total), "lite_ppo": batch_std_advantages(total),
        "gdpo": decoupled_advantages(rewards, weights=[2.0, 0.5]),
    }.items():
        torch.testing.assert_close(resolve(name).advantages(rollout), expected)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_advantages_of_a_run_are_those_of_the_groups_of_all_devices(name, monkeypatch):
    """As if this device had the first group, and another one the second. For OVER_ALL_DEVICES
    the other one matters."""
    whole, asked = a_rollout([[1.0, 0.0], [5.0, 9.0]]), []
    first = replace(whole, rewards=whole.rewards[:, :1], lengths=whole.lengths[:1])
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(
        ranks, "gather", lambda own: asked.append(name) or [*own, whole.rewards[:, 1:]])
    _, algorithm = config_of({"algorithm": name})
    expected = resolve(name).advantages(whole)
    torch.testing.assert_close(algorithm.advantages(first), expected[:1])
    assert bool(asked) == (name in OVER_ALL_DEVICES), is_new(name, "OVER_ALL_DEVICES")("")


def test_scale_rewards_says_what_the_advantages_are_divided_by():
    rollout = a_rollout(torch.tensor([[1.0, 0, 0, 3], [2, 2, 0, 1]]))
    centred = rollout.total - rollout.total.mean(1, keepdim=True)
    expected = {"group": centred / (rollout.total.std(1, keepdim=True) + 1e-4),
                "batch": centred / (rollout.total.std() + 1e-4), "none": centred}
    for scale, advantages in expected.items():
        algorithm = resolve("cppo", scale_rewards=scale)
        torch.testing.assert_close(algorithm.advantages(rollout), advantages)
        assert algorithm.over_all_devices == (scale == "batch")


def test_token_weights_says_how_much_each_token_counts():
    """Of completions with 3 and 1 tokens, in a batch of 8 completions with 20 tokens, of 5 at
    most."""
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    lengths = torch.tensor([[3.0], [1]])
    expected = {"sequence_mean": mask / (8 * lengths), "token_mean": mask / 20,
                "constant": mask / (8 * 5)}
    for name, weights in expected.items():
        algorithm = resolve("dapo", token_weights=name)
        torch.testing.assert_close(algorithm.token_weights(mask, 8, 20, 5), weights)


def test_gfpos_adaptive_k_keeps_its_own_number_of_each_question():
    """So the advantages are taken over 4, 8 and 6 completions."""
    ks, rewards = [4, 8, 6], seeded(3, 10)
    lengths = torch.randint(1, 9, (3, 10), generator=torch.Generator().manual_seed(1))
    advantages, kept = chosen(torch.tensor(ks), rewards, lengths, name="gfpo_adaptive")
    rows = []
    for q, k in enumerate(ks):
        own, expected = lengths[q].argsort(stable=True)[:k].sort().values, torch.zeros(10)
        rows += (own + 10 * q).tolist()
        expected[own] = group_advantages(rewards[q, own][None], ddof=0)[0]
        torch.testing.assert_close(advantages[q], expected)
    assert kept == rows


def test_adaptive_k_compares_with_the_mean_rewards_of_earlier_questions():
    rollout = a_rollout([[3.0] * 16, [1.0] * 16], history=[1, 2, 3, 4])
    rows, _ = resolve("gfpo_adaptive").keep_completions(rollout, rollout.total)
    assert [(rows // 16 == q).sum().item() for q in (0, 1)] == [6, 8]


@pytest.mark.parametrize("name, keep", [
    ("gfpo", None), ("gfpo_adaptive", None), ("pods", None), ("gdpo", "shortest"),
])  # fmt: skip
def test_a_device_without_a_question_keeps_nothing_and_takes_part(name, keep):
    """GDPO compares over all devices: a device that did not take part would let the others wait for
    ever."""
    algorithm, calls = resolve(name, keep=keep), []
    own = algorithm.advantages
    algorithm = replace(algorithm, advantages=lambda rollout: calls.append(1) or own(rollout))
    rollout = a_rollout(torch.zeros(1, 0, 16))
    rows, advantages = algorithm.keep_completions(rollout, algorithm.advantages(rollout))
    assert rows.tolist() == [] and advantages.shape == (0, 16)
    assert len(calls) == (1 if algorithm.k_by_difficulty else 2)


# --- a rule of one's own ---


@pytest.mark.parametrize("returned, said", [
    ([0, 8], "each once, from 0 to 7"), ([-1, 2], "from 0 to 7"), ([2, 2], "each once"),
    ([[0], [4]], "rows of the batch"), ([0.9, 1.2, 5.7], "rows must be whole numbers"),
    (torch.tensor([False, True]), r"a mask must be \(Q, G\) or"),
    (([0, 1], [1.0, torch.nan]), "advantages of kept rows must be finite"),
    (([3, 5], torch.ones(8)), "one for each row"), (([0, 1], [1.0]), "one for each row"),
], ids=str)
def test_what_a_rule_of_ones_own_returns_is_refused_if_it_would_train_on_the_wrong_thing(
    returned, said
):
    with pytest.raises(AssertionError, match=said):
        by_rule(lambda rollout, advantages, k: returned)


def test_what_a_rule_changes_changes_nothing_in_the_step():
    A, history = torch.tensor([[1.0, -2.0, 0.5, -0.5]]), [0.5]
    rollout = a_rollout(torch.ones(1, 4), history=history)
    before = repr(rollout)

    def rule(rollout, advantages, k):
        for value in vars(rollout).values():
            if torch.is_tensor(value):
                value.copy_(value == 0)
            if isinstance(value, list):
                value.clear()
        return advantages.abs_().flatten().topk(2).indices

    rows, found = resolve("cppo", keep=rule, group_size=4).keep_completions(rollout, A)
    assert rows.tolist() == [0, 1] and found.tolist() == [[1.0, -2.0, 0.5, -0.5]]
    assert repr(rollout) == before and history == [0.5]


@pytest.mark.parametrize("values", [torch.zeros(2, 1), torch.full((2, 4), torch.nan)], ids=str)
def test_a_metric_of_ones_own_must_be_a_finite_number_for_each_completion(values):
    for changed in ({"keep": smallest(lambda rollout: values)},
                    {"advantages": lambda rollout: values[:, :2]}):  # over the kept ones
        algorithm = replace(resolve("gfpo", group_size=4, pruning_rate=0.5), **changed)
        with pytest.raises(AssertionError, match=r"must be finite numbers, \(Q, G\)"):
            algorithm.keep_completions(a_rollout(torch.zeros(2, 4)), torch.zeros(2, 4))


MASK = torch.tensor([[True, False, False, True], [False, True, False, False]])


@pytest.mark.parametrize("rows, kept", [
    ([5, 0, 3], [0, 3, 5]), ([], []), (torch.tensor([]), []), (MASK, [0, 3, 5]),
    (MASK.flatten().tolist(), [0, 3, 5]), (torch.tensor([5, 0, 3], dtype=torch.int32), [0, 3, 5])])
def test_the_rows_of_a_rule_come_in_order_and_may_be_none(rows, kept):
    found = by_rule(lambda rollout, advantages, k: rows)
    assert found.tolist() == kept and found.dtype == torch.int64


# --- several rollouts as one ---


def test_two_rollouts_joined_are_that_of_all_their_questions():
    whole = a_rollout(
        torch.arange(12.0).view(2, 3, 2), [[3, 1], [2, 2], [5, 4]], texts=list("abcdef"), seed=7,
        questions=[{"prompt": [number]} for number in range(3)], history=[0.5],
        trainable=torch.tensor([[True, True], [False, False], [True, False]]),
        tokens=torch.arange(30).view(6, 5), logp=-torch.arange(30.0).view(6, 5))
    for padded in (whole.tokens, whole.logp):  # the first rollout has 3 tokens, and 0 after them
        padded[:2, 3:] = 0

    def part(questions, rows, T, **more):
        fields = {"questions": whole.questions[questions], "texts": whole.texts[rows],
                  "rewards": whole.rewards[:, questions], **more}
        for name in ("question_numbers", "lengths", "truncated", "trainable"):
            fields[name] = getattr(whole, name)[questions]
        for name in ("tokens", "logp", "mask"):
            fields[name] = getattr(whole, name)[rows, :T]
        return replace(whole, **fields)

    one = part(slice(1), slice(2), 3, failures=1)
    two = part(slice(1, 3), slice(2, 6), 5, failures=2, seed=8)
    found = vars(join([one, two]))
    for name, expected in vars(replace(whole, failures=3, rollouts=2)).items():
        same = torch.equal if torch.is_tensor(expected) else eq
        assert same(found[name], expected), name


# --- a rollout becomes a batch ---


def minibatches_of(rows, count, numbers=(0, 1)):
    """The mini-batches of a device that keeps these rows of two questions with two completions of
    3, 1, 2 and 1 tokens."""
    rollout = a_rollout(
        torch.zeros(2, 2), [[3, 1], [2, 1]], questions=[{"prompt": [7]}, {"prompt": [8, 8]}],
        tokens=torch.arange(12).view(4, 3), logp=-torch.arange(12.0).view(4, 3),
        question_numbers=torch.tensor(numbers))
    advantages = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    algorithm = resolve("grpo", minibatches=count)
    return split_into_mini_batches(rollout, advantages, torch.tensor(rows), algorithm, 48)


def cut(batch, max_tokens, can_share_prefix=True):
    """[(rows, lengths) of each micro-batch]"""
    policy = Policy(torch.nn.Identity(), can_share_prefix=can_share_prefix)
    return [(rows.tolist(), part.mask.sum(1).tolist())
            for rows, part in split_into_micro_batches(batch, max_tokens, policy)]


def test_a_batch_holds_the_kept_rows_with_all_that_belongs_to_them():
    """Cut to the longest of them, with the sampler's log-probabilities."""
    [batch] = minibatches_of([1, 2], 1)
    assert batch.prompts == [[7], [8, 8]]
    assert batch.tokens.tolist() == [[3, 4], [6, 7]]
    assert batch.mask.tolist() == [[True, False], [True, True]]
    assert batch.sampled_logp.tolist() == [[-3.0, -4.0], [-6.0, -7.0]]
    torch.testing.assert_close(batch.advantages, torch.tensor([0.2, 0.3]))
    torch.testing.assert_close(batch.weights, torch.tensor([[1 / 2, 0.0], [1 / 4, 1 / 4]]))
    assert cut(batch, 100) == [([1, 0], [2, 1])]
    assert cut(batch, 1) == [([1], [2]), ([0], [1])]


@pytest.mark.parametrize("rows, count, lengths", [
    ([0, 1], 2, [[3], [1]]),  # the completions of one question may be in several
    ([1, 2], 4, [[1], [2]]),  # fewer completions than mini-batches make fewer
    ([0, 1, 2, 3], 2, [[3, 1], [2, 1]]),
])  # fmt: skip
def test_a_batch_is_cut_into_mini_batches(rows, count, lengths):
    assert [batch.mask.sum(1).tolist() for batch in minibatches_of(rows, count)] == lengths


def test_a_mini_batch_is_cut_in_the_order_of_the_questions_of_all_devices(monkeypatch):
    """Here another device has the first and the third question, and this device the second and the
    fourth."""
    monkeypatch.setattr(ranks, "gather", lambda numbers: [*numbers, 0, 1, 4, 5])
    monkeypatch.setattr(
        ranks, "all_reduce", lambda device, sums: {name: n + 2 for name, n in sums.items()}
    )
    first, second = minibatches_of([0, 1, 2, 3], 2, numbers=(1, 3))
    assert first.prompts == [[7], [7]] and second.prompts == [[8, 8], [8, 8]]
    assert first.weights.sum().item() == 2 / 4  # 2 of the 4 completions of all devices


# --- completions that may not be trained on ---


@pytest.mark.parametrize("rule", [rule for rule in KEEP if rule != "all"])
def test_completions_that_may_not_be_trained_on_take_no_place_of_another(rule):
    """The wrong ones are cut off. Without this, the largest |A| would keep them alone, and nothing
    would be trained on."""
    truncated = torch.tensor([[False] * 6 + [True] * 2] * 2)
    lengths = torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2]] * 2)
    rollout = a_rollout((~truncated).float(), lengths, trainable=~truncated)
    algorithm = resolve("grpo", keep=rule, pruning_rate=0.75, group_size=8)
    rows, _ = algorithm.keep_completions(rollout, algorithm.advantages(rollout))
    assert len(rows) == 4 and not truncated.flatten()[rows].any()
    # fewer than k: those that there are
    few = replace(rollout, trainable=torch.tensor([[False] * 7 + [True]] * 2))
    assert algorithm.keep_completions(few, algorithm.advantages(few))[0].tolist() == [7, 15]


def test_one_advantage_for_a_whole_group_is_refused():
    """Of shape (Q, 1) it would say that each group has 1 completion."""
    rollout = a_rollout(torch.zeros(2, 4))
    for wrong in (torch.zeros(2, 1), torch.full((2, 4), torch.nan)):
        with pytest.raises(AssertionError, match=r"\(Q, G\)"):
            resolve("grpo", group_size=4).keep_completions(rollout, wrong)


# --- rules that say how much each kept completion counts ---


def test_a_rule_may_return_the_advantages_of_its_rows():
    A = torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.0, 2.0, -2.0, 0.5]])
    rule = lambda rollout, advantages, k: ([6, 0], [7.0, 9.0])
    rows, advantages = resolve("cppo", keep=rule, group_size=4).keep_completions(
        a_rollout(torch.zeros(2, 4)), A
    )
    assert rows.tolist() == [0, 6]
    assert advantages.tolist() == [[9.0, -1.0, 0.5, 0.0], [0.0, 2.0, 7.0, 0.5]]
    assert A[0, 0] == 1.0  # what the rule was given stays as it is


@pytest.mark.parametrize("rule", [KEEP["unbiased"].function, half_of_each_sign])
def test_what_is_drawn_with_chances_is_right_on_average(rule):
    """Σ over the kept of A' f / k is on average Σ over all of A f / G, whatever f a completion has
    (its score / |o|). Only 2 completions of the last question have an advantage other than 0."""
    rewards = (torch.arange(16) < torch.tensor([[1], [5], [8], [15], [16], [1]])).float()
    rewards[5, 2:] = 0.5
    A, f, k, found = group_advantages(rewards), seeded(6, 16), 4, []
    for seed in range(1000):
        rows, own = rule(SimpleNamespace(seed=seed, trainable=torch.ones(6, 16).bool()), A, k)
        assert len(rows) == 6 * k
        found.append(torch.zeros(96).index_copy(0, rows, own).view(6, 16).mul(f).sum(1) / k)
    found = torch.stack(found)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - (A * f).mean(1)).abs() <= 4 * error + 1e-6).all()
