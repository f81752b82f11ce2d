"""What allocation promises: after pruning, more questions fill the device, and no place is wasted.

The order: how many questions fill a device, how completions are shared out to devices, and why this
matters (the bucket effect). Small cases are compared with brute force. (test_copying.py shows that
the file needs neither torch nor numpy.)
"""

import random
from itertools import product

import pytest

from allocate import balance, fill, micro_batches, questions_per_step, step_time

# --- how many questions fill a device: ⌊B·G / k⌋ --------------------------------------------------


@pytest.mark.parametrize(
    "questions, group_size, k, expected",
    [
        (1, 16, 16, 1),  # the paper: one question per device and step for GRPO …
        (1, 16, 8, 2),
        (1, 16, 4, 4),
        (1, 16, 2, 8),
        (1, 16, 1, 16),  # … and sixteen for CPPO with P = 0.9375
        (1, 16, 3, 5),  # rounded down: 15 of 16 places are taken
        (5, 8, 3, 13),  # 40 / 3 = 13.3, not 5 · ⌊8 / 3⌋ = 10: it is rounded only once
        (4, 10, 1, 40),
    ],
)
def test_the_number_of_questions_whose_kept_completions_fill_a_device(
    questions, group_size, k, expected
):
    n = questions_per_step(questions, group_size, k)
    assert n == expected and type(n) is int
    assert n * k <= questions * group_size < (n + 1) * k  # one more would not fit


@pytest.mark.parametrize(
    "kept_counts, capacity, expected",
    [
        ([4, 4, 4], 8, 2),  # exact fit
        ([4, 4, 4], 7, 1),
        ([9, 1, 1], 8, 0),  # the first does not fit, and no later question overtakes it
        ([4, 9, 1], 8, 1),
        ([1, 2, 3], 100, 3),  # all fit
        ([1, 2, 3], 6, 3),
        ([0, 0, 3, 0, 5], 3, 4),  # a dropped group takes no place
        ([], 8, 0),
        ([1], 0, 0),
    ],
)
def test_fill_takes_questions_in_their_order_as_long_as_they_fit(kept_counts, capacity, expected):
    assert fill(kept_counts, capacity) == expected


# --- sharing out to devices -----------------------------------------------------------------------


def loads(lengths, shares):
    return [sum(lengths[i] for i in share) for share in shares]


def test_balance_by_hand():
    """7 | 6, then 5 joins the 6, 4 joins the 7, and 3 joins either of them (11 and 11)."""
    lengths = [3, 4, 5, 6, 7]
    assert sorted(loads(lengths, balance(lengths, 2))) == [11, 14]
    # in the order in which they are given it would be 1 and 3
    assert sorted(loads([1, 1, 2], balance([1, 1, 2], 2))) == [2, 2]
    # with more devices than completions some get none
    assert sorted(balance([5, 7], 4)) == [[], [], [0], [1]]


@pytest.mark.parametrize("seed", range(40))
def test_balance_needs_at_most_four_thirds_of_the_best_split(seed):
    """Graham's bound for longest-first: 4/3 − 1/(3·parts). The best is found by trying all. Each
    completion is given to exactly one device."""
    rng = random.Random(seed)
    parts = rng.choice([2, 3])
    lengths = [rng.randint(0, 12) for _ in range(rng.randint(1, 9 if parts == 2 else 6))]
    shares = balance(lengths, parts)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    splits = product(range(parts), repeat=len(lengths))
    best = min(
        max(sum(n for n, own in zip(lengths, split) if own == part) for part in range(parts))
        for split in splits)
    bound = (4 / 3 - 1 / (3 * parts)) * best
    assert best <= max(loads(lengths, shares)) <= bound + 1e-9


# --- the bucket effect ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, costs, seconds",
    [
        ([10, 40, 20], {}, 40.0),
        ([10, 40], {"seconds_per_token": 0.5}, 20.0),
        ([40, 10, 0], {"overhead": 1.0, "seconds_per_token": 2.0}, 81.0),
        ([0, 0], {"overhead": 2.0}, 2.0),
    ],
)
def test_a_step_lasts_as_long_as_the_busiest_device(tokens, costs, seconds):
    assert step_time(tokens, **costs) == pytest.approx(seconds)


def test_the_same_tokens_take_less_time_if_they_are_balanced():
    lengths = [90, 80, 10, 20]
    assert step_time(loads(lengths, [[0, 1], [2, 3]])) == 170
    assert step_time(loads(lengths, balance(lengths, 2))) == 100


# --- micro-batches: each completion once, and no pass above the limit -----------------------------


def test_micro_batches_by_hand():
    #  index:              0  1   2  3  4
    assert micro_batches([3, 10, 3, 9, 5], 20) == [[1, 3], [4, 0, 2]]  # 2 × 10, then 3 × 5


@pytest.mark.parametrize("seed", range(60))
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
