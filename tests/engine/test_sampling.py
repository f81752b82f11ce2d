"""Sampling: what is drawn, what leaves the batch, and that the scorer agrees with the sampler."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.contract import Sampling, stop_tokens
from engine.model.sampling import ASK_EVERY, Sampler, sample_token
from tests.examples import seeded
from tests.training import completion_logprobs


# how often the device is asked which completions have ended: as on a CPU and as on a GPU. Nothing
# below depends on it
@pytest.fixture(params=[1, 8], autouse=True)
def every(request, monkeypatch):
    monkeypatch.setitem(ASK_EVERY, "cpu", request.param)
    return request.param


PROMPTS = ["1+2+3+4+5=?", "9-8=?", "7+8-3=?"]  # of different lengths


def run(loaded, prompts=PROMPTS, group=4, seed=0, batch_size=None, places=None, **options):
    model, tokenizer = loaded
    sampling = Sampling(**{"max_new_tokens": 20, **options})
    ids = [tokenizer.encode(p) for p in prompts]
    sampler = Sampler(model, tokenizer)
    sampler.batch_size = batch_size
    return ids, sampler.sample(ids, group, sampling, seed, places)


def test_scorer_and_sampler_speak_of_the_same_policy(loaded):
    """The log-probabilities noted while sampling, from a cache and in shrinking batches, are those
    of one forward pass."""
    ids, drawn = run(loaded, group=8, temperature=0.7)
    prompts = [prompt for prompt in ids for _ in range(8)]
    scored = completion_logprobs(loaded[0], prompts, drawn.tokens, drawn.mask, temperature=0.7)
    assert_close(scored, drawn.logp, rtol=1e-4, atol=1e-5)


def test_greedy_equals_generate_of_transformers(loaded):
    ids, drawn = run(loaded, group=1, temperature=0.0)
    for prompt, tokens, length in zip(ids, drawn.tokens, drawn.lengths):
        [reference] = loaded[0].generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=20)
        assert prompt + tokens[:length].tolist() == reference.tolist()


def test_rows_that_have_ended_leave_when_the_device_is_asked(loaded, every, monkeypatch):
    rows = []
    monkeypatch.setattr(
        "engine.model.sampling.sample_token",
        lambda logits, *args: rows.append(len(logits)) or sample_token(logits, *args),
    )
    _, drawn = run(loaded, group=16, max_new_tokens=24)
    assert len(set(drawn.lengths.tolist())) > 3
    # the t-th token is drawn for those that had not ended at the last multiple of `every`
    assert rows == [(drawn.lengths > t - t % every).sum() for t in range(len(rows))]
    assert drawn.lengths.max() <= len(rows) < drawn.lengths.max() + every


def test_the_last_token_costs_no_forward_pass(loaded):
    passes = []
    loaded[0].get_input_embeddings().register_forward_hook(lambda *of_pass: passes.append(of_pass))
    run(loaded, max_new_tokens=1)
    assert len(passes) == 1  # of the prompts


def test_log_probabilities_that_are_not_finite_are_an_error(loaded):
    loaded[0].get_output_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        run(loaded)


class Answers(TorchDispatchMode):
    """Counts the operations for whose result the host would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        self.count += name in (
            "_local_scalar_dense", "nonzero", "masked_select", "equal", "multinomial", "_unique2",
        )
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 5}])
@pytest.mark.parametrize("every", [8], indirect=True)
def test_the_host_waits_for_less_than_one_answer_a_token(loaded, prompts, options):
    """If prompts are padded, transformers would ask for each token whether the mask hides
    anything."""
    loaded[0].generation_config.eos_token_id = None
    loaded[1].eos_token_id = None  # nothing ends
    with Answers() as asked:
        _, drawn = run(loaded, prompts, max_new_tokens=24, **options)
    assert drawn.truncated.all() and drawn.tokens.shape[1] == 24
    assert asked.count <= 24 / 8 + 4


def forgetful(loaded, monkeypatch, room):
    """A Sampler on a device that has memory for `room` completions of this model, and runs out of
    it after some tokens."""
    sampler, tokens = Sampler(*loaded), []

    def choose(logits, *rest):
        tokens.append(len(logits))
        if len(tokens) % 5 == 0 and len(logits) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample_token(logits, *rest)

    monkeypatch.setattr("engine.model.sampling.sample_token", choose)
    return sampler


def test_out_of_memory_halves_what_is_sampled_at_a_time_and_changes_no_completion(
    loaded, monkeypatch, capsys
):
    prompts, how = [loaded[1].encode(p) for p in PROMPTS * 3], Sampling(20)
    expected = Sampler(*loaded).sample(prompts, 4, how, 7)
    sampler = forgetful(loaded, monkeypatch, room=8)
    for _ in range(2):  # the second time it knows
        drawn = sampler.sample(prompts, 4, how, 7)
        for name in ("tokens", "lengths", "truncated", "mask"):
            assert torch.equal(getattr(drawn, name), getattr(expected, name))
        assert_close(drawn.logp, expected.logp, rtol=1e-4, atol=1e-5)
    assert sampler.batch_size == 8 and len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(torch.OutOfMemoryError):  # one question that does not fit
        forgetful(loaded, monkeypatch, room=3).sample(prompts, 4, how, 7)


