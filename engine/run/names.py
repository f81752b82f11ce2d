"""The names that TRL and verl have for our options, and what an unknown option may have meant."""

import difflib

# Ours: theirs. docs/names.md says where they differ. verl's names stand here without their folders,
# as n for actor_rollout_ref.rollout.n
THEIRS = {
    "model": "model_name_or_path path",
    "dataset": "dataset_name train_files",
    "group_size": "num_generations n",
    "questions_per_step": "per_device_train_batch_size steps_per_generation train_batch_size",
    "minibatches": "steps_per_generation gradient_accumulation_steps train_batch_size "
                   "ppo_mini_batch_size",
    "micro_batch_tokens": "per_device_train_batch_size ppo_micro_batch_size_per_gpu "
                          "ppo_max_token_len_per_gpu",
    "mu": "num_iterations ppo_epochs",
    "beta": "kl_loss_coef use_kl_loss",
    "clip_low": "epsilon clip_ratio_low",
    "clip_high": "epsilon_high clip_ratio_high",
    "max_new_tokens": "max_completion_length max_response_length",
    "max_prompt_tokens": "max_prompt_length",
    "rewards": "reward_funcs reward_weights",
    "algorithm": "loss_type loss_agg_mode scale_rewards norm_adv_by_std_in_grpo "
                 "importance_sampling_level loss_mode",
    "max_rollouts": "filter_groups",
    "mask_truncated": "mask_truncated_completions",
    "importance_cap": "vllm_importance_sampling_mode rollout_is",
    "importance_low": "vllm_importance_sampling_clip_min",
    "lr": "learning_rate",
    "warmup": "warmup_steps lr_warmup_steps_ratio",
    "lr_schedule": "lr_scheduler_type",
    "max_grad_norm": "clip_grad",
    "epochs": "num_train_epochs total_epochs",
    "steps": "max_steps total_training_steps",
    "rollout": "use_vllm name",
    "vllm_share": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "save_every": "save_steps save_freq",
    "save_total_limit": "max_actor_ckpt_to_keep",
    "log": "report_to logger",
}


def meant(name, options):
    """What a user may have meant by an unknown option: the end of a sentence, or "". options: the
    known names."""
    last = name.replace("-", "_").rpartition(".")[2]  # actor_rollout_ref.actor.optim.lr is lr
    ours = [o for o in options if o == last or last in THEIRS.get(o, "").split()]
    if ours:
        return f"in this project it is {' or '.join(f'--{o}' for o in ours)} (docs/names.md)."
    near = difflib.get_close_matches(f"--{name}", [f"--{o}" for o in options], n=1, cutoff=0.85)
    return f"did you mean {near[0]}?" if near else ""
