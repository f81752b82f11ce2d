"""What cutting by prompts promises: each completion once, and no pass above the limit."""

import random

import pytest

from allocate import micro_batches
from engine.model.cutting import (
    Prompt,
    forward_cost,
    micro_batches_by_prompt,
    question_by_question,
)
from engine.model.pace import PACES


@pytest.mark.parametrize("prompts, lengths, cost", [
    # padding of prompts and of completions counts
    ([300, 300, 200, 200], [10, 4, 2, 30], (2 * 300 + 4 * 30 + 4 * 330 // 8, True)),
    ([1, 2], [5, 1], (2 * 6, False)),  # the longest row, twice
    ([12] * 16, [14] * 16, (12 + 16 * 14 + 16 * 26 // 8, True)),  # as dear: 416 − 128
    # 16 completions of the toy: two passes save about 100 tokens, too few to pay
    ([14] * 16, [36] * 16, (16 * 50, False)),
])
def test_what_two_passes_cost_by_hand(prompts, lengths, cost):
    """prompts: the tokens of each. Those with equally many are equal."""
    rows = range(len(prompts))
    assert forward_cost([Prompt(n, n) for n in prompts], lengths, rows, second_pass=128) == cost


def groups(seed):
    """(prompts, lengths) of a few questions with different numbers of completions, shuffled."""
    rng = random.Random(seed)
    rows = []
    for question in range(rng.randint(1, 6)):
        prompt = Prompt(question, rng.randint(1, 60))
        rows += [(prompt, rng.choice([0, 1, rng.randint(1, 80)])) for _ in range(rng.randint(1, 9))]
    rng.shuffle(rows)
    return [prompt for prompt, _ in rows], [length for _, length in rows]


@pytest.mark.parametrize("second_pass", [0, 256])
@pytest.mark.parametrize("seed", range(60))
def test_the_cheaper_cut_is_taken_and_holds_every_completion_once(seed, second_pass):
    prompts, lengths = groups(seed)
    whole = [prompt.tokens + n for prompt, n in zip(prompts, lengths)]
    for max_tokens in (1, 100, 400, 3000):
        by_question = question_by_question(prompts, lengths, max_tokens, second_pass)
        longest = [max(lengths[i] for i in rows) for rows in by_question]
        assert longest == sorted(longest, reverse=True)  # what may not fit comes first
        costs = {}
        for cut in (micro_batches(whole, max_tokens), by_question):
            assert sorted(sum(cut, [])) == [*range(len(lengths))]
            cost = 0
            for rows in cut:
                tokens, twice = forward_cost(prompts, lengths, rows, second_pass)
                assert tokens <= max_tokens or len(rows) == 1
                cost += tokens + twice * second_pass
            costs[str(cut)] = cost
        found = micro_batches_by_prompt(prompts, lengths, max_tokens, second_pass)
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
    """prompts: the tokens of each. Those with equally many are equal."""
    prompts = [Prompt(n, n) for n in prompts]
    assert question_by_question(prompts, lengths, max_tokens, second_pass=0) == expected


def test_questions_share_a_micro_batch_if_they_fit():
    prompts = [Prompt(1, 150)] * 16 + [Prompt(2, 150)] * 16
    whole = list(range(32))
    assert micro_batches_by_prompt(prompts, [10] * 32, 2048, 128) == [whole]
    # on a GPU a second pass costs more: 32 rows of 160 tokens are less than 5,120 + 4,096
    _, once = forward_cost(prompts, [10] * 32, whole, PACES["cuda"].second_pass)
    assert not once
