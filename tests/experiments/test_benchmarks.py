"""The benchmarks run, and what they measure holds: memory falls with k, and no tensor of logits
outgrows a chunk."""

import json
import math
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cppo import batch_rows, prune, prune_pooled
from engine.base.errors import UserError
from experiments import gpu, gradients, real, rules
from family.dapo import token_mean_weights
from family.drgrpo import constant_weights
from grpo import group_advantages, sequence_mean_weights

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(script, *words, env=None):
    command = [sys.executable, f"experiments/{script}.py", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from "
                                                                       "Linux's /proc")
def test_memory(tmp_path):
    done = run("memory", "--quick", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "memory.json").read_text())
    peak = {row["k"]: row["peak"] for row in result["points"] if row["way"] == "whole"}
    assert peak[16] > 1.5 * peak[4] and peak[4] > 1.5 * peak[1]
    chunk, watched = result["options"]["chunk_elements"], result["watched"]
    assert watched["all_tokens"] >= 8 * chunk  # there was something to cut
    assert watched["largest"] <= chunk
    # logits, logits / temperature, log-softmax; backward: log-softmax and two gradients. Never two
    # chunks of one of them
    assert watched["most"] <= 3 * chunk
    assert (tmp_path / "memory.md").read_text().startswith("# Peak memory") and (
        tmp_path / "memory.png"
    ).stat().st_size > 10_000


