"""Sampling: what is drawn, what leaves the batch, and that the scorer agrees with the sampler."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close

from engine.base import progress
from engine.model import shards
from engine.model.decoding import sample_token
from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling, stop_tokens
from tests.helpers.examples import seeded
from tests.helpers.graphs import Answers, graphs_on_a_cpu
from tests.helpers.training import at_pace, completion_logprobs

# the host's habits: those of a CPU, with fewer questions to the device, and those of a GPU
HABITS = {
    "cpu": {},
    "asks less": {"ask_every": 8},
    "gpu": {"ask_every": 4, "leave_at": 0.5, "columns": 16, "records": True},
}


@pytest.fixture(params=HABITS, autouse=True)
def habits(request, monkeypatch):
    """Nothing below depends on them. Returns the graphs that are recorded."""
    at_pace(monkeypatch, **HABITS[request.param])
    return graphs_on_a_cpu(monkeypatch)


@pytest.fixture
def passes(loaded):
    """How many rows the model reads in each forward pass."""
    rows = []
    loaded[0].get_input_embeddings().register_forward_hook(
        lambda module, args, out: rows.append(len(out)))
    return rows


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


@pytest.mark.parametrize("habits", ["cpu", "asks less"], indirect=True)
def test_rows_that_have_ended_leave_when_the_device_is_asked(loaded, monkeypatch):
    rows, every = [], DEVICE_DEFAULTS["cpu"].ask_every
    monkeypatch.setattr(
        "engine.model.decoding.sample_token",
        lambda logits, *args: rows.append(len(logits)) or sample_token(logits, *args),
    )
    _, drawn = run(loaded, group=16, max_new_tokens=24)
    assert len(set(drawn.lengths.tolist())) > 3
    # the t-th token is drawn for those that had not ended at the last multiple of `every`
    assert rows == [(drawn.lengths > t - t % every).sum() for t in range(len(rows))]
    assert drawn.lengths.max() <= len(rows) < drawn.lengths.max() + every


def test_the_last_token_costs_no_forward_pass(loaded, passes):
    run(loaded, max_new_tokens=1)
    assert len(passes) == 1  # of the prompts


def test_log_probabilities_that_are_not_finite_are_an_error(loaded):
    loaded[0].get_output_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        run(loaded)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 5}])
@pytest.mark.parametrize("habits", ["asks less"], indirect=True)
def test_the_host_waits_for_less_than_one_answer_a_token(loaded, prompts, options):
    """If prompts are padded, transformers would ask for each token whether the mask hides
    anything."""
    loaded[0].generation_config.eos_token_id = None
    loaded[1].eos_token_id = None  # nothing ends
    with Answers() as asked:
        _, drawn = run(loaded, prompts, max_new_tokens=24, **options)
    assert drawn.truncated.all() and drawn.tokens.shape[1] == 24
    assert asked.count <= 24 / 8 + 4


@pytest.mark.parametrize("habits", ["gpu"], indirect=True)
def test_a_gpu_records_a_step_for_each_width_and_whenever_half_of_the_rows_have_left(
    loaded, habits, passes
):
    _, drawn = run(loaded, group=16, max_new_tokens=40)
    prompts, first, *recorded = passes
    assert (prompts, first) == (3, 48)  # the first step prepares, and is not recorded
    steps = 1 + sum(graph.replays for graph in habits)
    # each is repeated until another is recorded; the last tokens are those of no completion
    assert 0 <= steps - (drawn.lengths.max() - 1) < 4
    longest = len(loaded[1].encode(PROMPTS[0]))
    running, widths, expected = 48, set(), []
    for t in range(2, steps + 1):
        going_on = int((drawn.lengths > t).sum())
        if t % 4 == 0 and going_on <= running / 2:
            running, widths = going_on, set()
        width = (longest + t - 1) // 16
        if width not in widths:
            widths.add(width)
            expected.append(running)
    assert recorded == expected and len(habits) == len(recorded) > len({*recorded}) > 1


@pytest.mark.parametrize("habits", ["gpu"], indirect=True)
def test_a_model_that_asks_the_device_is_sampled_without_a_graph_and_the_user_is_told(
    loaded, habits, capsys
):
    progress.note_once.cache_clear()
    _, expected = run(loaded)
    assert habits and "slow" not in capsys.readouterr().out
    count = len(habits)
    for _ in range(2):
        with loaded[0].get_input_embeddings().register_forward_hook(
            lambda module, args, out: out if out.sum().item() else out
        ):
            _, drawn = run(loaded)
        assert torch.equal(drawn.tokens, expected.tokens)
        assert torch.equal(drawn.logp, expected.logp)
    assert len(habits) == count
    [line] = capsys.readouterr().out.splitlines()  # once
    assert "sampling is slow" in line and "not permitted" in line


@pytest.mark.parametrize("change", ["refresh", "adapters"])
def test_after_a_refresh_and_with_adapters_the_new_weights_are_sampled(loaded, change):
    model, tokenizer = loaded
    sampler = Sampler(copy.deepcopy(model), tokenizer, copy=True)
    prompts, how = [tokenizer.encode(prompt) for prompt in PROMPTS], Sampling(20)
    before = sampler.sample(prompts, 4, how, 3)
    torch.manual_seed(0)
    if change == "adapters":
        model.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
        sampler = Sampler(model, tokenizer)
    else:
        for p in model.parameters():
            p.data.mul_(1.1)
        sampler.free_memory()
        sampler.refresh(shards.full_state_dict(model, sampler.dtype))
    drawn = sampler.sample(prompts, 4, how, 3)
    assert drawn.tokens.tolist() != before.tokens.tolist()
    rows = [prompt for prompt in prompts for _ in range(4)]
    scored = completion_logprobs(model, rows, drawn.tokens, drawn.mask)
    assert_close(scored, drawn.logp, rtol=1e-4, atol=1e-5)


def forgetful(loaded, monkeypatch, room):
    """A Sampler on a device that has memory for `room` completions of this model, and runs out of
    it after some tokens."""
    sampler, tokens = Sampler(*loaded), []

    def choose(logits, *rest):
        tokens.append(len(logits))
        if len(tokens) % 5 > 1 and len(logits) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sample_token(logits, *rest)

    monkeypatch.setattr("engine.model.decoding.sample_token", choose)
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


def test_a_completion_ends_with_the_token_that_completes_a_text_of_stop(loaded):
    """The completions are those that are sampled without it, cut off."""
    tokenizer = loaded[1]
    loaded[0].generation_config.eos_token_id = tokenizer.eos_token_id = None  # nothing else ends
    _, plain = run(loaded, max_new_tokens=60, group=8)
    texts = plain.texts(tokenizer)
    stop = [texts[0][9:14], texts[9][40:44], "never"]
    _, drawn = run(loaded, max_new_tokens=60, group=8, stop=stop)
    assert 0 < drawn.truncated.sum() < 24
    for i, text in enumerate(texts):
        ends = [n for n in range(1, 61)
                if any(s in tokenizer.decode(plain.tokens[i, :n]) for s in stop)]
        n = min(ends, default=60)
        assert drawn.lengths[i] == n and drawn.truncated[i] == (not ends)
        assert drawn.tokens[i, :n].equal(plain.tokens[i, :n])
        assert drawn.texts(tokenizer)[i] == min((text.split(s)[0] for s in stop), key=len)


def test_rows_that_a_text_ends_leave_the_batch(loaded, passes):
    loaded[0].generation_config.eos_token_id = loaded[1].eos_token_id = None
    run(loaded, max_new_tokens=60, stop=[*"0123456789=;<-+"])
    assert len(passes) <= 17  # the first look is at 16 tokens


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
    parts = [*vars(drawn).values()][:5] + [drawn.texts(loaded[1])]
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


@pytest.mark.parametrize("options", [{}, {"top_k": 3}])
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
    ({"top_k": 2}, 2), ({"top_p": 0.5}, 1), ({"top_p": 0.7}, 2),
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
