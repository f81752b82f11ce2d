"""train.py: one step of every algorithm, and what a run leaves behind."""

import copy
import math
import random
import re
import signal
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import algorithms
import eval as evaluation
import loop.rollout as rollout_module
import train
from algorithms import ALGORITHMS, resolve, table
from cppo import prune
from engine.base import files, ranks
from engine.base.errors import UserError
from engine.base.progress import Clock
from engine.data import questions as questions_module
from engine.model import shards
from engine.model.folders import checkpoints
from engine.model.logprobs import Policy
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from engine.report.metrics import first_group
from engine.run import begin, checkpoint, state
from engine.run.state import Run
from judges import mathematics
from loop.records import Parts
from tasks.table import task_of
from tests.helpers.examples import named
from tests.helpers.runs import go_on, json_of, metrics_of
from tests.helpers.training import CPU, LONGEST, logprobs, networks_around, stepper

pytestmark = pytest.mark.usefixtures("undrawn")

# --- one step ---


@pytest.fixture
def step_inputs(loaded):
    """(model, tokenizer, four questions)"""
    questions, _ = questions_module.load_questions("toy", loaded[1], limit=4)
    return *loaded, questions


def run_step(step_inputs, functions, algorithm="cppo", number=1, **options):
    """Step `number` as the first one of a run, with these options."""
    return stepper(*step_inputs, functions, algorithm, **options)(number)


def only_first(step_inputs):
    model, tokenizer, questions = step_inputs
    return model, tokenizer, questions[:1]


def noted_updates(monkeypatch):
    """What the updates are given from now on. None is made."""
    given = []
    monkeypatch.setattr(
        train, "update", lambda networks, minibatches, *_: given.extend(minibatches) or ({}, []))
    return given


def noted_passes(monkeypatch):
    """(batch, the policy's temperature) of each pass from now on."""
    passes, real = [], Policy.logprobs

    def logprobs(policy, batch, *options, **more):
        passes.append((batch, policy.temperature))
        return real(policy, batch, *options, **more)

    monkeypatch.setattr(Policy, "logprobs", logprobs)
    return passes


def number_of_digits(completions, **columns):
    return [float(sum(c.isdigit() for c in text)) for text in completions]


def ones(completions, **columns):
    return [1.0] * len(completions)


@pytest.mark.parametrize("algorithm, passes", [("cppo", 3), ("ppo", 6)])
def test_every_pass_is_made_for_the_kept_only_at_the_temperature_of_the_sampler(
    step_inputs, monkeypatch, algorithm, passes
):
    """The reference once, and the policy μ times; PPO's also before its updates, for π_old. At
    another temperature than the sampler's each ratio would be wrong."""
    noted = noted_passes(monkeypatch)
    options = {"group_size": 8, "temperature": 0.7, "micro_batch_tokens": 10**6}
    step = run_step(step_inputs, [number_of_digits], algorithm, **options)
    metrics = step.metrics
    sample = first_group(step.rollout, step.advantages, step.kept, step_inputs[1])
    k = resolve(algorithm, group_size=8).k
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (4, 32, 4 * k)
    assert [(len(batch.prompts), T) for batch, T in noted] == [(4 * k, 0.7)] * passes
    assert metrics["sampler_logp_diff_max"] < 1e-3
    assert (metrics["tokens_trained"] < metrics["tokens_generated"]) == (k < 8)
    kept = [i for i, row in enumerate(sample["completions"]) if row["kept"]]
    advantages = torch.tensor([[row["advantage"] for row in sample["completions"]]])
    assert kept == prune(advantages, k)[0].tolist()