def test_generation(tmp_path):
    done = run("generation", "--quick", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    [point] = json.loads((tmp_path / "generation.json").read_text())["points"]
    assert set(point["ways"]) == {"dynamic", "static", "continuous", "ours"}
    assert point["tokens"]["alike"] == 16 * point["longest"] > point["tokens"]["ragged"]
    assert point["different_tokens"] > 2  # the greedy completions are no repetition of one token
    for way in point["ways"].values():
        assert way["greedy"]["same"] == 1.0
        assert all(seconds > 0 for seconds in way["alike"] + way["ragged"])
    assert "| ours |" in (tmp_path / "generation.md").read_text()


def test_prompts(tmp_path):
    done = run("prompts", "--quick", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {
        (row["case"], row["k"]): row
        for row in json.loads((tmp_path / "prompts.json").read_text())["rows"]
    }
    assert all(row[way]["seconds"] > 0 for row in rows.values() for way in ("once", "rows"))
    grpo, one = rows["short answers", 16], rows["short answers", 1]
    # a prompt of 150 tokens, and of 16 completions all tokens but the last ones; the longest
    # completion has 4 to 6
    assert grpo["once"]["tokens"] in [150 + 16 * n for n in (3, 4, 5)]
    assert grpo["once"]["bytes"] < grpo["rows"]["bytes"] / 3
    # 16 questions have one completion each: there is nothing to share
    for name in ("tokens", "bytes"):
        assert one["once"][name] == one["rows"][name]
    assert "| short answers | GRPO (16) | 1 |" in (tmp_path / "prompts.md").read_text()


def test_precision(small, tmp_path):
    done = run(
        "precision", "--model", small, "--dataset", "toy", "--rounds", 1, "--output", tmp_path
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "precision.json").read_text())["figures"]
    assert figures["ratio_max of this step"] == pytest.approx(
        {"float32": 1, "bfloat16": 1}, abs=1e-6
    )
    gap = figures["sampler_gap of this step"]
    assert gap["float32"] < 1e-5 < 1e-4 < gap["bfloat16"] < 0.02
    assert "| a step of GRPO, s |" in (tmp_path / "precision.md").read_text()


def test_gpu(tmp_path):
    """The whole script, on a tiny model; where the packages that only data, rewards and adapters
    need are absent."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules |= dict.fromkeys(['datasets', 'math_verify', 'peft'])\n"
    )
    done = run(
        "gpu", "--quick", "--output", tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    [model] = json.loads((tmp_path / "gpu.json").read_text())["models"]
    sections = model["sections"]
    assert not [row["error"] for rows in sections.values() for row in rows if "error" in row]
    [distance] = sections["exactness"]
    assert 0 < distance["sampler_max"] < 1e-4
    assert {
        (row["P"], row["allocation"]): (row["questions"], row["kept"]) for row in sections["steps"]
    } == {
        (0.0, False): (1, 16), (0.5, False): (1, 8), (0.75, False): (1, 4), (0.875, False): (1, 2),
        (0.9375, False): (1, 1), (0.5, True): (2, 16), (0.75, True): (4, 16),
        (0.875, True): (8, 16), (0.9375, True): (16, 16),
    }
    page = (tmp_path / "gpu.md").read_text()
    assert "| CPPO, P = 0.9375 | yes | 256 | 16 |" in page and "| 256 | yes |" in page


def test_what_a_gpu_is_measured_by():
    """The operations of an update are those that PyTorch counts, and one point without memory does
    not end the others."""
    subject = gpu.Subject(gpu.TINY, 512, gpu.QUICK, torch.device("cpu"))
    batch = subject.made_up(3)
    # no padding, which PyTorch would count
    batch.prompts, batch.lengths[:] = [[1] * 8] * 3, batch.tokens.shape[1]
    with FlopCounterMode(display=False) as counter:
        batch.logprobs(subject.model, 1.0).sum().backward()
    width, layers, tokens = gpu.TINY[0], gpu.TINY[2], batch.tokens.shape[1]
    attention = 3 * layers * 6 * width * (8 + tokens) ** 2  # which PyTorch does not count on a CPU
    twice = 2 * 512 * width * 3 * tokens  # the output head, computed again on the way back
    assert gpu.flops(subject.model, batch) - attention == counter.get_total_flops() - twice

    def full():
        raise torch.OutOfMemoryError

    rows = []
    gpu.run_points([({"n": 1}, full), ({"n": 2}, lambda: {"s": 3.0})], math.inf, rows.append)
    gpu.run_points([({"n": 3}, full)], 0.0, rows.append)
    assert rows == [
        {"n": 1, "error": "out of memory"}, {"n": 2, "s": 3.0},
        {"n": 3, "error": "left out: no time"},
    ]
    assert (
        gpu.table({"n": lambda r: str(r["n"]), "s": lambda r: str(r["s"])}, rows).splitlines()[2]
        == "| 1 | out of memory |"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(tmp_path):
    done = run("gpu", "--output", tmp_path)
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == "error: this benchmark needs a GPU: with --quick a CPU runs a tiny model, to see that "
           "it works."
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: pip install trl")
def test_beside_trl(tmp_path):
    done = run("vs_trl", "--quick", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "vs_trl.json").read_text())
    same = result["same_completions"]
    assert same["loss"]["ours"] == pytest.approx(same["loss"]["trl"], rel=1e-4, abs=1e-6)
    assert same["gradient_distance"] < 1e-4
    assert same["clip_fraction"] > 0 and same["kl"] > 1e-3  # the loss compared is not a trivial one
    assert result["questions_per_step"] == {"trl": 8, "trl_cppo": 64, "grpo": 8, "cppo": 64}
    assert "| ours, CPPO, P = 0.875 | 64 |" in (tmp_path / "vs_trl.md").read_text()


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed")
def test_without_trl_one_sentence_says_what_to_install(tmp_path):
    done = run("vs_trl", "--output", tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "error: this benchmark needs TRL, which is not installed: `pip install trl`."
    ]
    assert not list(tmp_path.iterdir())


def test_gradients(small, tmp_path, monkeypatch):
    monkeypatch.setattr(gradients.toy_model, "base", lambda: small)
    gradients.main(["--sets", "2", "--questions", "16", "--steps", "20", "--output", str(tmp_path)])
    tables = json.loads((tmp_path / "gradients.json").read_text())["tables"]
    assert len(tables) == 8
    for k in ("0.875", "0.75"):
        rows = tables[f"P = {k}: cosine of a step"]
        assert list(rows) == list(gradients.METHODS) and all(
            list(row) == list(gradients.DIVISORS) for row in rows.values()
        )
        assert all(
            len(sets) == 2 and max(map(abs, sets)) <= 1
            for row in rows.values()
            for sets in row.values()
        )
    assert "| largest \\|A\\| (CPPO) |" in (tmp_path / "gradients.md").read_text()


def test_the_divisors_are_those_of_the_losses_and_the_inner_products_give_the_cosine():
    generator = torch.Generator().manual_seed(0)
    A = group_advantages(torch.rand(4, 16, generator=generator))
    lengths, of_each = (
        torch.randint(1, 9, (4, 16), generator=generator), torch.randn(64, 50, generator=generator),
    )
    mask = torch.arange(48) < lengths.flatten()[:, None]
    written = {
        "1/|o|": sequence_mean_weights, "token mean": token_mean_weights,
        "constant": partial(constant_weights, max_tokens=48),
    }
    figures = gradients.measure(of_each, A, lengths.float(), 1, 0)
    for divisor, token_weights in written.items():
        halves = [
            A[half].flatten() * token_weights(mask.view(4, 16, 48)[half].flatten(0, 1))[:, 0]
            for half in (slice(2), slice(2, 4))
        ]
        own, other = halves[0] @ of_each[:32], halves[1] @ of_each[32:]
        if divisor == "token mean":  # of GRPO's steps, one question each
            other = sum(A[q] / lengths[q].sum() @ of_each[16 * q : 16 * q + 16] for q in (2, 3))
        # the step has both questions of its half
        cosine = figures["P = 0.875: cosine of a step", gradients.ALL, divisor]
        assert cosine == pytest.approx(torch.cosine_similarity(own, other, dim=0).item(), abs=1e-4)
    rows = batch_rows(prune(A, 2), 16)  # only the kept ones count
    kept = gradients.step_weights(
        gradients.CPPO, 2, "token mean", A[None], lengths[None].float(), None
    ).flatten()
    torch.testing.assert_close(kept[rows], A.flatten()[rows] * token_mean_weights(mask[rows])[:, 0])
    assert kept.count_nonzero() == 8
    group = gradients.step_weights(
        "random", 16, "group's mean", A[None], lengths[None].float(), generator
    )
    assert group[0, 0, 3] == pytest.approx(A[0, 3] / lengths[0].float().mean() / 64)


@pytest.mark.parametrize("name", ["importance, weighted", "half of each sign, weighted", "random"])
def test_the_mean_of_many_draws_is_the_gradient_of_all(name):
    right = torch.arange(16) < torch.tensor([1, 5, 8, 15])[:, None]
    A = group_advantages(right.float())
    for k in gradients.KEPT:
        times, advantages = gradients.METHODS[name](
            A.expand(20_000, 4, 16), k, torch.Generator().manual_seed(0)
        )
        drawn = times * advantages
        assert (times.sum(2) == k).all()
        assert ((drawn.mean(0) - A * k / 16).abs() <= 5 * drawn.std(0) / 20_000**0.5 + 1e-6).all()


def test_what_the_other_rules_keep():
    A = group_advantages((torch.arange(16) < torch.tensor([1, 5, 15, 0])[:, None]).float())[None]
    times, kept = gradients.half_of_each_sign(A, 4, torch.Generator().manual_seed(0))
    assert times[A > 0].sum() == 1 + 2 + 3 and (times.sum(2) == 4).all() and torch.equal(kept, A)
    times, _ = gradients.pooled(A, 2, None)
    assert times.flatten().nonzero().flatten().tolist() == prune_pooled(A[0], 8).tolist()
    times, advantages = gradients.minus_their_mean(A, 2, None)
    kept = times * advantages
    torch.testing.assert_close(kept.sum(2), torch.zeros(1, 4))
    # two right ones: nothing is left
    assert (kept[0, 0] != 0).sum() == 2 and (kept[0, 1].abs() < 1e-6).all()


def test_one_of_each_kind():
    A = torch.tensor([[0.5, -1.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [-0.2, 0.1, 0.4, -0.3]])
    assert rules.distinct(None, A, 2).tolist() == [0, 1, 4, 10, 11]
    assert rules.distinct(None, A, 3).tolist() == [0, 1, 4, 8, 10, 11]


@pytest.mark.parametrize(("plan", "other"), [([], "CPPO, P=0.875"), (["--second"], "published, "
                                                                                   "P=0.5")])
def test_a_run_on_a_real_model_has_the_same_seconds_whatever_the_method(
    plan, other, small, tmp_path, monkeypatch
):
    monkeypatch.setattr(real, "AT", (0.5, 1.0))
    monkeypatch.setattr(real, "EVAL_QUESTIONS", 3)
    words = ["--model", small, "--seeds", "1", "--methods", "GRPO", other, *plan]
    words += ["--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "page")]
    second = "_second" if plan else ""
    real.main(words)
    files = sorted((tmp_path / f"runs{second}").iterdir())
    assert {path.name for path in files} == {
        other.replace(", ", "-") + "-seed-1.json", "GRPO-seed-1.json",
    }
    for path in files:
        done = json.loads(path.read_text())
        assert [e["at"] for e in done["evaluations"]] == [0.5, 1.0]
        seconds = [step["seconds"] for step in done["steps"]]
        # the step that goes beyond ends it
        assert seconds == sorted(seconds) and seconds[-1] > 1.0 >= ([0] + seconds)[-2]
    before = [path.stat().st_mtime_ns for path in files]
    real.main(words)  # finished runs are kept
    assert [path.stat().st_mtime_ns for path in files] == before
    page = (tmp_path / f"page/real{second}.md").read_text()
    assert (
        "lan, written " in page
        and f"| {other} | 1 |" in page
        and (tmp_path / f"page/real{second}.png").exists()
    )


def test_a_difference_is_each_seed_above_each_seed():
    seeds = {
        "GRPO": (0.4, 0.6), "CPPO, P=0.875": (0.6, 0.7), "random, P=0.875": (0.61, 0.9),
        "CPPO, P=0.5": (0.1, 0.39),
    }
    rows = {
        name: {f"greedy {when}": {"min": low, "max": high} for when in real.AT}
        for name, (low, high) in seeds.items()
    }
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in real.differences(rows, "greedy").splitlines()[2:]
    ]
    beside = [["–", "–"], ["–", "–"], ["above", "–"], ["below", "below"]]  # GRPO, CPPO
    assert [line[2:4] for line in table] == [line[5:7] for line in table] == beside


@pytest.mark.parametrize(("words", "sentence"), [
    (["--share", "x"], "--share must be I/N"), (["--share", "3/2"], "--share must be I/N"),
    (["--methods", "GPRO"], "unknown method 'GPRO'"), (["--page"], "holds no finished run"),
])  # fmt: skip
def test_a_mistake_with_the_real_model_is_one_sentence(words, sentence, tmp_path):
    with pytest.raises(UserError, match=re.escape(sentence)):
        real.main([*words, "--folder", str(tmp_path)])
