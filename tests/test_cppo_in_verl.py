"""examples/cppo_in_verl.py with verl's own trainer class and store, on a CPU. Run it by `bash
examples/test_in.sh verl`."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: bash examples/test_in.sh verl")
tq = pytest.importorskip("transfer_queue")
from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tensordict.tensorclass import NonTensorStack  # noqa: E402

from examples.cppo_in_verl import CPPOTrainer  # noqa: E402
from grpo import group_advantages  # noqa: E402

G, Q = 8, 4


@pytest.fixture(scope="module", autouse=True)
def store():
    import ray

    ray.init(num_cpus=16, include_dashboard=False)  # logical ones: the store has several actors
    tq.init()
    yield
    tq.close()
    ray.shutdown()


def trainer(mini_batch=1, rate=0.75, normalised=True):
    own = object.__new__(CPPOTrainer)
    own.config = OmegaConf.create({
        "actor_rollout_ref": {"rollout": {"n": G}, "actor": {"ppo_mini_batch_size": mini_batch}},
        "algorithm": {
            "adv_estimator": "grpo", "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0,
            "norm_adv_by_std_in_grpo": normalised,
        },
        "trainer": {"v1": {"cppo": {"pruning_rate": rate}}, "critic_warmup": 0},
    })  # fmt: skip
    own.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
    own.tokenizer, own.use_critic, own.global_steps = SimpleNamespace(eos_token_id=0), False, 1
    return own


def sampled(partition, seed=0, missing=0):
    """(batch as verl's replay buffer hands it out, rewards (Q, G), lengths (Q, G)) of completions
    in another order."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(Q, G, generator=generator)
    lengths = torch.randint(2, 6, (Q, G), generator=generator)
    places = [(q, i) for q in range(Q) for i in range(G)]
    order = torch.randperm(Q * G, generator=generator)[missing:].tolist()
    keys = [f"{'abcd'[q]}uid_{i}_0" for q, i in (places[row] for row in order)]
    rows = [places[row] for row in order]

    def nested(row_of):
        return torch.nested.as_nested_tensor(
            [row_of(*place) for place in rows], layout=torch.jagged
        )

    fields = TensorDict({
        "uid": NonTensorStack(*[f"{'abcd'[q]}uid" for q, i in rows]),
        "response_mask": nested(lambda q, i: torch.ones(lengths[q, i], dtype=torch.long)),
        "rm_scores": nested(
            lambda q, i: torch.cat([torch.zeros(lengths[q, i] - 1), rewards[q, i : i + 1]])),
    }, batch_size=len(rows))  # fmt: skip
    tags = [{"seq_len": int(lengths[place])} for place in rows]
    return (
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields, tags=tags), rewards,
        lengths,
    )


@pytest.mark.parametrize("normalised", [True, False])
def test_the_kept_go_on_with_the_advantages_over_all(normalised):
    partition = f"train {normalised}"
    batch, rewards, lengths = sampled(partition)
    own = trainer(normalised=normalised)
    kept = own._balance_batch(batch, {})
    A = group_advantages(rewards, divide_by_std=normalised)
    expected = {
        f"{'abcd'[q]}uid_{i}_0" for q in range(Q) for i in A[q].abs().topk(2).indices.tolist()
    }
    assert set(kept.keys) == expected and len(kept.keys) == Q * 2
    assert set(tq.kv_list(partition)[partition]) == expected  # the pruned are gone from the store
    done = own._compute_advantage(kept, {})
    data = tq.kv_batch_get(
        keys=done.keys, partition_id=partition, select_fields=["advantages", "returns"]
    )
    for key, row, other in zip(done.keys, data["advantages"].unbind(), data["returns"].unbind()):
        q, i = "abcd".index(key[0]), int(key.split("_")[1])
        torch.testing.assert_close(row, A[q, i].expand(int(lengths[q, i])))
        torch.testing.assert_close(row, other)


def test_what_cannot_be_pruned_is_refused_in_one_sentence():
    batch, *_ = sampled("incomplete", missing=1)
    with pytest.raises(ValueError, match="CPPO needs 8 completions of each question"):
        trainer()._balance_batch(batch, {})
    batch, *_ = sampled("mini-batches")
    with pytest.raises(ValueError, match="ppo_mini_batch_size × n = 24"):
        trainer(mini_batch=3)._balance_batch(batch, {})


def test_verls_names_are_there():
    """What is read in verl and used by its trainer: the registry, the buffer's mode."""
    from verl.trainer.ppo.v1 import get_trainer_cls

    assert get_trainer_cls("cppo") is CPPOTrainer
