"""What experiments/moe.py computes: the replay of the old experts, the share of changed choices,
and the bases."""

import math

import pytest
import torch

from experiments import moe
from experiments.library import toy_model
from experiments.moe import changed, in_use, moved, of_completions, scored
from records import Batch
from tests.examples import seeded

TOKENIZER = toy_model.make_tokenizer()
MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return moe.network(moe.MIXTURE, TOKENIZER)


def two_completions():
    prompts = [TOKENIZER("7+8-3=?").input_ids, TOKENIZER("1+2+9=?").input_ids]
    tokens = torch.randint(2, 22, (2, 5), generator=seeded(0))
    return Batch(prompts, tokens, MASK, torch.tensor([1.0, -1.0]))


def other_routers(model):
    """The routers' weights change, and nothing else."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                p += 0.2 * torch.randn(p.shape, generator=seeded(1))


def test_a_replay_forces_the_old_experts_and_weighs_them_by_the_new_logits(model):
    batch = two_completions()
    logp, old = scored(model, batch)
    same, again = scored(model, batch, old)
    torch.testing.assert_close(same, logp)
    other_routers(model)
    own, new = scored(model, batch)
    replay, forced = scored(model, batch, old)
    assert all(torch.equal(a, b) for a, b in zip(old, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(old, forced, strict=True))
    assert changed(torch.cat(old), torch.cat(new)) > 0.1
    # the old experts with new weights: neither the new policy nor the old one
    for one, other in ((replay, own), (replay, logp)):
        assert (one - other).abs().max() > 0.01
    # after the block the routers are free again
    torch.testing.assert_close(scored(model, batch)[0], own)


def test_the_forced_experts_are_weighed_as_transformers_weighs_them(model):
    """If the forced choices are the router's own ones in another order, nothing changes."""
    batch = two_completions()
    logp, choices = scored(model, batch)
    turned, _ = scored(model, batch, [of_layer.flip(1) for of_layer in choices])
    torch.testing.assert_close(turned, logp)


def test_the_share_of_changed_choices():
    old = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    new = torch.tensor([[1, 0], [2, 7], [0, 1], [6, 7]])  # the order does not matter
    assert changed(old, new) == 3 / 8


def test_the_choices_of_the_completions_are_those_that_predict_their_tokens():
    batch = two_completions()
    width = len(batch.prompts[0]) + 5
    position = torch.arange(2 * width)[:, None]  # in place of a choice
    found = of_completions([position, position + 100], batch)[:, 0].tolist()
    first = [len(batch.prompts[0]) - 1 + t for t in range(5)]
    second = [width + column for column in first[:3]]
    assert found == [*first, *second, *(100 + column for column in first + second)]


def test_the_experts_in_use():
    assert in_use(torch.arange(8).view(4, 2)) == pytest.approx(8)
    half = torch.tensor([[0, 1], [0, 2]])  # shares 1/2, 1/4, 1/4
    assert in_use(half) == pytest.approx(math.exp(1.5 * math.log(2)))


def test_how_far_a_policy_has_moved():
    batch = two_completions()
    old = torch.zeros(2, 5)
    logp = torch.tensor([[0.3, 0, 0, 0, 0], [-1e-4, 2e-4, 1e-4, 9, 9]]) * 1.0
    found = moved(batch, old, logp)
    assert found["tokens"].tolist() == pytest.approx([0.3, 0, 0, 0, 0, 1e-4, 2e-4, 1e-4])
    assert found["sequences"].tolist() == pytest.approx([0.06, 2e-4 / 3], rel=1e-3)
    # A = 1, −1: GRPO clips one token of five, GSPO one completion of two
    assert found["GRPO clips"].item() == pytest.approx(0.1)
    assert found["GSPO clips"].item() == pytest.approx(0.5)


def test_the_bases_differ_in_the_mlp_alone_and_have_equal_counts():
    counts, others = {}, []
    for kind in moe.KINDS:
        model = moe.network(kind, TOKENIZER)
        counts[kind] = moe.parameters(model)
        others.append({name: p.shape for name, p in model.named_parameters() if "mlp" not in name})
    assert all(other == others[0] for other in others)
    (total, active), (many, _), (dense, _), (small, _) = counts.values()
    assert dense == pytest.approx(total, rel=1e-3) and small == pytest.approx(active, rel=3e-3)
    assert many == pytest.approx(total, rel=0.02)
    # by hand: two of the eight experts of each layer are used
    assert total - active == 2 * 6 * 3 * 64 * 48
