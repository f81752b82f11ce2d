"""The networks of a run: adapters, gradient checkpointing, the sampler's copy, and memory that runs
out."""

import json

import pytest
import torch
from torch.testing import assert_close

from algorithms import resolve
from engine.base.errors import UserError
from engine.model import loading
from engine.model.folders import base_of
from engine.model.logprobs import Policy
from engine.model.networks import add_adapter, build, load_policy
from engine.model.precision import frozen_copy
from engine.model.sampler import Sampler
from engine.model.shards import full_state_dict
from engine.options.config import config_of
from loop.update import Limits
from tests.helpers import runs
from tests.helpers.examples import seeded
from tests.helpers.runs import sums, written
from tests.helpers.training import CPU, completions, updated, weights_of
from tests.test_docs import FENCED, ROOT


@torch.no_grad()
def logprobs_of(policy, batch):
    return policy.logprobs(batch)


def test_only_the_adapter_learns_and_the_reference_is_the_model_without_it(small):
    config, algorithm = config_of({"algorithm": "grpo", "beta": 0.04, "lora": 4, "lr": 1e-2})
    networks = build(config, algorithm, small, CPU)
    policy = networks.policy
    reference = networks.reference
    model = networks.model
    batch = completions(networks.tokenizer)
    base = logprobs_of(load_policy(small, CPU, "auto")[0], batch)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    updated(model, networks.optimizer, [batch], resolve("grpo"))
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert_close(logprobs_of(reference, batch), base)
    assert not torch.allclose(logprobs_of(policy, batch), base)  # the adapter is on again


def test_an_adapter_adds_twice_the_product_of_its_matrices(small):
    """W x + (α / rank) B A x with α = 2 rank."""
    model, _ = loading.load_model(small, CPU)
    add_adapter(model, 4, seed=0)
    layer = model.model.layers[0].mlp.down_proj
    A, B = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    torch.nn.init.normal_(B)
    x = torch.ones(A.shape[1])
    assert_close(layer(x), (layer.base_layer.weight + 2 * B @ A) @ x)


def merge_as_docs_say(run, folder):
    """Run the lines of docs/gpus.md. Returns the new folder."""
    [lines] = [code for language, code in FENCED.findall((ROOT / "docs/gpus.md").read_text())
               if language == "python"]
    source = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    out = str(run / "merged")
    exec(lines, {"SOURCE": source, "CHECKPOINT": str(folder), "OUT": out})
    return out


@pytest.mark.slow
def test_a_run_with_adapters_is_saved_as_adapter_resumed_and_merged(small, tmp_path):
    run = tmp_path / "run"
    data = written(tmp_path / "x.jsonl", sums(4))
    runs.run(small, run, f"--dataset {data} --lora 4 --lr 1e-2 --group_size 8 --max_new_tokens 40 "
             "--algorithm grpo --rewards soft_format_reward --steps 2")
    runs.go_on(run, "--steps 3")
    folder = run / "checkpoint-000003"
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(UserError, match="holds adapters, .* --lora 4, .*docs/gpus.md"):
        config_of({"model": str(run)})
    whole = merge_as_docs_say(run, folder)
    config_of({"model": whole})  # not refused
    (adapted, tokenizer), (merged, _), (base, _) = (
        load_policy(str(path), CPU, "auto") for path in (run, whole, small))
    assert adapted.model.active_adapters()
    config, algorithm = config_of({"lora": 4})
    resumed = build(config, algorithm, small, CPU, str(folder)).model
    assert_close(adapter_of(resumed), adapter_of(adapted.model), rtol=0, atol=0)
    assert [*merged.model.state_dict()] == [*base.model.state_dict()]
    batch = completions(tokenizer)
    trained, as_one, before = (logprobs_of(policy, batch) for policy in (adapted, merged, base))
    assert_close(as_one, trained, rtol=0, atol=1e-4)  # rounding; the base is further away than 1e-3
    assert not torch.allclose(as_one, before, atol=1e-3)


def adapter_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".default." in name}


