"""engine/run/plan.py and shapes.py: items against figures worked out by hand and against PyTorch,
and the peak against that of real steps. test_plan_command.py compares whole plans with the tables
of the docs."""

import multiprocessing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from engine.base.errors import UserError
from engine.model.logprobs import Policy
from engine.model.networks import add_adapter, whole_networks
from engine.run import plan as planning
from engine.run.config import Config, algorithm_of, check
from engine.run.options import compose
from engine.run.plan import EVALUATED, GB, PHASES, device_of, plan, token_memory
from engine.run.plan_command import eval_batch_size
from engine.run.shapes import PUBLISHED, skeleton, widths
from engine.tasks import toy_model
from experiments.memory import growth, return_what_is_freed
from experiments.plan import DEEP, longest_steps

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


def config(size="0.5B", **given):
    """Options as they are after the command line was checked: CPPO's published setting, unless
    other options are given."""
    published = {"dataset": "gsm8k", "pruning_rate": 0.875, "micro_batch_tokens": 8192}
    options = {"model": f"Qwen/Qwen2.5-{size}"} | published | given
    c, _ = check(Config.of(plan=True, **options))
    return c.options


def planned(size="0.5B", **given):
    return plan(config(size, **given))


# --- the shapes ---


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_as_many_parameters_as_published(name):
    network = skeleton(f"{name}-Instruct")
    assert all(p.is_meta for p in network.parameters())
    assert network.num_parameters() == PARAMETERS[name]


def test_the_toy_has_the_model_of_its_data_set():
    base, code = (skeleton("toy", dataset).config.vocab_size for dataset in ("toy", "toy_code"))
    assert base < code < 50


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


@pytest.mark.parametrize("shape", [{"intermediate_size": [8, 16]}, {"hidden_size": None}], ids=str)
def test_a_run_whose_layers_differ_cannot_be_planned_and_goes_on_with_a_note(shape, monkeypatch):
    layers = SimpleNamespace(
        **{"model_type": "odd", "hidden_size": 64, "num_attention_heads": 4} | shape)
    monkeypatch.setattr("engine.run.plan.widths", lambda _: widths(layers))
    with pytest.raises(UserError, match="odd"):
        planned()
    evaluated, [note] = eval_batch_size(compose(Config, vars(config())))
    assert evaluated == EVALUATED and "odd" in note


# --- the items ---


def test_the_bytes_of_a_parameter_and_of_a_checkpoint():
    """float32 weights, two moments, and a reference that changes."""
    plain = planned()
    assert (plain.peaks[0], plain.peaks[3]) == (8 * W_SMALL, 18 * W_SMALL)
    assert plain.items["gradients"] == (0, 0, 4 * W_SMALL + 8 * HEAD_SMALL, 4 * W_SMALL, 0)
    assert plain.checkpoint == 12 * W_SMALL
    assert planned(refresh_reference=100).checkpoint == 14 * W_SMALL
    assert planned(beta=0.0).items["reference"] == (0,) * 5
    p = planned("7B", algorithm="ppo", pruning_rate=None)  # a critic is trained too
    assert p.trained == 2 * W_LARGE - HEAD_LARGE and p.items["weights"] == (4 * p.trained,) * 5


def test_the_gradients_of_a_mini_batch_in_one_piece_come_while_its_activations_go():
    one = planned(micro_batch_tokens=16 * 1536)
    gradients, update = 4 * W_SMALL, 4 * W_SMALL + 8 * HEAD_SMALL
    activations = one.items["activations"][2]
    assert one.items["gradients"][2] == max(update - gradients, update - activations)
    ppo = planned(algorithm="ppo", pruning_rate=None, micro_batch_tokens=10**9)
    assert ppo.items["gradients"][2] > 4 * ppo.trained  # the critic's are there already


def test_a_mini_batch_may_lie_on_one_device():
    """They are cut in the order of the questions. Four of two questions: each holds half of one
    question."""
    def activations(devices, questions):
        options = {"algorithm": "gspo", "pruning_rate": None, "micro_batch_tokens": 10**9}
        p = planned(devices=devices, questions_per_step=questions, **options)
        return p.items["activations"][2]

    more = (512 + 8 * 1024 + 8 * 192) / (512 + 4 * 1024 + 4 * 192)
    assert activations(2, 1) == pytest.approx(activations(1, 1) * more)
    # two questions of 16 on one device; one of two devices' four on each
    assert activations(1, 8) == activations(2, 8)


def test_adapters():
    p = planned(lora=16)
    # q and o: 896 → 896; k and v: 896 → 128; gate, up, down: 896 ↔ 4864; in 24 layers
    adapters = 24 * 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert (p.trained, p.parameters, p.checkpoint) == (adapters, W_SMALL, 12 * adapters)
    assert p.items["weights"] == (2 * W_SMALL + 4 * adapters,) * 5
    assert p.items["gradients"] == (0, 0, 4 * adapters + 8 * 16 * 4864, 4 * adapters, 0)
    assert p.items["compute copy"] == (0, 0, 2 * adapters, 0, 0)
    assert p.items["reference"] == p.items["rollout copy"] == (0,) * 5


