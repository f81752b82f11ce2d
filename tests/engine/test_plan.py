"""`train.py --plan`: what it prints is what the docs show, and its peak is that of real steps."""

import itertools
import multiprocessing
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from algorithms import KEEP, token_mean
from engine.base import ranks
from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.loading import fuse_norms
from engine.model.logprobs import Policy, recompute_layers
from engine.model.networks import add_adapter
from engine.options.command_line import parse_given
from engine.options.config import Config, config_of
from engine.run import plan as planning
from engine.run.plan import plan
from engine.run.shapes import skeleton
from engine.scoring.score import Reward
from experiments.library import toy_model
from experiments.library.bench import every_second, growth, return_what_is_freed
from grpo import grpo_loss
from loop.records import Parts
from loop.update import Limits
from tests.helpers.runs import ROOT
from tests.helpers.training import networks_around

pytestmark = pytest.mark.slow

DOCS = (ROOT / "docs/gpus.md").read_text()
GSM8K, MATH = ROOT / "recipes/gsm8k_1.5b_cppo.yaml", ROOT / "recipes/math_7b_cppo.yaml"
SMALL_GPU = "--plan 24 --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k"
PARAMETERS = {  # as published on the hub; tied weights count once
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920, "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008, "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


def test_a_published_shape_has_as_many_parameters_as_published():
    found = {name: skeleton(f"{name}-Instruct").num_parameters() for name in PARAMETERS}
    assert found == PARAMETERS


# --- what is printed ---


def told(words, capsys):
    """(what `train.py` prints, its exit code)"""
    code = train.main([*map(str, words)])
    return capsys.readouterr().out, code


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_fits_the_gpus_that_its_first_line_names(recipe, monkeypatch, capsys):
    devices, memory = re.search(r"for (\d) GPUs? of (\d+) GB", recipe.read_text()).groups()
    monkeypatch.setattr(ranks, "world_size", lambda: int(devices))
    out, code = told(["--plan", memory, "--recipe", recipe], capsys)
    assert code == 0 and "It fits" in out


def test_what_the_docs_show_is_printed(capsys):
    shown = DOCS[DOCS.index(f"    $ python train.py {SMALL_GPU}\n") :]
    shown = shown[shown.index("    It ") :].splitlines()
    block = itertools.takewhile(lambda line: not line or line[:4] == "    ", shown)
    out, code = told(SMALL_GPU.split(), capsys)
    assert code == 3 and out.endswith("\n" + "\n".join(line[4:] for line in block).strip() + "\n")
    # what is printed to type fits
    _, _, typed = out.rstrip().rpartition(" train.py ")
    again, code = told([*typed.split(), "--plan", 24], capsys)
    assert code == 0 and "It fits" in again and "with these changes" not in again


@pytest.mark.parametrize("recipe", [GSM8K, MATH])
def test_the_recipes_of_the_paper_are_its_first_code(recipe):
    """Token mean, the largest |A| of a device's whole batch, μ = 2, β = 0.04; its GRPO is the same
    row with P = 0."""
    chosen = parse_given(Config, ["--plan", "--recipe", str(recipe)])
    _, row = config_of(chosen)
    assert row.loss.func is grpo_loss and row.token_weights is token_mean
    assert row.keep is KEEP["pooled"]
    assert (row.group_size, row.k, row.questions_per_step, row.mu, row.beta) == (16, 2, 8, 2, 0.04)
    _, grpo = config_of(chosen | {"pruning_rate": 0.0})
    assert (grpo.token_weights, grpo.k, grpo.questions_per_step) == (token_mean, 16, 1)


# --- what a run takes from it ---


def test_a_run_on_a_gpu_takes_the_largest_micro_batches_that_the_plan_says_fit(monkeypatch):
    """Ranks take the smallest. A CPU, and a user who names them, take no plan."""
    config, _ = config_of({"model": "Qwen/Qwen2.5-1.5B", "dataset": "gsm8k", "plan": 80.0})
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    choose = planning.choose_micro_batch_tokens
    tokens, [sentence] = choose(config.options, gpu)
    assert f"{tokens:,}" in sentence and tokens == 8192
    for twice in (False, True):
        config.devices.micro_batch_tokens = tokens * (1 + twice)
        assert plan(config.options).fits != twice
    config.devices.micro_batch_tokens = None
    monkeypatch.setattr(ranks, "gather", lambda own: [*own, 4096])
    assert choose(config.options, gpu)[0] == 4096
    assert choose(config.options, cpu) == (2048, [])
    config.devices.micro_batch_tokens = 77
    assert choose(config.options, gpu) == (77, [])


# --- the peak ---

WIDE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 4000, "tie_word_embeddings": True,
}
DEEP = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 20_000, "tie_word_embeddings": False,
}
STEP = {
    "dataset": "toy", "questions_per_step": 1, "group_size": 8, "pruning_rate": 0.5,
    "max_prompt_tokens": 112, "max_new_tokens": 16,
    # 2 questions, 8 completions kept, two micro-batches of four
    "micro_batch_tokens": 512,
    "mu": 1, "dtype": "float32", "plan": 80.0,
}
ROWS = {"group_size": 64, "micro_batch_tokens": 128, "pruning_rate": 0.98, "allocation": False}
CASES = {
    "wide, tied": (WIDE, {}),
    "deep, untied": (DEEP, {"beta": 0.0}),
    "deep, checkpointed": (DEEP, {"gradient_checkpointing": True}),
    "PPO": (WIDE, {"algorithm": "ppo", "pruning_rate": 0.0}),
    "LoRA": (WIDE, {"lora": 8, "beta": 0.0}),
    "many rows": (DEEP, ROWS | {"beta": 0.0}),
}


