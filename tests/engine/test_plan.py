"""engine/run/plan.py and shapes.py: items against figures worked out by hand and against PyTorch,
and the peak against that of real steps. test_plan_command.py compares whole plans with the tables
of the docs."""

import multiprocessing
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine.base import ranks
from engine.base.errors import UserError
from engine.model.logprobs import Policy, recompute_layers
from engine.model.networks import add_adapter
from engine.model.pace import PACES
from engine.run import plan as planning
from engine.run.config import config_of
from engine.run.plan import GB, USABLE, device_of, plan, token_memory
from engine.run.shapes import skeleton, widths
from engine.scoring.score import Reward
from experiments.library import toy_model
from experiments.library.bench import every_second
from experiments.memory import growth, return_what_is_freed
from tasks import toy
from tests.training import networks_around
from train import train_step
from update import Limits

pytestmark = pytest.mark.slow

PARAMETERS = {  # as published on the hub; tied weights count once
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920, "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008, "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}
W_SMALL, W_MIDDLE, _, W_LARGE, *_ = PARAMETERS.values()
HEAD_SMALL, HEAD_LARGE = 151_936 * 896, 152_064 * 3584  # of them


def planned(size="0.5B", **given):
    """The Plan of CPPO's published setting, unless other options are given."""
    published = {"dataset": "gsm8k", "pruning_rate": 0.875, "micro_batch_tokens": 8192}
    chosen = {"plan": 80.0, "model": f"Qwen/Qwen2.5-{size}"} | published | given
    config, _ = config_of(chosen)
    return plan(config.options)


# --- the micro-batches ---


@pytest.mark.parametrize("options, tokens", [
    ({}, 8192),  # of the shape with 1.5 billion parameters on 80 GB
    ({"plan": 141.0}, 16384),
    ({"plan": 48.0}, 2048),
    ({"plan": 10.0}, 2048),  # it does not fit
    ({"plan": 141.0, "shard": "full"}, 8192),  # nothing can be halved: one step smaller
    ({"micro_batch_tokens": 300}, 300),
])
def test_a_gpu_computes_as_many_tokens_at_a_time_as_fit(options, tokens):
    p = planned("1.5B", **{"micro_batch_tokens": None, "pruning_rate": 0.5} | options)
    assert p.micro_batch_tokens == tokens
    given = planned("1.5B", **options | {"micro_batch_tokens": tokens, "pruning_rate": 0.5})
    assert p == given
    if p.fits and "shard" not in options and tokens in (2048, 4096, 8192):
        twice = planned("1.5B", **options | {"micro_batch_tokens": 2 * tokens, "pruning_rate": 0.5})
        assert not twice.fits


def test_ranks_take_the_smallest_and_a_cpu_and_a_user_take_no_plan(monkeypatch):
    config, _ = config_of({"model": "Qwen/Qwen2.5-1.5B", "dataset": "gsm8k", "plan": 80.0})
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    choose = planning.choose_micro_batch_tokens
    tokens, [sentence] = choose(config.options, gpu)
    assert f"{tokens:,}" in sentence and tokens > 2048
    monkeypatch.setattr(ranks, "gather", lambda own: [*own, 4096])
    assert choose(config.options, gpu)[0] == 4096
    assert choose(config.options, cpu) == (2048, [])
    config.devices.micro_batch_tokens = 77
    assert choose(config.options, gpu) == (77, [])
    config.devices.micro_batch_tokens, config.data.model = None, "me/none"
    assert choose(config.options, gpu)[0] == 2048  # it cannot be planned


# --- the shapes ---


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_as_many_parameters_as_published(name):
    network = skeleton(f"{name}-Instruct")
    assert all(p.is_meta for p in network.parameters())
    assert network.num_parameters() == PARAMETERS[name]


def test_the_toy_has_the_shape_of_its_base_model():
    base = AutoModelForCausalLM.from_pretrained(toy.BASE)
    assert skeleton("toy").num_parameters() == base.num_parameters()
    assert widths(skeleton("toy").config) == widths(base.config)


def test_the_model_of_a_run_is_its_newest_checkpoint(tmp_path):
    for step, size in (("000050", 32), ("000100", 64)):
        shape = Qwen2Config(vocab_size=10, hidden_size=size, num_hidden_layers=1)
        shape.save_pretrained(tmp_path / f"checkpoint-{step}")
    assert skeleton(str(tmp_path)).config.hidden_size == 64