@pytest.mark.parametrize("of_a_node, devices, sharing", [
    (4, 2, 2), (4, 4, 4), (4, 8, 4),
    (1, 8, 8),  # one device in each node: all in a row
])
def test_the_devices_of_a_node_share_all_weights(of_a_node, devices, sharing, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(of_a_node))  # as torchrun sets it
    weights = planned("7B", devices=devices, shard="full").items["weights"]
    assert weights == (4 * W_LARGE // sharing,) * 5


def test_a_reward_model_takes_its_place_too(tmp_path):
    shape = Qwen2Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_labels=1,
    )
    shape.save_pretrained(tmp_path)
    size = 4 * Qwen2ForSequenceClassification(shape).num_parameters()
    p = planned(rewards=["gsm8k_accuracy", f"RewardModel:{tmp_path}:0.5"])
    assert p.items["reward models"] == (0, size, size, size, size)


def test_sampling_in_parts_holds_the_cache_and_the_logits_of_one_part():
    whole, parts, one_part = (
        planned(sample_batch_size=size, eval_dataset="gsm8k") for size in (None, 20, 1000))
    for item in ("KV cache", "logits"):
        # 20, rounded up to two questions
        assert parts.items[item][1] == whole.items[item][1] * 32 / 128
    assert [p.counts["evaluated at once"] for p in (whole, parts)] == [256, 20]
    assert one_part.items == whole.items


def test_an_evaluation_takes_no_more_than_training():
    sharded = {"devices": 4, "shard": "full", "gradient_checkpointing": True}
    few, none = planned("7B", eval_dataset="gsm8k", **sharded), planned("7B", **sharded)
    a_row = (few.peaks[4] - none.peaks[4]) / few.counts["evaluated at once"]
    # one more would be too many
    assert max(few.peaks[:4]) - a_row < few.peaks[4] <= max(few.peaks[:4])
    # less than one fits: it is made one by one all the same
    tiny = planned(
        eval_dataset="gsm8k", max_prompt_tokens=10_000, micro_batch_tokens=1, max_new_tokens=1,
        group_size=2, pruning_rate=0.5)
    assert tiny.counts["evaluated at once"] >= 1


def test_vllm_has_its_share_and_starts_if_this_holds_its_weights_and_one_completion():
    # 1,536 tokens; 28 layers of keys and values, and half a layer; 2 heads of 128 in two bytes
    least = 2 * W_MIDDLE + 1536 * 57 * 2 * 128 * 2
    more, less = ({"rollout": "vllm", "device_gb": (least + n) / GB / 0.3} for n in (1e6, -1e6))
    p = planned("1.5B", eval_dataset="gsm8k", **more)
    assert p.items["vLLM"] == pytest.approx((least + 1e6,) * 5)
    assert p.counts["evaluated at once"] == EVALUATED
    assert p.items["rollout copy"] == (0,) * 5 and "KV cache" not in p.items
    with pytest.raises(UserError, match="3.1 GB, and --vllm_share 0.3 of a device is 3.1 GB"):
        planned("1.5B", **less)