def longest_steps(shape, options):
    """The Plan of two real steps with random weights. All prompts and completions are as long as
    allowed, and in the second step the optimizer has its moments from the start."""
    config, algorithm = config_of(STEP | options)
    devices = config.devices
    model = Qwen2ForCausalLM(Qwen2Config(**shape, bos_token_id=None, eos_token_id=None)).eval()
    fuse_norms(model)  # as on a GPU
    planning.skeleton = lambda _: model
    p = plan(config.options)
    if devices.lora:
        add_adapter(model, devices.lora, seed=0)
    networks = networks_around(
        Policy(model), toy_model.make_tokenizer(), lr=config.update.lr, beta=algorithm.beta,
        critic=algorithm.critic)
    networks.sampler.stop_ids = [-1]  # no token ends a completion
    if devices.gradient_checkpointing:
        recompute_layers(model)
    questions = []
    for i in range(algorithm.questions_per_step):  # an equal prompt would be computed once
        prompt = [5 + i] * config.data.max_prompt_tokens
        questions.append({"question": "?", "answer": "1", "prompt": prompt})
    reward, limits = Reward("every second", every_second), Limits(devices.micro_batch_tokens)
    parts = Parts(networks, algorithm, [reward], config.sampling, limits)
    for number in (1, 2):
        step = train.train_step(parts, questions, random.Random(number))
        generated = p.questions * algorithm.group_size * config.sampling.max_new_tokens
        assert step.metrics["tokens_generated"] == generated
    return p


def measure(case):
    """(peaks as planned, the peak as the growth of this process)."""
    shape, options = case
    torch.set_num_threads(1)
    # the plan is for a GPU
    DEVICE_DEFAULTS["cpu"] = replace(DEVICE_DEFAULTS["cuda"], records=False)
    plans = []
    # what a first step allocates for good
    small = WIDE | {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    longest_steps(small, options | {"max_prompt_tokens": 4, "max_new_tokens": 4})
    return_what_is_freed()
    measured = growth(lambda: plans.append(longest_steps(shape, options)), torch.device("cpu"))
    return plans[0].peaks, measured


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_real_steps(name):
    # a fresh process: in a fork, freed memory would stay in the holes that the tests before have
    # left between what lives
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peaks, measured = pool.apply(measure, (CASES[name],))
    generation, update = peaks
    print(f"{name}: planned {peaks}, measured {measured}, ratio {max(peaks) / measured:.3f}")
    assert (generation > update) == (name == "many rows")
    assert 0.92 * measured < max(peaks) < 1.2 * measured