@pytest.mark.parametrize("share", [0, 1])
def test_a_step_on_random_prefixes_computes_only_these(step_inputs, monkeypatch, share):
    options = {"group_size": 8, "micro_batch_tokens": 10**6, "pruning_rate": 0.5, "mu": 1}
    whole = run_step(copy.deepcopy(step_inputs), [number_of_digits], **options).metrics
    noted = noted_passes(monkeypatch)
    metrics = run_step(step_inputs, [number_of_digits], min_prefix=share, **options).metrics
    assert metrics["kept"] == whole["kept"]
    assert metrics["tokens_generated"] == whole["tokens_generated"]
    assert metrics["sampler_logp_diff_max"] < 1e-3
    # the reference and the update
    assert {batch.mask.sum().item() for batch, _ in noted} == {metrics["tokens_trained"]}
    trained = metrics["tokens_trained"] / whole["tokens_trained"]
    if share:  # the shortest prefix is the whole completion
        assert trained == 1 and metrics["grad_norm"] == whole["grad_norm"]
    else:
        assert 0.3 < trained < 0.7


def test_the_sampler_a_rule_and_the_prefixes_draw_from_streams_of_their_own(
    step_inputs, monkeypatch
):
    """The rule and the prefixes on each rank, too. torch's generator reads 32 bits of a seed."""
    seeds, real = [], Sampler.sample

    def sample(self, prompts, group_size, sampling, seed, places):
        seeds.append(seed)
        return real(self, prompts, group_size, sampling, seed, places)

    def with_prefixes(rollout, share, seed):
        seeds.extend([rollout.seed, seed])

    model, tokenizer, questions = step_inputs
    networks = networks_around(Policy(model), tokenizer, lr=0.0)
    monkeypatch.setattr(Sampler, "sample", sample)
    monkeypatch.setattr(rollout_module, "with_prefixes", with_prefixes)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "gather", lambda rows: rows)
    algorithm = resolve("cppo", min_prefix=0.5, group_size=4)
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "rank", partial(int, rank))
        parts = Parts(networks, algorithm, named(ones), Sampling(4), limits=None)
        rollout_module.sample_and_score(parts, questions, random.Random(1), Clock(CPU))
    assert len({seed % 2**32 for seed in seeds}) == 5 and seeds[0] == seeds[3]


def test_tokens_that_the_sampler_did_not_report_are_counted(step_inputs, monkeypatch):
    """They are left out of the means; without the first token of each completion here."""
    make = stepper(*step_inputs, [number_of_digits], group_size=8, lr=0.0, beta=0.0)
    everything = make()
    real = Sampler.sample

    def sample(self, *given, **options):
        completions = real(self, *given, **options)
        completions.logp[:, 0] = math.nan
        completions.logp[1, 1] = -math.inf
        return completions

    monkeypatch.setattr(Sampler, "sample", sample)
    metrics = make().metrics
    assert everything.metrics["tokens_without_logp"] == 0 and metrics["tokens_without_logp"] == 33
    for name in ("entropy", "mixed_groups", "sampler_logp_diff", "sampler_logp_diff_max", "loss",
                 "grad_norm"):
        assert math.isfinite(metrics[name]), name
    assert metrics["grad_norm"] == everything.metrics["grad_norm"]
    assert metrics["entropy"] > 0 and metrics["sampler_logp_diff_max"] < 1e-3


