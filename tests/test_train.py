"""train.py: one step of every algorithm, and what a run leaves behind."""

import copy
import json
import math
import re
import shutil
import signal
import weakref
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file

import eval as evaluation
import train
from algorithms import ALGORITHMS, resolve, table
from cppo import prune
from engine.base import files, ranks
from engine.base.errors import UserError
from engine.data import questions as questions_module
from engine.model import shards
from engine.model.logprobs import Policy
from engine.model.sampling import Sampler
from engine.run import begin, checkpoint, state
from engine.run.config import config_of
from engine.run.metrics import first_group
from engine.run.state import learning_rate, run_progress
from tasks.table import task_of
from tests.examples import named
from tests.training import LONGEST, a_rollout, logprobs, stepper

# --- one step ---


@pytest.fixture
def step_inputs(loaded):
    """(model, tokenizer, four questions)"""
    questions, _ = questions_module.load_questions("toy", loaded[1], limit=4)
    return *loaded, questions


def run_step(step_inputs, functions, algorithm="cppo", number=1, **options):
    """(metrics, sample) of step `number` as the first one of a run, with these options."""
    step = stepper(*step_inputs, functions, algorithm, **options)(number)
    return step.metrics, first_group(step, step_inputs[1])


def noted_updates(monkeypatch):
    """What the updates are given from now on. None is made."""
    given = []
    monkeypatch.setattr(
        train, "update", lambda networks, minibatches, *_: given.extend(minibatches) or ({}, []))
    return given


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
    scored, real = [], Policy.logprobs

    def score(policy, batch, *options, **more):
        scored.append((len(batch.prompts), policy.temperature))
        return real(policy, batch, *options, **more)

    monkeypatch.setattr(Policy, "logprobs", score)
    options = {"group_size": 8, "temperature": 0.7, "micro_batch_tokens": 10**6}
    metrics, sample = run_step(step_inputs, [number_of_digits], algorithm, **options)
    k = resolve(algorithm, group_size=8).k
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (4, 32, 4 * k)
    assert scored == [(4 * k, 0.7)] * passes and metrics["sampler_gap_max"] < 1e-3
    assert (metrics["tokens_trained"] < metrics["tokens_generated"]) == (k < 8)
    kept = [i for i, row in enumerate(sample["completions"]) if row["kept"]]
    advantages = torch.tensor([[row["advantage"] for row in sample["completions"]]])
    assert kept == prune(advantages, k)[0].tolist()


@pytest.mark.parametrize("share, most", [(0.0, 0.7), (0.8, 0.99), (1.0, 1.0)])
def test_a_step_on_random_prefixes_computes_only_these(step_inputs, monkeypatch, share, most):
    computed, real = [], Policy.logprobs

    def count(policy, batch, *options, **more):
        computed.append(int(batch.mask.sum()))
        return real(policy, batch, *options, **more)

    options = {"group_size": 8, "micro_batch_tokens": 10**6, "pruning_rate": 0.5, "mu": 1}
    whole, _ = run_step(copy.deepcopy(step_inputs), [number_of_digits], "cppo", **options)
    monkeypatch.setattr(Policy, "logprobs", count)
    metrics, _ = run_step(
        step_inputs, [number_of_digits], "cppo", shortest_prefix=share, **options)
    assert metrics["kept"] == whole["kept"]
    assert metrics["tokens_generated"] == whole["tokens_generated"]
    assert max(share, 0.3) <= metrics["tokens_trained"] / whole["tokens_trained"] <= most
    assert set(computed) == {metrics["tokens_trained"]}  # the reference and the update
    assert (metrics["grad_norm"] == whole["grad_norm"]) == (share == 1)


@pytest.mark.parametrize("keep", ["random", "unbiased"])
def test_the_prefixes_do_not_follow_the_draws_of_a_rule(step_inputs, monkeypatch, keep):
    """NAT's factor of the last token is 1/p with the chance p, and else 0: on average 1, for the
    kept completions, too. If a rule that draws and the prefixes had the same random numbers, the
    mean would be 6.5 here."""
    kept, real = [], train.cut_into_minibatches

    def cut(rollout, advantages, rows, *rest):
        last = rollout.mask.sum(1, keepdim=True) - 1
        kept.append(rollout.prefix_weights.gather(1, last)[rows, 0])
        return real(rollout, advantages, rows, *rest)

    monkeypatch.setattr(train, "cut_into_minibatches", cut)
    noted_updates(monkeypatch)
    make = stepper(*step_inputs, [number_of_digits], keep=keep, pruning_rate=0.875,
                   shortest_prefix=0.5, max_new_tokens=12, group_size=64, beta=0.0)
    for number in range(1, 16):
        make(number)
    factors = torch.cat(kept)
    error = factors.std().item() / len(factors) ** 0.5
    assert error < 0.1 and factors.mean().item() == pytest.approx(1, abs=4 * error)


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
    for name in ("entropy", "group_gap", "sampler_gap", "sampler_gap_max", "loss", "grad_norm"):
        assert math.isfinite(metrics[name]), name
    assert metrics["grad_norm"] == everything.metrics["grad_norm"]
    assert metrics["entropy"] > 0


