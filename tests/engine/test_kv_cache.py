"""The cache with room: it gives what a pass without a cache gives, also beside layers of another
kind, and copies little."""

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from engine.model.kv_cache import give_room, keep_rows
from engine.model.sampling import Sampling, sample

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}
MODELS = {
    "Gemma3": SMALL | {
        "sliding_window": 6, "query_pre_attn_scalar": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Lfm2": SMALL | {"full_attn_idxs": [1]},  # a state of the last tokens in layer 0
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15, 16], [17, 18, 19, 20, 21]]


def make(name):
    """A model of this family with random weights, large enough that its tokens differ."""
    torch.manual_seed(0)
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8) if p.dim() == 2 else None
    return model


def draw(model, prompts=PROMPTS, new_tokens=20, stop_ids=(3, 4, 5, 6)):
    return sample(
        model, prompts, 4, Sampling(new_tokens), stop_ids=list(stop_ids), pad_id=0,
        generator=torch.Generator().manual_seed(1),
    )


@pytest.mark.parametrize("name", MODELS)
def test_logp_is_that_of_a_pass_without_a_cache(name):
    model = make(name)
    drawn = draw(model)
    for i, (tokens, n) in enumerate(zip(drawn.tokens, drawn.lengths)):
        prompt = torch.tensor(PROMPTS[i // 4])
        with torch.no_grad():
            logits = model(torch.cat([prompt, tokens[:n]])[None]).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, tokens[:n, None]).squeeze(-1)
        torch.testing.assert_close(logp, drawn.logp[i, :n], rtol=1e-3, atol=1e-4)


def filled(rows=3, length=4, repeats=2, longest=11):
    cache = DynamicCache()
    x = torch.randn(2, rows, 2, length, 5)
    cache.update(*x, 0)
    give_room(cache, rows, repeats, longest)
    return cache, x.repeat_interleave(repeats, 1)


@pytest.mark.parametrize("kept", [[0, 2, 5], [3, 4, 5], [5], [0, 1, 2, 3, 4, 5]])
def test_tokens_are_appended_in_place_to_the_rows_that_stay(kept):
    cache, expected = filled()
    layer = cache.layers[0]
    addresses = [room.data_ptr() for room in layer.rooms]
    for _ in range(2):
        new = torch.randn(2, 6, 2, 1, 5)
        expected = torch.cat([expected, new], 3)
        for seen, x in zip(cache.update(*new, 0), expected):
            assert torch.equal(seen, x)
    order = keep_rows(cache, torch.tensor(kept), "cpu")
    assert sorted(order.tolist()) == kept
    new = torch.randn(2, len(kept), 2, 1, 5)
    for seen, x in zip(cache.update(*new, 0), torch.cat([expected[:, order], new], 3)):
        assert torch.equal(seen, x)
    assert [room.data_ptr() for room in layer.rooms] == addresses
    assert cache.get_seq_length() == 7