def test_a_model_whose_config_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "me/none"):
        with pytest.raises(UserError, match=name):
            skeleton(name)


@pytest.mark.parametrize("kind, more", [
    ("gpt2", {}), ("qwen2", {"intermediate_size": [8, 16]}), ("qwen2", {"hidden_size": None}),
])
def test_layers_of_another_kind_cannot_be_planned(kind, more):
    shape = AutoConfig.for_model(kind)
    for name, value in more.items():
        shape.__dict__[name] = value
    with pytest.raises(UserError, match=kind):
        widths(shape)


# --- the items ---


def per_parameter(parameters, **given):
    """{item: bytes per parameter in the (generation, update)} of a plan."""
    return {
        name: (generation / parameters, update / parameters)
        for name, (generation, update) in planned(**given).items.items()
    }


NONE = (0, 0)


@pytest.mark.parametrize("given, changed", [
    ({}, {}), ({"beta": 0.0}, {"reference": NONE}), ({"beta": 0.0, "stop_kl": 0.5}, {}),
    ({"dtype": "float32"}, {"reference": (4, 4), "compute copy": NONE, "rollout copy": NONE}),
])
def test_the_bytes_of_a_parameter(given, changed):
    """float32 weights, gradients and two moments; copies, and a reference, in bfloat16."""
    usual = {
        "weights": (4, 4), "gradients": (0, 4), "optimizer": (8, 8), "reference": (2, 2),
        "compute copy": (0, 2), "rollout copy": (2, 0),
        "new gradient": (0, 8 * HEAD_SMALL / W_SMALL),
    }
    assert (usual | changed).items() <= per_parameter(W_SMALL, **given).items()


def test_a_critic_is_trained_too():
    p = planned("7B", algorithm="ppo", pruning_rate=0.0)
    assert p.trained == 2 * W_LARGE - HEAD_LARGE
    assert p.items["weights"] == (4 * p.trained, 4 * p.trained)


def test_adapters():
    p = planned(lora=16)
    # q and o: 896 → 896; k and v: 896 → 128; gate, up, down: 896 ↔ 4864; in 24 layers
    adapters = 24 * 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    weights = 2 * W_SMALL + 4 * adapters
    expected = {"weights": (weights, weights), "gradients": (0, 4 * adapters)}
    for name in ("new gradient", "reference", "compute copy", "rollout copy"):
        expected[name] = NONE
    assert p.trained == adapters and expected.items() <= p.items.items()


def test_the_devices_divide_all_weights(monkeypatch):
    monkeypatch.setattr(ranks, "world_size", lambda: 4)
    items = planned("7B", shard="full").items
    assert items["weights"] == (W_LARGE, W_LARGE) and items["gradients"] == (0, W_LARGE)
    # embedding, head and two of the 28 layers, each with its gradient; the rest is the final norm
    gathered = 2 * HEAD_LARGE + (W_LARGE - 2 * HEAD_LARGE) / 28 * 2
    assert items["compute copy"] == (0, pytest.approx(4 * gathered, rel=1e-4))
    assert items["rollout copy"] == (2 * W_LARGE, 0)


# 1,536 tokens; 28 layers of keys and values; 2 heads of 128 in two bytes; and 14 bytes a logit
COMPLETION = 1536 * 28 * 2 * 2 * 128 * 2 + 151_936 * 14


def test_if_memory_is_short_fewer_questions_are_sampled_at_a_time():
    """As the sampler does when memory runs out: half as many, down to one question."""
    p = planned("1.5B")
    assert p.at_once == p.questions == 8
    assert p.items["KV cache"] == (128 * COMPLETION, 0)
    for questions, at_once in ((7.9, 4), (3.9, 2), (0.1, 1)):
        needed = p.peaks[0] - (8 - questions) * 16 * COMPLETION
        fewer = planned("1.5B", plan=needed / USABLE / GB)
        assert fewer.at_once == at_once
        assert fewer.items["KV cache"] == (at_once * 16 * COMPLETION, 0)


def test_another_sampler_has_its_share_which_must_hold_weights_and_a_completion():
    least = 2 * W_MIDDLE + COMPLETION
    enough, less = ((least + n) / GB / 0.3 for n in (1e6, -1e6))
    p = planned("1.5B", sampler="vllm", plan=enough)
    assert p.items["sampler"] == pytest.approx((least + 1e6, least + 1e6))
    assert p.items["rollout copy"] == (0, 0) and "KV cache" not in p.items and p.sampler_starts
    assert not planned("1.5B", sampler="vllm", plan=less).sampler_starts
    # although the device holds the peak
    small_share = planned("1.5B", sampler="vllm", vllm_share=0.03)
    assert max(small_share.peaks) < USABLE * 80 * GB and not small_share.fits


