"""engine/run/plan.py: every item against a figure worked out by hand, and the peak against that of
real steps."""

import multiprocessing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from engine.base.errors import UserError
from engine.model.logprobs import Policy
from engine.model.networks import add_adapter, whole_networks
from engine.run.config import Config, algorithm_of, check
from engine.run.plan import EVALUATED, GB, PHASES, compute_bytes, plan, saved_by_layer
from engine.run.plan_command import fit
from engine.run.skeleton import widths
from engine.tasks import toy_model
from experiments.memory import growth, return_what_is_freed
from experiments.plan import DEEP, longest_steps

pytestmark = pytest.mark.slow

QWEN = {  # hidden, layers, MLP, heads, key-value heads, vocabulary, tied; parameters as published
    "0.5B": (896, 24, 4864, 14, 2, 151_936, True, 494_032_768),
    "1.5B": (1536, 28, 8960, 12, 2, 151_936, True, 1_543_714_304),
    "7B": (3584, 28, 18_944, 28, 4, 152_064, False, 7_615_616_512),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """{size: a folder that holds the config.json of Qwen2.5, and nothing else}."""
    folders = {}
    for size, (hidden, layers, inner, heads, kv_heads, vocabulary, tied, _) in QWEN.items():
        folders[size] = str(tmp_path_factory.mktemp(size))
        Qwen2Config(
            hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner,
            num_attention_heads=heads, vocab_size=vocabulary, num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
        ).save_pretrained(folders[size])
    return folders


def config(**given):
    """Options as they are after the command line was checked: CPPO's published setting, unless
    other options are given."""
    c = Config(
        plan=True, **{"dataset": "gsm8k", "pruning_rate": 0.875, "micro_batch_tokens": 8192} | given
    )
    check(c)
    return c


def planned(**given):
    return plan(config(**given))


@pytest.mark.parametrize("size", QWEN)
def test_parameters_are_those_published(qwen, size):
    p = planned(model=qwen[size])
    assert p.parameters == p.trained == QWEN[size][-1]


def test_every_item_of_the_published_setting(qwen):
    p, W, head = planned(model=qwen["1.5B"], devices=2), 1_543_714_304, 151_936 * 1536
    assert (p.devices, p.questions, p.completions, p.kept) == (2, 8, 128, 16)
    expected = {
        "weights": (4 * W,) * 5,
        "gradients": (0, 0, 4 * W + 8 * head, 4 * W, 0),
        "optimizer": (0, 8 * W, 8 * W, 8 * W, 8 * W),
        "reference": (2 * W,) * 5,
        "compute copy": (0, 0, 2 * W, 0, 0),
        "rollout copy": (2 * W, 2 * W, 0, 0, 2 * W),  # it rests during the update
        # 128 rows of 512 + 1024 tokens; 28 layers of keys and values, 2 heads of 128 in two bytes;
        # and half a layer
        "KV cache": (0, 128 * 1536 * 57 * 2 * 128 * 2, 0, 0, 0),
        # 8,192 tokens; norms 2·(4 + 4)·1536, five casts 2·1536, q and output 2·1536, k and v 2·256,
        # MLP 4·2·8960, 12 heads
        "activations": (
            0, 0,
            8192 * (28 * (16 * 1536 + 10 * 1536 + 4 * 1536 + 4 * 256 + 8 * 8960 + 48) + 20 * 1536),
            0, 0,
        ),
        # 14 bytes of every logit while sampling; three float32 chunks of 110 tokens, the most below
        # 2^24 entries
        "logits": (0, 128 * 151_936 * 14, 12 * 110 * 151_936, 0, 0),
    }
    assert p.items == expected and p.evaluated == 0
    assert p.peaks == [sum(item[phase] for item in expected.values()) for phase in range(5)]


def test_sampling_in_parts_holds_the_cache_and_the_logits_of_one_part(qwen):
    whole, parts = (
        planned(model=qwen["1.5B"], sample_batch_size=size, eval_dataset="gsm8k")
        for size in (None, 20)
    )
    for item in ("KV cache", "logits"):
        # 20, rounded up to two questions
        assert parts.items[item][1] == whole.items[item][1] * 32 / 128
    assert (whole.evaluated, parts.evaluated) == (256, 20)
    assert (
        planned(model=qwen["1.5B"], sample_batch_size=1000).items["KV cache"]
        == planned(model=qwen["1.5B"]).items["KV cache"]
    )


def test_an_evaluation_takes_no_more_than_training(qwen):
    W = QWEN["1.5B"][-1]
    p = planned(model=qwen["1.5B"], devices=2, eval_dataset="gsm8k")
    training, evaluation = max(p.peaks[:4]), p.peaks[4]
    # 256 rows: their keys and values, their logits, and while 512 tokens are read what more these
    # take: 4 · 1536 + 3 · 8960 numbers of two bytes for each, and their keys and values in 28
    # layers
    row = 1536 * 57 * 2 * 128 * 2 + 151_936 * 14
    reading = 512 * 2 * (4 * 1536 + 3 * 8960 + 56 * 256)
    assert p.evaluated == 256 and evaluation == 16 * W + 256 * max(row, reading) < training
    few = planned(
        model=qwen["7B"], devices=4, shard="full", gradient_checkpointing=True, eval_dataset="gsm8k"
    )
    assert few.evaluated < 256
    a_row = (
        few.peaks[4]
        - sum(few.items[name][4] for name in ("weights", "optimizer", "reference", "rollout copy"))
    ) / few.evaluated
    # one more would be too many
    assert max(few.peaks[:4]) - a_row < few.peaks[4] <= max(few.peaks[:4])
    # less than one fits: it is made one by one all the same
    assert (
        planned(
            model=qwen["0.5B"], micro_batch_tokens=1, max_new_tokens=1, group_size=2,
            pruning_rate=0.5, eval_dataset="gsm8k", max_prompt_tokens=10_000,
        ).evaluated
        >= 1
    )


def test_building_holds_what_stays_and_of_shards_one_whole_tensor(qwen):
    W, head = QWEN["7B"][-1], 152_064 * 3584
    assert planned(model=qwen["7B"]).peaks[0] == 8 * W
    assert (
        planned(model=qwen["7B"], devices=4, shard="full").peaks[0]
        == W + W // 2 + 2 * W + 2 * head * 9 // 4
    )
    assert (
        planned(model=qwen["7B"], lora=16).peaks[0]
        == planned(model=qwen["7B"], lora=16).items["weights"][0]
    )


def test_the_gradients_of_a_mini_batch_in_one_piece_come_while_its_activations_go(qwen):
    W, head = QWEN["0.5B"][-1], 151_936 * 896
    several, one = (
        planned(model=qwen["0.5B"], micro_batch_tokens=tokens) for tokens in (8192, 16 * 1536)
    )
    assert several.items["gradients"][2] == 4 * W + 8 * head
    assert one.items["gradients"][2] == max(
        8 * head, 4 * W + 8 * head - one.items["activations"][2]
    )


def test_no_reference_without_its_term(qwen):
    assert planned(model=qwen["0.5B"], beta=0.0).items["reference"] == (0,) * 5


def test_shared_out(qwen):
    p, W, head = (
        planned(model=qwen["7B"], devices=4, shard="full", gradient_checkpointing=True),
        QWEN["7B"][-1], 152_064 * 3584,
    )
    layer = (W - 2 * head - 3584) // 28
    assert (
        p.items["weights"] == (W,) * 5
        and p.items["gradients"] == (0, 0, W, W, 0)
        and p.items["optimizer"][1:4] == (2 * W, 2 * W, 2 * W)
    )
    assert p.items["reference"] == (W // 2,) * 5 and p.items["rollout copy"] == (
        2 * W, 2 * W, 0, 0, 2 * W,
    )
    # embedding, head, two layers and the last norm, in bfloat16, with gradients
    assert p.items["compute copy"] == (
        2 * head * 9 // 4, 0, 4 * (2 * head + 2 * layer + 3584), 0, 0,
    )
    # every layer's input; one layer: norms 2·(4 + 2)·H, inputs 4·H, q and output 4·H, k and v
    # 4·512, MLP 8·I, 28 heads; the ends 10·H
    per_token = 28 * 2 * 3584 + 20 * 3584 + 4 * 512 + 8 * 18_944 + 4 * 28 + 10 * 3584
    assert p.items["activations"] == (0, 0, 8192 * per_token, 0, 0)


def test_with_several_nodes_the_devices_of_each_node_share_all_weights(qwen, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # as torchrun sets it
    weights = [
        planned(model=qwen["7B"], devices=n, shard="full").items["weights"][0]
        for n in (2, 4, 8, 16)
    ]
    assert weights == [4 * QWEN["7B"][-1] // n for n in (2, 4, 4, 4)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # one device in each node: all in a row
    assert (
        planned(model=qwen["7B"], devices=8, shard="full").items["weights"][0]
        == QWEN["7B"][-1] // 2
    )


def test_a_mini_batch_may_lie_on_one_device(qwen):
    """They are cut in the order of the questions. Four of two questions: each holds half of one
    question."""
    options = {
        "model": qwen["0.5B"], "algorithm": "gspo", "pruning_rate": None, "questions_per_step": 1,
        "micro_batch_tokens": 10**9,
    }
    one, two = (planned(devices=n, **options).items["activations"][2] for n in (1, 2))
    assert two == pytest.approx(one * (512 + 8 * 1024 + 8 * 192) / (512 + 4 * 1024 + 4 * 192))
    many = [
        planned(devices=n, **options | {"questions_per_step": 8}).items["activations"][2]
        for n in (1, 2)
    ]
    assert many[0] == many[1]  # two questions of 16 on one device; one of two devices' four on each


def test_adapters(qwen):
    p, W = planned(model=qwen["0.5B"], lora=16), QWEN["0.5B"][-1]
    # q and o: 896 → 896; k and v: 896 → 128; gate, up, down: 896 ↔ 4864; in 24 layers
    adapters = 24 * 16 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert p.trained == adapters and p.parameters == W
    assert p.items["weights"] == (2 * W + 4 * adapters,) * 5
    assert (
        p.items["gradients"] == (0, 0, 4 * adapters + 8 * 16 * 4864, 4 * adapters, 0)
        and p.items["optimizer"][1] == 8 * adapters
    )
    assert p.items["compute copy"] == (0, 0, 2 * adapters, 0, 0)
    assert p.items["reference"] == p.items["rollout copy"] == (0,) * 5
    # 24 layers: norms 2·4·896, six casts 2·896, q and output 2·896, k and v 2·128, MLP 4·2·4864, 14
    # heads; and the ends 5·2·896
    assert p.items["activations"][2] == 8192 * (
        24 * (8 * 896 + 12 * 896 + 4 * 896 + 4 * 128 + 8 * 4864 + 4 * 14) + 10 * 896
    )


def test_adapters_of_a_model_whose_matrices_are_conv1d(tmp_path):
    GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=2048).save_pretrained(
        tmp_path
    )
    # in 2 layers: q, k, v from one matrix, the output, and the two of the MLP
    assert planned(model=str(tmp_path), lora=4).trained == 2 * 4 * (
        (64 + 192) + (64 + 64) + 2 * (64 + 256)
    )


@pytest.mark.parametrize("shape", [{"intermediate_size": [8, 16]}, {"head_dim": [4, 8]}, {"hidden_size": None}], ids=str)
def test_a_model_whose_layers_differ_cannot_be_planned_and_a_run_goes_on_with_a_note(
    shape, qwen, monkeypatch
):
    layers = SimpleNamespace(
        **{"model_type": "odd", "hidden_size": 64, "num_attention_heads": 4} | shape
    )
    with pytest.raises(
        UserError,
        match="^the memory of a model of type odd cannot be planned, because its layers differ: "
              "train ",
    ):
        widths(layers)
    c = config(model=qwen["0.5B"])
    monkeypatch.setattr("engine.run.plan.widths", lambda _: widths(layers))
    evaluated, [note] = fit(c)
    assert evaluated == EVALUATED and note.startswith(
        "--plan: the memory of a model of type odd cannot be planned"
    )


@pytest.mark.parametrize("in_hardware", [True, False])
def test_a_gpu_without_bfloat16_is_planned_in_float32(in_hardware, qwen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: in_hardware)
    for options, size in [
        ({}, 2 if in_hardware else 4), ({"device_gb": 80.0}, 2), ({"dtype": "bfloat16"}, 2),
        ({"dtype": "float32"}, 4),
    ]:
        assert compute_bytes(config(model=qwen["0.5B"], **options), on_gpu=True) == size


def test_a_critic_is_trained_too(qwen):
    p, W, backbone = (
        planned(model=qwen["7B"], algorithm="ppo", pruning_rate=None), QWEN["7B"][-1],
        QWEN["7B"][-1] - 152_064 * 3584,
    )
    assert (
        p.trained == W + backbone
        and p.items["weights"] == (4 * p.trained,) * 5
        and p.items["reference"] == (2 * W,) * 5
    )


def test_what_the_tokens_need_ends_at_the_completions_there_are(qwen):
    def activations(**given):
        return planned(model=qwen["0.5B"], **given).items["activations"][2]

    a_completion = activations(micro_batch_tokens=1536)
    assert activations(micro_batch_tokens=1) == a_completion  # a micro-batch holds at least one
    assert activations(micro_batch_tokens=3072) == 2 * a_completion
    # all that are kept, 2 of each question, with each prompt once; 1536 / 8 of each are for keys
    # and values
    assert activations(micro_batch_tokens=10**9) == pytest.approx(
        a_completion * (8 * 512 + 16 * 1024 + 16 * 192) / 1536
    )
    assert activations(micro_batch_tokens=10**9, minibatches=3) == pytest.approx(
        a_completion * (3 * 512 + 6 * 1024 + 6 * 192) / 1536
    )
    # the context's end
    assert (
        activations(micro_batch_tokens=1, max_prompt_tokens=10**6) == a_completion * 32_768 / 1536
    )
    few = planned(model=qwen["0.5B"], micro_batch_tokens=1, max_prompt_tokens=90, max_new_tokens=10)
    assert few.items["logits"][2] == 10 * 151_936 * 12  # fewer tokens than fill a chunk


@pytest.mark.parametrize("dtype, stream, cast, lora", [
    (torch.float32, 4, False, None), (torch.float32, 4, True, None), (torch.bfloat16, 2, False, None),
    (torch.float32, 4, False, 4), (torch.bfloat16, 2, True, 4)])
def test_a_layer_saves_what_pytorch_is_seen_to_save(dtype, stream, cast, lora):
    """Two layers against one, with 8 rows of 96 tokens, in every way to compute: float32, autocast,
    all in bfloat16, adapters."""
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

    (one, shape), (two, _) = saved(1), saved(2)
    compute = 2 if cast or dtype == torch.bfloat16 else 4
    # the plan leaves out two float32 per token, of the norms, and what is between the two matrices
    # of each adapter
    seen = (two - one) / 768 - 8 - (7 * lora * compute if lora else 0)
    assert seen == saved_by_layer(shape, compute, stream, lora, on_gpu=False)
    # on a GPU 2 heads of keys and values, of 16 numbers each, become 8 in float32
    more = 4 * 2 * (8 - 2) * 16 if compute == 4 else 0
    assert seen + more == saved_by_layer(shape, compute, stream, lora)


SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "vocab_size": 64,
}
WIDE = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 4000, "tie_word_embeddings": True,
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
        STEP
        | {
            "group_size": 64, "micro_batch_tokens": 128, "pruning_rate": 0.98, "allocation": False,
            "beta": 0.0,
        },
    ),
}