def test_dynamic_sampling_replaces_groups_without_signal_until_the_step_is_full(
    step_inputs, monkeypatch, capsys
):
    asked, given, questions = [], noted_updates(monkeypatch), step_inputs[2]

    # 4 questions at first, then as many as are missing; the supply ends after 9
    def more(missing):
        left = 9 - 4 - sum(asked)
        asked.append(missing)
        return (questions * 3)[: min(missing, left)] or None

    def signal_in_every_second_group(completions, **columns):
        return [float(i // 4 % 2 and i % 4) for i in range(len(completions))]

    step = stepper(*step_inputs, [signal_in_every_second_group], "dapo", group_size=4,
                   max_rollouts=5, minibatches=2)
    metrics = step(more=more).metrics
    # 4 gave 2, then 2 gave 1, then one question at a time gave none
    assert asked == [2, 1, 1, 1] and metrics["rollouts"] == 5
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (9, 36, 12)
    assert metrics["frac_reward_zero_std"] == pytest.approx(6 / 9)
    assert "all equal after sampling 5 times: 1." in capsys.readouterr().out
    # mini-batches follow the order of all rollouts: the second, the fourth, the second again
    prompts = [questions[i]["prompt"] for i in (1, 3, 1) for _ in range(4)]
    assert [batch.prompts for batch in given] == [prompts[:6], prompts[6:]]
    advantages = torch.cat([batch.advantages for batch in given])
    assert (advantages.view(3, 4).std(1) > 0).all()


def test_verdicts_that_run_out_of_time_are_counted(step_inputs):
    """In each rollout of a step."""
    def three_of_four(completions, **columns):
        mathematics.COUNTS["timeouts"] += 3
        return [0.0] * len(completions)

    options = {"group_size": 4, "max_rollouts": 2}
    metrics = run_step(only_first(step_inputs), [three_of_four], "dapo", **options).metrics
    assert metrics["rollouts"] == 2 and metrics["verdict_timeouts"] == 0.75


def every_second_is_right(completions, **columns):
    return [float(i % 2) for i in range(len(completions))]


def test_no_signal_is_the_share_of_groups_whose_advantages_are_all_0(step_inputs):
    """The completions that GFPO keeps here are right, so nothing is compared."""
    options = {"keep": "efficiency", "group_size": 4}
    step = run_step(step_inputs, [every_second_is_right], "gfpo", **options)
    assert step.metrics["frac_reward_zero_std"] == 1


def test_a_group_without_signal_is_replaced_and_left_out_whatever_else_changes_the_rollout(
    step_inputs
):
    """Dynamic sampling goes by the rewards before the overlong penalty. A completion that is not
    cut off is still left out if its group has no signal."""
    options = {"group_size": 4, "max_new_tokens": 8, "overlong_buffer": 7, "mask_truncated": True,
               "max_rollouts": 2}
    step = run_step(only_first(step_inputs), [ones], "dapo", number=2, **options)
    metrics = step.metrics
    # the advantages are those of right answers that differ in length alone
    assert step.advantages.any() and metrics["truncated"] < 1
    assert metrics["rollouts"] == 2 and metrics["kept"] == 0 and metrics["loss"] is None


def test_truncated_completions_are_left_out_but_count_in_their_group(step_inputs, monkeypatch):
    given = noted_updates(monkeypatch)
    options = {"group_size": 8, "max_new_tokens": 8, "mask_truncated": True, "overlong_buffer": 4}
    step = run_step(step_inputs, [number_of_digits], "grpo", number=2, **options)
    metrics = step.metrics
    assert 0 < metrics["kept"] == round(32 * (1 - metrics["truncated"])) < 32
    [batch] = given
    assert ((batch.tokens == 1) & batch.mask).any(1).all()  # 1 is EOS
    penalty = metrics["reward"] - metrics["reward/number_of_digits"]
    assert metrics["reward/overlong"] == pytest.approx(penalty) and penalty < 0
    assert step.advantages.sum(1).abs().max() < 1e-4 and step.advantages.any()


def test_mini_batches_cover_the_kept_once_and_know_the_old_policy(step_inputs, monkeypatch):
    """The token weights of each are made once."""
    asked, given = [], noted_updates(monkeypatch)  # so the policy is still the old one

    def token_weights(mask, n, tokens, longest):
        asked.append((n, tokens, longest))
        return mask / n

    options = {"group_size": 8, "token_weights": token_weights}
    run_step(step_inputs, [number_of_digits], "gspo", **options)
    assert asked == [(8, batch.mask.sum(), LONGEST) for batch in given] and len(asked) == 4
    # the first one gets π_old from its first update, for nothing
    assert given[0].old_logp is None
    for batch in given[1:]:
        expected = logprobs(step_inputs[0], batch)
        torch.testing.assert_close(batch.old_logp, expected, atol=1e-5, rtol=1e-5)


def few_digits(completions, **columns):
    """Above 0, as MaxRL needs it."""
    return [32.0 - sum(c.isdigit() for c in text) for text in completions]


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_raises_its_reward(step_inputs, algorithm):
    options = {"group_size": 8, "lr": 2e-3, "max_new_tokens": 16}
    make = stepper(*step_inputs, [few_digits], algorithm, **options)
    rewards = [make(step).metrics["reward"] for step in range(5)]
    assert rewards[-1] > rewards[0] + 1


def test_ppos_critic_learns_from_equal_rewards_and_the_kl_is_in_its_rewards(step_inputs):
    """V is 0 and, with λ = 1, the return of every token is the score of 1, less β times the KL of
    the tokens from there on: without β the critic's loss is ½ (0 − 1)²."""
    reference = copy.deepcopy(step_inputs[0])
    with torch.no_grad():
        reference.lm_head.weight *= 0.5
    options = {"group_size": 4, "lam": 1.0, "lr": 0.0, "reference": reference}
    free, bound = (run_step(step_inputs, [ones], "ppo", beta=beta, **options).metrics
                   for beta in (0.0, 0.1))
    assert free["frac_reward_zero_std"] == 1 and free["value_loss"] == pytest.approx(0.5)
    assert bound["kl"] > 0 == free["kl"] and abs(bound["value_loss"] - 0.5) > 0.01


# --- a run ---


def go(small, folder, *options, steps=3):
    argv = [
        "--model", small, "--output_dir", str(folder), "--lr", "1e-3", "--questions_per_step", "2",
        "--max_new_tokens", "48", "--group_size", "8", "--eval_questions", "8", "--steps",
        str(steps),
        *options,
    ]
    return train.main(argv)


def run_of(folder):
    """What a run has come to: its metrics without the seconds, GFPO's past, and the networks and
    moments of its checkpoint."""
    newest, saved = checkpoint.newest(folder), {}
    for path in newest.glob("networks/*"):
        saved |= load_file(path)
    past = json_of(newest / "state.json")["past"]
    return metrics_of(folder), past, saved


def stop_after(step, monkeypatch):
    """Ctrl-C in this step of the next run, once."""
    real, made = train.train_step, []

    def stopping(*words):
        made.append(step)
        if len(made) == step:
            signal.raise_signal(signal.SIGINT)
        return real(*words)

    monkeypatch.setattr(train, "train_step", stopping)


@pytest.mark.parametrize("options", [
    ["--mu", "1", "--minibatches", "1", "--temperature", "0.9", "--dtype", "float32"],
    pytest.param(["--algorithm", "ppo", "--group_size", "1", "--questions_per_step", "16"],
                 marks=pytest.mark.slow),
    pytest.param(["--algorithm", "gfpo_adaptive", "--group_size", "16", "--keep", "efficiency"],
                 marks=pytest.mark.slow),
], ids=["reference", "ppo, one completion of a question", "gfpo_adaptive"])
def test_a_reference_a_critic_and_the_past_survive_a_resume(
    small, tmp_path, monkeypatch, options
):
    monkeypatch.setattr(begin, "load_rewards", lambda *_: named(number_of_digits))
    go(small, tmp_path / "straight", *options)
    stop_after(2, monkeypatch)
    assert go(small, tmp_path / "resumed", *options) == 130
    go_on(tmp_path / "resumed")
    (rows, past, saved), resumed = run_of(tmp_path / "straight"), run_of(tmp_path / "resumed")
    assert (rows, past) == resumed[:2] and [row["step"] for row in rows] == [1, 2, 3]
    torch.testing.assert_close(saved, resumed[2], rtol=0, atol=0)
    if "ppo" in options:
        assert saved["critic.head.bias"] != 0 and all(row["value_loss"] > 0 for row in rows)
    elif "gfpo_adaptive" in options:
        assert len(past) == 6 and rows[0]["kept"] == 2 * 8 > min(row["kept"] for row in rows)
    else:  # the reference stays the model that the run started from
        kls = [row["kl"] for row in rows]
        assert kls[0] == 0 < min(kls[1:])
        # policy and reference have the sampler's temperature
        assert max(row["sampler_logp_diff_max"] for row in rows) < 1e-3


# --- a step that fails ---


def own_reward(completions, **columns):
    return OWN.reward(completions)


def stop_twice():
    signal.raise_signal(signal.SIGINT)
    time.sleep(1.1)
    signal.raise_signal(signal.SIGINT)


def fail(error):
    raise error


OWN = SimpleNamespace(reward=number_of_digits)
UPDATES = iter([1, 0])  # the second one fails


@pytest.mark.parametrize("owner, name, failure, saved", [
    (OWN, "reward", lambda: 1 / 0, ["0", "2"]), (OWN, "reward", stop_twice, ["0", "2"]),
    (algorithms, "kept_rows", lambda: fail(IndexError("own")), ["0", "2"]),
    # an update is made, or the weights are broken
    (shards, "clip_gradients", lambda: 1 / next(UPDATES), ["0"]),
    (Sampler, "sample", lambda: fail(FloatingPointError("own")), ["0"]),
], ids=["reward", "reward that hangs", "rule", "update", "weights"])  # fmt: skip
def test_if_step_3_fails_step_2_is_saved_first(
    small, tmp_path, monkeypatch, capsys, owner, name, failure, saved
):
    """The next checkpoint would be that of step 50. After the resume no question is asked twice or
    left out."""
    real = getattr(owner, name)

    def failing(*words, **options):
        if len(files.read_lines(tmp_path / "metrics.jsonl")) == 2:
            failure()
        return real(*words, **options)

    monkeypatch.setattr(begin, "load_rewards", lambda *_: named(own_reward))
    with monkeypatch.context() as patch, suppress(IndexError, UserError, ZeroDivisionError):
        patch.setattr(owner, name, failing)
        assert go(small, tmp_path, "--eval_questions", "0", steps=4) == 130
    assert [path.name[-1] for path in checkpoints(tmp_path)] == saved
    sentence = f"stopped at once. To go on from checkpoint-00000{saved[-1]}"
    assert (sentence in capsys.readouterr().out) == (failure is stop_twice)
    go_on(tmp_path)
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    position = json_of(tmp_path / "summary.json")["position"]
    assert position == sum(row["questions"] for row in rows)


def test_if_an_evaluation_fails_its_step_is_saved_with_its_line(small, tmp_path, monkeypatch):
    """That of --eval_every, in step 2, and that after the run, which has a checkpoint already."""
    real, fails = train.evaluate, ["evaluation"]

    def evaluate(*words, label, **more):
        return real(*words, label=label, **more) if label not in fails else fail(UserError("own"))

    monkeypatch.setattr(train, "evaluate", evaluate)
    with pytest.raises(UserError, match="own To go on from checkpoint-000002"):
        go(small, tmp_path, "--eval_every", "2")
    fails[0] = "evaluation after"
    with pytest.raises(UserError, match="own To go on from checkpoint-000003"):
        go_on(tmp_path)
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3]


def test_a_run_goes_on_if_its_custom_metrics_fail(small, tmp_path, capsys):
    """They fail in the steps 2 and 3, as a tracker that cannot be reached, and it is told once."""
    hooks = tmp_path / "mine.py"
    hooks.write_text("import torch\n"
                     "def metrics(step):\n"
                     "    if step.rollout.step == 3: raise torch.OutOfMemoryError\n"
                     "    return {'x': 1 / (step.rollout.step - 2)}\n")
    folder = tmp_path / "run"
    go(small, folder, "--hooks", str(hooks), steps=2)
    go_on(folder, "--steps 4")
    assert capsys.readouterr().out.count("the custom metrics fail: ") == 1
    assert json_of(folder / "summary.json")["hook_failures"] == 2
    assert [row.get("custom/x") for row in metrics_of(folder)] == [-1, None, None, 0.5]


@pytest.mark.slow
def test_stop_kl_ends_a_run_with_the_checkpoint_from_before(small, tmp_path, monkeypatch, capsys):
    """Without β; and after a resume, with the same limit and a larger one."""
    real, evaluated, real_build, models = train.evaluate, {}, state.build, []

    def build(*words):
        assert not any(model() for model in models)  # no two are in memory at once
        networks = real_build(*words)
        models.append(weakref.ref(networks.model))
        return networks

    def examine(sampler, *words, label, **more):
        weights = sampler.model.state_dict().items()
        evaluated[label] = {name: weight.clone() for name, weight in weights}
        return real(sampler, *words, label=label, **more)

    monkeypatch.setattr(begin, "load_rewards", lambda *_: named(number_of_digits))
    monkeypatch.setattr(train, "evaluate", examine)
    monkeypatch.setattr(begin, "build", build)
    monkeypatch.setattr(state, "build", build)
    words = ["--beta", "0", "--seed", "1", "--save_every", "2", "--minibatches", "1",
             "--dtype", "float32"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    go(small, whole, *words, "--stop_kl", "1e9", steps=6)
    measured, _, _ = run_of(whole)
    assert 0 < measured[0]["kl"] < measured[4]["kl"]
    capsys.readouterr()
    assert go(small, folder, *words, "--stop_kl", "1e-12", steps=6) == 0
    for limit in ("1e-12", "1e9"):
        assert run_of(folder)[0] == measured[:4]
        summary = json_of(folder / "summary.json")
        assert summary["checkpoint"].endswith("checkpoint-000002") and summary["step"] == 4
        [sentence] = [s for s in summary["notes"] if "ends the run at step 4" in s]
        assert sentence in capsys.readouterr().out and "checkpoint-000002" in sentence
        saved = load_file(folder / "checkpoint-000002/model.safetensors")
        after = evaluated.pop("evaluation after")
        assert all(torch.equal(weight, after[name].cpu()) for name, weight in saved.items())
        go_on(folder, f"--stop_kl {limit}")
    assert run_of(folder)[0] == measured and checkpoint.newest(folder).name == "checkpoint-000006"


def test_a_step_knows_how_far_the_run_is_and_the_learning_rates_follow(
    small, tmp_path, monkeypatch
):
    """Before the step for its rules: its own questions, a third of all, do not count yet. In its
    middle for the learning rates of the policy and the critic, each from its own peak."""
    real, progress, rates, draws = train.train_step, [], [], set()

    def step(parts, questions, rng, so_far, more):
        draws.add(rng.getstate())
        progress.append(so_far.progress)
        rates.append([group["lr"] for group in parts.networks.optimizer.param_groups])
        return real(parts, questions, rng, so_far, more)

    monkeypatch.setattr(train, "train_step", step)
    task = task_of("toy")
    words = ["--algorithm", "ppo", "--questions_per_step", "4", "--warmup", "0.25", "--epochs",
             str(12 / task.train_questions)]
    go(small, tmp_path / "run", *words, steps=99)
    assert progress == pytest.approx([0, 1 / 3, 2 / 3]) and len(draws) == 3
    # in a line up to 1 after a quarter of the run, then a cosine down to 0: (1 + cos 7/9 π) / 2
    shares = (2 / 3, 3 / 4, 0.1169778)
    assert rates == [pytest.approx([share * 1e-3, share * task.critic_lr]) for share in shares]


def schedule(places, steps, total, per_step, algorithm="grpo"):
    """How far a run of so many steps and questions in all is after these (steps, questions)."""
    run = SimpleNamespace(
        steps=steps, total=total, per_step=per_step, algorithm=ALGORITHMS[algorithm],
        config=SimpleNamespace(update=SimpleNamespace(warmup=1.0)))  # so the rate is the progress
    found = []
    for step, position in places:
        run.state = SimpleNamespace(step=step, position=position)
        found.append(Run.learning_rate(run, 1.0))
    return pytest.approx(found)


@pytest.mark.parametrize("steps", [4, 3])
def test_steps_of_three_questions_each_lie_evenly_in_the_schedule(steps):
    """Of 10 questions, so the fourth step is shorter."""
    found = schedule([(done, 3 * done) for done in range(steps)], steps, 10, 3)
    assert found == [(done + 0.5) / steps for done in range(steps)]


def test_steps_of_uneven_length_lie_in_the_schedule_by_their_questions():
    """DAPO takes 5 questions in place of 2 for a step: the middles of the steps, of 24 questions.
    And a run that was through its 10 questions goes on with 10 more."""
    found = schedule([(done, 5 * done) for done in range(5)], 99, 24, 2, "dapo")
    assert found == [x / 24 for x in (1, 7.5, 12.5, 17.5, 22)]
    assert schedule([(3, 10), (4, 14)], 5, 20, 4) == [3.5 / 5, 4.5 / 5]
    assert schedule([(40, 399)], 99, 400, 4) == [1 - 0.125 / 100]


def test_a_run_leaves_its_files_and_metrics(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # with this seed every step has a signal, and so a loss
    assert go(small, "run", "--seed", "1") == 0
    rows = files.read_lines("run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(x) for row in rows for x in row.values())
    summary = json_of(tmp_path / "run/summary.json")
    assert summary["questions"] == 24 and {"before", "after"} <= set(summary)
    assert len(files.read_lines("run/samples.jsonl")) == 3

    # the checkpoint is a Hugging Face folder, and eval.py finds it by the run's name
    evaluation.main(["--model", "run", "--questions", "8", "--samples", "2"])
    assert json_of(tmp_path / "run/eval-toy.json")["questions"] == 8

    # a run that starts from a run starts from its newest checkpoint of this moment, and keeps to it
    go("run", "next", steps=1)
    state = json_of(tmp_path / "next/checkpoint-000001/state.json")
    assert state["source"] == "run/checkpoint-000003"

    for words, message in [
        ([], "if it is a run, add --resume"), (["--resume"], "has made its 3 steps"),
        (["--resume", "--algorithm", "grpo"], "--algorithm cppo"),
    ]:
        with pytest.raises(UserError, match=message):
            go(small, "run", *words, steps=3 if words == ["--resume"] else 9)


def test_five_updates_in_a_row_that_are_not_finite_end_the_run(small, tmp_path, monkeypatch):
    """4 updates a step: those of the first two steps are finite."""
    norms = iter([1.0] * 8)
    monkeypatch.setattr(shards, "clip_gradients", lambda *_: next(norms, math.nan))
    with pytest.raises(UserError, match="step 4: 8 updates in a row.* --resume"):
        go(small, tmp_path / "run", "--save_every", "1", "--seed", "1", steps=9)
    assert checkpoint.newest(tmp_path / "run").name == "checkpoint-000002"


def first_two(rollout, advantages, k):
    """A keep rule of a row."""
    return torch.arange(advantages.numel()).view_as(advantages)[:, :2].flatten()


def test_a_row_with_a_rule_of_its_own_is_listed_trains_and_resumes(small, tmp_path, monkeypatch):
    name = "tests.test_train:first_two"
    mine = replace(ALGORITHMS["grpo"], pruning_rate=0.75)
    for rule in (partial(first_two), first_two):
        monkeypatch.setitem(ALGORITHMS, "mine", replace(mine, keep=rule))
        assert re.search(r"^mine .* first_two +· +0.75 ", table(), re.MULTILINE)
    names = [line.split()[0] for line in table("mine").splitlines() if line]
    assert names == ["algorithm", "grpo", "mine"]
    train.main(["--model", small, "--algorithm", "mine", "--plan"])
    go(small, tmp_path / "run", "--algorithm", "mine", "--beta", "0", steps=1)
    go_on(tmp_path / "run", "--steps 2")
    options = json_of(tmp_path / "run/run.json")
    assert (options["keep"], options["steps"]) == (name, 2)
    # without β there is no reference
    assert [row["kl"] for row in metrics_of(tmp_path / "run")] == [0, 0]
    for sample in files.read_lines(tmp_path / "run/samples.jsonl"):
        kept = [row["kept"] for row in sample["completions"]]
        assert kept == [True] * 2 + [False] * 6
