"""Sampling through vLLM: what it is asked, and what it says it did. (Its correction:
tests/concepts/test_tis.py.)"""

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from engine.base import files, ranks
from engine.base.errors import UserError
from engine.model import vllm
from engine.model.contract import Sampling
from engine.model.vllm import VLLM
from experiments.library.toy_model import make_tokenizer
from tests.engine.runs import ROOT
from tests.engine.test_sampler import assert_each_ends_at_its_first_stop
from tests.training import completion_logprobs

pytestmark = pytest.mark.slow

PROMPTS = ["1+2+3+4+5=?", "9-8=?", "7+8-3=?"]
CLOSE = 1e-4  # two sums in float32, in different orders
LONG = "1+2+3+4+5+6+7+8+9" * 18 + "=?"  # fills blocks of the prefix cache


def config(**options):
    usual = {"plan": None, "temperature": 1.0, "lora": None, "vllm_share": 0.3, "stop": None}
    return SimpleNamespace(**usual | options)


def vllm_of(folder, tokenizer, **options):
    """The engine with these options, which only <eos> stops."""
    return VLLM(
        str(folder), tokenizer, torch.float32, config(**options),
        stop_ids=[tokenizer.eos_token_id], longest=1020, seed=0)


# what is refused before any work


@pytest.mark.parametrize("name, value", [
    ("temperature", 2.5), ("temperature", 0.001), ("lora", 4),
])  # fmt: skip
def test_what_vllm_cannot_sample_is_refused(name, value, monkeypatch):
    monkeypatch.setattr(vllm, "find_spec", lambda name: name)
    VLLM.check(config(temperature=0.7))
    with pytest.raises(UserError, match=f"--{name}"):
        VLLM.check(config(**{name: value}))
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install vllm"):
        VLLM.check(config())


@pytest.fixture
def fake(monkeypatch):
    """A vLLM that draws the tokens 5 and 6. Returns (its class, a list: of each completion that was
    asked for last, the prompt and how to sample)."""
    llm, asked = MagicMock(), []
    logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in (5, 6)]
    drawn = SimpleNamespace(token_ids=[5, 6], logprobs=logprobs, finish_reason="stop")

    def generate(requests, options, use_tqdm):
        asked[:] = zip([request["prompt_token_ids"] for request in requests], options)
        return [SimpleNamespace(outputs=[drawn]) for _ in requests]

    llm.return_value.generate = generate
    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(LLM=llm, SamplingParams=SimpleNamespace))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return llm, asked


def test_each_completion_draws_by_its_seed_its_place_and_its_number(small, fake):
    """Whichever ranks ask, and however many prompts a rank has: what a completion draws stays the
    same."""
    (llm, asked), seeds = fake, {}
    engine = vllm_of(small, make_tokenizer(), vllm_share=0.15)
    assert llm.call_args.kwargs["gpu_memory_utilization"] == 0.15
    for prompts, places in [([[3], [4], [5]], None), ([[3], [5]], [0, 2]), ([[4]], [1])]:
        drawn = engine.sample(prompts, 2, Sampling(20), 7, places)
        assert drawn.tokens.tolist() == [[5, 6]] * 2 * len(prompts) and not drawn.truncated.any()
        assert (drawn.logp == -0.5).all() and (drawn.lengths == 2).all() and drawn.mask.all()
        for i, ([prompt], how) in enumerate(asked):
            assert seeds.setdefault((prompt, i % 2), how.seed) == how.seed
    assert len({*seeds.values()}) == 6
    assert engine.sample([], 2, Sampling(20), 7).tokens.shape == (0, 1)


def test_texts_of_stop_end_a_completion(small, fake):
    """vLLM needs a tokenizer for them. Its token ids include the token that completes one."""
    (llm, asked), tokenizer = fake, make_tokenizer()
    engine = vllm_of(small, tokenizer, stop=["4"])
    assert llm.call_args.kwargs["skip_tokenizer_init"] is False
    text = tokenizer.decode([5, 6])
    drawn = engine.sample([[3]], 1, Sampling(20, stop=[text[-1]]), 7)
    [(_, how)] = asked
    assert drawn.texts(tokenizer) == [text[:-1]] and how.stop == [text[-1]]
    assert how.detokenize and how.include_stop_str_in_output


# the engine