def steps(shape, given):
    """Two real steps with random weights, all prompts and completions as long as allowed. Returns
    their Plan, for a CPU."""
    c = config(**given)
    algorithm = algorithm_of(c)
    model = Qwen2ForCausalLM(
        Qwen2Config(**{"num_key_value_heads": 2} | shape, bos_token_id=None, eos_token_id=None)
    ).eval()
    p = plan(c, model=model, on_gpu=False)
    if c.lora:
        add_adapter(model, c.lora, c.seed)
    networks = whole_networks(
        Policy(model), toy_model.make_tokenizer(), lr=c.lr, beta=c.beta, critic=algorithm.critic,
        adapter=bool(c.lora), gradient_checkpointing=c.gradient_checkpointing,
        batch_size=c.sample_batch_size,
    )
    for metrics in longest_steps(networks, c, algorithm):
        assert (
            metrics["tokens_generated"] == p.completions * c.max_new_tokens
            and metrics["kept"] == p.kept
        )
    trained = sum(
        q.numel() for network in networks.learners for q in network.parameters() if q.requires_grad
    )
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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from "
                                                                       "Linux's /proc")
@pytest.mark.parametrize("name", CASES)
def test_the_peak_is_that_of_real_steps(name):
    if name == "LoRA" and find_spec("peft") is None:
        pytest.skip("peft is not installed")
    # a fresh process: in a fork, freed memory would stay in the holes that the tests before have
    # left between what lives
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peaks, measured = pool.apply(measure, (CASES[name],))
    print(
        f"{name}: planned {[round(peak / 1e6) for peak in peaks]} MB, measured "
        f"{measured / 1e6:.0f}, ratio {max(peaks) / measured:.3f}"
    )
    assert PHASES[peaks.index(max(peaks))] == ("generation" if name == "many rows" else "update")
    assert 0.95 * measured < max(peaks) < 1.2 * measured  # 0.97 to 1.16 of it were seen


