"""Train a language model with GRPO, CPPO or a relative, on questions with checkable answers.

    torchrun train.py                       the embedded default: no download, no GPU, minutes
    torchrun --nproc-per-node 2 train.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k
    python train.py --plan --recipe recipes/gsm8k_1.5b_cppo.yaml      the memory that a run needs
    python train.py --help                  every option
    python algorithms.py                    every algorithm

`train_step` below is the papers' algorithm box. For each step:

    1 sample G completions o_1 … o_G of each question from the policy π_old (loop/rollout.py)
    2 score them: rewards r                                                      (rewards.py)
    3 advantages A over all G completions of a question                          (grpo.py)
    4 keep all of them (GRPO), or the k with the largest |A| (CPPO), which        (cppo.py,
      leaves room for more questions per step                                    allocate.py)
    5 log-probabilities of the reference policy, for the kept completions only
    6 μ updates on the kept completions                                     (loop/update.py)

algorithms.py says what each algorithm does in steps 3, 4 and 6.

We depart from the papers' published runs. Each device samples questions of its own, and the loss is
normalised over the kept completions of all devices. So the update does not depend on how the
questions were shared out.
"""

import random
from dataclasses import replace

import torch

from engine.base import progress, ranks
from engine.base.program import run_program
from engine.data.questions import rows_of_run
from engine.model.critic import compute_advantages
from engine.report import logs
from engine.report.findings import of_one_step, tell_first_sentence
from engine.report.metrics import step_metrics
from engine.report.plan_command import print_plan
from engine.report.preview import print_preview
from engine.run import checkpoint
from engine.run.begin import begin_run, open_run
from engine.run.folder import exclusive_run_folder, how_to_resume, keep_options, run_folder
from engine.run.interrupt import Interrupt, as_user_error
from engine.scoring.score import is_graded
from eval import evaluate, sample_batch
from loop.batches import split_into_mini_batches
from loop.records import FIRST_STEP, Parts, Step, TrainingProgress
from loop.rollout import sample_and_score
from loop.update import NO_UPDATE, Limits, map_micro_batches, update


def train_step(parts, questions, rng, so_far=FIRST_STEP, more=None):
    """One turn of the algorithm box: μ · mini-batches updates. Returns a Step.

    parts: the networks and what is done with them. questions: those of this device. rng: the source
    of all random numbers. so_far: the number of the step, and how far the run is. more(n): this
    device's share of the next n questions, for algorithms that sample again.
    """
    networks, algorithm, limits = parts.networks, parts.algorithm, parts.limits
    policy, reference, critic = networks.policy, networks.reference, networks.critic
    device = policy.model.device
    clock = progress.Clock(device)
    # 1 sample G completions of each question, 2 score them
    rollout = sample_and_score(parts, questions, rng, clock, so_far, more)
    # 3 advantages A over all G completions of a question; GRPO, CPPO: grpo.group_advantages
    advantages = algorithm.advantages(rollout)
    # 4 keep all of them (GRPO), or the k with the largest |A| (CPPO: cppo.prune). Some rules also
    # say what the kept ones count (GFPO, PODS, unbiased)
    kept, advantages = algorithm.keep_completions(rollout, advantages)
    minibatches = split_into_mini_batches(
        rollout, advantages, kept, algorithm, parts.sampling.max_new_tokens)
    stats, skipped = {}, []
    if minibatches:  # else nobody has anything to learn
        networks.sampler.free_memory()  # until it is refreshed
        with clock.phase("logprobs"), torch.no_grad():
            # 5 log-probabilities of the reference policy, for the kept completions only
            if reference:  # if β > 0, or --stop_kl needs it
                for batch in minibatches:
                    batch.ref_logp = map_micro_batches(reference.logprobs, batch, policy, limits)
            # the first update gives those of π_old for free, because π_θ is then still π_old
            for batch in minibatches if critic else minibatches[1:]:
                batch.old_logp = map_micro_batches(policy.logprobs, batch, policy, limits)
            if critic:  # PPO: the scores become advantages
                for batch in minibatches:
                    batch.old_values = map_micro_batches(critic, batch, policy, limits)
                compute_advantages(minibatches, device, beta=algorithm.beta, lam=algorithm.lam)
        with clock.phase("update"):
            # 6 μ updates on the kept completions
            stats, skipped = update(networks, minibatches, algorithm, limits)
            networks.sync_sampler()
    metrics = step_metrics(rollout, advantages, kept) | NO_UPDATE | stats | clock.seconds()
    return Step(metrics, rollout, advantages, kept, skipped)


