"""Train a language model with GRPO, CPPO or a relative, on questions with checkable answers.

    torchrun train.py                       the embedded default: no download, no GPU, minutes
    torchrun --nproc-per-node 2 train.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k
    python train.py --plan --recipe recipes/gsm8k_1.5b_cppo.yaml      the memory that a run needs
    python train.py --help                  every option
    python algorithms.py                    every algorithm

`train_step` below is the papers' algorithm box. For each step:

    1 sample G completions o_1 … o_G of each question from the policy π_old      (rollout.py)
    2 score them: rewards r                                                      (rewards.py)
    3 advantages A over all G completions of a question                          (grpo.py)
    4 keep all of them (GRPO), or the k with the largest |A| (CPPO), which        (cppo.py,
      leaves room for more questions per step                                    allocate.py)
    5 log-probabilities of the reference policy, for the kept completions only
    6 μ updates on the kept completions                                          (update.py)

algorithms.py says what each algorithm does in steps 3, 4 and 6.

We depart from the papers' published runs. Each device samples questions of its own, and the loss is
normalised over the kept completions of all devices. So the update does not depend on how the
questions were shared out.
"""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.base import progress, ranks
from engine.base.errors import UserError
from engine.data.questions import questions_of_run, rows_of_run
from engine.model import shards
from engine.model.critic import estimate
from engine.model.folders import resolve_model
from engine.model.networks import build
from engine.run import checkpoint, logs, plan_command
from engine.run.command_line import flat, run_program
from engine.run.config import open_run
from engine.run.doctor import diagnosis
from engine.run.folder import alone, keep_options, run_folder
from engine.run.interrupt import Interrupt, in_one_sentence
from engine.run.metrics import Clock, summarize
from engine.run.preview import show
from engine.run.state import open_state, refuse_failing_updates
from engine.scoring.golds import before_a_run
from engine.scoring.score import accuracy_reward, load_rewards
from eval import examine, sample_batch
from records import FIRST, Moment, Step
from rollout import sample_and_score
from tasks.table import base_model, task_of
from update import NO_UPDATE, Limits, compute_minibatch, cut_into_minibatches, update


def train_step(
    networks, algorithm, reward_functions, sampling, limits, next_questions, rng, moment=FIRST
):
    """One turn of the algorithm box. Returns a Step.

    next_questions(n): this device's share of the next n questions; None: of a step's questions.
    rng: the source of all random numbers. moment: the number of the step, and how far the run is.
    """
    model, clock = networks.model, Clock(networks.model.device)
    # 1 sample G completions of each question, 2 score them
    rollout = sample_and_score(
        next_questions, networks, algorithm, reward_functions, sampling, rng, clock, moment)
    # 3 advantages A over all G completions of a question; GRPO, CPPO: grpo.group_advantages
    advantages = algorithm.advantages(rollout)
    # 4 keep all of them (GRPO), or the k with the largest |A| (CPPO: cppo.prune)
    rows, advantages = algorithm.keep_completions(rollout, advantages)
    metrics = summarize(rollout, advantages, rows) | NO_UPDATE
    skipped = []
    minibatches = cut_into_minibatches(
        rollout, advantages, rows, algorithm, sampling.max_new_tokens)

    compute = partial(compute_minibatch, networks=networks, limits=limits)

    if minibatches:  # else nobody has anything to learn
        networks.sampler.free_memory()  # until `refresh`
        with clock.phase("logprobs"), torch.no_grad():
            # 5 log-probabilities of the reference policy, for the kept completions only
            if networks.reference:  # if β > 0, or --stop_kl needs it
                for batch in minibatches:
                    batch.ref_logp = compute(networks.reference.logprobs, batch)
            # the first update gives those of π_old for free, because π_θ is then still π_old
            later = minibatches if networks.critic else minibatches[1:]
            for batch in later:
                batch.old_logp = compute(networks.policy.logprobs, batch)
            if networks.critic:  # PPO: the scores become advantages
                for batch in minibatches:
                    batch.old_values = compute(networks.critic, batch)
                estimate(minibatches, model.device, beta=algorithm.beta, lam=algorithm.lam)
        with clock.phase("update"):
            # 6 μ updates on the kept completions
            stats, skipped = update(networks, minibatches, algorithm, limits)
            networks.sampler.refresh(shards.whole_weights(model, networks.sampler.dtype))
        metrics |= stats
    return Step(metrics | clock.seconds(), rollout, advantages, rows, skipped)


def networks_of(config, algorithm, source, device, folder=None):
    """The Networks of a run. source, folder: as for `build`."""
    return build(
        source, device, config.devices, config.sampling, config.update, algorithm,
        critic_lr=task_of(config.data.dataset).critic_lr,
        stop_kl=config.run.stop_kl,
        longest=config.data.max_prompt_tokens + config.sampling.max_new_tokens,
        seed=config.run.seed, folder=folder)


