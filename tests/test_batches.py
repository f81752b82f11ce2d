"""What cutting by prompts promises: each completion once, and no pass above the limit."""

import random

import pytest

from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.prefix_sharing import SequenceCost, forward_cost
from loop.batches import by_length, cheaper_cut, question_by_question


def rows_of(prompts, lengths):
    """prompts: the tokens of each. Those with equally many are equal. lengths: of completions."""
    pairs = enumerate(zip(prompts, lengths))
    return [SequenceCost(i, tokens, tokens, n) for i, (tokens, n) in pairs]


@pytest.mark.parametrize("prompts, lengths, cost", [
    # padding of prompts and of completions counts
    ([300, 300, 200, 200], [10, 4, 2, 30], (2 * 300 + 4 * 30 + 4 * 330 // 8, True)),
    ([1, 2], [5, 1], (2 * 6, False)),  # the longest row, twice
    ([12] * 16, [14] * 16, (12 + 16 * 14 + 16 * 26 // 8, True)),  # as dear: 416 − 128
    # 16 completions of the toy: two passes save about 100 tokens, too few to pay
    ([14] * 16, [36] * 16, (16 * 50, False)),
])
def test_what_two_passes_cost_by_hand(prompts, lengths, cost):
    assert forward_cost(rows_of(prompts, lengths), second_pass=128) == cost


def groups(seed):
    """Rows of a few questions with different numbers of completions, shuffled."""
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 6)):
        prompt = rng.randint(1, 60)
        rows += [(prompt, rng.choice([0, 1, rng.randint(1, 80)])) for _ in range(rng.randint(1, 9))]
    rng.shuffle(rows)
    return rows_of(*zip(*rows))


@pytest.mark.parametrize("second_pass", [0, 256])
@pytest.mark.parametrize("seed", range(60))
def test_the_cheaper_cut_is_taken_and_holds_every_completion_once(seed, second_pass):
    rows = groups(seed)
    for max_tokens in (1, 100, 400, 3000):
        by_question = question_by_question(rows, max_tokens, second_pass)
        longest = [max(row.tokens for row in batch) for batch in by_question]
        assert longest == sorted(longest, reverse=True)  # what may not fit comes first
        costs = {}
        for cut in (by_length(rows, max_tokens), by_question):
            assert sorted(sum(cut, [])) == rows
            cost = 0
            for batch in cut:
                tokens, twice = forward_cost(batch, second_pass)
                assert tokens <= max_tokens or len(batch) == 1
                cost += tokens + twice * second_pass
            costs[str(cut)] = cost
        found = cheaper_cut(rows, max_tokens, second_pass)
        assert costs[str(found)] == min(costs.values())


FOUR = [40, 10, 10, 10]  # a cut before the second one saves 3 · 30 tokens


@pytest.mark.parametrize("prompts, lengths, max_tokens, expected", [
    # the cut saves as many tokens as the prompt has, or one more
    ([90] * 4, FOUR, 312, [[0, 1, 2], [3]]),
    ([89] * 4, FOUR, 312, [[0], [1, 2, 3]]),
    # after a cut the padding is that of the new piece: 2 · 10 tokens are no reason for another cut
    # (another question's piece would lie between the two)
    ([50, 50, 50, 50, 51], [200, 40, 30, 30, 38], 304, [[0], [1, 2, 3], [4]]),
    # a piece of 50 + 4 · 10 + 4 · 60 / 8 = 120 tokens fits, or not
    ([50] * 5, [10] * 5, 120, [[0, 1, 2, 3], [4]]),
    ([50] * 5, [10] * 5, 119, [[0, 1, 2], [3, 4]]),
])
def test_a_question_is_cut_by_hand(prompts, lengths, max_tokens, expected):
    found = question_by_question(rows_of(prompts, lengths), max_tokens, second_pass=0)
    assert [[row.number for row in rows] for rows in found] == expected


def test_questions_share_a_micro_batch_if_they_fit():
    rows = [SequenceCost(i, i // 16, 150, 10) for i in range(32)]
    assert cheaper_cut(rows, 2048, 128) == [rows]
    assert cheaper_cut(rows, 1000, 128) == [rows[:16], rows[16:]]
    # on a GPU a second pass costs more: 32 rows of 160 tokens are less than 5,120 + 4,096
    _, once = forward_cost(rows, DEVICE_DEFAULTS["cuda"].second_pass)
    assert not once
