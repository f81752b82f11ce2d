"""The cache with room: it gives what a pass without a cache gives, also beside layers of another
kind, and copies little."""

from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicCache

from engine.model.contract import Sampling
from engine.model.decoding import Rows
from engine.model.kv_cache import Place, RoomyLayer
from engine.model.sampling import Sampler
from tests.engine.graphs import graphs_on_a_cpu
from tests.engine.test_logprobs import make
from tests.training import at_pace, completion_logprobs

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15, 16], [17, 18, 19, 20, 21]]


@pytest.mark.parametrize("habits", [{}, {"columns": 16, "records": True}])
@pytest.mark.parametrize("kind", ["mistral, sliding window", "lfm2", "bloom", "gpt2"])
def test_logp_is_that_of_a_pass_without_a_cache(kind, habits, monkeypatch):
    """Also with the habits of a GPU. Only the steps of GPT-2 can be recorded."""
    at_pace(monkeypatch, **habits)
    graphs = graphs_on_a_cpu(monkeypatch)
    model = make(kind)
    sampler = Sampler(model, SimpleNamespace(eos_token_id=3, pad_token_id=0))
    sampler.stop_ids = [3, 4, 5, 6]
    drawn = sampler.sample(PROMPTS, 4, Sampling(20), seed=1)
    assert len(set(drawn.lengths.tolist())) > 3
    assert bool(graphs) == (kind == "gpt2" and bool(habits))
    prompts = [prompt for prompt in PROMPTS for _ in range(4)]
    with torch.no_grad():
        logp = completion_logprobs(
            model, prompts, drawn.tokens, drawn.mask, shares_prompts=False)
    assert logp.std() > 0.3  # the tokens differ
    torch.testing.assert_close(logp, drawn.logp, rtol=1e-3, atol=1e-4)


def filled(rows=6, length=4, room=11):
    cache = DynamicCache()
    x = torch.randn(2, rows, 2, length, 5)
    cache.update(*x, 0)
    place = Place(torch.tensor([length]), length)
    cache.layers[0] = RoomyLayer(cache.layers[0], room, place)
    return cache, place, x


def append(cache, place, new):
    """The keys and values that are seen after one more token."""
    place.width += 1
    seen = cache.update(*new, 0)
    place.column += 1
    return seen


@pytest.mark.parametrize("kept", [[0, 2, 5], [3, 4, 5], [5], [0, 1, 2, 3, 4, 5]])
def test_tokens_are_appended_in_place_to_the_rows_that_stay(kept):
    cache, place, expected = filled()
    layer = cache.layers[0]
    addresses = [layer.all_keys.data_ptr(), layer.all_values.data_ptr()]
    for _ in range(2):
        new = torch.randn(2, 6, 2, 1, 5)
        expected = torch.cat([expected, new], 3)
        for seen, x in zip(append(cache, place, new), expected):
            assert torch.equal(seen, x)
    rows = SimpleNamespace(cache=cache, tokens=torch.zeros(1), mask=None)
    for name in ("number", "position", "newest", "ended"):
        setattr(rows, name, torch.arange(6))
    Rows.keep(rows, torch.tensor(kept))
    order = rows.number
    assert sorted(order.tolist()) == kept and torch.equal(rows.ended, order)
    new = torch.randn(2, len(kept), 2, 1, 5)
    for seen, x in zip(append(cache, place, new), torch.cat([expected[:, order], new], 3)):
        assert torch.equal(seen, x)
    assert [layer.keys.data_ptr(), layer.values.data_ptr()] == addresses
    assert cache.get_seq_length() == 7