def test_adapters_are_trained_further_and_the_reference_is_their_start(small, tmp_path):
    """Also after a resume."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = "--algorithm grpo --beta 0.04 --lr 1e-2 --group_size 4 --max_new_tokens 8 --lora 4 "
    words += "--steps 1 --questions_per_step 2 --eval_questions 2"
    runs.run(small, first, words)
    runs.run(first, second, words)
    options = {"model": str(first), "algorithm": "grpo", "beta": 0.04, "lora": 4, "lr": 1e-2}
    config, algorithm = config_of(options)
    source, trained = first / "checkpoint-000001", second / "checkpoint-000001"
    batch = completions(load_policy(small, CPU, "auto")[1])
    of_first, of_second, of_base = (
        logprobs_of(load_policy(str(path), CPU, "auto")[0], batch)
        for path in (source, trained, small))
    assert not torch.allclose(of_first, of_base) and not torch.allclose(of_first, of_second)
    for folder, expected in ((None, of_first), (str(trained), of_second)):
        networks = build(config, algorithm, str(source), CPU, folder)
        assert_close(logprobs_of(networks.reference, batch), of_first)
        assert_close(logprobs_of(networks.policy, batch), expected)
        learning = {name for name, p in networks.model.named_parameters() if p.requires_grad}
        assert learning == {*adapter_of(networks.model)}
    config = json.loads((trained / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(small) == base_of(trained) == base_of(small)


def test_an_adapter_starts_from_the_seed(small):
    found = []
    for seed in (1, 1, 2):
        model, _ = loading.load_model(small, CPU)
        add_adapter(model, 4, seed)
        found.append(torch.cat([p.flatten() for p in adapter_of(model).values()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.slow
def test_an_adapter_on_a_bfloat16_model_comes_back_as_it_was_saved(small, tmp_path):
    def load(folder):
        return loading.load_model(str(folder), CPU, "bfloat16", frozen=True)

    model, tokenizer = load(small)
    add_adapter(model, 4, seed=1)
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn(p.shape, generator=seeded(0))  # no numbers of bfloat16
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    (again, _), (evaluated, _) = load(small), load(tmp_path)
    add_adapter(again, 4, seed=2, folder=tmp_path)
    for found in (again, evaluated):
        assert all(p.dtype == torch.float32 for p in adapter_of(found).values())
        assert found.base_model.dtype == torch.bfloat16
        assert_close(adapter_of(found), adapter_of(model), rtol=0, atol=0)


def test_a_bfloat16_copy_rests_until_it_is_refreshed_and_keeps_the_rotary_frequencies(loaded):
    """With `--shard full` the sampler has a copy. A policy never rests. Rounded to bfloat16, the
    frequencies of Qwen2.5 would be off by radians at token 1,500."""
    def memory(model):
        return sum(p.untyped_storage().nbytes() for p in model.parameters())

    model, tokenizer = loaded
    copy = frozen_copy(model, torch.bfloat16)
    assert not any(p.requires_grad for p in copy.parameters())
    frequencies = [each.model.rotary_emb.inv_freq for each in (copy, model)]
    assert_close(*frequencies, rtol=0, atol=0)
    sampler = Sampler(copy, tokenizer, copy=True)
    sampler.free_memory()
    assert memory(copy) == 0
    sampler.refresh(full_state_dict(model, sampler.dtype))
    for p, q in zip(copy.parameters(), model.parameters()):
        assert torch.equal(p, q.bfloat16())
    before = memory(model)
    Sampler(model, tokenizer).free_memory()
    assert memory(model) == before > 0


@pytest.mark.slow
@pytest.mark.parametrize("fits, limit, failures", [(40, 32, 1), (10, 8, 3)])
def test_where_memory_runs_out_the_same_update_is_made_in_smaller_micro_batches(
    small, monkeypatch, fits, limit, failures
):
    """Four mini-batches, twice: the first one finds what fits, and the limit holds from then on.
    Memory runs out in the second micro-batch, when the first one has left its gradient."""
    monkeypatch.setattr("loop.update.LEAST_TOKENS", 8)
    real = Policy.logprobs
    limits = Limits(micro_batch_tokens=64)
    calls = []

    def full(self, batch, **options):
        if limits.micro_batch_tokens > fits:
            calls.append(batch)
            if len(calls) % 2 == 0:
                raise torch.OutOfMemoryError("out of memory")
        return real(self, batch, **options)

    def trained():
        model, tokenizer = loading.load_model(small, CPU)
        minibatches = [completions(tokenizer, n=12, seed=seed) for seed in range(4)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        updated(model, optimizer, minibatches, resolve("grpo", mu=2, beta=0.0), limits=limits)
        return weights_of(model)

    expected = trained()
    monkeypatch.setattr(Policy, "logprobs", full)
    assert_close(trained(), expected, rtol=1e-5, atol=1e-6)
    assert limits.micro_batch_tokens == limit and len(calls) == 2 * failures