def assert_each_ends_at_its_first_stop(drawn, stops, longest, pad_id):
    assert drawn.truncated.any() and not drawn.truncated.all()
    assert not drawn.logp[~drawn.mask].any()
    rows, lengths, masks = drawn.tokens.tolist(), drawn.lengths.tolist(), drawn.mask.tolist()
    for row, n, mask, truncated in zip(rows, lengths, masks, drawn.truncated):
        assert not stops & {*row[: n - 1]}
        assert truncated == (row[n - 1] not in stops)
        assert n == longest or not truncated
        assert {*row[n:]} <= {pad_id} and mask == [t < n for t in range(len(row))]


def test_completions_end_with_a_stop_token_or_are_marked_truncated(loaded):
    """Those of the generation config end one, too; padding may have the id of the EOS."""
    model, tokenizer = loaded
    model.generation_config.eos_token_id = [5, tokenizer.eos_token_id]
    tokenizer.pad_token = tokenizer.eos_token
    stops = {*stop_tokens(model, tokenizer)}
    assert stops == {5, tokenizer.eos_token_id}
    _, drawn = run(loaded, group=16, max_new_tokens=8)
    assert_each_ends_at_its_first_stop(drawn, stops, 8, tokenizer.pad_token_id)


def test_any_number_of_ranks_draws_the_same_completions(loaded):
    """They follow from the seed. Each rank knows the places of its questions among those of all."""
    _, whole = run(loaded)
    for places in ([0, 2], [1], [2, 0]):
        _, share = run(loaded, [PROMPTS[place] for place in places], places=places)
        rows = torch.tensor([place * 4 + i for place in places for i in range(4)])
        longest = share.tokens.shape[1]
        assert torch.equal(share.tokens, whole.tokens[rows, :longest])
        assert torch.equal(share.lengths, whole.lengths[rows])
    assert run(loaded, seed=1)[1].tokens.tolist() != whole.tokens.tolist()


def test_no_prompt_gives_no_completion(loaded):
    _, drawn = run(loaded, prompts=[])
    parts = [*vars(drawn).values(), drawn.texts(loaded[1])]
    assert [len(part) for part in parts] == [0] * 6


def test_a_token_is_drawn_if_the_random_number_lies_in_its_share():
    """Also for a large vocabulary, in which most tokens are so unlikely that float32 could not add
    them up."""
    logits = 2 * torch.randn(1, 50_000, generator=seeded(0))
    expected = (logits / 0.7).log_softmax(-1).squeeze(0)
    ends = expected.double().exp().cumsum(-1)
    ends = ends / ends[-1]
    middle = (ends + torch.cat([torch.zeros(1), ends[:-1]])) / 2
    some = torch.arange(0, 50_000, 97)
    token, logp = sample_token(
        logits.expand(len(some), -1), Sampling(1, temperature=0.7), middle[some])
    assert token.tolist() == some.tolist()
    assert_close(logp, expected[some])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"temperature": 0.3}])
def test_the_least_and_the_largest_random_number_draw_tokens_that_can_come(options):
    """0, and the largest number below 1. Tokens with probability 0 stand on both sides."""
    least, largest = 0.0, 1 - 2.0**-53
    nothing = torch.full((200, 1), -torch.inf)
    some = torch.randn(200, 5, generator=seeded(0))
    logits = torch.cat([nothing, some, nothing, nothing], 1)
    for u, end in ((least, 0), (largest, -1)):
        us = torch.full((200,), u, dtype=torch.float64)
        token, logp = sample_token(logits, Sampling(1, **options), us)
        allowed = logits.topk(options.get("top_k", 5)).indices.sort(-1).values
        assert logp.isfinite().all() and torch.equal(token, allowed[:, end])


@pytest.mark.parametrize("options, allowed", [
    ({"top_k": 2}, 2), ({"top_k": 1}, 1), ({"top_p": 0.5}, 1), ({"top_p": 0.7}, 2),
    ({"top_p": 0.95}, 3),
])
def test_top_k_and_top_p_draw_from_the_most_likely_only(options, allowed):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])  # softmax: 0.64, 0.24, 0.09, 0.03, 0.004
    n = 10_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    token, logp = sample_token(logits.repeat(n, 1), Sampling(1, **options), u)
    observed = torch.bincount(token, minlength=5) / n
    assert_close(
        observed[:allowed], logits[:allowed].softmax(-1), rtol=0, atol=1 / n)
    assert_close(logp, logits.log_softmax(-1)[token])  # of the model's own policy
