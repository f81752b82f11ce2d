"""Options of TRL and verl, and earlier names, and what to write here. docs/names.md says more about
each."""

NAMES = {  # what to write here: its names there, verl's without the prefix actor_rollout_ref.
    "--group_size": "num_generations rollout.n",
    "--questions_per_step":
        "per_device_train_batch_size steps_per_generation data.train_batch_size",
    "--minibatches": "gradient_accumulation_steps actor.ppo_mini_batch_size",
    "--micro_batch_tokens": "actor.ppo_micro_batch_size_per_gpu actor.ppo_max_token_len_per_gpu",
    "--mu": "num_iterations actor.ppo_epochs",
    "--beta": "actor.kl_loss_coef actor.use_kl_loss",
    "grpo.kl_k3": "actor.kl_loss_type",
    "--clip_low, --clip_high": "epsilon",
    "--clip_high": "epsilon_high actor.clip_ratio_high",
    "--clip_low": "actor.clip_ratio_low",
    "--max_new_tokens": "max_completion_length data.max_response_length",
    "--max_prompt_tokens": "data.max_prompt_length",
    "--chat_template_kwargs": "data.apply_chat_template_kwargs",
    "--stop": "generation_kwargs",
    "--temperature": "rollout.temperature",
    "off: train.py samples from the whole policy": "top_p top_k rollout.top_p rollout.top_k",
    "--rewards NAME:WEIGHT": "reward_funcs reward_weights",
    "--algorithm":
        "loss_type actor.loss_agg_mode scale_rewards algorithm.norm_adv_by_std_in_grpo "
        "importance_sampling_level actor.policy_loss.loss_mode algorithm.adv_estimator "
        "algorithm.filter_groups",
    "--algorithm deepseek_v32": "use_bias_correction_kl off_policy_mask_threshold",
    "--mask_truncated": "mask_truncated_completions",
    "--min_prefix": "shortest_prefix",  # an earlier name, as two more below
    "--overlong_buffer": "overlong_cache",
    "--sampler_correction":
        "importance_weights "
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min algorithm.rollout_correction.rollout_is "
        "algorithm.rollout_correction.rollout_is_threshold",
    "--lr": "learning_rate actor.optim.lr",
    "--warmup": "warmup_steps actor.optim.lr_warmup_steps_ratio",
    "a cosine": "lr_scheduler_type actor.optim.lr_scheduler_type",
    "1.0: Limits in loop/update.py": "max_grad_norm actor.optim.clip_grad",
    "--model": "model_name_or_path model.path",
    "--dataset": "dataset_name data.train_files",
    "--epochs": "num_train_epochs trainer.total_epochs",
    "--steps": "max_steps trainer.total_training_steps",
    "--sampler examples/vllm_sampler.py:VLLM": "use_vllm rollout.name",
    "share in examples/vllm_sampler.py":
        "vllm_gpu_memory_utilization rollout.gpu_memory_utilization",
    "--save_every": "save_steps trainer.save_freq",
    "--hooks": "report_to trainer.logger",
    "2: KEPT in checkpoint.py": "save_total_limit trainer.max_actor_ckpt_to_keep",
}
