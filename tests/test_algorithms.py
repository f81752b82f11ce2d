"""algorithms.py: the table and its settings, what each rule keeps, and the advantages of several
rewards."""

import copy
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from algorithms import ALGORITHMS, KEEP, advantages_over_kept, resolve, table
from cppo import batch_rows, prune
from engine.base import ranks
from engine.base.errors import UserError
from engine.run.config import Config, fill_in, own_rule
from engine.run.options import flat
from experiments.rules import half_of_each_sign, importance, largest_abs_by_group
from family.gdpo import decoupled_advantages
from family.gfpo import retained_advantages
from grpo import group_advantages
from records import Batch, Rollout, into_minibatches, join


def a_rollout(rewards, lengths=None, reward_weights=None, **more):
    """A Rollout of rewards (Q, G), or of several (R, Q, G). lengths: (Q, G), or 1 token each."""
    rewards = torch.as_tensor(rewards)
    rewards = rewards.view(-1, *rewards.shape[-2:])
    lengths = torch.ones_like(rewards[0]) if lengths is None else torch.as_tensor(lengths)
    R, Q, G = rewards.shape
    longest = int(lengths.max())
    sampled = {
        "tokens": torch.ones(Q * G, longest, dtype=torch.long), "logp": torch.zeros(Q * G, longest),
    }
    return Rollout(**{
        "questions": [{"prompt": [1]}] * Q, **sampled, "texts": ["?"] * Q * G, "lengths": lengths.long(),
        "truncated": torch.zeros(Q, G, dtype=torch.bool), "rewards": rewards,
        "reward_names": [f"reward_{i}" for i in range(R)], "reward_weights": reward_weights or [1.0] * R, **more,
    })  # fmt: skip


def chosen(k, rewards, lengths=None, name="cppo", **options):
    """(advantages, rows) that an algorithm makes of rewards if it keeps k of each question."""
    rollout = a_rollout(rewards, lengths)
    algorithm = resolve(name, group_size=rollout.lengths.shape[1], **options)
    advantages = algorithm.advantages(rollout)
    rows = algorithm.keep(rollout, advantages, k)
    return advantages_over_kept(
        algorithm, rollout, rows
    ) if algorithm.over_kept else advantages, rows.tolist()


# --- the settings ---


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_advantages_of_each_algorithm(name):
    """Of rewards 2, 0, 1, 1: mean 1, unbiased std √⅔, the population's √½. With one reward, GDPO's
    are GRPO's over their std."""
    rewards = torch.tensor([[2.0, 0.0, 1.0, 1.0]])
    compared = (rewards - 1) / ((2 / 3) ** 0.5 + 1e-4)
    expected = {
        "drgrpo": rewards - 1, "ppo": rewards, "gdpo": compared / (compared.std() + 1e-4),
        "gfpo": (rewards - 1) / (0.5**0.5 + 1e-4),
        "gfpo_adaptive": (rewards - 1) / (0.5**0.5 + 1e-4),
    }
    torch.testing.assert_close(
        resolve(name).advantages(a_rollout(rewards)), expected.get(name, compared)
    )


def test_an_option_that_is_given_wins_over_the_row_and_a_row_over_the_function():
    grpo, gspo = resolve("grpo"), resolve("gspo")
    assert (grpo.beta, grpo.clip_low, grpo.clip_high, grpo.mu, grpo.minibatches) == (
        0.04, 0.2, 0.2, 2, 1,
    )
    assert (gspo.beta, gspo.clip_low, gspo.clip_high, gspo.minibatches) == (0.0, 3e-4, 4e-4, 4)
    assert resolve("dapo").clip_high == 0.28 and resolve("gfpo").beta == 0.001
    given = resolve("gspo", beta=0.1, clip_low=0.3, mu=5, minibatches=None)
    assert (given.beta, given.clip_low, given.clip_high, given.mu, given.minibatches) == (
        0.1, 0.3, 4e-4, 5, 4,
    )
    assert resolve("gspo").beta == 0.0  # the table stays as it is


def test_k_and_the_questions_of_a_step_follow_from_the_pruning_rate():
    cppo = resolve("cppo", questions_per_step=2)
    assert (cppo.k, cppo.questions_per_step) == (4, 8)  # ⌊2·16/4⌋
    assert (
        resolve("cppo", pruning_rate=0.9375).k == 1
        and resolve("grpo", questions_per_step=2).questions_per_step == 2
    )
    # pruning on top of another algorithm is as strong as CPPO's, if nothing else is said
    assert (
        resolve("gspo", keep="largest_abs").k == 4
        and resolve("gspo", keep="largest_abs", pruning_rate=0.5).k == 8
    )
    with pytest.raises(ValueError, match="keeps none of 16 completions"):
        resolve("cppo", pruning_rate=0.95)


