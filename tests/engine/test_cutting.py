"""What cutting by prompts promises: each completion once, and no pass above the limit."""

import math
import random
from itertools import product

import pytest

from engine.model.cutting import best_cuts, forward_cost, micro_batches_by_prompt, two_pass_cost
from engine.model.pace import PACES


@pytest.mark.parametrize("prompts, lengths, cost", [
    # padding of prompts and of completions counts
    ([[1] * 300] * 2 + [[2] * 200] * 2, [10, 4, 2, 30],
     (2 * 300 + 4 * 30 + 4 * 330 // 8, True)),
    ([[1], [2, 2]], [5, 1], (2 * 6, False)),  # the longest row, twice
    # 16 completions of the toy: two passes save about 100 tokens, too few to pay
    ([[1] * 14] * 16, [36] * 16, (16 * 50, False)),
])
def test_what_two_passes_cost_by_hand(prompts, lengths, cost):
    assert forward_cost(prompts, lengths, range(len(prompts)), second_pass=128) == cost


def groups(seed):
    """(prompts, lengths) of a few questions with different numbers of completions, shuffled."""
    rng = random.Random(seed)
    rows = []
    for question in range(rng.randint(1, 6)):
        prompt = [question] * rng.randint(1, 60)
        rows += [(prompt, rng.choice([0, 1, rng.randint(1, 80)])) for _ in range(rng.randint(1, 9))]
    rng.shuffle(rows)
    return [prompt for prompt, _ in rows], [length for _, length in rows]


@pytest.mark.parametrize("second_pass", [0, 256])
@pytest.mark.parametrize("seed", range(60))
def test_micro_batches_by_prompt_hold_every_completion_once(seed, second_pass):
    prompts, lengths = groups(seed)
    for max_tokens in (1, 100, 400, 3000):
        batches = micro_batches_by_prompt(prompts, lengths, max_tokens, second_pass)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            cost, _ = forward_cost(prompts, lengths, batch, second_pass)
            assert cost <= max_tokens or len(batch) == 1
        longest = [max(lengths[i] for i in batch) for batch in batches]
        assert longest == sorted(longest, reverse=True)  # what may not fit comes first


@pytest.mark.parametrize("seed", range(40))
def test_no_other_way_to_cut_a_question_costs_less(seed):
    """All 2^(n − 1) ways to cut n completions, the longest first, are tried."""
    rng = random.Random(seed)
    prompt, max_tokens = [7] * rng.randint(1, 60), rng.choice([150, 300, 10_000])
    lengths = sorted((rng.randint(1, 90) for _ in range(rng.randint(1, 9))), reverse=True)

    def cost(start, end):
        two_passes = two_pass_cost(1, len(prompt), end - start, lengths[start])
        tokens, _ = forward_cost([prompt] * len(lengths), lengths, range(start, end), 0)
        return two_passes if tokens <= max_tokens or end - start == 1 else math.inf

    costs = []
    for cuts in product([False, True], repeat=len(lengths) - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        costs.append(sum(map(cost, at, at[1:])))
    pieces = best_cuts(lengths, len(prompt), max_tokens, 0)
    assert sum(cost(*piece) for piece in pieces) == min(costs)


def test_questions_share_a_micro_batch_if_they_fit():
    prompts = [[1] * 150] * 16 + [[2] * 150] * 16
    whole = list(range(32))
    assert micro_batches_by_prompt(prompts, [10] * 32, 2048, 128) == [whole]
    assert micro_batches_by_prompt(prompts, [10] * 32, 1000, 128) == [whole[:16], whole[16:]]
    # on a GPU a second pass costs more: 32 rows of 160 tokens are less than 5,120 + 4,096
    _, once = forward_cost(prompts, [10] * 32, whole, PACES["cuda"].second_pass)
    assert not once