def test_the_model_of_a_run_is_its_newest_checkpoint(qwen, tmp_path):
    for step, size in (("000050", "0.5B"), ("000100", "1.5B")):
        (tmp_path / f"checkpoint-{step}").symlink_to(qwen[size])
    # the own options of an older run
    (tmp_path / "config.json").write_text('{"algorithm": "cppo"}')
    assert planned(model=str(tmp_path)).parameters == QWEN["1.5B"][-1]


def test_a_model_whose_config_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UserError,
        match=r"^the config.json of .* cannot be read \(.*\): name a folder that holds it, or go "
              r"online.$",
    ):
        planned(model=str(tmp_path))
    # asked once
    with pytest.raises(
        UserError, match="^the model me/none is no folder here, and the hub cannot be reached"
    ):
        planned(model="me/none")


def test_a_reward_model_takes_its_place_too(qwen, tmp_path):
    shape = Qwen2Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_labels=1,
    )
    shape.architectures = ["Qwen2ForSequenceClassification"]
    shape.save_pretrained(tmp_path)
    model = Qwen2ForSequenceClassification(shape)
    p = planned(model=qwen["0.5B"], rewards=["gsm8k_accuracy", f"RewardModel:{tmp_path}:0.5"])
    assert p.items["reward models"] == (0, *(4 * model.num_parameters(),) * 4)