def random_model(tokenizer, seed):
    """A Qwen2 whose attention heads are of a size that vLLM has kernels for; its answers are
    random, but far from uniform."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
            tie_word_embeddings=True, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        )
    ).eval()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """One engine for all tests, with the model that it samples from, the tokenizer, and the model's
    folder."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if torch.cuda.is_available():
        pytest.skip("exact comparisons need float32, which is what vLLM computes in on a CPU")
    folder = tmp_path_factory.mktemp("vllm")
    tokenizer = make_tokenizer()
    model = random_model(tokenizer, seed=0)
    # what a chat model ships for chatting, and must not leak in
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, 7], temperature=0.1, top_k=1, top_p=0.1,
        repetition_penalty=1.5, do_sample=True,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    engine = vllm_of(folder, tokenizer)
    yield SimpleNamespace(engine=engine, model=model, tokenizer=tokenizer, folder=str(folder))
    ranks.stop()


def run(world, prompts=PROMPTS, group=4, temperature=1.0):
    """(prompt of each completion, Completions)"""
    ids = world.tokenizer(prompts).input_ids
    drawn = world.engine.sample(ids, group, Sampling(20, temperature), seed=0)
    return [prompt for prompt in ids for _ in range(group)], drawn


def disagreement(model, prompts, drawn, temperature=1.0):
    """Largest |difference| between the log-probabilities that vLLM states and those of one forward
    pass."""
    with torch.no_grad():
        scored = completion_logprobs(
            model, prompts, drawn.tokens, drawn.mask, temperature=temperature)
    return (scored - drawn.logp).abs().max().item()


def test_stated_log_probabilities_are_the_trainers(world):
    prompts, drawn = run(world, group=8, temperature=0.7)
    assert drawn.tokens.dtype == torch.int64 and drawn.logp.dtype == torch.float32
    assert disagreement(world.model, prompts, drawn, 0.7) < CLOSE


# a tied head is missing from the first
@pytest.mark.parametrize("names", ["named_parameters", "state_dict"])
def test_refresh_samples_from_the_new_weights_alone(world, names):
    def differences(*texts):
        prompts, drawn = run(world, [*texts])
        return [disagreement(model, prompts, drawn) for model in (world.model, new)]

    new = random_model(world.tokenizer, seed=1)
    weights = dict(getattr(new, names)())
    assert differences(LONG)[0] < CLOSE  # its keys and values are in the prefix cache now
    try:
        world.engine.refresh(weights.items())
        for texts in ([LONG], PROMPTS):
            of_old, of_new = differences(*texts)
            assert of_new < CLOSE < 0.1 < of_old
    finally:
        world.engine.refresh(world.model.state_dict().items())
    assert differences(LONG)[0] < CLOSE


@pytest.mark.parametrize("stop_ids", [[1], [3, 9]])  # <eos>; others, of which <eos> is none
def test_completions_end_at_the_stop_ids_or_are_marked_truncated(world, monkeypatch, stop_ids):
    monkeypatch.setattr(world.engine, "stop_ids", stop_ids)
    monkeypatch.setattr(world.engine, "pad_id", 20)
    _, drawn = run(world, group=16)
    assert_each_ends_at_its_first_stop(drawn, {*stop_ids}, 20, 20)
    # neither the tokenizer's EOS nor the generation config's ends one
    inside = {
        token for row, n in zip(drawn.tokens.tolist(), drawn.lengths.tolist())
        for token in row[: n - 1]
    }
    assert {1, 7} - {*stop_ids} <= inside


@pytest.mark.parametrize("launcher", [
    "", "-m torch.distributed.run --standalone --nproc-per-node 2",
])
def test_a_run_samples_from_the_weights_of_its_last_update(world, tmp_path, launcher):
    """On one process, and on two that share the weights out."""
    run_dir = tmp_path / "run"
    (tmp_path / "x.jsonl").write_text('{"question": "1+2=?", "answer": "3"}\n' * 8)
    (tmp_path / "r.py").write_text(
        "def r(completions, **columns):\n    return [float(len(c) % 3) for c in completions]\n"
    )
    words = (
        f"--model {world.folder} --dataset {tmp_path}/x.jsonl --output_dir {run_dir} "
        f"--sampler vllm --algorithm drgrpo --rewards {tmp_path}/r.py:r --lr 1e-2 --warmup 0 "
        "--max_new_tokens 12 --group_size 8 --importance_weights sequence_truncate "
        f"--save_every 2 --epochs 2 --shard {'full' if launcher else 'none'}")
    for more in ("--steps 3", "--steps 5 --resume"):
        command = f"{sys.executable} {launcher} {ROOT}/train.py {words} {more}"
        subprocess.run(command.split(), check=True)
    steps = files.read(run_dir / "metrics.jsonl")
    # the update moves log-probabilities by far more than the two arithmetics differ
    assert all(step["sampler_gap_max"] < CLOSE for step in steps)
    assert max(step["kl_old"] for step in steps) > 1e-3
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert all(step["loss"] is not None for step in steps)