@pytest.mark.parametrize("in_hardware, size", [(True, 2), (False, 4)])
def test_a_gpu_without_bfloat16_is_planned_in_float32(in_hardware, size, monkeypatch):
    gpu = SimpleNamespace(total_memory=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: in_hardware)
    assert device_of(0.0, "auto") == (5, size)
    assert device_of(24, "auto") == (24 * GB, 2)
    assert device_of(0.0, "float32") == (5, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(0.0, "auto") == (80 * GB, 2)


def activations(tokens, **given):
    return planned(micro_batch_tokens=tokens, **given).items["activations"][1]


def test_what_the_tokens_need_ends_at_the_completions_there_are():
    one = activations(1536)
    assert activations(1) == one  # a micro-batch holds at least one
    assert activations(3072) == 2 * one
    # all that are kept, 2 of each of 8 questions: a second pass would save too few tokens
    assert activations(10**9) == 16 * one
    # a third of them
    assert activations(10**9, minibatches=3) == 6 * one
    # 16 of one question: its prompt once, and an eighth of a row for the keys and values of each
    assert activations(10**9, pruning_rate=0.0) * 1536 == (512 + 16 * 1024 + 16 * 192) * one
    # the context's end
    assert activations(1, max_prompt_tokens=10**6) == one * 32_768 / 1536
    few = planned(micro_batch_tokens=1, max_prompt_tokens=90, max_new_tokens=10)
    assert few.items["logits"][1] == 10 * 151_936 * 12  # fewer tokens than fill a chunk


def test_a_device_has_whole_questions_of_a_mini_batch_or_all_of_it(monkeypatch):
    """Mini-batches are cut in the order of the questions of all devices."""
    def of_gspo(devices, questions):
        monkeypatch.setattr(ranks, "world_size", lambda: devices)
        return activations(
            10**9, algorithm="gspo", pruning_rate=0.0, questions_per_step=questions)

    # four mini-batches of two questions: each holds half of one question, which is on one device
    assert of_gspo(2, 1) == pytest.approx(of_gspo(1, 1) * 2)
    # two questions of 16 on one device; one of two devices' four on each
    assert of_gspo(1, 8) == of_gspo(2, 8)


def test_the_gradients_of_a_single_backward_pass_come_while_its_activations_go():
    one = planned(micro_batch_tokens=10**9).items
    assert one["activations"][1] > 4 * W_SMALL and one["gradients"] == (0, 0)
    few = planned("1.5B", pruning_rate=0.9375, allocation=False, micro_batch_tokens=10**9)
    activations = few.items["activations"][1]
    assert few.items["gradients"] == (0, 4 * W_MIDDLE - activations)
    # PPO makes a second backward pass, for its critic
    ppo = planned(algorithm="ppo", pruning_rate=0.0, micro_batch_tokens=10**9)
    assert ppo.items["gradients"] == (0, 4 * ppo.trained)


def saved_for_backward(shape, dtype, cast, lora):
    """Bytes that PyTorch keeps of a forward pass of 8 rows of 96 tokens, weights left out."""
    model = Qwen2ForCausalLM(shape).to(dtype).eval()
    if lora:
        add_adapter(model, lora, seed=0)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}  # alive, so that no address is used twice

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", enabled=cast):
        model.base_model(input_ids=torch.zeros((8, 96), dtype=torch.long), use_cache=False)
    size = sum(storage.nbytes() for storage in kept.values())
    if cast:
        layers = model.base_model.layers.parameters()
        size -= sum(2 * p.numel() for p in layers if p.dim() == 2 and p.requires_grad)
    return size


@pytest.mark.parametrize("dtype, cast, lora", [
    (torch.float32, False, None), (torch.float32, True, None), (torch.bfloat16, False, None),
    (torch.bfloat16, True, 4)])
