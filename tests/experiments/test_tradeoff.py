"""Two rewards that trade off: what is computed, beside hand cases."""

import pytest
import torch

from experiments import tradeoff
from rewards import toy_accuracy

THOUGHT = "<think>1+1=2;2+1=3;3+5=8;8+1=9;</think>\n<answer>{}</answer>"  # the shortest there is
TEXTS = {
    "lucky guess": "<answer>9</answer>", "wrong guess": "<answer>10</answer>",
    "right thought": THOUGHT.format(9), "wrong thought": THOUGHT.format(8),
}


def rewarded(*names):
    """One group of these kinds: (2, 1, G)."""
    texts = [TEXTS[name] for name in names]
    rewards = [toy_accuracy(texts, answer=["9"] * len(texts)), tradeoff.short(texts)]
    return torch.tensor(rewards)[:, None]


def test_each_text_is_of_its_kind_alone():
    for kind in tradeoff.KINDS:
        found = tradeoff.of_kind(rewarded(*TEXTS), kind)[0].tolist()
        assert found == [name == kind for name in TEXTS]


def test_the_sum_cannot_tell_a_wrong_guess_from_a_right_thought_and_gdpo_can():
    group = rewarded("lucky guess", "wrong guess", "wrong guess", "right thought")
    A = tradeoff.advantages_of(group, 1.0)
    # sums 2, 1, 1, 1: mean 5/4, std 1/2
    assert A["grpo"][0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)
    # right 1, 0, 0, 1: ±0.866; short 1, 1, 1, 0: 0.5 and −1.5; sums 1.366, −0.366, −0.366, −0.634
    summed = torch.tensor([1.366, -0.366, -0.366, -0.634])
    assert A["gdpo"][0].tolist() == pytest.approx((summed / summed.std()).tolist(), abs=1e-3)


def test_groups_are_one_if_they_have_the_same_advantages_in_some_order():
    assert tradeoff.different(torch.tensor([[1.0, -1, 0], [0, 1, -1], [1, 1, -2]])) == 2
