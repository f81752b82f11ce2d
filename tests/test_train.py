"""train.py: one step of every algorithm, and what a run leaves behind."""

import copy
import json
import math
import shutil

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import eval as evaluation
import train
from algorithms import ALGORITHMS, KEEP
from cppo import prune
from engine.base import files
from engine.base.errors import UserError
from engine.model import loading, sampling
from engine.model import networks as networks_module
from engine.model.logprobs import Policy
from engine.run import checkpoint, folder
from engine.run import curves as curves_module
from engine.run.state import learning_rate, run_progress
from engine.tasks import questions as questions_module
from engine.tasks import toy_model
from records import Batch, micro_batches_of
from tests.engine.test_ranks import ROOT, torchrun
from tests.examples import named
from tests.training import CPU, stepper, weights_of

# ---- one step
# -------------------------------------------------------------------------------------------------------


@pytest.fixture
def step_inputs(small):
    """(model, tokenizer, four questions)"""
    model, tokenizer = loading.load_model(small, CPU)
    questions, _ = questions_module.load_questions("toy", tokenizer, limit=4)
    return model, tokenizer, questions


def run_step(step_inputs, functions, algorithm="cppo", number=1, **options):
    """(metrics, sample) of step `number` as the first one of a run, with these options."""
    return stepper(*step_inputs, functions, algorithm, **options)(number)[:2]


def number_of_digits(completions, **columns):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def test_every_forward_pass_of_an_update_is_made_for_the_kept_only(step_inputs, monkeypatch):
    scored, real = [], Batch.logprobs

    def logprobs(self, *args, **options):
        scored.append(len(self.prompts))
        return real(self, *args, **options)

    monkeypatch.setattr(Batch, "logprobs", logprobs)
    metrics, sample = run_step(
        step_inputs, [number_of_digits], group_size=8, pruning_rate=0.75, mu=2,
        micro_batch_tokens=100,
    )
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (4, 32, 8)
    # the reference once, the policy μ=2 times, none of them for a pruned completion
    assert sum(scored) == 3 * 8
    # the advantages are those of all 8 completions of a question, and the kept are its largest
    rewards = torch.tensor([[row["reward"] for row in sample["completions"]]])
    advantages = torch.tensor([[row["advantage"] for row in sample["completions"]]])
    torch.testing.assert_close(advantages, (rewards - rewards.mean()) / (rewards.std() + 1e-4))
    assert [i for i, row in enumerate(sample["completions"]) if row["kept"]] == prune(
        advantages, 2
    )[0].tolist()
    assert (
        metrics["tokens_trained"]
        < metrics["tokens_generated"]
        == pytest.approx(metrics["length"] * 32)
    )


@pytest.mark.parametrize("algorithm, passes", [("grpo", 3), ("ppo", 6)])
def test_the_policy_that_is_scored_is_the_one_that_was_sampled(
    step_inputs, monkeypatch, algorithm, passes
):
    """Reference, π_old and π_θ are all taken at the sampler's temperature. At another one each
    ratio would be wrong."""
    temperatures, real = [], Batch.logprobs

    def logprobs(self, model, temperature, **options):
        temperatures.append(temperature)
        return real(self, model, temperature, **options)

    monkeypatch.setattr(Batch, "logprobs", logprobs)
    options = {"group_size": 4, "temperature": 0.7, "micro_batch_tokens": 10**6}
    metrics, _ = run_step(step_inputs, [number_of_digits], algorithm, **options)
    assert temperatures == [0.7] * passes and metrics["sampler_gap_max"] < 1e-3