def set_up(config, algorithm, device, rows):
    """What a run needs: (run, networks, reward_functions, evaluate, ask, notes).

    rows: as of `rows_of_run`. ask(start=i) → [the greedy answer to test question i, a record].
    """
    data, sampling = config.data, config.sampling
    begin, saved, notes = None, None, []
    if config.run.resume:
        begin, saved, notes = checkpoint.resume(config.run.output_dir)
    source = resolve_model(base_model(data.model, data.dataset))
    networks = networks_of(config, algorithm, source, device, begin)
    questions, test, more_notes = questions_of_run(
        data, rows, sampling.max_new_tokens, networks.tokenizer, networks.model)
    run = open_state(config, algorithm, questions, source, saved)
    if saved:
        checkpoint.restore(begin, networks)
    reward_functions = load_rewards(data.rewards)
    eval_dataset = data.eval_dataset or data.dataset
    run.golds, lost = before_a_run(reward_functions, questions, run.numbers_ahead())
    is_right = accuracy_reward(reward_functions, data.dataset, eval_dataset)
    asked = (networks.sampler, networks.tokenizer, test, is_right)
    evaluate = partial(examine, *asked, sampling, seed=run.seed)
    greedy = replace(sampling, temperature=0.0)
    ask = partial(sample_batch, *asked, greedy, samples=1, size=1, seed=run.seed)
    return run, networks, reward_functions, evaluate, ask, notes + more_notes + lost


def train(config, algorithm, device, rows, notes):
    """The whole run. Returns the exit code: 130 after Ctrl-C, otherwise 0 (also after SIGTERM)."""
    run, networks, reward_functions, evaluate, ask, more_notes = set_up(
        config, algorithm, device, rows)
    state, folder, notes = run.state, config.run.output_dir, notes + more_notes
    limits = Limits(config.devices.micro_batch_tokens)
    logs.announce(config, run, networks.model, notes)
    keep_options(folder, flat(config))
    if not config.run.resume:
        state.before = evaluate(label="evaluation before")
        if not checkpoint.save(folder, networks, state):
            raise UserError("stopped, because this run cannot be saved. Free the disk, or name "
                            "another --output_dir.")

    log = logs.Logs(config, state, networks.tokenizer, ask)
    bar = progress.bar(algorithm.name, run.steps, "steps", done=state.step)
    with Interrupt() as interrupt, bar as shown:
        while not run.finished and not interrupt.asked:
            # the schedule, if there is one, and the learning rate
            run.follow_schedule()
            lr = networks.follow(run.learning_rate)
            # the step: its random numbers follow from the seed and its number
            rng = random.Random(f"{run.seed} {state.step + 1} 0")
            moment = Moment(state.step + 1, run.progress, run.mean_rewards)
            step = train_step(networks, run.algorithm, reward_functions, config.sampling, limits,
                              run.next_questions, rng, moment)
            run.count(step)
            # the log
            step.metrics.update(run.hooks.measure(step))
            log.write(state.step, step, lr)
            logs.show_step(shown, run, step.metrics)
            log.show(state.step, run.finished)
            refuse_failing_updates(state, folder)
            # the checkpoint
            interrupt.agree(device)
            last = run.finished or interrupt.asked
            if run.saves(last) and not checkpoint.save(folder, networks, state) and last:
                raise UserError(f"the run has ended at step {state.step}. What it learned after "
                                "its last checkpoint is lost.")
    log.close()
    if not run.finished:
        return interrupt.tell(state.step, run.steps, folder)
    if run.went_too_far:
        notes.append(run.go_back())
        del networks, evaluate, ask, log  # before they are built again, as in the checkpoint
        _, _, _, evaluate, *_ = set_up(config, algorithm, device, rows)
    after = evaluate(label="evaluation after")
    logs.finish(config, algorithm, run, after, notes)
    return 0


def check_rewards(config, algorithm, device, rows):
    """--check_rewards: steps 1 and 2 of the first step, printed."""
    run, networks, reward_functions, _, _, notes = set_up(config, algorithm, device, rows)
    logs.announce(config, run, networks.model, notes)
    rollout = sample_and_score(
        run.next_questions, networks, algorithm, reward_functions, config.sampling,
        random.Random(f"{run.seed} 1 0"), Clock(device))
    show(rollout, run.algorithm, flat(config), networks.tokenizer)


def main(argv):
    config, algorithm, notes = open_run(argv)
    run, preview = config.run, config.preview
    device = ranks.start()
    if preview.plan is not None:
        return plan_command.print_plan(config.options, notes)
    rows = rows_of_run(config.data)  # a wrong line is refused before any slow work
    if preview.check_rewards:
        return check_rewards(config, algorithm, device, rows)
    stem = f"{Path(config.data.dataset).stem}-{algorithm.name}"
    run.output_dir = ranks.from_first(
        run_folder(run.output_dir, stem) if ranks.rank() == 0 else None)
    with alone(run.output_dir):
        try:
            code = train(config, algorithm, device, rows, notes)
        except KeyboardInterrupt:
            progress.note(f"stopped at once. {checkpoint.how_to_resume(run.output_dir)}")
            code = 130
        except (RuntimeError, OSError, FloatingPointError) as error:
            raise in_one_sentence(error, run.output_dir) from None
        finally:
            if ranks.rank() == 0:
                for sentence in diagnosis(run.output_dir)[0]:
                    progress.note(sentence)
    ranks.stop()
    return code


if __name__ == "__main__":
    run_program(main)
