"""Any number of ranks makes the same update, however the completions are shared out. `make` is what
each of two processes does."""

import json
import math
import multiprocessing
import os
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from torch.nn.utils.parametrize import register_parametrization
from torch.testing import assert_close

from algorithms import resolve
from engine.base import files, ranks
from engine.model import shards
from engine.model.critic import compute_advantages
from engine.model.logprobs import completion_mask
from engine.model.networks import build
from engine.options.config import config_of
from engine.run import checkpoint
from engine.run.state import State
from family.gdpo import decoupled_advantages
from loop.records import Batch, Parts
from loop.rollout import sample_and_score
from loop.update import Limits, forward_backward, map_micro_batches, update
from tests.helpers.examples import seeded
from tests.helpers.runs import ENVIRONMENT, ROOT, free_port, sums, written
from tests.helpers.training import CPU, a_rollout, minibatches_of

# how six fixed completions are shared out to one rank and to two: by unequal numbers and tokens,
# all to one. A rank has the parts r, r + world size …
SHARES = {
    "uneven": [[5], [0, 1, 2, 3, 4]], "all": [[], [5, 4, 3, 2, 1, 0]],
    "signal": [[0, 1, 3], [2, 4, 5]],
}
# how, and on replicas or shards
UPDATED = {
    "cppo": [("uneven", "full"), ("all", "none")], "ppo": [("uneven", "none"), ("all", "full")],
    "dapo": [("uneven", "none")], "drgrpo": [("uneven", "none")],
}


def fixed(folder, algorithm, shard, checkpoint_of=None, device=CPU, **options):
    """The Networks that start from the model in `folder`, or go on from a checkpoint, and their
    Algorithm. options: of train.py."""
    config, algorithm = config_of({
        "algorithm": algorithm, "model": "toy", "lr": 1e-3, "beta": 0.04, "shard": shard,
        "gradient_checkpointing": shard == "full", "minibatches": 1, "dtype": "float32", **options,
    })
    saved = str(checkpoint.newest(checkpoint_of)) if checkpoint_of else None
    networks = build(config, algorithm, folder, device, saved)
    if saved:
        checkpoint.restore(saved, networks)
    return networks, algorithm


def six_completions(device, scale=1.0):
    generator = seeded(0)
    prompts = [[6 + i, 16, 7, 18, 19] * (1 + i % 2) for i in range(6)]
    tokens = torch.randint(2, 22, (6, 9), generator=generator)
    mask = completion_mask(tokens, torch.tensor([1, 9, 3, 8, 2, 5]))
    advantages = scale * torch.randn(6, generator=generator)
    return Batch(prompts, tokens.to(device), mask, advantages.to(device))


def own_share(name):
    """This rank's rows of the six completions."""
    return sum(ranks.split_over_ranks(SHARES[name]), [])


def fixed_update(networks, algorithm, name, optimizer, scale=1.0):
    """The weights after the updates on this rank's rows of the six completions, and the update's
    metrics."""
    policy = networks.policy
    critic = networks.critic
    share = own_share(name)
    own = six_completions(policy.model.device, scale).select(share)
    minibatches = [batch] = minibatches_of(own, algorithm, share)

    def computed(function):
        return map_micro_batches(function, batch, policy, Limits(micro_batch_tokens=40))

    with torch.no_grad():
        batch.ref_logp = computed(networks.reference.logprobs) - 0.05
        # no backward pass follows, and still its embedding and head are given up again
        if policy.sharded:
            assert all(isinstance(p, DTensor) for p in networks.reference.model.parameters())
        if critic:
            for p in critic.head.parameters():  # a head of 0 would leave nothing to tell apart
                p.fill_(0.1)
            batch.old_logp, batch.old_values = computed(policy.logprobs), computed(critic)
            compute_advantages(
                minibatches, policy.model.device, beta=algorithm.beta, lam=algorithm.lam)
    return updated(networks, minibatches, algorithm, optimizer)


def updated(networks, minibatches, algorithm, optimizer):
    networks.optimizer = optimizer
    stats, skipped = update(networks, minibatches, algorithm, Limits(micro_batch_tokens=40))
    ranks.gather([])
    weights = [
        tensor.flatten() for network in networks.optimized_networks
        for _, tensor in shards.full_state_dict(network)
    ]
    return {"weights": torch.cat(weights), "stats": stats | {"skipped": skipped}}


def sgd_update(folder, algorithm, shard="none", name="uneven", rounded=False, **options):
    """rounded: compute with weights in bfloat16, as shards do. Autocast would keep all but the
    products in float32."""
    networks, algorithm = fixed(folder, algorithm, shard, **options)
    if rounded:
        copy_master_weights(networks.model)
        copy_master_weights(networks.critic.backbone)
    optimizer = torch.optim.SGD(
        [p for network in networks.optimized_networks for p in network.parameters()], lr=0.1
    )
    return fixed_update(networks, algorithm, name, optimizer)


class Rounded(torch.nn.Module):
    def forward(self, weight):
        return weight.bfloat16()


