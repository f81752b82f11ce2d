"""Two rewards that trade off, and the gradients of a real model: what is computed, beside hand
cases."""

import json

import pytest
import torch

from experiments import claims, claims_real, tradeoff
from experiments.gradients import scores
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


def test_the_products_are_those_of_the_gradients(loaded):
    batch, _, _ = claims.sampled(*loaded, 1, 2)
    batch = batch.rows(range(6))
    of_each = scores(loaded[0], batch)
    found, expected = claims_real.inner_products(loaded[0], batch), of_each @ of_each.T
    size = expected.diagonal().sqrt()
    # bfloat16 has 8 bits, but the errors of many weights cancel
    torch.testing.assert_close(found / size / size[:, None], expected / size / size[:, None],
                               rtol=0, atol=2e-3)


@pytest.mark.slow
def test_a_run_on_a_model_makes_the_page(small, tmp_path, monkeypatch):
    """The toy's model cannot do these word problems, so another reward pays."""
    monkeypatch.setattr(claims_real, "number_accuracy",
                        lambda texts, answer: [float(i % 3 == 0) for i, _ in enumerate(texts)])
    monkeypatch.setattr(claims_real, "FOLDER", str(tmp_path / "runs"))
    monkeypatch.setattr(claims_real, "STEPS", 4)
    claims_real.main(["--model", small, "--groups", "1", "--output", str(tmp_path)])
    figures = json.loads((tmp_path / "claims_real.json").read_text())["figures"]
    # 6 of 16 are right: |A| of a right one is 10/6 of the others', and 2 or 4 are ties among these
    assert figures["base"]["the larger |A| / the smaller"]["mean"] == pytest.approx(10 / 6)
    assert (tmp_path / "claims_real.png").exists()
