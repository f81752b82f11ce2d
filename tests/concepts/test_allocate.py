"""What allocation promises: after pruning, more questions fill the device, and no place is wasted.

The order: how many questions fill a device, how completions become micro-batches, how they are
shared out to devices, and why this matters (the bucket effect). Small cases are compared with brute
force. (test_copying.py shows that the file needs neither torch nor numpy.)
"""

import random
from itertools import product

import pytest

import allocate
from allocate import (
    balance,
    best_cuts,
    fill,
    forward_cost,
    micro_batches,
    micro_batches_by_prompt,
    questions_per_step,
    step_time,
    two_passes,
)

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


# --- micro-batches --------------------------------------------------------------------------------


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
    in_order = [lengths[i] for batch in batches for i in batch]
    assert in_order == sorted(lengths, reverse=True)  # the longest first
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
    for batch in batches[:-1]:
        assert (len(batch) + 1) * max(lengths[i] for i in batch) > max_tokens


def test_padding_counts():
    """9 + 1 + 1 tokens are fewer than 20, but three rows that are padded to 9 are 27."""
    assert micro_batches([9, 1, 1], 20) == [[0, 1], [2]]


def test_a_completion_that_is_too_long_gets_a_micro_batch_of_its_own():
    assert micro_batches([4, 50, 4], 10) == [[1], [0, 2]]


def test_no_completions_make_no_micro_batches():
    assert micro_batches([], 100) == []


# --- micro-batches of a model that computes a prompt once for all its completions
# ------------------


def test_what_two_passes_cost_by_hand():
    """GSM8K: a prompt of 180 tokens, 16 completions of 250: 4,180 tokens instead of 6,880."""
    prompts, lengths = [[1] * 180] * 16, [250] * 16
    assert forward_cost(prompts, lengths) == (4180 + 16 * (180 + 250) // 8, True)
    # with one completion of each question nothing is saved
    different = [[q] * 180 for q in range(16)]
    assert forward_cost(different, lengths) == (6880, False)


def test_padding_of_prompts_and_of_completions_counts():
    prompts = [[1] * 300, [1] * 300, [2] * 200, [2] * 200]
    assert forward_cost(prompts, [10, 4, 2, 30]) == (2 * 300 + 4 * 30 + 4 * 330 // 8, True)
    assert forward_cost([[1], [2, 2]], [5, 1]) == (2 * 6, False)  # the longest row, twice


def test_a_second_pass_has_to_save_something(monkeypatch):
    """16 completions of the toy: two passes save about 100 tokens, too few to pay."""
    prompts, lengths = [[1] * 14] * 16, [36] * 16
    assert forward_cost(prompts, lengths) == (16 * 50, False)
    monkeypatch.setattr(allocate, "SECOND_PASS", 0)
    assert forward_cost(prompts, lengths) == (14 + 16 * 36 + 100, True)


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
def test_micro_batches_by_prompt_hold_every_completion_once(seed, second_pass, monkeypatch):
    monkeypatch.setattr(allocate, "SECOND_PASS", second_pass)
    prompts, lengths = groups(seed)
    for max_tokens in (1, 100, 400, 3000):
        batches = micro_batches_by_prompt(prompts, lengths, max_tokens)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            cost, _ = forward_cost([prompts[i] for i in batch], [lengths[i] for i in batch])
            assert cost <= max_tokens or len(batch) == 1
        longest = [max(lengths[i] for i in batch) for batch in batches]
        assert longest == sorted(longest, reverse=True)  # what may not fit comes first


def cost_of(pieces, prompt, lengths):
    return sum(two_passes(1, prompt, end - start, lengths[start]) for start, end in pieces)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_way_to_cut_a_question_costs_less(seed, monkeypatch):
    """All 2^(n − 1) ways to cut n completions, the longest first, are tried."""
    monkeypatch.setattr(allocate, "SECOND_PASS", 0)
    rng = random.Random(seed)
    prompt = rng.randint(1, 60)
    lengths = sorted((rng.randint(1, 90) for _ in range(rng.randint(1, 9))), reverse=True)
    max_tokens = rng.choice([150, 300, 10_000])
    costs = []
    for cuts in product([False, True], repeat=len(lengths) - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        pieces = list(zip(at, at[1:]))
        fits = [
            end - start == 1
            or forward_cost([[7] * prompt] * (end - start), lengths[start:end])[0] <= max_tokens
            for start, end in pieces
        ]
        if all(fits):
            costs.append(cost_of(pieces, prompt, lengths))
    assert cost_of(best_cuts(lengths, prompt, max_tokens), prompt, lengths) == min(costs)


def test_a_long_prompt_keeps_completions_together_and_a_short_one_lets_them_be_cut():
    lengths = [100] * 4 + [10] * 4
    assert best_cuts(lengths, 500, 10_000) == [(0, 8)]
    assert best_cuts(lengths, 5, 10_000) == [(0, 4), (4, 8)]  # 5 tokens repeated, 360 saved


def test_questions_share_a_micro_batch_if_they_fit():
    prompts = [[1] * 150] * 16 + [[2] * 150] * 16
    whole = list(range(32))
    assert micro_batches_by_prompt(prompts, [10] * 32, 2048) == [whole]
    assert micro_batches_by_prompt(prompts, [10] * 32, 1000) == [whole[:16], whole[16:]]


def test_no_completions_make_no_micro_batches_by_prompt():
    assert micro_batches_by_prompt([], [], 100) == []


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
