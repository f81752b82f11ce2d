"""examples/cppo_in_trl.py in TRL itself. Needs TRL: `bash examples/test_in.sh trl` makes an
environment with it."""

import os

import pytest
import torch
from datasets import Dataset

from cppo import prune
from experiments.library.toy_model import make_model, make_tokenizer
from grpo import grpo_loss, token_logprobs

trl = pytest.importorskip("trl", reason="TRL is not installed: bash examples/test_in.sh trl")

from examples import cppo_in_trl  # noqa: E402
from examples.cppo_in_trl import CPPOTrainer  # noqa: E402
from tests.helpers.runs import python  # noqa: E402
from tests.helpers.training import weights_of  # noqa: E402

G = 8


def trained(kind, folder, *, mu=1, batches=1, options=(), **more):
    """A trainer of TRL after `batches` batches of completions, each trained on μ times.

    It has `inputs` and `losses`, one for each micro-batch, `digits`, the rewards, and `before`, the
    weights before training. options: of its config. more: arguments of the trainer.
    """
    tokenizer, rewards = make_tokenizer(), []

    def digits(completions, **columns):
        rewards.extend(float(sum(c.isdigit() for c in text)) for text in completions)
        return rewards[-len(completions) :]

    torch.manual_seed(0)
    make_model(tokenizer).save_pretrained(folder)
    config = trl.RLOOConfig if kind is trl.RLOOTrainer else trl.GRPOConfig
    config = config(**{
        "output_dir": str(folder), "model_init_kwargs": {"dtype": "float32"}, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_dropout": True,
        "dataloader_pin_memory": False, "report_to": "none", "per_device_train_batch_size": 2 * G,
        "num_generations": G, "max_completion_length": 12, "num_iterations": mu,
        "max_steps": batches * mu, "beta": 0.0, "max_grad_norm": 0.0, "learning_rate": 1e-3,
        "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "seed": 1,
    } | dict(options))  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"{a}+{b}=?"} for a in range(4) for b in range(4)])
    trainer = kind(str(folder), digits, config, rows, processing_class=tokenizer, **more)
    trainer.inputs, trainer.losses, trainer.digits = [], [], rewards
    trainer.before, compute = weights_of(trainer.model), trainer.compute_loss

    def compute_loss(model, batch, *args, **kwargs):
        loss = compute(model, batch, *args, **kwargs)
        trainer.losses.append(loss.item())
        trainer.inputs.append(batch)
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    return trainer


def cppo(folder, options=(), batches=2, kind=CPPOTrainer, **more):
    options = {"per_device_train_batch_size": G, "gradient_accumulation_steps": 2, "beta": 0.04,
               "loss_type": "grpo", "use_bias_correction_kl": False, **dict(options)}
    return trained(kind, folder, batches=batches, options=options, **more)


@pytest.mark.parametrize("mu", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_without_pruning_it_is_trls_own_trainer(beta, mu, tmp_path):
    theirs = cppo(tmp_path / "a", {"beta": beta}, mu=mu, kind=trl.GRPOTrainer)
    ours = cppo(tmp_path / "b", {"beta": beta}, mu=mu, pruning_rate=0.0)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-6) and len(ours.losses) == 4 * mu
    torch.testing.assert_close(
        weights_of(ours.model), weights_of(theirs.model), rtol=0, atol=1e-6)
    assert (weights_of(ours.model) - ours.before).norm() > 0.01


@pytest.mark.parametrize("mu", [1, 2])
def test_a_quarter_is_trained_on_and_nothing_is_computed_for_the_others(mu, tmp_path, monkeypatch):
    advantages, passes, real = [], {"policy": 0, "reference": 0}, CPPOTrainer.__init__

    def init(self, *args, **kwargs):
        def count(name):
            def hook(module, args, kwargs):
                if "labels" in kwargs:  # log-probabilities, not sampling
                    passes[name] += len(kwargs["input_ids"])

            return hook

        real(self, *args, **kwargs)
        self.model.register_forward_pre_hook(count("policy"), with_kwargs=True)
        self.ref_model.register_forward_pre_hook(count("reference"), with_kwargs=True)

    monkeypatch.setattr(CPPOTrainer, "__init__", init)
    monkeypatch.setattr(cppo_in_trl, "prune", lambda A, k: advantages.append(A) or prune(A, k))
    inputs = cppo(tmp_path, mu=mu, pruning_rate=0.75).inputs
    sampled = sum(A.numel() for A in advantages)
    assert sampled == 2 * 2 * G and {len(batch["advantages"]) for batch in inputs} == {2}
    kept = torch.cat([batch["advantages"] for batch in inputs[:2]]).abs().sort().values
    torch.testing.assert_close(kept, advantages[0].abs().topk(2).values.flatten().sort().values)
    # π_old has a pass of its own if μ > 1; each update has one; the reference one for each batch of
    # completions
    assert passes == {"policy": (mu + (mu > 1)) * sampled // 4, "reference": sampled // 4}
    tokens = sum(batch["completion_mask"].sum() for batch in inputs[:2])
    assert inputs[0]["num_items_in_batch"] == tokens


def gradients(trainer, batch, ours):
    """(TRL's gradient, ours). ours: (logp, mask) → loss."""
    model, T = trainer.model, batch["completion_ids"].shape[1]
    tokens, seen = (
        torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    logits = model(input_ids=tokens, attention_mask=seen).logits[:, -T - 1 : -1]
    logp = token_logprobs(logits, batch["completion_ids"])
    mine = gradient(ours(logp, batch["completion_mask"].bool()))
    theirs = trainer._compute_loss(model, batch) * trainer.current_gradient_accumulation_steps
    return gradient(theirs), mine


def test_the_gradient_is_that_of_grpo_loss_on_the_kept(tmp_path):
    """At TRL's second step, when policy and reference differ."""
    trainer, seen = cppo(tmp_path, mu=2, pruning_rate=0.75), []
    batch = trainer.inputs[-1]

    def loss(logp, mask):
        value, stats = grpo_loss(
            logp, batch["old_per_token_logps"], batch["advantages"], mask,
            ref_logp=batch["ref_per_token_logps"], beta=0.04)
        seen.append(stats)
        return value

    theirs, mine = gradients(trainer, batch, loss)
    assert seen[0]["kl"] > 0 and seen[0]["ratio_max"] != 1
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_what_it_cannot_prune_is_refused(tmp_path):
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
    with pytest.raises(ValueError, match="4 equal batches"):  # TRL would drop kept rows
        cppo(tmp_path, options, pruning_rate=0.875)
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match="needs beta=0"):  # adapters have no reference
        cppo(tmp_path, peft_config=adapter)


def two_devices(folder, rows):
    """Called in each of two processes: `rows` completions on a device."""
    options = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    inputs = cppo(f"{folder}/{os.environ['RANK']}", options, batches=1, pruning_rate=0.75).inputs
    print(f"\nrows {[len(batch['advantages']) for batch in inputs]}", flush=True)


@pytest.mark.parametrize("rows, said", [(8, "rows [2]"), (4, "split a group of 8")])
def test_on_two_devices_each_holds_whole_groups(rows, said, tmp_path):
    (tmp_path / "program.py").write_text(
        f"from tests.test_cppo_in_trl import two_devices\ntwo_devices({str(tmp_path)!r}, {rows})")
    two = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    _, output = python(*two, tmp_path / "program.py")
    assert output.count(said) >= 2, output[-2000:]