def test_the_freed_places_are_filled_for_cppo_but_not_for_gfpo_and_pods():
    def questions(name="cppo", **options):
        return resolve(name, questions_per_step=1, **options).questions_per_step

    assert (
        questions() == questions("gspo", keep="largest_abs") == 4
        and questions(allocation=False) == 1
    )
    assert (
        questions("gfpo") == questions("pods") == questions("ppo") == 1
        and questions("pods", allocation=True) == 4
    )


def test_the_settings_of_ppo_and_of_gfpos_adaptive_k(small):
    def options(**given):
        config, _ = fill_in(Config.of(**given))
        return SimpleNamespace(**flat(config))

    ppo = options(algorithm="ppo")
    assert (ppo.mu, ppo.lam, ppo.beta, ppo.critic_lr) == (4, 0.95, 0.02, 1e-3)
    assert options(algorithm="ppo", model=small, dataset="gsm8k").critic_lr == 1e-5
    adaptive = resolve("gfpo_adaptive")
    assert (adaptive.k, adaptive.ks, adaptive.allocation) == (8, (4, 6, 8, 8), False)
    assert options(algorithm="gfpo_adaptive").keep == "shortest"


def test_the_table_has_a_line_for_every_algorithm():
    heading, *lines = table().splitlines()
    assert [line.split()[0] for line in lines] == list(ALGORITHMS)
    rows = {line.split()[0]: dict(zip(heading.split(), line.split())) for line in lines}
    assert (rows["cppo"]["loss"], rows["cppo"]["keep"], rows["cppo"]["pruning_rate"]) == (
        "grpo_loss", "largest_abs", "0.75",
    )
    assert (
        rows["gspo_token"]["loss"] == "gspo_loss"
        and rows["gspo"]["clip_high"] == "0.0004"
        and rows["ppo"]["mu"] == "4"
    )


# --- which completions are kept ---