@pytest.mark.parametrize("in_hardware, size", [(True, 2), (False, 4)])
def test_a_gpu_without_bfloat16_is_planned_in_float32(in_hardware, size, monkeypatch):
    gpu = SimpleNamespace(total_memory=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: in_hardware)
    assert device_of(None, "auto") == (5, size) and device_of(24, "auto") == (24 * GB, 2)
    assert device_of(None, "bfloat16") == (5, 2) and device_of(None, "float32") == (5, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(None, "auto") == (80 * GB, 2)


def test_what_the_tokens_need_ends_at_the_completions_there_are():
    def activations(tokens, **given):
        return planned(micro_batch_tokens=tokens, **given).items["activations"][2]

    one = activations(1536)
    assert activations(1) == one  # a micro-batch holds at least one
    assert activations(3072) == 2 * one
    # all that are kept, 2 of each question, with each prompt once; 1536 / 8 of each are for keys
    # and values
    every = (8 * 512 + 16 * 1024 + 16 * 192) / 1536
    assert activations(10**9) == pytest.approx(one * every)
    third = (3 * 512 + 6 * 1024 + 6 * 192) / 1536
    assert activations(10**9, minibatches=3) == pytest.approx(one * third)
    # the context's end
    assert activations(1, max_prompt_tokens=10**6) == one * 32_768 / 1536
    few = planned(micro_batch_tokens=1, max_prompt_tokens=90, max_new_tokens=10)
    assert few.items["logits"][2] == 10 * 151_936 * 12  # fewer tokens than fill a chunk


@pytest.mark.parametrize("dtype, cast, lora", [
    (torch.float32, False, None), (torch.float32, True, None), (torch.bfloat16, False, None),
    (torch.float32, False, 4), (torch.bfloat16, True, 4)])
def test_a_layer_saves_what_pytorch_is_seen_to_save(dtype, cast, lora):
    """Two layers against one, with 8 rows of 96 tokens, in every way to compute: float32, autocast,
    all in bfloat16 (as a shard), adapters."""
    def saved(layers):
        shape = Qwen2Config(
            vocab_size=32, hidden_size=128, intermediate_size=352, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=2,
        )
        model, held = Qwen2ForCausalLM(shape).to(dtype).eval(), {}
        if lora:
            pytest.importorskip("peft")
            add_adapter(model, lora, seed=0)
        own = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                # kept alive: an address is not used twice
                held[storage._cdata] = storage.nbytes(), tensor
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            torch.autocast("cpu", enabled=cast),
        ):
            model.base_model(input_ids=torch.zeros((8, 96), dtype=torch.long), use_cache=False)
        layer = model.base_model.layers[0].parameters()
        # of the weights
        casts = 2 * sum(p.numel() for p in layer if p.dim() == 2 and p.requires_grad) if cast else 0
        return sum(size for size, _ in held.values()) - casts * layers, shape

    (one, shape), (two, deeper) = saved(1), saved(2)
    compute = 2 if cast or dtype == torch.bfloat16 else 4
    # the plan leaves out two float32 per token, of the norms, and what is between the two matrices
    # of each adapter
    seen = (two - one) / 768 - 8 - (7 * lora * compute if lora else 0)
    how = {"sharded": dtype == torch.bfloat16, "lora": lora}
    of_a_layer = token_memory(deeper, compute, **how) - token_memory(shape, compute, **how)
    # on a GPU 2 heads of keys and values, of 16 numbers each, become 8 in float32
    assert seen + (4 * 2 * (8 - 2) * 16 if compute == 4 else 0) == of_a_layer


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
    "mu": 1,
}
CASES = {
    "wide, tied": (WIDE, STEP),
    "deep, untied": (DEEP, STEP | {"beta": 0.0}),
    "deep, checkpointed": (DEEP, STEP | {"gradient_checkpointing": True}),
    "PPO": (WIDE, STEP | {"algorithm": "ppo", "pruning_rate": None}),
    "LoRA": (WIDE, STEP | {"lora": 8, "beta": 0.0}),
    "many rows": (
        DEEP,
        STEP | {
            "group_size": 64, "micro_batch_tokens": 128, "pruning_rate": 0.98, "allocation": False,
            "beta": 0.0,
        },
    ),
}


def steps(shape, given):
    """Two real steps with random weights, all prompts and completions as long as allowed. Returns
    their Plan, for a CPU: in float32."""
    c = config(**given)
    algorithm = algorithm_of(c)
    # as many heads of keys and values as others: in float32 a GPU makes as many of fewer
    heads = {"num_key_value_heads": shape["num_attention_heads"]}
    model = Qwen2ForCausalLM(
        Qwen2Config(**shape | heads, bos_token_id=None, eos_token_id=None)).eval()
    planning.skeleton, planning.device_of = lambda *_: model, lambda *_: (80 * GB, 4)
    p = plan(c)
    if c.lora:
        add_adapter(model, c.lora, c.seed)
    networks = whole_networks(
        Policy(model), toy_model.make_tokenizer(), lr=c.lr, beta=c.beta, critic=algorithm.critic,
        adapter=bool(c.lora), gradient_checkpointing=c.gradient_checkpointing,
        batch_size=c.sample_batch_size,
    )
    for metrics in longest_steps(networks, compose(Config, vars(c)), algorithm):
        assert metrics["tokens_generated"] == p.counts["completions"] * c.max_new_tokens
        assert metrics["kept"] == p.counts["kept"]
    trained = sum(
        q.numel() for network in networks.learners for q in network.parameters() if q.requires_grad)
    assert trained == p.trained + algorithm.critic * (shape["hidden_size"] + 1)  # the critic's head
    return p


def measure(case):
    """(peaks as planned, the peak as the growth of this process)."""
    shape, given = case
    torch.set_num_threads(1)
    plans = []
    # what a first step allocates for good
    steps(SMALL, given | {"max_prompt_tokens": 4, "max_new_tokens": 4})
    return_what_is_freed()
    measured = growth(lambda: plans.append(steps(shape, given)), torch.device("cpu"))
    return plans[0].peaks, measured


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_real_steps(name):
    if name == "LoRA" and find_spec("peft") is None:
        pytest.skip("peft is not installed")
    # a fresh process: in a fork, freed memory would stay in the holes that the tests before have
    # left between what lives
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peaks, measured = pool.apply(measure, (CASES[name],))
    print(f"{name}: planned {[round(peak / 1e6) for peak in peaks]} MB, measured "
          f"{measured / 1e6:.0f}, ratio {max(peaks) / measured:.3f}")
    assert PHASES[peaks.index(max(peaks))] == ("generation" if name == "many rows" else "update")
    assert 0.92 * measured < max(peaks) < 1.2 * measured  # 0.94 to 1.06 of it were seen