def test_vllm_has_its_share_of_the_device(qwen):
    assert (
        planned(model=qwen["0.5B"], rollout="vllm", device_gb=50, vllm_share=0.2).items["vLLM"]
        == (10 * GB,) * 5
    )
    p = planned(model=qwen["0.5B"], rollout="vllm", device_gb=50)
    assert (
        p.items["vLLM"] == (15 * GB,) * 5
        and p.items["rollout copy"] == (0,) * 5
        and "KV cache" not in p.items
    )


def test_vllm_starts_if_its_share_holds_its_weights_and_one_completion(qwen):
    # 1,536 tokens; 28 layers of keys and values, and half a layer; 2 heads of 128 in two bytes
    least = 2 * QWEN["1.5B"][-1] + 1536 * 57 * 2 * 128 * 2
    for more in (-1, 1):
        p = planned(model=qwen["1.5B"], rollout="vllm", device_gb=(least + more * 10**6) / GB / 0.3)
        assert p.vllm == least and p.vllm_starts == (more > 0)
    assert planned(model=qwen["1.5B"], device_gb=1).vllm_starts  # our own sampler


def test_a_checkpoint_holds_float32_weights_and_two_moments(qwen):
    W = QWEN["7B"][-1]
    assert planned(model=qwen["7B"]).checkpoint == 12 * W
    # and the reference, in bfloat16
    assert planned(model=qwen["7B"], refresh_reference=100).checkpoint == 14 * W
    adapters = planned(model=qwen["7B"], lora=16)
    assert adapters.checkpoint == 12 * adapters.trained
