"""The cache with room: it gives what a pass without a cache gives, also beside layers of another
kind, and copies little."""

from types import SimpleNamespace

import pytest
import torch
from transformers.cache_utils import DynamicCache

from engine.model.decoding import DecodingState
from engine.model.kv_cache import CachePosition, StaticLayer
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from tests.engine.test_logprobs import make
from tests.helpers.graphs import graphs_on_a_cpu
from tests.helpers.training import at_pace, completion_logprobs

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
            model, prompts, drawn.tokens, drawn.mask, can_share_prefix=False)
    assert logp.std() > 0.3  # the tokens differ
    torch.testing.assert_close(logp, drawn.logp, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kept", [[0, 2, 5], [3, 4, 5], [5], [0, 1, 2, 3, 4, 5]])
def test_tokens_are_appended_in_place_to_the_rows_that_stay(kept):
    """Six rows of four tokens, with room for seven more."""
    cache, place = DynamicCache(), CachePosition(torch.tensor([4]), 4)
    expected = torch.randn(2, 6, 2, 4, 5)
    cache.update(*expected, 0)
    layer = cache.layers[0] = StaticLayer(cache.layers[0], 11, place)
    addresses = {layer.all_keys.data_ptr(), layer.all_values.data_ptr()}
    rows = SimpleNamespace(cache=cache, tokens=torch.zeros(1), mask=None)
    for name in ("number", "position", "newest", "ended"):
        setattr(rows, name, torch.arange(6))
    for t in range(3):
        if t == 2:
            DecodingState.keep(rows, torch.tensor(kept))
            assert sorted(rows.number.tolist()) == kept and torch.equal(rows.ended, rows.number)
        new = torch.randn(2, len(rows.number), 2, 1, 5)
        expected = torch.cat([expected[:, rows.number], new], 3)
        place.width += 1
        seen = cache.update(*new, 0)
        place.column += 1
        assert torch.equal(torch.stack(seen), expected)
    assert {each.data_ptr() for each in seen} == addresses and cache.get_seq_length() == 7