def test_the_weights_of_a_mini_batch_are_computed_once(step_inputs):
    """Not again in each of its micro-batches, nor in the second of μ = 2 updates."""
    asked = []

    def token_weights(mask, n, tokens, longest):
        asked.append((n, tokens, longest))
        return mask / n

    options = {"minibatches": 2, "micro_batch_tokens": 128, "token_weights": token_weights}
    metrics, _ = run_step(step_inputs, [number_of_digits], "grpo", group_size=8, **options)
    first, second = asked
    assert [first[0], second[0]] == [16, 16] and first[2] == second[2] == LONGEST
    assert first[1] + second[1] == metrics["tokens_trained"]


def test_dynamic_sampling_replaces_groups_without_signal_until_the_step_is_full(
    step_inputs, monkeypatch, capsys
):
    asked, given = [], noted_updates(monkeypatch)

    # 4 questions at first, then as many as are missing; the supply ends after 9
    def more(missing):
        left = 9 - 4 - sum(asked)
        asked.append(missing)
        return (step_inputs[2] * 3)[: min(missing, left)] or None

    def signal_in_every_second_group(completions, **columns):
        return [float(i // 4 % 2 and i % 4) for i in range(len(completions))]

    def step(max_rollouts):
        make = stepper(*step_inputs, [signal_in_every_second_group], "dapo", group_size=4,
                       max_rollouts=max_rollouts)
        return make(1, step_inputs[2], more=more)[0]

    metrics = step(5)
    # 4 gave 2, then 2 gave 1, then one question at a time gave none
    assert asked == [2, 1, 1, 1] and metrics["rollouts"] == 5
    assert (metrics["questions"], metrics["completions"], metrics["kept"]) == (9, 36, 12)
    assert metrics["no_signal"] == pytest.approx(6 / 9)
    [batch] = given
    assert (batch.advantages.view(3, 4).std(1) > 0).all()
    # the rows of several rollouts still are what the sampler drew
    drawn = logprobs(step_inputs[0], batch)
    torch.testing.assert_close(drawn, batch.sampled_logp, rtol=0, atol=1e-4)
    assert "all equal after sampling 5 times: 1." in capsys.readouterr().out
    asked.clear()
    assert step(2)["rollouts"] == 2


def rewarded(*values):
    """Functions as rewards, each the values of two completions in turn."""
    return [lambda completions, pair=pair, **_: [float(x) for _, x in zip(completions, cycle(pair))]
            for pair in values]


@pytest.mark.parametrize("functions, algorithm, options, no_signal", [
    # the sums are equal, but GDPO normalises each reward by itself: 0.87 + 0.87 − 0.87
    (rewarded((1, 0), (1, 0), (0, 2)), "gdpo", {}, 0),
    (rewarded((1, 0), (1, 0), (0, 2)), "grpo", {}, 1),
    # all are right, and some are too long
    ([ones], "grpo", {"max_new_tokens": 8, "overlong_cache": 7}, 0),
    ([ones], "grpo", {"max_new_tokens": 8}, 1),
    # the two that GFPO keeps are right
    (rewarded((1, 0)), "gfpo", {"keep": "efficiency"}, 1),
    (rewarded((1, 0), (0, 2)), "ppo", {}, 0),  # PPO has only scores
])
def test_no_signal_is_the_share_of_groups_whose_advantages_are_all_0(
    step_inputs, functions, algorithm, options, no_signal
):
    options |= {"group_size": 4, "lr": 0.0, "number": 2}  # in step 2 the lengths differ
    one_question = (*step_inputs[:2], step_inputs[2][:1])
    for i, function in enumerate(functions):
        function.__name__ = f"reward_{i}"
    assert run_step(one_question, functions, algorithm, **options)[0]["no_signal"] == no_signal


def test_dynamic_sampling_goes_by_the_rewards_before_the_overlong_penalty(step_inputs):
    one_question = (*step_inputs[:2], step_inputs[2][:1])
    options = {"group_size": 4, "max_new_tokens": 8, "overlong_cache": 7, "max_rollouts": 2}
    metrics, sample = run_step(one_question, [ones], "dapo", number=2, **options)
    # of right answers that differ in length alone
    assert any(row["advantage"] for row in sample["completions"])
    assert metrics["rollouts"] == 2 and metrics["kept"] == 0 and metrics["loss"] is None


def test_truncated_completions_are_left_out_but_count_in_their_group(step_inputs, monkeypatch):
    given = noted_updates(monkeypatch)
    options = {"group_size": 8, "max_new_tokens": 8, "mask_truncated": True, "overlong_cache": 4}
    metrics, sample = run_step(step_inputs, [number_of_digits], "grpo", number=2, **options)
    assert 0 < metrics["kept"] == round(32 * (1 - metrics["truncated"])) < 32
    [batch] = given
    assert ((batch.tokens == 1) & batch.mask).any(1).all()  # 1 is EOS
    penalty = metrics["reward"] - metrics["reward/number_of_digits"]
    assert metrics["reward/overlong"] == pytest.approx(penalty) and penalty < 0
    advantages = [row["advantage"] for row in sample["completions"]]
    assert sum(advantages) == pytest.approx(0, abs=1e-4) and any(advantages)


def test_mini_batches_cover_the_kept_once_and_know_the_old_policy(step_inputs, monkeypatch):
    given = noted_updates(monkeypatch)  # so the policy is still the old one
    run_step(step_inputs, [number_of_digits], "gspo", group_size=8)
    assert [len(batch.prompts) for batch in given] == [8] * 4
    # the first one gets π_old from its first update, for nothing
    assert given[0].old_logp is None
    for batch in given[1:]:
        expected = logprobs(step_inputs[0], batch)
        torch.testing.assert_close(batch.old_logp, expected, atol=1e-5, rtol=1e-5)


def few_digits(completions, **columns):
    """Above 0, as MaxRL needs it."""
    return [32.0 - sum(c.isdigit() for c in text) for text in completions]


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_two_algorithms_compare_with_the_groups_of_all_devices(name, monkeypatch):
    called = []
    monkeypatch.setattr(ranks, "over_all_groups", lambda *given: called.append(given))
    _, algorithm = config_of({"algorithm": name})
    rollout = a_rollout([[1.0, 0.0], [5.0, 9.0]])
    algorithm.advantages(rollout)
    wanted = [(resolve(name).advantages, rollout)] if name in ("gdpo", "lite_ppo") else []
    assert called == wanted


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_every_algorithm_raises_its_reward(step_inputs, algorithm):
    make = stepper(*step_inputs, [few_digits], algorithm, group_size=8, lr=1e-3)
    rewards = [make(step)[0]["reward"] for step in range(12)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5


def test_ppos_critic_learns_from_equal_rewards_and_the_kl_is_in_its_rewards(step_inputs):
    """V is 0 and, with λ = 1, the return of every token is the score of 1, less β times the KL of
    the tokens from there on: without β the critic's loss is ½ (0 − 1)²."""
    reference = copy.deepcopy(step_inputs[0])
    with torch.no_grad():
        reference.lm_head.weight *= 0.5
    options = {"group_size": 4, "lam": 1.0, "lr": 0.0, "reference": reference}
    free, bound = (
        run_step(step_inputs, [ones], "ppo", beta=beta, **options)[0] for beta in (0.0, 0.1)
    )
    assert free["no_signal"] == 1 and free["value_loss"] == pytest.approx(0.5)
    assert bound["kl"] > 0 == free["kl"] and abs(bound["value_loss"] - 0.5) > 0.01


def test_learning_rate_rises_over_the_warm_up_and_falls_like_a_cosine():
    found = [learning_rate(x, 2.0, 0.2) for x in (0.1, 0.2, 0.4, 0.8)]
    assert found == pytest.approx([1, 2, 2 * 0.853553, 2 * 0.146447], abs=1e-5)


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
    rows = [{k: v for k, v in row.items() if "seconds" not in k}
            for row in files.read(folder / "metrics.jsonl")]
    newest, saved = checkpoint.newest(folder), {}
    for path in newest.glob("networks/*"):
        saved |= load_file(path)
    return rows, json.loads((newest / "state.json").read_text())["past"], saved


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
    ["--mu", "1", "--minibatches", "1", "--temperature", "0.9"],
    ["--algorithm", "ppo", "--group_size", "1", "--questions_per_step", "16"],
    ["--algorithm", "gfpo_adaptive", "--group_size", "16", "--keep", "efficiency"],
], ids=["reference", "ppo, one completion of a question", "gfpo_adaptive"])  # fmt: skip
def test_a_reference_a_critic_and_the_past_survive_a_resume(
    small, tmp_path, monkeypatch, options
):
    monkeypatch.setattr(begin, "load_rewards", lambda *_: named(number_of_digits))
    go(small, tmp_path / "straight", *options, steps=4)
    stop_after(2, monkeypatch)
    assert go(small, tmp_path / "resumed", *options, steps=4) == 130
    train.main(["--output_dir", str(tmp_path / "resumed"), "--resume"])
    (rows, past, saved), resumed = run_of(tmp_path / "straight"), run_of(tmp_path / "resumed")
    assert (rows, past) == resumed[:2] and [row["step"] for row in rows] == [1, 2, 3, 4]
    torch.testing.assert_close(saved, resumed[2], rtol=0, atol=0)
    if "ppo" in options:
        assert saved["critic.head.bias"] != 0 and all(row["value_loss"] > 0 for row in rows)
    elif "gfpo_adaptive" in options:
        assert len(past) == 8 and rows[0]["kept"] == 2 * 8 > min(row["kept"] for row in rows)
    else:  # the reference stays the model that the run started from
        kls = [row["kl"] for row in rows]
        assert kls[0] == 0 < min(kls[1:])
        # policy and reference have the sampler's temperature
        assert max(row["sampler_gap_max"] for row in rows) < 1e-3


def test_stop_kl_ends_a_run_with_the_checkpoint_from_before(small, tmp_path, monkeypatch, capsys):
    """Without β, which changes nothing else; and after a resume, with the same limit and a larger
    one."""
    real, evaluated, real_build, models = train.examine, {}, state.build, []

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
    monkeypatch.setattr(train, "examine", examine)
    monkeypatch.setattr(begin, "build", build)
    monkeypatch.setattr(state, "build", build)
    words = ["--beta", "0", "--seed", "1", "--save_every", "3", "--minibatches", "1"]
    go(small, tmp_path / "free", *words, steps=9)
    rows, _, _ = run_of(tmp_path / "free")
    folder = tmp_path / "run"
    go(small, folder, *words, "--stop_kl", "1e9", steps=9)
    measured, _, _ = run_of(folder)
    kls = [row["kl"] for row in measured]
    assert [row | {"kl": 0} for row in measured] == rows and min(kls[1:]) > 0
    means = [fmean(kls[i - 4 : i]) for i in range(4, 10)]  # of the steps 4 … 9
    limit = str((means[3] + means[4]) / 2)  # steps 7 and 8
    assert max(means[:4]) < float(limit) < means[4]

    shutil.rmtree(folder)
    capsys.readouterr()
    assert go(small, folder, *words, "--stop_kl", limit, steps=9) == 0
    for words in (["--stop_kl", limit], ["--stop_kl", "1e9"]):
        assert run_of(folder)[0] == measured[:8]
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["checkpoint"].endswith("checkpoint-000006") and summary["step"] == 8
        [sentence] = [s for s in summary["notes"] if "ends the run at step 8" in s]
        assert sentence in capsys.readouterr().out and "checkpoint-000006" in sentence
        saved = load_file(folder / "checkpoint-000006/model.safetensors")
        after = evaluated.pop("evaluation after")
        assert all(torch.equal(weight, after[name]) for name, weight in saved.items())
        train.main(["--output_dir", str(folder), "--resume", *words])
    assert run_of(folder)[0] == measured and checkpoint.newest(folder).name == "checkpoint-000009"


def test_a_step_knows_how_far_the_run_is_before_it(small, tmp_path, monkeypatch):
    """Its own questions, a third of all, do not count yet."""
    real, moments = train.train_step, []
    monkeypatch.setattr(
        train, "train_step", lambda *given: moments.append(given[7]) or real(*given))
    epochs = 12 / task_of("toy").train_questions
    words = ["--questions_per_step", "4", "--allocation", "false", "--epochs", str(epochs)]
    go(small, tmp_path / "run", *words, steps=99)
    assert [moment.progress for moment in moments] == pytest.approx([0, 1 / 3, 2 / 3])


def test_policy_and_critic_follow_the_schedule_each_from_its_own_peak(small, tmp_path, monkeypatch):
    real, rates = train.train_step, []
    monkeypatch.setattr(train, "train_step", lambda networks, *rest: rates.append(
        [group["lr"] for group in networks.optimizer.param_groups]) or real(networks, *rest))
    go(small, tmp_path / "run", "--algorithm", "ppo", "--warmup", "0.5", steps=4)
    shares = (0.25, 0.75, 0.5 + 0.125**0.5, 0.5 - 0.125**0.5)
    critic_lr = task_of("toy").critic_lr
    assert rates == [pytest.approx([share * 1e-3, share * critic_lr]) for share in shares]


@pytest.mark.parametrize("questions, per_step", [(2048, 8), (7473, 16), (10, 3), (5, 7)])
@pytest.mark.parametrize("most", [math.inf, 3])
def test_steps_that_all_take_the_same_number_of_questions_lie_evenly_in_the_schedule(
    questions, per_step, most
):
    """The last step, which may be shorter, too."""
    steps = min(most, math.ceil(questions / per_step))
    for done in range(steps):
        found = run_progress(done, steps, done * per_step, questions, per_step)
        assert found == (done + 0.5) / steps


def test_steps_of_uneven_length_lie_in_the_schedule_by_their_questions():
    """DAPO takes 5 questions in place of 2 for a step: the middles of the steps, of 24 questions.
    And a run that was through its 10 questions goes on with 10 more."""
    found = [run_progress(done, 99, 5 * done, 24, 2) for done in range(5)]
    assert found == pytest.approx([x / 24 for x in (1, 7.5, 12.5, 17.5, 22)])
    found = [run_progress(done, 5, seen, 20, 4) for done, seen in [(3, 10), (4, 14)]]
    assert found == [3.5 / 5, 4.5 / 5] and run_progress(40, 99, 399, 400, 4) <= 1


def test_a_run_leaves_its_files_and_metrics(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # with this seed every step has a signal, and so a loss
    assert go(small, "run", "--seed", "1") == 0
    rows = files.read("run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(x) for row in rows for x in row.values())
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["questions"] == 24 and {"before", "after"} <= set(summary)
    assert (tmp_path / "run/curves.png").exists() and len(files.read("run/samples.jsonl")) == 3
    saved = json.loads((tmp_path / "run/run.json").read_text())
    assert (saved["pruning_rate"], saved["beta"], saved["lr"]) == (0.75, 0.04, 1e-3)

    # the checkpoint is a Hugging Face folder, and eval.py finds it by the run's name
    evaluation.main(["--model", "run", "--questions", "8", "--samples", "2"])
    assert json.loads((tmp_path / "run/eval-toy.json").read_text())["questions"] == 8

    # a run that starts from a run starts from its newest checkpoint of this moment, and keeps to it
    go("run", "next", steps=1)
    state = json.loads((tmp_path / "next/checkpoint-000001/state.json").read_text())
    assert state["source"] == "run/checkpoint-000003"

    for words, message in [
        ([], "already holds a run: add --resume"), (["--resume"], "has finished its 3 steps"),
        (["--resume", "--algorithm", "grpo"], "--algorithm cppo"),
    ]:
        with pytest.raises(UserError, match=message):
            go(small, "run", *words, steps=3 if words == ["--resume"] else 9)


def test_five_updates_in_a_row_that_are_not_finite_end_the_run(small, tmp_path, monkeypatch):
    go(small, tmp_path / "run", "--save_every", "1", steps=2)
    monkeypatch.setattr(shards, "clip_gradients", lambda *_: math.nan)
    with pytest.raises(UserError, match="8 updates in a row.* --resume"):
        go(small, tmp_path / "run", "--resume", steps=9)
    assert checkpoint.newest(tmp_path / "run").name == "checkpoint-000002"


def first_two(rollout, advantages, k):
    """A keep rule of a row."""
    return torch.arange(advantages.numel()).view_as(advantages)[:, :2].flatten()


def test_a_row_with_a_rule_of_its_own_is_listed_trains_and_resumes(small, tmp_path, monkeypatch):
    name = "tests.test_train:first_two"
    for rule in (partial(first_two), first_two):
        mine = replace(ALGORITHMS["grpo"], keep=rule, pruning_rate=0.75)
        monkeypatch.setitem(ALGORITHMS, "mine", mine)
        assert re.search(r"^mine .* first_two +· +0.75 ", table(), re.MULTILINE)
    train.main(["--model", small, "--algorithm", "mine", "--plan"])
    go(small, tmp_path / "run", "--algorithm", "mine", steps=1)
    train.main(["--output_dir", str(tmp_path / "run"), "--resume", "--steps", "2"])
    options = json.loads((tmp_path / "run/run.json").read_text())
    assert (options["keep"], options["steps"]) == (name, 2)
    for sample in files.read(tmp_path / "run/samples.jsonl"):
        kept = [row["kept"] for row in sample["completions"]]
        assert kept == [True] * 2 + [False] * 6
