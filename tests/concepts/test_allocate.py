"""What allocation promises: after pruning, more questions fill the device, and no place is wasted.

The order: how many questions fill a device, how completions are shared out to devices, and why this
matters (the bucket effect). Small cases are compared with brute force. (test_copying.py shows that
the file needs neither torch nor numpy.)
"""

import random
from itertools import product

import pytest

from allocate import balance, fill, questions_per_step, step_time

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
    assert questions_per_step(questions, group_size, k) == expected


def test_one_more_question_would_not_fit():
    for questions, group_size in product(range(1, 7), range(1, 17)):
        for k in range(1, group_size + 1):
            n = questions_per_step(questions, group_size, k)
            assert n * k <= questions * group_size < (n + 1) * k
            assert type(n) is int


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


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("seed", range(5))
def test_balance_gives_every_completion_to_exactly_one_device(parts, seed):
    lengths = [random.Random(seed).randint(0, 30) for _ in range(12)]
    shares = balance(lengths, parts)
    assert len(shares) == parts
    assert sorted(i for share in shares for i in share) == list(range(12))


@pytest.mark.parametrize("seed", range(40))
def test_balance_needs_at_most_four_thirds_of_the_best_split(seed):
    """Graham's bound for longest-first: 4/3 − 1/(3·parts). The best is found by trying all."""
    rng = random.Random(seed)
    parts = rng.choice([2, 3])
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 9 if parts == 2 else 6))]

    def busiest(split):
        work = [0] * parts
        for length, part in zip(lengths, split, strict=True):
            work[part] += length
        return max(work)

    best = min(map(busiest, product(range(parts), repeat=len(lengths))))
    bound = (4 / 3 - 1 / (3 * parts)) * best
    assert best <= max(loads(lengths, balance(lengths, parts))) <= bound + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_no_device_is_behind_by_more_than_one_completion(seed):
    """The last completion of the busiest device came when that device was the least busy one."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 1000) for _ in range(64)]
    shares = balance(lengths, 8)
    work = loads(lengths, shares)
    busiest = work.index(max(work))
    assert max(work) - min(lengths[i] for i in shares[busiest]) <= min(work)


def test_with_more_devices_than_completions_some_get_none():
    assert sorted(balance([5, 7], 4)) == [[], [], [0], [1]]
    assert balance([], 2) == [[], []]


# --- the bucket effect ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, costs, seconds",
    [
        ([10, 40, 20], {}, 40.0),
        ([10], {}, 10.0),
        ([10, 40], {"seconds_per_token": 0.5}, 20.0),
        ([10, 40], {"overhead": 3.0}, 43.0),
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
