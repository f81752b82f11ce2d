"""engine/run/duration.py: the time of a run against sums by hand, published speeds of sampling, and
the seconds in CPPO's paper."""

from pathlib import Path

import pytest

from engine.run.config import config_of
from engine.run.duration import GB, GPUS, SHARES, gpus_of, length_of_run, step_seconds
from engine.run.plan import plan

A100 = next(gpu for gpu in GPUS if gpu.name == "A100" and gpu.memory == 80)


def planned(size="1.5B", **given):
    """The Plan of CPPO's published setting with vLLM, unless other options are given."""
    usual = {"plan": 80.0, "model": f"Qwen/Qwen2.5-{size}", "dataset": "gsm8k", "shard": "full",
             "algorithm": "cppo_published", "pruning_rate": 0.875, "mu": 2, "beta": 0.04,
             "rollout": "vllm"}
    return plan(config_of(usual | given)[0].options, devices=1)


def test_a_step_by_hand():
    """Eight questions of 512 + 1,024 tokens, 128 completions, two of each 16 kept, at half of an
    A100's speed."""
    N = 1_543_714_304
    half = 156e12, 1.0195e12
    prompts = 2 * N * 8 * 512 / half[0]
    cache = 28 * 2 * 2 * 128 * 2  # layers, keys and values, 2 heads of 128, 2 bytes
    token = (2 * N + 128 * (512 + 512) * cache) / half[1]  # on average half of 1,024 tokens
    update = (6 * 2 + 2) * N * (8 * 512 + 16 * 1024) / half[0]
    expected = prompts + 1024 * token + update
    assert step_seconds(planned(), A100, 0.5) == pytest.approx(expected, rel=1e-9)


def test_more_work_takes_longer():
    def seconds(share=0.25, length=1.0, **given):
        return step_seconds(planned(**given), A100, share, length)

    usual = seconds()
    assert seconds(share=0.125) == pytest.approx(2 * usual)
    assert usual / 10 < seconds(length=0.25) < usual / 4  # the cache is shorter, too
    N, tokens, speed = 1_543_714_304, 8 * 512 + 16 * 1024, 0.25 * 312e12
    assert usual - seconds(mu=1) == pytest.approx(6 * N * tokens / speed)
    assert usual - seconds(beta=0.0) == pytest.approx(2 * N * tokens / speed)
    assert usual == seconds(beta=0.0, stop_kl=0.5)
    # PPO updates two networks, and keeps all completions of its one question
    ppo, grpo = (seconds(algorithm=name, pruning_rate=0.0, mu=2, beta=0.04)
                 for name in ("ppo", "grpo"))
    assert ppo - grpo == pytest.approx(12 * N * (512 + 16 * 1024) / speed)


def test_many_rows_are_bound_by_their_operations():
    """100 questions, 1,600 rows, on a GPU whose memory takes no time."""
    p = planned(questions_per_step=100, pruning_rate=0.0, mu=1, beta=0.0)
    rows, N = 1600, 1_543_714_304
    sampling = 2 * N * (100 * 512 + rows * 1024)
    update = 6 * N * (100 * 512 + rows * 1024)
    found = step_seconds(p, A100._replace(bandwidth=1e30), 1.0)
    assert found == pytest.approx((sampling + update) / 312e12)


@pytest.mark.parametrize("size, transformers, vllm", [
    ("0.5B", 47.40, 311.55), ("1.5B", 39.68, 183.33),
])
def test_sampling_one_completion_is_as_fast_as_published(size, transformers, vllm):
    """Qwen2.5's speed benchmark: tokens per second of one completion of 2,048 on an A100 80 GB,
    prompt of 1 token. vLLM reaches 15 % (0.5B) and 28 % (1.5B) of the bandwidth: in a small model
    it is not the bandwidth alone that binds."""
    one = {"group_size": 2, "questions_per_step": 1, "max_prompt_tokens": 1, "max_new_tokens": 2048,
           "pruning_rate": 0.0}

    def tokens_per_second(share, rollout):
        p = planned(size, rollout=rollout, **one)
        p.options.group_size, p.options.mu, p.options.beta = 1, 0, 0.0  # nothing but sampling
        return 2048 / step_seconds(p, A100, share)

    assert tokens_per_second(0.45, "own") == pytest.approx(transformers, rel=0.03)
    shares = {"0.5B": 0.15, "1.5B": 0.28}
    assert tokens_per_second(shares[size], "vllm") == pytest.approx(vllm, rel=0.05)


PAPER = [  # size, P, devices that train, questions of the data set, seconds (2503.22342, version 1)
    ("1.5B", 0.0, 1, 7473, 23393), ("1.5B", 0.5, 1, 7473, 12930), ("1.5B", 0.75, 1, 7473, 7159),
    ("1.5B", 0.875, 1, 7473, 4781), ("1.5B", 0.9375, 1, 7473, 2813),
    ("7B", 0.0, 3, 7500, 33902), ("7B", 0.5, 3, 7500, 20550), ("7B", 0.75, 3, 7500, 12959),
    ("7B", 0.875, 3, 7500, 9657), ("7B", 0.9375, 3, 7500, 8375),
]


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("size, P, devices, questions, seconds", PAPER)
def test_the_papers_seconds_lie_within_the_calculated(size, P, devices, questions, seconds):
    """The paper does not name its GPUs of 80 GB, nor the lengths. An A100 is taken, and lengths
    between a quarter of what is allowed and all of it: a wide range, and the paper is in it."""
    p = planned(size, pruning_rate=P, plan=200.0)
    steps = length_of_run(p.options, questions, p.questions * devices)
    fastest = steps * step_seconds(p, A100, max(SHARES), 0.25)
    slowest = steps * step_seconds(p, A100, min(SHARES), 1.0)
    print(f"{size}, P = {P}: {fastest:,.0f} to {slowest:,.0f} s, measured {seconds:,} s")
    assert fastest < seconds < slowest
    if P in (0.0, 0.875):  # the table of the docs
        for page in ("gpus.md", "zh/gpus.md"):
            text = (DOCS / page).read_text()
            [row] = [line for line in text.splitlines() if line.endswith(f"| {seconds:,} |")]
            assert f"| {fastest:,.0f} " in row and f" {slowest:,.0f} |" in row


def test_steps_are_counted_as_a_run_counts_them():
    options = planned().options
    assert length_of_run(options, 7473, 8) == 935
    options.epochs, options.steps = 0.5, 100
    assert length_of_run(options, 7473, 8) == 100
    assert length_of_run(options, 7473, 64) == 59


@pytest.mark.parametrize("memory, names", [
    (80, ["A100", "H100"]), (85.0, ["A100", "H100"]), (150.1, ["H200"]), (25.3, ["RTX 4090"]),
    (40, ["A100"]), (12, []), (60, []),
])
def test_a_gpu_is_known_by_its_memory(memory, names):
    assert [gpu.name for gpu in gpus_of(memory * GB)] == names