def train(config, algorithm, device, rows, notes):
    """The whole run. Returns the exit code: 130 after Ctrl-C, otherwise 0 (also after SIGTERM)."""
    run, more_notes = begin_run(config, algorithm, device, rows)
    state, folder, notes = run.state, config.run.output_dir, notes + more_notes
    parts = Parts(run.networks, algorithm, run.reward_functions, config.sampling,
                  Limits(run.micro_batch_tokens))
    logs.announce(config, run, notes)
    keep_options(folder, config)
    if not config.run.resume:
        state.before = evaluate_run(run, "evaluation before", run.test)
        checkpoint.save_or_stop(folder, run.networks, state)

    log = logs.Logs(config, state, run.networks.tokenizer, lambda i: greedy_answer(run, i))
    bar = progress.bar(algorithm.name, run.steps, "steps", done=state.step)
    with Interrupt() as interrupt, bar as shown:
        while not run.finished and not interrupt.asked:
            with interrupt.saving_first(run):
                step = next_step(run, parts, log)
                logs.show_step(shown, run, step.metrics)
                log.show(run, step.metrics)
            run.refuse_failing_updates()
            # the checkpoint
            interrupt.agree(device)
            run.save(last=run.finished or interrupt.asked)
    if not run.finished:
        return interrupt.tell(state.step, run.steps, folder)
    del parts  # so the networks can leave the memory
    if run.went_too_far:
        notes.append(run.go_back())
    with interrupt.saving_first(run):
        after = evaluate_run(run, "evaluation after", run.test, path=logs.begin_answers(run))
    logs.write_summary(algorithm, run, after, notes)
    return 0


def next_step(run, parts, log):
    """The next step of a run, which is counted, evaluated if that is due, and logged."""
    state = run.state
    lr = run.networks.set_learning_rate(run.learning_rate)
    # its random numbers follow from the seed and its number
    rng = random.Random(f"{run.seed} {state.step + 1} 0")
    so_far = TrainingProgress(state.step + 1, run.progress, state.past)
    step = train_step(parts, run.next_questions(), rng, so_far, run.next_questions)
    run.count(step)
    run.look_at_rewards(step)
    try:
        if run.evaluates:
            scores = evaluate_run(run, "evaluation", run.to_choose, samples=0)
            step.metrics.update(run.count_evaluation(scores))
        step.metrics.update(run.measure(step))
    finally:  # also if its evaluation fails
        log.write(state.step, step, lr)
    return step


def evaluate_run(run, label, questions, samples=1, path=None):
    """The scores of the policy on questions; {} if there are none. path: where its answers go."""
    networks = run.networks
    scores = evaluate(
        networks.sampler, networks.tokenizer, questions, run.accuracy_reward, run.config.sampling,
        samples=samples, measure=run.config.data.measure, seed=run.seed, label=label, path=path)
    if scores.get("measure") == "reward":
        run.show_rewards()
    return scores


def greedy_answer(run, i):
    """The record of the policy's greedy answer to test question i."""
    networks, greedy = run.networks, replace(run.config.sampling, temperature=0.0)
    [record] = sample_batch(
        networks.sampler, networks.tokenizer, run.test, run.accuracy_reward, greedy,
        samples=1, start=i, size=1, seed=run.seed)
    return record


def check_rewards(config, algorithm, device, rows):
    """--check_rewards: steps 1 and 2 of the first step, printed."""
    run, notes = begin_run(config, algorithm, device, rows)
    logs.announce(config, run, notes)
    parts = Parts(run.networks, algorithm, run.reward_functions, config.sampling, limits=None)
    rng = random.Random(f"{run.seed} 1 0")
    rollout = sample_and_score(
        parts, run.next_questions(), rng, progress.Clock(device), more=run.next_questions)
    metrics, sample = print_preview(rollout, run.algorithm, run.networks.tokenizer)
    if any(is_graded(run.reward_functions[0].function, x) for x in rollout.rewards[0].flatten()):
        config.data.measure = "reward"
    if finding := of_one_step(metrics, sample, config.options):
        progress.note(finding)


def main(argv):
    config, algorithm, notes = open_run(argv)
    device = ranks.start()
    if config.preview.plan is not None:
        return print_plan(config.options, notes, argv)
    rows = rows_of_run(config.data)  # a wrong line is refused before any slow work
    if config.preview.check_rewards:
        return check_rewards(config, algorithm, device, rows)
    folder = config.run.output_dir = run_folder(config)
    with exclusive_run_folder(folder) as steps_before:
        try:
            code = train(config, algorithm, device, rows, notes)
        except KeyboardInterrupt:
            progress.note(f"stopped at once. {how_to_resume(folder)}")
            code = 130
        except (RuntimeError, OSError, FloatingPointError) as error:
            raise as_user_error(error, folder) from None
        finally:
            tell_first_sentence(folder, steps_before)
    ranks.stop()
    return code


if __name__ == "__main__":
    run_program(main)