def copy_master_weights(network):
    """Compute with weights in bfloat16, from now on. The weights that learn stay float32."""
    for module in list(network.modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            register_parametrization(module, name, Rounded(), unsafe=True)


def whole_gradient(folder):
    """The gradient of shards in bfloat16 over all ranks. Each rank has one micro-batch."""
    networks, algorithm = fixed(folder, "cppo", "full", dtype="bfloat16")
    share = own_share("uneven")
    [batch] = minibatches_of(six_completions(CPU).select(share), algorithm, share)
    forward_backward(networks, batch, algorithm, Limits(max_grad_norm=math.inf))
    return torch.cat([p.grad.full_tensor().flatten() for p in networks.model.parameters()])


def update_with_signal_in_one(folder, shard="none"):
    """Two times through two mini-batches, then two times through seven, of which the last has no
    completion. Only row 2 has an advantage. The optimizer remembers."""
    (networks, _), share = fixed(folder, "drgrpo", shard), own_share("signal")
    everything = six_completions(networks.model.device)
    everything.advantages[[0, 1, 3, 4, 5]] = 0
    optimizer = torch.optim.SGD(networks.model.parameters(), lr=0.1, momentum=0.9)
    for count in (2, 7):
        algorithm = resolve("drgrpo", mu=2, minibatches=count)
        minibatches = minibatches_of(everything.select(share), algorithm, share)
        assert len(minibatches) == 1
        result = updated(networks, minibatches, algorithm, optimizer)
    return result


def saved_update(networks, algorithm, run_dir, step):
    """One update with AdamW, and a checkpoint behind it."""
    fixed_update(networks, algorithm, "uneven", networks.optimizer, scale=1 / step)
    assert checkpoint.save(run_dir, networks, State("toy", "data", devices=1, step=step))


def torchrun(*arguments, ranks=2, timeout=120, cwd=ROOT):
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    command = [sys.executable, *launch, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd,
                          env=os.environ | ENVIRONMENT)


def ranks_do(*arguments, **options):
    done = torchrun(*arguments, **options)
    assert done.returncode == 0, done.stderr[-6000:]  # torchrun's own report is long


@pytest.fixture(scope="module")
def two(small, tmp_path_factory):
    """Folder of what two ranks made of the six completions, on replicas and on weights shared
    out."""
    out = tmp_path_factory.mktemp("made")
    # one process imports all, and each rank is a fork of it
    modules = [__name__, "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2"]
    multiprocessing.set_forkserver_preload(modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        start_processes(make, (free_port(), small, out), nprocs=2, start_method="forkserver")
    return out


def make(rank, port, folder, out):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks.start()

    def save(result, name):
        torch.save(result, out / f"{name}-{rank}.pt")

    for algorithm, ways in UPDATED.items():
        for name, shard in ways:
            save(sgd_update(folder, algorithm, shard, name), f"{algorithm}-{name}-{shard}")
    saved_update(*fixed(folder, "cppo", "full"), out / "run", step=1)
    save(sgd_update(folder, "ppo", "full", dtype="bfloat16", mu=1), "bfloat16")
    save(whole_gradient(folder), "gradient")
    for shard in ("none", "full"):
        save(update_with_signal_in_one(folder, shard), f"signal-{shard}")
    own = some_rewards().tensor_split(2, dim=1)[rank]
    save(ranks.over_all_groups(resolve("gdpo").advantages, a_rollout(own)), "gdpo")

    ranks.gather([])  # a rank that leaves early would end the talk of the other
    ranks.stop()


def results(out, name):
    """One from each rank."""
    return [torch.load(path) for path in sorted(out.glob(f"{name}-?.pt"))]


def common_result(out, name):
    first, *others = results(out, name)
    assert others and all(torch.equal(first["weights"], other["weights"]) for other in others)
    return first


@pytest.mark.parametrize("algorithm", UPDATED)
def test_several_ranks_make_the_same_update(small, two, algorithm):
    """Weights count completions, tokens, or the longest completion allowed, of all ranks together;
    PPO's advantages are whitened over all ranks, and its critic learns from all."""
    one = sgd_update(small, algorithm)
    for name, shard in UPDATED[algorithm]:
        assert_same_result(common_result(two, f"{algorithm}-{name}-{shard}"), one)


def test_one_process_goes_on_from_the_checkpoint_of_several(small, two, tmp_path):
    """As one that made the first update itself."""
    alone = fixed(small, "cppo", "none")
    for step in (1, 2):
        saved_update(*alone, tmp_path, step)
    saved_update(*fixed(small, "cppo", "none", two / "run"), two / "run", step=2)
    for step in (1, 2):
        expected, found = (
            load_file(run / f"checkpoint-{step:06d}/model.safetensors")
            for run in (tmp_path, two / "run"))
        assert expected.keys() == found.keys()
        for name in expected:
            # AdamW makes much of a gradient that is all rounding
            difference = (found[name] - expected[name]).abs()
            assert (difference > 1e-4).sum() <= 1 and difference.mean() < 1e-6


def assert_same_result(found, expected):
    """But for the rounding of sums in another order."""
    assert_close(found["weights"], expected["weights"], rtol=1e-5, atol=1e-7)
    for key, value in expected["stats"].items():
        assert found["stats"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_shared_out_weights_learn_the_same_in_bfloat16(small, two):
    """Shards round where one process rounds whose weights are in bfloat16. So their results lie
    much nearer to each other than to float32.

    One update only: afterwards a ratio may lie so near to a clip that the rounding decides whether
    a token has a gradient.
    """
    exact = sgd_update(small, "ppo", mu=1)["weights"]
    one = sgd_update(small, "ppo", dtype="bfloat16", mu=1, rounded=True)["weights"]
    shards = common_result(two, "bfloat16")["weights"]
    assert shards.dtype == torch.float32
    assert (shards - one).norm() < 0.5 * (one - exact).norm()


def test_shards_add_gradients_up_in_float32(two):
    """A rank's gradient is in bfloat16. The sum over the ranks has more digits than bfloat16."""
    gradient = results(two, "gradient")[0]
    has_more_digits = gradient != gradient.bfloat16()
    assert has_more_digits.float().mean() > 0.5


@pytest.mark.parametrize("shard", ["none", "full"])
def test_ranks_leave_the_same_mini_batches_out(small, two, shard):
    """One without a completion or without an advantage on any rank; not one with an advantage on
    another rank."""
    one = update_with_signal_in_one(small)
    assert len(one["stats"]["skipped"]) == 2
    assert_same_result(common_result(two, f"signal-{shard}"), one)


def test_gdpo_normalises_over_the_groups_of_all_ranks(two):
    assert_close(torch.cat(results(two, "gdpo")), decoupled_advantages(some_rewards()))


def some_rewards():
    return torch.randn(2, 5, 4, generator=seeded(0))


def test_each_rank_cuts_its_completions_at_random_places_of_its_own(monkeypatch):
    """NAT trains on random prefixes."""
    drawn = a_rollout(torch.zeros(1, 8), torch.full((1, 8), 99))
    monkeypatch.setattr("loop.rollout.roll_out", lambda *_, **__: drawn)
    algorithm = resolve("grpo", min_prefix=0.1)
    found = []
    for number in (0, 0, 1):
        monkeypatch.setattr(ranks, "rank", lambda number=number: number)
        parts = Parts(None, algorithm, [], None, None)
        cut = sample_and_score(parts, [], random.Random(1), None)
        found.append(cut.prefix_weights.tolist())
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_any_number_of_ranks_samples_the_same_completions_and_cuts_the_same_mini_batches(
    small, tmp_path
):
    """With dynamic sampling, too, which samples further questions within a step, and trains on some
    of them."""
    sampled = []
    updates = []
    for processes in (1, 3):
        words = (
            f"--model {small} --output_dir {processes} --algorithm dapo --minibatches 4 --lr 1e-3 "
            f"--questions_per_step {6 // processes} --group_size 4 --max_new_tokens 24 --steps 2 "
            "--eval_questions 1")
        ranks_do(ROOT / "train.py", *words.split(), ranks=processes, cwd=tmp_path)
        rows = files.read_lines(tmp_path / str(processes) / "metrics.jsonl")
        names = ("questions", "rollouts", "accuracy", "length", "truncated")
        sampled.append([[row[name] for name in names] for row in rows])
        updates.append([rows[0][name] for name in ("loss", "grad_norm", "approx_kl", "ratio_max")])
    assert sampled[0][0][1] > 1
    for row, expected in zip(*sampled, strict=True):
        assert row == pytest.approx(expected, rel=1e-9)
    assert updates[0] == pytest.approx(updates[1], rel=1e-3)


@pytest.mark.parametrize("algorithm", ["dapo", "gfpo_adaptive", "ppo"])
@pytest.mark.slow
def test_a_rank_without_a_question_is_no_trouble(small, tmp_path, algorithm):
    """Two ranks and three questions: the last step leaves a rank without one."""
    written(tmp_path / "x.jsonl", sums(3))
    words = (
        f"--model {small} --dataset x.jsonl --output_dir run --algorithm {algorithm} "
        "--group_size 8 --max_new_tokens 8 --allocation false")
    ranks_do(ROOT / "train.py", *words.split(), cwd=tmp_path)
    state = json.loads((checkpoint.newest(tmp_path / "run") / "state.json").read_text())
    # a mean reward for each question of all ranks
    assert len(state["past"]) == (3 if algorithm == "gfpo_adaptive" else 0)
    assert state["position"] == 3


@pytest.mark.slow
def test_a_users_mistake_is_told_once_and_is_the_last_thing_that_torchrun_prints(small, tmp_path):
    written(tmp_path / "x.jsonl", sums(1))
    words = f"--model {small} --dataset x.jsonl --max_new_tokens 8"
    done = torchrun(ROOT / "train.py", *words.split(), cwd=tmp_path)
    message = "error: 2 devices for 1 questions"
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and sum(line.startswith(message) for line in lines) == 1
    assert lines[0].startswith(message) and message in lines[-2] and set(lines[-1]) == {"="}
    assert done.stderr.count("Traceback") == 1  # torchrun's own