def test_dynamic_sampling_replaces_groups_without_signal_until_the_step_is_full(
    step_inputs, monkeypatch, capsys
):
    questions = step_inputs[2]
    asked, trained = [], []
    monkeypatch.setattr(
        train, "update",
        lambda networks, minibatches, *_: trained.extend(micro_batches_of(minibatches)) or ({}, []),
    )

    # 4 questions in all at first, then as many as are missing; the supply ends after 9
    def next_questions(missing):
        asked.append(missing)
        left = 9 - sum(n or 4 for n in asked[:-1])
        return (questions * 3)[: min(missing or 4, left)] if left > 0 else None

    def signal_in_every_second_group(completions, **columns):
        return [float(i // 4 % 2 and i % 4) for i in range(len(completions))]

    def step(max_rollouts):
        make = stepper(
            *step_inputs, [signal_in_every_second_group], "dapo", group_size=4,
            max_rollouts=max_rollouts,
        )
        return make(1, next_questions)[0]

    metrics = step(5)
    # 4 gave 2, then 2 gave 1, then one question at a time gave none
    assert asked == [None, 2, 1, 1, 1] and metrics["rollouts"] == 5
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (9, 36, 12)
    assert (
        metrics["no_signal"] == pytest.approx(6 / 9)
        and sum(len(batch.prompts) for batch in trained) == 12
    )
    assert all(len(set(batch.advantages.tolist())) > 1 for batch in trained)
    asked.clear()
    assert (
        "1 groups are still without signal after sampling 5 times: the step trains on the others."
        in capsys.readouterr().out
    )
    assert step(2)["rollouts"] == 2


def of_two(even, odd):
    """A reward: of every question the first, third, … completion earns `even`, the others `odd`."""
    return lambda completions, **columns: [
        float(odd if i % 2 else even) for i in range(len(completions))
    ]


def rewarded(*values):
    """Functions as rewards with names of their own, each the values of two completions in turn."""
    functions = [of_two(*pair) for pair in values]
    for i, function in enumerate(functions):
        function.__name__ = f"reward_{i}"
    return functions


def test_no_signal_is_the_share_of_groups_whose_advantages_are_all_0(step_inputs):
    # one question, whose group is in the samples
    step_inputs = (*step_inputs[:2], step_inputs[2][:1])

    def no_signal(functions, algorithm, **options):
        metrics, sample = run_step(
            step_inputs, functions, algorithm, group_size=4, lr=0.0, **options
        )
        advantages = [row["advantage"] for row in sample["completions"]]
        assert metrics["no_signal"] == (not any(advantages))
        return metrics["no_signal"]

    # the sums are equal, but GDPO normalises each reward by itself: 0.87 + 0.87 − 0.87
    assert no_signal(rewarded((1, 0), (1, 0), (0, 2)), "gdpo") == 0
    assert no_signal(rewarded((1, 0), (1, 0), (0, 2)), "grpo") == 1
    # all are right, and some are too long
    assert no_signal([ones], "grpo", max_new_tokens=8, overlong_cache=7) == 0
    assert no_signal([ones], "grpo", max_new_tokens=8) == 1
    # the two that GFPO keeps are right
    assert no_signal(rewarded((1, 0)), "gfpo", keep="efficiency") == 1


def test_no_signal_counts_a_gdpo_group_of_equal_rewards_beside_others(step_inputs):
    """The mean over the batch is 0, and its rounding is not."""
    def equal_in_the_first(completions, **columns):
        return [i // 4 and i * i % 7 / 10 for i in range(len(completions))]

    metrics, sample = run_step(step_inputs, [equal_in_the_first], "gdpo", group_size=4)
    assert (
        metrics["no_signal"] == 0.25
        and [row["advantage"] for row in sample["completions"]] == [0.0] * 4
    )


def test_ppos_no_signal_is_the_share_of_groups_whose_scores_are_equal(step_inputs):
    def no_signal(functions):
        return run_step(step_inputs, functions, "ppo", group_size=4, lr=0.0)[0]["no_signal"]

    assert no_signal(rewarded((1, 0), (0, 1))) == 1 and no_signal(rewarded((1, 0), (0, 2))) == 0


def test_dynamic_sampling_goes_by_the_rewards_before_the_overlong_penalty(step_inputs):
    step_inputs = (*step_inputs[:2], step_inputs[2][:1])
    metrics, sample = run_step(
        step_inputs, [ones], "dapo", group_size=4, max_new_tokens=8, overlong_cache=7,
        max_rollouts=2,
    )
    # of right answers that differ in length alone
    assert any(row["advantage"] for row in sample["completions"])
    assert metrics["rollouts"] == 2 and metrics["kept"] == 0 and metrics["loss"] is None


def test_truncated_completions_are_left_out_but_count_in_their_group(step_inputs, monkeypatch):
    trained = []
    monkeypatch.setattr(train, "update", lambda networks, minibatches, *_: trained.extend(micro_batches_of(minibatches)) or ({}, []))
    options = {"group_size": 8, "max_new_tokens": 8, "mask_truncated": True, "overlong_cache": 4}
    metrics, sample = run_step(step_inputs, [number_of_digits], "grpo", **options)
    assert 0 < metrics["truncated"] < 1 and metrics["kept"] == round(
        32 * (1 - metrics["truncated"])
    )
    assert sum(len(batch.prompts) for batch in trained) == metrics["kept"]
    # 1 is EOS
    assert all(
        n < 8 or batch.tokens[i, 7] == 1
        for batch in trained
        for i, n in enumerate(batch.lengths.tolist())
    )
    assert metrics["reward/overlong"] < 0 and metrics["reward"] == pytest.approx(
        metrics["reward/number_of_digits"] + metrics["reward/overlong"])
    torch.testing.assert_close(
        sum(row["advantage"] for row in sample["completions"]), 0.0, atol=1e-4, rtol=0
    )


def test_mini_batches_cover_the_kept_once_and_know_the_old_policy(step_inputs, monkeypatch):
    seen, real = [], train.update

    def update(networks, minibatches, *rest):
        seen.extend(minibatches)
        # the first one gets π_old from its first update, for nothing
        assert [m.micro_batches[0].old_logp is None for m in minibatches] == [
            True, False, False, False,
        ]
        return real(networks, minibatches, *rest)

    monkeypatch.setattr(train, "update", update)
    model = copy.deepcopy(step_inputs[0])  # π_old
    metrics, _ = run_step(step_inputs, [number_of_digits], "gspo", group_size=8, mu=1, lr=1e-2)
    batches = micro_batches_of(seen)
    assert len(seen) == 4 and sum(len(batch.prompts) for batch in batches) == 32
    for batch in batches:
        with torch.no_grad():
            torch.testing.assert_close(
                batch.old_logp, batch.logprobs(Policy(model), 1.0), atol=1e-5, rtol=1e-5
            )
    # with μ = 1, and without mini-batches, both would be 0
    assert metrics["clip_fraction"] > 0 and metrics["kl_old"] > 0


def test_the_updates_end_when_the_policy_is_too_far_from_the_old_one(step_inputs):
    options = {"group_size": 8, "mu": 6, "lr": 1e-3}
    free, _ = run_step(step_inputs, [number_of_digits], "grpo", **options)
    step_inputs = (loading.load_model(step_inputs[0].name_or_path, CPU)[0], *step_inputs[1:])
    bound, _ = run_step(step_inputs, [number_of_digits], "grpo", **options, target_kl=1e-3)
    assert free["kl_old"] > 1e-3 and 0 < bound["kl_old"] < free["kl_old"]


def few_digits(completions, **columns):
    return [-float(sum(c.isdigit() for c in text)) for text in completions]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_raises_its_reward(step_inputs, algorithm):
    make = stepper(*step_inputs, [few_digits], algorithm, group_size=8, lr=1e-3)
    rewards = [make(step)[0]["reward"] for step in range(12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5


def test_a_random_choice_of_the_kept_follows_from_seed_and_step(step_inputs):
    def kept(number):
        _, sample = run_step(
            step_inputs, [number_of_digits], number=number, pruning_rate=0.5, keep="random", lr=0.0
        )
        return [row["kept"] for row in sample["completions"]]

    assert kept(1) == kept(1) != kept(2)


def test_the_random_choice_draws_other_numbers_than_the_sampler(step_inputs, monkeypatch):
    seeds, sample = {}, sampling.Sampler.sample

    def noted(self, *rest):
        seeds["sampled"] = rest[3]
        return sample(self, *rest)

    def keep(rollout, advantages, k):
        seeds["kept"] = rollout.seed
        return KEEP["random"](rollout, advantages, k)

    monkeypatch.setattr(sampling.Sampler, "sample", noted)
    run_step(step_inputs, [number_of_digits], keep=keep, lr=0.0)
    kept, sampled = (
        torch.rand(4, 16, generator=torch.Generator().manual_seed(seeds[name]))
        for name in ("kept", "sampled")
    )
    assert not torch.equal(kept, sampled)


def test_a_step_without_signal_makes_no_update(step_inputs):
    before = weights_of(step_inputs[0])
    metrics, _ = run_step(step_inputs, [ones], group_size=4)
    assert metrics["no_signal"] == 1 and metrics["loss"] is None and metrics["skipped_updates"] == 0
    assert torch.equal(weights_of(step_inputs[0]), before)


def ones(completions, **columns):
    return [1.0] * len(completions)


@pytest.mark.parametrize("score", [0.0, 2.0])
def test_ppo_has_an_update_to_make_where_all_rewards_are_equal(step_inputs, score):
    """V is 0 and, with λ = 1, the return of every token is the score: the critic's loss is ½ (0 −
    score)²."""
    equal = lambda completions, **columns: [score] * len(completions)
    metrics, _ = run_step(step_inputs, [equal], "ppo", group_size=4, lam=1.0, lr=0.0)
    assert metrics["no_signal"] == 1 and metrics["value_loss"] == pytest.approx(score**2 / 2)


def test_ppo_learns_from_equal_rewards_what_its_critic_did_not_foresee(step_inputs):
    before = step_inputs[0].lm_head.weight.clone()
    make = stepper(*step_inputs, [ones], "ppo", group_size=4, lr=1e-3)
    losses = [make(step)[0]["value_loss"] for step in range(6)]
    assert losses[-1] < losses[0] / 2 and not torch.equal(step_inputs[0].lm_head.weight, before)


def test_ppos_kl_is_in_the_rewards(step_inputs):
    """A policy that was moved away from its reference: a large β brings it back, a tiny one lets it
    go where the reward is."""
    model, kls = step_inputs[0], {}
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    for beta in (1e-6, 100.0):
        make = stepper(
            copy.deepcopy(model),
            *step_inputs[1:], [number_of_digits], "ppo", group_size=8, lr=1e-3, beta=beta,
            reference=reference,
        )
        kls[beta] = [make(step)[0]["kl"] for step in range(6)]
    assert sum(kls[100.0][3:]) < sum(kls[1e-6][3:]) / 2
    # no reference
    assert run_step(step_inputs, [number_of_digits], "ppo", group_size=4, beta=0.0)[0]["kl"] == 0


def test_gfpos_adaptive_k_goes_by_the_mean_rewards_of_the_questions_so_far(step_inputs):
    """Question q of four earns q for each of its 16 completions, in the third step 3 − q; and 1 for
    no reason."""
    history, kept = [], []
    for step, reward in enumerate([lambda i: i // 16, lambda i: i // 16, lambda i: 3 - i // 16]):
        mine = lambda completions, reward=reward, **columns: [
            float(reward(i)) for i in range(len(completions))
        ]
        metrics, sample, mean_rewards, _ = stepper(*step_inputs, [mine, ones], "gfpo_adaptive")(
            step, history=history
        )
        history += mean_rewards
        kept.append((metrics["kept"], sum(row["kept"] for row in sample["completions"])))
    assert history == [1, 2, 3, 4, 1, 2, 3, 4, 4, 3, 2, 1]
    # of all, and of the first question
    assert kept == [(4 * 8, 8), (8 + 8 + 6 + 4, 8), (4 + 6 + 8 + 8, 4)]


def test_a_step_is_a_function_of_its_number_and_the_seed(step_inputs):
    def samples(*numbers, **options):
        return [
            run_step(step_inputs, [number_of_digits], number=number, group_size=4, **options)[1]
            for number in numbers
        ]

    texts = [[row["completion"] for row in sample["completions"]] for sample in samples(3, 4)]
    assert texts[0] != texts[1]
    first, again = samples(3, 3, lr=0.0)
    assert first == again


@pytest.mark.parametrize("values, message", [
    ([1.0], "returned 1 values for"), ([math.nan] * 16, r"returned nan \(float\) for the completion")])
def test_a_reward_that_misbehaves_is_named(step_inputs, values, message):
    def my_reward(completions, **columns):
        return values

    with pytest.raises(UserError, match=f"the reward my_reward {message}"):
        run_step(step_inputs, [my_reward], group_size=4)


def test_learning_rate_rises_over_the_warm_up_and_falls_to_0():
    assert learning_rate(0.05, 2.0, 0.1) == pytest.approx(1.0) and learning_rate(
        0.1, 2.0, 0.1
    ) == pytest.approx(2.0)
    assert learning_rate(0.55, 2.0, 0.1) == pytest.approx(1.0) and learning_rate(
        1.0, 2.0, 0.1
    ) == pytest.approx(0.0)
    assert learning_rate(0.001, 2.0, 0.1) > 0 and learning_rate(0.5, 1.0, 0.0) == pytest.approx(0.5)
    for schedule, after in {
        "cosine": (0.853553, 0.146447), "linear": (0.75, 0.25), "constant": (1, 1),
    }.items():
        rates = [learning_rate(x, 2.0, 0.2, schedule) for x in (0.1, 0.2, 0.4, 0.8)]
        assert rates == pytest.approx([1, 2, 2 * after[0], 2 * after[1]], abs=1e-5)


# ---- a run
# ----------------------------------------------------------------------------------------------------------


def go(small, folder, *options, steps=3):
    argv = [
        "--model", small, "--output_dir", str(folder), "--lr", "1e-3", "--questions_per_step", "2",
        "--max_new_tokens", "48", "--group_size", "8", "--eval_questions", "8", "--steps",
        str(steps),
        *options,
    ]
    return train.main(argv)


def go_in_two(small, folder, monkeypatch, *options, killed_in, save_every, steps):
    """A run that dies in a step, and its resumption."""
    real, begun = train.train_step, []

    def killed(*rest):
        begun.append(rest)
        if len(begun) == killed_in:
            raise RuntimeError("killed")
        return real(*rest)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(train, "train_step", killed)
        go(small, folder, *options, "--save_every", str(save_every), steps=steps)
    train.main(["--output_dir", str(folder), "--resume"])


def test_stop_kl_ends_the_run_with_a_checkpoint_and_a_sentence(
    small, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(train, "choose", lambda *_: named(number_of_digits))
    assert go(small, tmp_path / "run", "--stop_kl", "1e-7", steps=5) == 0
    assert "the KL to the reference is" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["step"] < 5 and summary["checkpoint"].endswith(
        f"checkpoint-{summary['step']:06d}"
    )


def test_the_reference_is_refreshed_and_survives_a_resume(small, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "choose", lambda *_: named(number_of_digits))
    kls, once = {}, ["--mu", "1", "--minibatches", "1"]
    for name, options in [("kept", []), ("refreshed", ["--refresh_reference", "2"])]:
        go(small, tmp_path / name, *once, *options, steps=5)
        kls[name] = [row["kl"] for row in files.read(tmp_path / name / "metrics.jsonl")]
    # there the reference is computed in bfloat16
    rounding = 1e-3 if torch.cuda.is_available() else 0
    # in steps 1, 3 and 5 the reference is the policy again
    assert max(kls["refreshed"][0::2]) <= rounding
    assert kls["kept"][2] > 0 and kls["refreshed"][3] > 0
    go_in_two(
        small, tmp_path / "resumed", monkeypatch,
        *once, "--refresh_reference", "2", killed_in=4, save_every=3, steps=5,
    )
    # step 4 is measured against the reference of step 2
    assert [row["kl"] for row in files.read(tmp_path / "resumed/metrics.jsonl")] == pytest.approx(
        kls["refreshed"], abs=rounding, rel=0
    )


def run_of(folder):
    """What a run has come to: its metrics without the seconds, GFPO's history, and the networks and
    moments of its checkpoint."""
    rows = [
        {k: v for k, v in row.items() if "seconds" not in k}
        for row in files.read(folder / "metrics.jsonl")
    ]
    newest = checkpoint.newest(folder)
    dcp_to_torch_save(newest / "networks", folder / "networks.pt")
    saved = torch.load(folder / "networks.pt")
    del saved["optimizer"]["param_groups"]  # names and rates: the rates are in the metrics
    return rows, json.loads((newest / "state.json").read_text())["history"], saved


@pytest.mark.parametrize("options", [
    ["--algorithm", "ppo"],
    ["--algorithm", "ppo", "--group_size", "1", "--questions_per_step", "16"],
    ["--algorithm", "gfpo_adaptive", "--group_size", "16", "--keep", "efficiency"],
], ids=["ppo", "ppo, one completion of a question", "gfpo_adaptive"])  # fmt: skip
def test_the_critic_and_the_history_survive_a_resume(small, tmp_path, monkeypatch, options):
    monkeypatch.setattr(train, "choose", lambda *_: named(number_of_digits))
    go(small, tmp_path / "straight", *options, steps=4)
    go_in_two(
        small, tmp_path / "resumed", monkeypatch, *options, killed_in=4, save_every=2, steps=4
    )
    (rows, history, saved), resumed = run_of(tmp_path / "straight"), run_of(tmp_path / "resumed")
    assert (rows, history) == resumed[:2] and [row["step"] for row in rows] == [1, 2, 3, 4]
    torch.testing.assert_close(saved, resumed[2], rtol=0, atol=0)
    if "ppo" in options:
        assert saved["critic"]["head.bias"] != 0 and all(row["value_loss"] > 0 for row in rows)
    else:
        assert len(history) == 8 and rows[0]["kept"] == 2 * 8 > min(row["kept"] for row in rows)


def test_policy_and_critic_follow_the_schedule_each_from_its_own_peak(small, tmp_path, monkeypatch):
    real, rates = train.train_step, []

    def noted(networks, *rest):
        for group, network in zip(
            networks.optimizer.param_groups, (networks.model, networks.critic), strict=True
        ):
            assert [id(p) for p in group["params"]] == [id(p) for p in network.parameters()]
        rates.append([group["lr"] for group in networks.optimizer.param_groups])
        return real(networks, *rest)

    monkeypatch.setattr(train, "train_step", noted)
    go(
        small, tmp_path / "run", "--algorithm", "ppo", "--critic_lr", "5e-3", "--warmup", "0.5",
        steps=4,
    )
    assert rates == [
        pytest.approx([share * 1e-3, share * 5e-3])
        for share in (0.25, 0.75, 0.5 + 0.125**0.5, 0.5 - 0.125**0.5)
    ]


def test_a_run_that_is_through_its_questions_early_is_at_the_end_of_the_schedule_then(
    small, tmp_path, monkeypatch
):
    """DAPO, whose steps take 5 questions here: 2, of which the second has a signal, and 1, 1, 1 for
    the first, which has none."""
    signal_in_every_second_group = lambda completions, **columns: [
        float(i // 8 % 2 and i % 2) for i in range(len(completions))
    ]
    signal_in_every_second_group.__name__ = "second"
    monkeypatch.setattr(train, "choose", lambda *_: named(signal_in_every_second_group))
    options = ["--algorithm", "dapo", "--epochs", str(24 / 2048), "--warmup", "0"]
    go_in_two(small, tmp_path / "run", monkeypatch, *options, killed_in=4, save_every=2, steps=99)
    rows = files.read(tmp_path / "run/metrics.jsonl")
    assert [row["questions"] for row in rows] == [5, 5, 5, 5, 4]
    middles = [2.5, 7.5, 12.5, 17.5, 22]  # of 24 questions
    expected = [1e-3 * 0.5 * (1 + math.cos(math.pi * middle / 24)) for middle in middles]
    assert [row["lr"] for row in rows[1:]] == pytest.approx(expected[1:])
    # before the first step 2 are expected
    assert rows[0]["lr"] == pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * 1 / 24)))
    go(small, tmp_path / "steps", *options, steps=2)  # where the steps end first, they count
    assert [row["lr"] for row in files.read(tmp_path / "steps/metrics.jsonl")] == pytest.approx(
        [1e-3 * 0.5 * (1 + math.cos(math.pi * share)) for share in (0.25, 0.75)])


@pytest.mark.parametrize("questions, per_step", [(2048, 8), (1024, 4), (7473, 16), (10, 3), (5, 7), (1, 1)])
@pytest.mark.parametrize("most", [math.inf, 3, 100])
def test_steps_that_all_take_the_same_number_of_questions_lie_evenly_in_the_schedule(
    questions, per_step, most
):
    """The last step, which may be shorter, too."""
    steps = min(most, math.ceil(questions / per_step))
    found = [
        run_progress(done, steps, done * per_step, questions, per_step) for done in range(steps)
    ]
    assert found == [(done + 0.5) / steps for done in range(steps)]


def test_a_run_that_was_through_its_questions_goes_on_with_more_of_them():
    """10 questions in steps of 4, 4 and 2; then twice as many."""
    found = [run_progress(done, 5, seen, 20, 4) for done, seen in [(3, 10), (4, 14)]]
    assert found == [3.5 / 5, 4.5 / 5] and run_progress(40, 99, 399, 400, 4) <= 1


def test_a_run_leaves_its_files_and_metrics(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # with this seed every step has a signal, and so a loss
    assert go(small, "run", "--seed", "1") == 0
    rows = files.read("run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    # dynamic allocation: B·G = 16 places, k = 2 of 8 kept, so 8 questions a step
    assert {(row["questions"], row["completions"], row["kept"]) for row in rows} == {(8, 64, 16)}
    named = {
        "accuracy", "reward", "reward/toy_accuracy", "length", "truncated", "no_signal", "loss",
        "kl", "clip_fraction", "ratio_max", "grad_norm", "lr", "entropy", "tokens_generated",
        "tokens_trained", "seconds/generate", "seconds/score", "seconds/logprobs", "seconds/update",
        "seconds/total",
    }
    assert named <= set(rows[0]) and all(math.isfinite(x) for row in rows for x in row.values())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["questions"] == 24 and {"before", "after"} <= set(summary)
    assert (tmp_path / "run/curves.png").stat().st_size > 10_000
    assert len(files.read("run/samples.jsonl")) == 3
    saved = json.loads((tmp_path / "run/run.json").read_text())
    assert saved["pruning_rate"] == 0.75 and saved["beta"] == 0.04 and saved["lr"] == 1e-3
    out = capsys.readouterr().out
    assert "accuracy, sampled" in out and "before" in out

    # the checkpoint is a Hugging Face folder, and eval.py finds it by the run's name
    evaluation.main(
        ["--model", "run", "--questions", "8", "--samples", "2", "--output_dir", "scores"]
    )
    scores, (_, *answers) = (
        json.loads((tmp_path / "scores/eval-toy.json").read_text()),
        files.read("scores/eval-toy.jsonl"),
    )
    assert scores["questions"] == 8 and len(answers) == 8 + 16
    for part in ("greedy", "sampled"):
        verdicts = [row["correct"] for row in answers if row["part"] == part]
        assert scores[part]["accuracy"] == sum(verdicts) / len(verdicts)
    assert [row["index"] for row in answers if row["part"] == "sampled"] == [
        i for i in range(8) for _ in range(2)
    ]

    # a run that starts from a run starts from its newest checkpoint of this moment, and keeps to it
    go("run", "next", steps=1)
    state = json.loads((tmp_path / "next/checkpoint-000001/state.json").read_text())
    assert state["source"] == "run/checkpoint-000003"

    with pytest.raises(UserError, match="already holds a run: add --resume"):
        go(small, "run")
    with pytest.raises(UserError, match="has finished its 3 steps"):
        go(small, "run", "--resume")
    with pytest.raises(UserError, match="was started with --algorithm cppo"):
        go(small, "run", "--resume", "--algorithm", "grpo")
    with pytest.raises(UserError, match="was started without --lora: resume it like that"):
        go(small, "run", "--resume", "--lora", "4", steps=9)
    with pytest.raises(UserError, match="was started with --questions_per_step 2"):
        go(small, "run", "--resume", "--questions_per_step", "3", steps=9)
    other = tmp_path / "other"
    with pytest.raises(UserError, match="was started with --model"):
        train.main(["--output_dir", "run", "--resume", "--model", str(other)])


def test_a_run_of_the_toy_keeps_the_base_model_that_it_started_from(small, tmp_path, monkeypatch):
    """The name of the base model holds a fingerprint of the toy's files, which an update of the
    project may change."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small, "runs/toy-base-1")
    monkeypatch.setattr(toy_model, "base", lambda kind: "runs/toy-base-1")
    go("toy", "run", steps=1)
    monkeypatch.setattr(toy_model, "base", lambda kind: pytest.fail("another base model is made"))
    assert go("toy", "run", "--resume", steps=2) == 0


def test_without_allocation_and_with_grpo_a_step_takes_b_questions(small, tmp_path):
    go(small, tmp_path / "a", "--allocation", "false", steps=1)
    go(small, tmp_path / "b", "--algorithm", "grpo", steps=1)
    counts = [
        [
            files.read(tmp_path / name / "metrics.jsonl")[0][key]
            for key in ("questions", "completions", "kept")
        ]
        for name in "ab"
    ]
    assert counts == [[2, 16, 4], [2, 16, 16]]


def test_runs_without_a_name_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [folder.new_folder("toy-cppo") for _ in range(2)] == [
        "runs/toy-cppo-1", "runs/toy-cppo-2",
    ]


def test_five_updates_in_a_row_that_are_not_finite_end_the_run(small, tmp_path, monkeypatch):
    real = train.update

    def poisoned(networks, minibatches, *rest):
        for batch in micro_batches_of(minibatches):
            batch.advantages *= math.nan
        return real(networks, minibatches, *rest)

    go(small, tmp_path / "run", "--save_every", "1", steps=2)
    monkeypatch.setattr(train, "update", poisoned)
    with pytest.raises(
        UserError, match="6 updates in a row had a loss or a gradient that is not finite"
    ) as error:
        go(small, tmp_path / "run", "--resume", steps=9)
    assert "--resume" in str(error.value)
    assert checkpoint.newest(tmp_path / "run").name == "checkpoint-000002"


def test_a_keep_rule_of_ones_own_needs_one_function_in_a_file(small, tmp_path, monkeypatch):
    """Pruning by |A| / length: k = 2 of 8, the two with the most advantage for a token."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("""
from cppo import batch_rows, prune

def by_length(rollout, advantages, k):
    return batch_rows(prune(advantages / rollout.lengths, k), advantages.shape[1])

def forgets(rollout, advantages, k):
    prune(advantages, k)
""")
    monkeypatch.setattr(train, "choose", lambda *_: named(number_of_digits))
    kept = []
    for name, rule in ("length", "mine.py:by_length"), ("abs", "largest_abs"):
        assert go(small, name, "--keep", rule, steps=2) == 0
        rows = files.read(f"{name}/metrics.jsonl")
        # a step takes ⌊2·8/2⌋ = 8 questions
        assert [(row["questions"], row["completions"], row["kept"]) for row in rows] == [
            (8, 64, 16)
        ] * 2
        kept.append(
            [
                [row["kept"] for row in sample["completions"]]
                for sample in files.read(f"{name}/samples.jsonl")
            ]
        )
    assert kept[0] != kept[1] and all(sum(flags) == 2 for flags in kept[0])
    assert json.loads((tmp_path / "length/run.json").read_text())["keep"] == "mine.py:by_length"
    go(small, "length", "--resume", steps=3)
    assert len(files.read("length/metrics.jsonl")) == 3
    with pytest.raises(
        UserError,
        match="^--keep mine.py:forgets must return rows of the batch, whole numbers from 0 to 63 "
              "and each once",
    ):
        go(small, "forgets", "--keep", "mine.py:forgets")


def test_list_prints_every_algorithm_and_help_every_group(capsys):
    assert not train.main(["--list"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "algorithm",
        *ALGORITHMS,
    ]
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    printed = capsys.readouterr().out
    places = [printed.index(f"\n{title}") for title in (
        "what to train, and on what:", "the algorithm (", "sampling:", "the update:", "memory and "
                                                                                      "devices:", "the run:",
        "instead of training:")]  # fmt: skip
    assert end.value.code == 0 and places == sorted(places)
    options = [
        printed.index(f"\n  --{option} ")
        for option in ("dataset", "pruning_rate", "temperature", "lr", "shard", "steps", "list")
    ]
    assert [sum(place < at for place in places) for at in options] == [1, 2, 3, 4, 5, 6, 7]


def test_a_bad_data_file_is_refused_before_the_model_is_loaded(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        networks_module, "load_model", lambda *_: pytest.fail("the model was loaded")
    )
    for content, message in [
        ("", "is empty"), ("{}\n", "line 1"),
        ('{"question": "a", "answer": "b"}\nno\n', "line 2"),
    ]:
        (tmp_path / "x.jsonl").write_text(content)
        with pytest.raises(UserError, match=message):
            train.main(["--model", small, "--dataset", "x.jsonl"])


def test_prompts_longer_than_the_context_are_skipped_and_reported(
    small, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "1+2=?", "answer": "3"}] * 3 + [
        {"question": "1+" * 100 + "1=?", "answer": "101"}
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        train.main(
            [
                "--model", small, "--dataset", "x.jsonl", "--max_new_tokens", "8", "--output_dir",
                "run",
            ]
        )
        == 0
    )
    assert "skipped 1 of 4 questions of x.jsonl" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["questions"] == 3 and "skipped 1 of 4" in summary["notes"][0]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--lora", "4", "--merge_lora", "--gradient_checkpointing"], ["--shard", "full"]], ids=" ".join)
def test_a_run_ends_with_where_its_model_is_and_no_warning_of_a_library(words, small, tmp_path):
    done = torchrun(ROOT / "train.py", "--model", small, "--steps", "1", "--group_size", "4", "--questions_per_step", "1", *words,
                    "--eval_questions", "2", "--output_dir", "run", cwd=tmp_path, ranks=2 if "--shard" in words else 1)  # fmt: skip
    assert done.returncode == 0 and "arning" not in done.stderr, done.stderr[-2000:]
    where = ["the merged model: run/merged"] * ("--merge_lora" in words) + [
        "the model: run/checkpoint-000001"
    ]
    assert [line for line in done.stdout.splitlines() if "model: " in line] == where
    assert done.stdout.endswith(
        'tokenizer = AutoTokenizer.from_pretrained("run/checkpoint-000001")\n'
    )


def test_the_merged_model_and_the_summary_are_made_even_if_the_curves_fail(
    small, tmp_path, monkeypatch, capsys
):
    def fails(*_):
        raise ValueError("no font")

    monkeypatch.setattr(curves_module, "curves", fails)
    with pytest.raises(ValueError, match="no font"):
        go(small, tmp_path / "run", "--lora", "4", "--merge_lora", steps=1)
    assert loading.load_model(str(tmp_path / "run/merged"), CPU)
    assert json.loads((tmp_path / "run/summary.json").read_text())["step"] == 1
    assert "the model: " in capsys.readouterr().out