def test_what_each_rule_keeps():
    # A has the signs and the order of r − mean; the means are −0.225, 0.0875
    rewards = [[0.1, -3.0, 2.0, 0.0], [0.2, 0.0, -0.15, 0.3]]

    def kept(k, **options):
        return chosen(k, rewards, **options)[1]

    assert kept(2, name="grpo") == list(range(8))
    assert kept(2) == [1, 2, 6, 7]
    assert kept(1) == [1, 6]
    assert chosen(2, [[1.0, -1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]])[1] == [0, 1, 4, 5]
    assert chosen(2, [[1.0, -1.0, 1.0, -1.0], [3.0, 0.0, 0.0, 0.0]], keep="pooled")[1] == [
        0, 1, 2, 4,
    ]
    assert kept(2, keep="largest") == [0, 2, 4, 7]
    assert kept(2, keep="smallest_abs") == [0, 3, 4, 5]
    # the same draw when a step is run again
    assert kept(2, keep="random") == kept(2, keep="random")
    assert [i // 4 for i in kept(2, keep="random")] == [0, 0, 1, 1]
    # CPPO's pruning combined with the others
    for name in ("grpo", "drgrpo", "dapo", "gspo", "gdpo"):
        assert kept(1, name=name, keep="largest_abs")[0] == 1


def test_the_random_rule_draws_by_the_rollouts_seed():
    draws = [
        KEEP["random"](a_rollout(torch.zeros(8, 8), seed=seed), torch.zeros(8, 8), 4).tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_gfpo_and_pods_take_the_advantages_over_those_they_keep():
    rewards, lengths = [[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]], [[9, 2, 4, 8], [5, 6, 7, 1]]
    advantages, kept = chosen(2, rewards, lengths, name="gfpo")
    assert kept == [1, 2, 4, 7]  # the shortest
    torch.testing.assert_close(
        advantages, retained_advantages(torch.tensor(rewards), torch.tensor([[1, 2], [0, 3]]))
    )
    torch.testing.assert_close(
        advantages[0], torch.tensor([0.0, -1.0, 1.0, 0.0]), atol=1e-3, rtol=0
    )
    # reward per token
    assert chosen(2, rewards, lengths, name="gfpo", keep="efficiency")[1] == [0, 2, 4, 7]
    advantages, kept = chosen(2, rewards, lengths, name="pods", pruning_rate=0.5)
    assert kept == [1, 2, 4, 6]  # one right and one wrong answer of each question
    torch.testing.assert_close(
        advantages.abs().sum(1), torch.full((2,), 2 / 2**0.5), atol=1e-3, rtol=0
    )


def test_weights_count_in_the_sum_and_for_gdpo_after_each_reward_is_normalised():
    rewards = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    rollout = a_rollout(rewards, reward_weights=[2.0, 0.5])
    torch.testing.assert_close(rollout.total, 2 * rewards[0] + 0.5 * rewards[1])
    torch.testing.assert_close(
        resolve("grpo").advantages(rollout), group_advantages(2 * rewards[0] + 0.5 * rewards[1])
    )
    torch.testing.assert_close(
        resolve("gdpo").advantages(rollout), decoupled_advantages(rewards, weights=[2.0, 0.5])
    )


def test_the_rule_and_not_the_algorithm_says_over_which_completions_the_advantages_are_taken():
    assert all(
        resolve("grpo", keep=rule).over_kept for rule in ("shortest", "efficiency", "max_variance")
    )
    assert (
        not resolve("gfpo", keep="largest_abs").over_kept
        and not resolve("pods", keep="all").over_kept
    )


@pytest.mark.parametrize("keep", ["shortest", "efficiency"])
def test_gfpos_adaptive_k_keeps_its_own_number_of_each_question(keep):
    """So the advantages are taken over 4, 8 and 6 completions."""
    both = torch.randint(0, 3, (2, 3, 10), generator=torch.Generator().manual_seed(0)).float()
    lengths = torch.randint(1, 9, (3, 10), generator=torch.Generator().manual_seed(1))
    advantages, kept = chosen(
        torch.tensor([4, 8, 6]), both, lengths, name="gfpo_adaptive", keep=keep
    )
    rewards = both[0] + both[1]
    metric = (lengths if keep == "shortest" else -rewards / lengths).tolist()
    own = [
        sorted(sorted(range(10), key=lambda i: metric[q][i])[:k]) for q, k in enumerate([4, 8, 6])
    ]
    assert kept == [10 * q + i for q in range(3) for i in own[q]]
    for q in range(3):
        of_kept = rewards[q, own[q]]
        expected = torch.zeros(10).scatter(
            0, torch.tensor(own[q]), (of_kept - of_kept.mean()) / (of_kept.std(correction=0) + 1e-4)
        )
        torch.testing.assert_close(advantages[q], expected)


def test_advantages_advantages_over_kept_see_the_lengths_of_the_kept():
    """For an idea such as a reward per token: rewards 1 and 6 with lengths 2 and 3, of which
    nothing is known but these two."""
    algorithm = replace(
        resolve("gfpo"), k=2, advantages=lambda rollout: rollout.total / rollout.lengths
    )
    rollout = a_rollout([[9.0, 1.0, 6.0]], [[9, 2, 3]])
    assert advantages_over_kept(algorithm, rollout, torch.tensor([1, 2])).tolist() == [[0.0, 0.5, 2.0]]


def test_adaptive_k_takes_its_numbers_from_the_row_and_its_quartiles_from_the_history():
    algorithm = replace(resolve("gfpo_adaptive"), ks=(1, 2, 3, 4))
    rollout = a_rollout([[1.0, 0.8], [0.0, 0.0], [0.4, 0.2]], history=[0.0, 0.1, 0.2, 0.3, 0.4])
    assert algorithm.how_many(rollout).tolist() == [1, 4, 1]
    assert algorithm.how_many(replace(rollout, history=[])).tolist() == [4, 4, 4]
    assert resolve("cppo").how_many(rollout) == 4


@pytest.mark.parametrize("name, keep", [("gfpo", None), ("gfpo_adaptive", None), ("pods", None), ("gdpo", "shortest")])
def test_a_device_without_a_question_keeps_nothing_and_takes_part(name, keep):
    """GDPO compares over all devices: a device that did not take part would let the others wait for
    ever."""
    algorithm, none, calls = resolve(name, keep=keep), torch.zeros(0, 16), []
    own = algorithm.advantages
    algorithm = replace(algorithm, advantages=lambda rollout: calls.append(1) or own(rollout))
    rollout = Rollout(
        [], none[:, :1].long(), none[:, :1], [], none.long(), none.bool(), none[None], ["reward"],
        [1.0],
    )
    rows = algorithm.keep(rollout, algorithm.advantages(rollout), algorithm.how_many(rollout))
    assert rows.tolist() == [] and advantages_over_kept(algorithm, rollout, rows).shape == (0, 16)
    assert len(calls) == (1 if algorithm.ks else 2)


# --- a rule of one's own ---


def by_length(rollout, advantages, k):
    return batch_rows(prune(advantages / rollout.lengths, k), advantages.shape[1])


def test_a_rule_of_ones_own_needs_no_row_of_the_table():
    """|A| / length: the long completion with the largest |A| goes, a short one with a smaller |A|
    stays."""
    rewards, lengths = [[1.0, 0.0, 0.5, 0.4], [0.0, 0.6, 0.5, 1.0]], [[90, 2, 4, 3], [5, 1, 7, 4]]
    assert chosen(1, rewards, lengths)[1] == [0, 4] and chosen(1, rewards, lengths, keep=by_length)[
        1
    ] == [1, 7]
    assert resolve("gspo", keep=by_length).k == 4 and not resolve("gspo", keep=by_length).over_kept


@pytest.mark.parametrize("rows", [
    None, "all", 3.0, [0.0, 1.0], [[0, 1], [4, 5]], [[0], [4, 5]], [None], [0, 8], [-1, 2], [2, 2],
    torch.tensor([[True] * 4] * 2), torch.ones(8).bool(),
], ids=str)  # fmt: skip
def test_a_rule_that_returns_no_rows_is_named_in_one_sentence(rows):
    rule = own_rule(lambda rollout, advantages, k: rows, "mine.py:rule")
    with pytest.raises(
        UserError,
        match="^--keep mine.py:rule must return rows of the batch, whole numbers from 0 to 7 and "
              "each once",
    ):
        rule(a_rollout(torch.zeros(2, 4)), torch.zeros(2, 4), 2)


@pytest.mark.parametrize("fail, error", [(lambda: sys.exit(0), "SystemExit: 0"), (lambda: {}["k"], "KeyError: 'k'")])
def test_a_rule_that_fails_is_one_sentence_and_so_is_sys_exit(fail, error):
    with pytest.raises(UserError, match=f"^--keep mine.py:rule failed: {error}\\.$"):
        own_rule(lambda *_: fail(), "mine.py:rule")(
            a_rollout(torch.zeros(2, 4)), torch.zeros(2, 4), 2
        )


def test_a_rule_cannot_change_the_rollout():
    def changes(rollout, advantages, k):
        rollout.rewards.zero_(), rollout.lengths.zero_(), rollout.questions[0].clear()
        rollout.texts, rollout.trainable[:] = [], False
        return [0]

    rollout = a_rollout(torch.ones(2, 4))
    rollout.questions = [{"answer": "1"}, {"answer": "2"}]
    before = copy.deepcopy(rollout)
    own_rule(changes, "mine.py:rule")(rollout, torch.zeros(2, 4), 2)
    assert all(
        torch.equal(getattr(rollout, name), getattr(before, name))
        for name in ("rewards", "lengths", "trainable")
    )
    assert rollout.questions == before.questions and rollout.texts == before.texts


@pytest.mark.parametrize("rows", [[], torch.tensor([])])
def test_a_rule_may_keep_nothing_for_example_on_a_device_without_a_question(rows):
    kept = own_rule(lambda rollout, advantages, k: rows, "mine.py:rule")(
        a_rollout(torch.zeros(2, 4)), torch.zeros(2, 4), 2
    )
    assert kept.tolist() == [] and kept.dtype == torch.int64


def test_the_rows_of_a_rule_come_in_order():
    rule = own_rule(lambda rollout, advantages, k: [5, 0, 3], "mine.py:rule")
    assert rule(a_rollout(torch.zeros(2, 4)), torch.zeros(2, 4), 2).tolist() == [0, 3, 5]


# --- several rollouts as one ---


def test_two_rollouts_joined_are_that_of_all_their_questions():
    one = a_rollout(
        [[[1.0, 0.0]], [[0.0, 2.0]]], [[3, 1]], texts=["a", "b"], failures=1, seed=7, history=[0.5]
    )
    two = a_rollout(
        torch.arange(8.0).view(2, 2, 2), [[2, 2], [5, 4]], texts=["c", "d", "e", "f"], failures=2,
        questions=[{"prompt": [2]}, {"prompt": [3]}],
        trainable=torch.tensor([[True, True], [False, False]]),
    )
    both = join([one, two])
    assert [q["prompt"] for q in both.questions] == [[1], [2], [3]] and both.texts == list("abcdef")
    assert both.rewards.tolist() == [[[1, 0], [0, 1], [2, 3]], [[0, 2], [4, 5], [6, 7]]]
    assert both.lengths.tolist() == [[3, 1], [2, 2], [5, 4]] and both.trainable.tolist() == [
        [True] * 2, [True] * 2, [False] * 2,
    ]
    # padded to the longest
    assert both.tokens.tolist() == [[1, 1, 1, 0, 0]] * 2 + [[1] * 5] * 4 and both.logp.shape == (
        6, 5,
    )
    assert (both.failures, both.rollouts, both.seed, both.history) == (3, 2, 7, [0.5])
    alone = join([one])
    assert torch.equal(alone.tokens, one.tokens) and alone.rollouts == 1


# --- a rollout becomes a batch ---


def test_truncated_completions_are_trained_on_if_nothing_else_is_said():
    truncated = torch.tensor([[True, False]])
    assert a_rollout([[1.0, 0.0]], truncated=truncated).trainable.tolist() == [[True, True]]


def batch_of(*rows):
    """The rows of a rollout of two questions with two completions of 3, 1, 2 and 1 tokens."""
    tokens, logp = torch.arange(12).view(4, 3), -torch.arange(12.0).view(4, 3)
    questions = [{"prompt": [7]}, {"prompt": [8, 8]}]
    rollout = a_rollout(
        torch.zeros(2, 2), [[3, 1], [2, 1]], questions=questions, tokens=tokens, logp=logp
    )
    return Batch.of(
        rollout, torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor(rows, dtype=torch.long)
    )


def test_a_batch_holds_the_kept_rows_with_all_that_belongs_to_them():
    """Cut to the longest of them, with the sampler's log-probabilities."""
    batch = batch_of(1, 2)
    assert batch.prompts == [[7], [8, 8]] and batch.lengths.tolist() == [1, 2]
    assert batch.tokens.tolist() == [[3, 4], [6, 7]] and batch.sampled_logp.tolist() == [
        [-3.0, -4.0], [-6.0, -7.0],
    ]
    torch.testing.assert_close(batch.advantages, torch.tensor([0.2, 0.3]))
    assert batch.old_logp is None and batch.ref_logp is None


def minibatches_of(rows, count, max_tokens=100, places=None):
    """The mini-batches of a device that keeps these rows of two questions with two completions of
    3, 1, 2 and 1 tokens."""
    model = SimpleNamespace(device=torch.device("cpu"), base_model=SimpleNamespace(), modules=list)
    rollout = a_rollout(
        torch.zeros(2, 2), [[3, 1], [2, 1]], tokens=torch.arange(12).view(4, 3),
        logp=torch.zeros(4, 3), questions=[{"prompt": [7]}, {"prompt": [8, 8]}], places=places,
    )
    advantages = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    return into_minibatches(
        rollout, advantages, torch.tensor(rows), count, max_tokens,
        SimpleNamespace(model=model, critic=None),
    )


def test_a_batch_of_fewer_completions_than_mini_batches_makes_fewer():
    assert [m.completions for m in minibatches_of([1, 2], 4)] == [
        1, 1,
    ] and batch_of().tokens.shape == (0, 0)


def test_the_completions_of_one_question_may_be_in_several_mini_batches():
    assert [m.micro_batches[0].lengths.tolist() for m in minibatches_of([0, 1], 2)] == [[3], [1]]


@pytest.mark.parametrize("max_tokens, cut", [(100, [1, 1]), (1, [2, 2])])
def test_each_mini_batch_is_cut_into_micro_batches(max_tokens, cut):
    assert [len(m.micro_batches) for m in minibatches_of([0, 1, 2, 3], 2, max_tokens)] == cut


def test_a_mini_batch_is_cut_in_the_order_of_the_questions_of_all_devices(monkeypatch):
    """Here another device has the first and the third question, and this device the second and the
    fourth."""
    monkeypatch.setattr(ranks, "gather", lambda places: [*places, 0, 1, 4, 5])
    monkeypatch.setattr(
        ranks, "all_sum", lambda counts, device: {name: n + 2 for name, n in counts.items()}
    )
    first, second = minibatches_of([0, 1, 2, 3], 2, places=torch.tensor([1, 3]))
    assert [b.prompts for b in first.micro_batches] == [[[7], [7]]] and [
        b.prompts for b in second.micro_batches
    ] == [[[8, 8], [8, 8]]]
    # the first one is only the other device's
    first, second = minibatches_of([2, 3], 2, places=torch.tensor([1, 3]))
    assert first.micro_batches[0].lengths.tolist() == [0] and second.micro_batches[
        0
    ].lengths.tolist() == [2, 1]


# --- completions that may not be trained on ---


@pytest.mark.parametrize("rule", [rule for rule in KEEP if rule != "all"])
def test_completions_that_may_not_be_trained_on_take_no_place_of_another(rule):
    """The wrong ones are cut off. Without this, the largest |A| would keep them alone, and nothing
    would be trained on."""
    rewards, truncated = (
        torch.tensor([[1.0, 1, 1, 1, 1, 1, 0, 0]] * 2),
        torch.tensor([[False] * 6 + [True] * 2] * 2),
    )
    rollout = a_rollout(
        rewards, torch.tensor([[9, 8, 7, 6, 5, 4, 3, 2]] * 2), truncated=truncated,
        trainable=~truncated,
    )
    algorithm = resolve("grpo", keep=rule, pruning_rate=0.75, group_size=8)
    rows, _ = algorithm.choose(rollout, algorithm.advantages(rollout))
    assert len(rows) == 4 and not truncated.flatten()[rows].any()
    # fewer than k: those that there are
    few = replace(rollout, trainable=torch.tensor([[False] * 7 + [True]] * 2))
    assert algorithm.choose(few, algorithm.advantages(few))[0].tolist() == [7, 15]


# --- rules that say how much each kept completion counts ---


def test_a_rule_may_return_the_advantages_of_its_rows():
    A = torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.0, 2.0, -2.0, 0.5]])
    rule = own_rule(lambda rollout, advantages, k: ([6, 0], [7.0, 9.0]), "mine.py:rule")
    rows, advantages = resolve("cppo", keep=rule, group_size=4).choose(
        a_rollout(torch.zeros(2, 4)), A
    )
    assert rows.tolist() == [0, 6] and advantages.tolist() == [
        [9.0, -1.0, 0.5, 0.0], [0.0, 2.0, 7.0, 0.5],
    ]
    assert A[0, 0] == 1.0  # what the rule was given stays as it is


