"""What allocation promises: after pruning, more questions fill the device, and no place is wasted.

The order: how many questions fill a device, how completions are shared out to devices, and why this
matters (the bucket effect). Small cases are compared with brute force. (test_copying.py shows that
the file needs neither torch nor numpy.)
"""

import math
import random
from itertools import product

import pytest

from allocate import balance, fill, micro_batches, questions_per_step, step_time

# --- how many questions fill a device: ⌊B·G / k⌋ --------------------------------------------------


@pytest.mark.parametrize("questions, group_size, k, expected", [
    (1, 16, 8, 2),
    (1, 16, 1, 16),  # the paper's 16 for CPPO with P = 0.9375
    (1, 16, 3, 5),  # rounded down: 15 of 16 places are taken
    (5, 8, 3, 13),  # 40 / 3 = 13.3, not 5 · ⌊8 / 3⌋ = 10: it is rounded only once
])
def test_the_number_of_questions_whose_kept_completions_fill_a_device(
    questions, group_size, k, expected
):
    n = questions_per_step(questions, group_size, k)
    assert n == expected and type(n) is int


@pytest.mark.parametrize("kept_counts, capacity, expected", [
    ([4, 4, 4], 8, 2),  # exact fit
    ([9, 1, 1], 8, 0),  # the first does not fit, and no later question overtakes it
    ([1, 2, 3], 100, 3),  # all fit
    ([0, 0, 3, 0, 5], 3, 4),  # a dropped group takes no place
])
def test_fill_takes_questions_in_their_order_as_long_as_they_fit(kept_counts, capacity, expected):
    assert fill(kept_counts, capacity) == expected


# --- sharing out to devices -----------------------------------------------------------------------


def loads(lengths, shares):
    return [sum(lengths[i] for i in share) for share in shares]


@pytest.mark.parametrize("lengths, parts, expected", [
    ([3, 4, 5, 6, 7], 2, [11, 14]),  # 7 | 6, then 5 joins the 6, 4 the 7, and 3 either of them
    ([1, 1, 2], 2, [2, 2]),  # in the order in which they are given it would be 1 and 3
    ([5, 7], 4, [0, 0, 5, 7]),  # with more devices than completions some get none
])
def test_balance_by_hand(lengths, parts, expected):
    assert sorted(loads(lengths, balance(lengths, parts))) == expected


@pytest.mark.parametrize("seed", range(12))
def test_balance_needs_at_most_four_thirds_of_the_best_split(seed):
    """Graham's bound for longest-first: 4/3 − 1/(3·parts). The best is found by trying all. Each
    completion is given to exactly one device."""
    rng = random.Random(seed)
    parts = rng.choice([2, 3])
    lengths = [rng.randint(0, 12) for _ in range(rng.randint(1, 9 if parts == 2 else 6))]
    shares = balance(lengths, parts)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    best = math.inf
    for split in product(range(parts), repeat=len(lengths)):
        busy = [sum(n for n, part in zip(lengths, split) if part == p) for p in range(parts)]
        best = min(best, max(busy))
    bound = (4 / 3 - 1 / (3 * parts)) * best
    assert best <= max(loads(lengths, shares)) <= bound + 1e-9


# --- the bucket effect ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens, costs, seconds", [
    ([10, 40, 20], {}, 40.0), ([40, 10, 0], {"overhead": 1.0, "seconds_per_token": 2.0}, 81.0)])
def test_a_step_lasts_as_long_as_the_busiest_device(tokens, costs, seconds):
    assert step_time(tokens, **costs) == seconds


def test_the_same_tokens_take_less_time_if_they_are_balanced():
    lengths = [90, 80, 10, 20]
    assert step_time(loads(lengths, [[0, 1], [2, 3]])) == 170
    assert step_time(loads(lengths, balance(lengths, 2))) == 100


# --- micro-batches: each completion once, and no pass above the limit -----------------------------


def test_micro_batches_by_hand():
    lengths = [3, 10, 3, 9, 5]
    batches = [[lengths[i] for i in batch] for batch in micro_batches(lengths, 20)]
    assert batches == [[10, 9], [5, 3, 3]]  # 2 × 10, then 3 × 5


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_hold_every_completion_once_and_none_could_be_fuller(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, rng.randint(1, 200)]) for _ in range(rng.randint(1, 60))]
    max_tokens = rng.choice([1, 50, 150, 400, 10_000])
    batches = micro_batches(lengths, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert [lengths[i] for batch in batches for i in batch] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(lengths[i] for i in batch) > max_tokens