def test_a_layer_saves_what_pytorch_is_seen_to_save(dtype, cast, lora):
    """Two layers against one: in float32, with autocast, all in bfloat16 (as a shard), adapters."""
    compute = 2 if cast or dtype == torch.bfloat16 else 4
    shard = "full" if dtype == torch.bfloat16 and not lora else "none"
    options = SimpleNamespace(shard=shard, lora=lora, gradient_checkpointing=False)
    seen, expected = [], []
    for layers in (1, 2):
        shape = Qwen2Config(
            vocab_size=32, hidden_size=128, intermediate_size=352, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=2)
        seen.append(saved_for_backward(shape, dtype, cast, lora) / 768)  # of a token
        expected.append(token_memory(shape, compute, options))
    # the plan leaves out a few numbers in float32: one for each head, and two of the norms
    of_a_layer = seen[1] - seen[0] - 4 * (8 + 2)
    if lora:  # and what is between the two matrices of each adapter; it counts the norms' outputs
        assert expected[1] - expected[0] == pytest.approx(of_a_layer - 7 * lora * 2, rel=0.06)
    else:
        assert expected[1] - expected[0] == of_a_layer


# --- the peak ---

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 64,
}
WIDE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "vocab_size": 4000, "tie_word_embeddings": True,
}
STEP = {
    "dataset": "toy", "questions_per_step": 1, "group_size": 8, "pruning_rate": 0.5,
    "max_prompt_tokens": 112, "max_new_tokens": 16,
    # 2 questions, 8 completions kept, two micro-batches of four
    "micro_batch_tokens": 512,
    "mu": 1, "dtype": "float32", "plan": 80.0,
}
DEEP = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 20_000, "tie_word_embeddings": False,
}
ROWS = {"group_size": 64, "micro_batch_tokens": 128, "pruning_rate": 0.98, "allocation": False}
CASES = {
    "wide, tied": (WIDE, STEP),
    "deep, untied": (DEEP, STEP | {"beta": 0.0}),
    "deep, checkpointed": (DEEP, STEP | {"gradient_checkpointing": True}),
    "PPO": (WIDE, STEP | {"algorithm": "ppo", "pruning_rate": 0.0}),
    "LoRA": (WIDE, STEP | {"lora": 8, "beta": 0.0}),
    "many rows": (DEEP, STEP | ROWS | {"beta": 0.0}),
}


def longest_steps(networks, config, algorithm):
    """Make two steps whose prompts and completions are all as long as allowed. Yields the metrics
    of each.

    In the second step the optimizer already has its moments while completions are sampled.
    """
    networks.sampler.stop_ids = [-1]  # no token ends a completion
    questions = []
    for i in range(algorithm.questions_per_step):  # an equal prompt would be computed once
        prompt = [5 + i] * config.data.max_prompt_tokens
        questions.append({"question": "?", "answer": "1", "prompt": prompt})
    reward = Reward("every second", every_second)
    limits = Limits(config.devices.micro_batch_tokens)
    for number in (1, 2):
        step = train_step(
            networks, algorithm, [reward], config.sampling, limits, questions,
            random.Random(number))
        yield step.metrics


def steps(shape, given):
    """The Plan of two real steps with random weights, all prompts and completions as long as
    allowed."""
    config, algorithm = config_of(given)
    heads = {"num_key_value_heads": shape["num_attention_heads"]}
    model = Qwen2ForCausalLM(
        Qwen2Config(**shape | heads, bos_token_id=None, eos_token_id=None)).eval()
    planning.skeleton = lambda _: model
    p = plan(config.options)
    devices = config.devices
    if devices.lora:
        add_adapter(model, devices.lora, seed=0)
    networks = networks_around(
        Policy(model), toy_model.make_tokenizer(), lr=config.update.lr, beta=algorithm.beta,
        critic=algorithm.critic)
    if devices.gradient_checkpointing:
        recompute_layers(model)
    for metrics in longest_steps(networks, config, algorithm):
        completions = p.questions * algorithm.group_size
        assert metrics["tokens_generated"] == completions * given["max_new_tokens"]
        assert metrics["kept"] == p.questions * algorithm.k
    trained = 0
    for network in networks.learners:
        trained += sum(q.numel() for q in network.parameters() if q.requires_grad)
    assert trained == p.trained + algorithm.critic * (shape["hidden_size"] + 1)  # the critic's head
    return p


def measure(case):
    """(peaks as planned, the peak as the growth of this process)."""
    shape, given = case
    torch.set_num_threads(1)
    PACES["cpu"] = replace(PACES["cuda"], records=False)  # the plan is for a GPU
    plans = []
    # what a first step allocates for good
    steps(SMALL, given | {"max_prompt_tokens": 4, "max_new_tokens": 4})
    return_what_is_freed()
    measured = growth(lambda: plans.append(steps(shape, given)), torch.device("cpu"))
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