@pytest.mark.parametrize("own", [[1.0], [1.0, math.nan], "ab", [[1.0], [2.0]]], ids=str)
def test_advantages_that_do_not_fit_the_rows_are_named_in_one_sentence(own):
    rule = own_rule(lambda rollout, advantages, k: ([0, 1], own), "mine.py:rule")
    with pytest.raises(
        UserError,
        match="^--keep mine.py:rule must return one finite advantage for each of its 2 rows",
    ):
        rule(a_rollout(torch.zeros(2, 4)), torch.zeros(2, 4), 2)


@pytest.mark.parametrize("rule", [importance, half_of_each_sign])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_what_is_drawn_with_chances_is_right_on_average(rule, k):
    """Σ over the kept of A' f / k is on average Σ over all of A f / G, whatever f a completion has
    (its score / |o|)."""
    rewards = (torch.arange(16) < torch.tensor([[1], [5], [8], [15], [16]])).float()
    A, f = group_advantages(rewards), torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for seed in range(3000):
        rows, own = rule(SimpleNamespace(seed=seed), A, k)
        assert len(rows) == 5 * k
        found.append(torch.zeros(80).index_copy(0, rows, own).view(5, 16).mul(f).sum(1) / k)
    found = torch.stack(found)
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - (A * f).mean(1)).abs() <= 4 * error + 1e-6).all()


def test_half_of_each_sign_keeps_as_many_right_as_wrong_ones_if_there_are_so_many():
    A = group_advantages((torch.arange(16) < torch.tensor([[1], [5], [8]])).float())
    for seed in range(20):
        rows, _ = half_of_each_sign(SimpleNamespace(seed=seed), A, 4)
        assert [(A.flatten()[rows[rows // 16 == q]] > 0).sum().item() for q in range(3)] == [
            1, 2, 2,
        ]


def test_the_mean_length_of_the_group_takes_the_place_of_the_completions_own():
    A, lengths = torch.tensor([[1.0, -1.0, 0.0, 0.0]]), torch.tensor([[2, 6, 4, 4]])
    rows, own = largest_abs_by_group(a_rollout(torch.zeros(1, 4), lengths), A, 2)
    # A |o| / 4: divided by |o| they are A / 4
    assert rows.tolist() == [0, 1] and own.tolist() == [0.5, -1.5]
