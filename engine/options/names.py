"""Options of TRL and verl, and what to write here in their place.

    python -m engine.options.names          prints them

Read in the code of TRL 1.16.0 (GRPOConfig) and verl 0.9.1. actor., rollout. and model. mean verl's
actor_rollout_ref.actor. and so on.
"""

import re
import signal

# what to write here; its names in TRL and verl, and an earlier one of ours; what differs
TABLE = """\
--group_size
    TRL   num_generations
    verl  rollout.n
    G
--questions_per_step
    TRL   per_device_train_batch_size, steps_per_generation, generation_batch_size
    verl  data.train_batch_size
    here questions of one device, before allocation. In TRL the product of the first two counts
    completions of one device, and the third those of all devices: divide by G. In verl questions
    of all devices
--minibatches
    TRL   gradient_accumulation_steps
    verl  actor.ppo_mini_batch_size
    here updates of a step in each of the μ passes. In TRL steps_per_generation divided by it, in
    verl data.train_batch_size divided by it
--micro_batch_tokens
    verl  actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu
    in TRL per_device_train_batch_size completions; verl's second one counts tokens
--mu
    TRL   num_iterations
    verl  actor.ppo_epochs
    μ
--beta
    TRL   beta, kl_coef
    verl  actor.kl_loss_coef, actor.use_kl_loss, algorithm.kl_ctrl.kl_coef,
    verl  algorithm.use_kl_in_reward
    β. verl's last two, and kl_coef of TRL's former PPO trainer, take the KL off the reward, as
    here only --algorithm ppo does
no option, because D_KL is always k3 (grpo.kl_k3)
    verl  actor.kl_loss_type
    verl's low_var_kl; TRL: k3 times the ratio, see docs/names.md
--clip_low and --clip_high
    TRL   epsilon
    verl  actor.clip_ratio
    ε
--clip_high
    TRL   epsilon_high
    verl  actor.clip_ratio_high
    with TRL's loss_type="cispo" it is the largest ratio itself: 5, ours 4
--clip_low
    verl  actor.clip_ratio_low
no option, but examples/my_loss.py bounds the ratio if A < 0
    TRL   delta
    verl  actor.clip_ratio_c
    dual clip
no option, but examples/my_loss.py has a bonus for entropy
    TRL   entropy_coef, use_adaptive_entropy, entropy_coef_min, entropy_coef_max,
    TRL   entropy_coef_delta, entropy_target
    verl  actor.entropy_coeff
no option, but a loss of your own may read the entropy, as examples/my_loss.py does
    TRL   top_entropy_quantile
    TRL trains on the tokens of highest entropy only
--pruning_rate and --keep
    k = ⌊G(1−P)⌋. Neither has it: examples/cppo_in_trl.py, examples/cppo_in_verl.py
--allocation
    neither has it: a larger per_device_train_batch_size, a larger data.train_batch_size
--max_new_tokens
    TRL   max_completion_length
    verl  data.max_response_length, rollout.response_length
--max_prompt_tokens
    TRL   max_prompt_length
    verl  data.max_prompt_length, rollout.prompt_length
    TRL 1.16.0 has none: earlier versions had it
--chat_template_kwargs
    TRL   chat_template_kwargs
    verl  data.apply_chat_template_kwargs
--stop
    TRL   generation_kwargs
    a list of texts
--temperature
    TRL   temperature
    verl  rollout.temperature
no option, because train.py samples from the policy that it scores
    TRL   top_p, top_k, min_p, repetition_penalty
    verl  rollout.top_p, rollout.top_k
    eval.py has --top_p and --top_k
--rewards NAME:WEIGHT
    TRL   reward_funcs, reward_weights
    verl  custom_reward_function.path
--algorithm gdpo
    TRL   multi_objective_aggregation
    TRL's normalize_then_sum. verl: algorithm.adv_estimator=gdpo
--token_weights and --algorithm
    TRL   loss_type
    verl  actor.loss_agg_mode
    sequence_mean, token_mean, constant: TRL's grpo, dapo, dr_grpo, verl's seq-mean-token-mean,
    token-mean, seq-mean-token-sum-norm. TRL's cispo and sapo are rows here. bnpo, luspo and vespo
    are not
--scale_rewards
    TRL   scale_rewards
    verl  algorithm.norm_adv_by_std_in_grpo
    group, batch or none, as in TRL; batch with token_mean is the row lite_ppo. verl: True or
    False
--algorithm
    TRL   importance_sampling_level
    verl  actor.policy_loss.loss_mode
    ratio of a token or a completion (GSPO). verl's cispo and sapo are rows here
--algorithm
    verl  algorithm.adv_estimator, algorithm.filter_groups.enable
    rloo (TRL: RLOOTrainer, with one ratio for a completion and β in the reward); another std than
    lite_ppo: verl's reinforce_plus_plus_baseline. filter_groups is DAPO's dynamic sampling:
    max_rollouts of the row; TRL has none
no option, but tau_positive and tau_negative in family/sapo.py
    TRL   sapo_temperature_pos, sapo_temperature_neg
    verl  actor.tau_pos, actor.tau_neg
no option, because VESPO is not here
    TRL   vespo_k_pos, vespo_k_neg, vespo_lambda_pos, vespo_lambda_neg
    arXiv 2602.10693
--algorithm deepseek_v32
    TRL   use_bias_correction_kl, off_policy_mask_threshold
    also scale_rewards="none", loss_type="grpo"
--mask_truncated
    TRL   mask_truncated_completions
--sampler_correction
    TRL   vllm_importance_sampling_correction, vllm_importance_sampling_mode,
    TRL   vllm_importance_sampling_clip_max, vllm_importance_sampling_clip_min
    verl  algorithm.rollout_correction.rollout_is, algorithm.rollout_correction.rollout_is_threshold
    token_truncate (TIS, at most 2), token_mask (IcePop, 0 outside 0.5 … 5); sequence_truncate,
    sequence_mask: the product, at most 3, or 0 above 3. TRL has the same names, and sequence_mask
    with 3 is its default. verl: token or sequence, with one number, or "0.5_5.0"; a masked
    sequence: "a_3", a > 0
--lr
    TRL   learning_rate
    verl  actor.optim.lr
--warmup
    TRL   warmup_steps, warmup_ratio
    verl  actor.optim.lr_warmup_steps, actor.optim.lr_warmup_steps_ratio
    here a share of the run. TRL 1.16.0 has no warmup_ratio: earlier versions had it
no option, because the learning rate falls like a cosine
    TRL   lr_scheduler_type
    verl  actor.optim.lr_scheduler_type
no option, but Limits in loop/update.py: 1.0
    TRL   max_grad_norm
    verl  actor.grad_clip, actor.optim.clip_grad
no option, because AdamW has no weight decay here
    TRL   weight_decay
    verl  actor.optim.weight_decay
--model
    TRL   model_name_or_path
    verl  model.path
    in TRL an option of its scripts
--dataset
    TRL   dataset_name
    verl  data.train_files
    in TRL an option of its scripts
--eval_dataset
    verl  data.val_files
--eval_every
    TRL   eval_steps, eval_strategy
    verl  trainer.test_freq
no option, because an evaluation takes one greedy and one sampled answer
    TRL   num_generations_eval
    verl  rollout.val_kwargs.n
    eval.py has --samples
--epochs
    TRL   num_train_epochs
    verl  trainer.total_epochs
--steps
    TRL   max_steps
    verl  trainer.total_training_steps
--sampler examples/vllm_sampler.py:VLLM
    TRL   use_vllm, vllm_mode
    verl  rollout.name
no option, but share in examples/vllm_sampler.py
    TRL   vllm_gpu_memory_utilization
    verl  rollout.gpu_memory_utilization
--dtype bfloat16
    TRL   bf16
    verl  actor.fsdp_config.dtype
--lora
    TRL   use_peft, lora_r
    verl  model.lora_rank
    the rank
no option, because α is twice the rank
    TRL   lora_alpha
    verl  model.lora_alpha
--gradient_checkpointing
    TRL   gradient_checkpointing, gradient_checkpointing_kwargs, activation_checkpointing
    verl  model.enable_gradient_checkpointing
--shard full
    TRL   fsdp, deepspeed
    verl  actor.strategy
no option, but torchrun --nproc-per-node N train.py
    verl  trainer.n_gpus_per_node, trainer.nnodes
    TRL: accelerate launch
--save_every
    TRL   save_steps
    verl  trainer.save_freq
no option, but KEPT in engine/run/checkpoint.py: the newest two
    TRL   save_total_limit
    verl  trainer.max_actor_ckpt_to_keep
--resume
    TRL   resume_from_checkpoint
    verl  trainer.resume_mode, trainer.resume_from_path
    with --output_dir; from the newest checkpoint
--hooks examples/my_tracker.py
    TRL   report_to
    verl  trainer.logger
no option, because metrics.jsonl has a line for every step
    TRL   logging_steps, logging_strategy
--output_dir
    TRL   output_dir
    verl  trainer.default_local_dir
--sampler_correction
    ours  importance_weights
--min_prefix
    ours  shortest_prefix
--overlong_buffer
    ours  overlong_cache
"""


def bare(name):
    """A name as it is compared: without a first part that people leave out, with _ for -."""
    name = name.lstrip("-").replace("-", "_")
    return re.sub(r"^(actor_rollout_ref|algorithm|data|trainer)\.", "", name)


NAMES = {}  # {bare name: what to write here}
for line in TABLE.splitlines():
    if line[0] != " ":
        here = line
    if names := re.match("    (?:TRL |verl|ours)  (.*)", line):
        NAMES |= dict.fromkeys(map(bare, re.findall(r"[\w.]+", names[1])), here)

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # … | head
    print(TABLE, end="")
