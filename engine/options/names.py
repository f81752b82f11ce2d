"""Options of TRL and verl, and what to write here in their place.

    python -m engine.options.names          prints the table of docs/names.md
"""

import re

# verl's names are without actor_rollout_ref.
TABLE = """\
| here | TRL, `GRPOConfig` | verl | what differs |
|---|---|---|---|
| `--group_size` | `num_generations` | `rollout.n` | G |
| `--questions_per_step` | `per_device_train_batch_size`, `steps_per_generation`, \
`generation_batch_size` | `data.train_batch_size` | here questions of one device, before \
allocation. In TRL the product of the first two counts completions of one device, and the third \
those of all devices: divide by G. In verl questions of all devices |
| `--minibatches` | `gradient_accumulation_steps` | `actor.ppo_mini_batch_size` | here updates of \
a step in each of the μ passes. In TRL `steps_per_generation` divided by it, in verl \
`data.train_batch_size` divided by it |
| `--micro_batch_tokens` |  | `actor.ppo_micro_batch_size_per_gpu`, \
`actor.ppo_max_token_len_per_gpu` | in TRL `per_device_train_batch_size` completions; verl's \
second one counts tokens |
| `--mu` | `num_iterations` | `actor.ppo_epochs` | μ |
| `--beta` | `beta`, `kl_coef` | `actor.kl_loss_coef`, `actor.use_kl_loss`, \
`algorithm.kl_ctrl.kl_coef`, `algorithm.use_kl_in_reward` | β. verl's last two, and `kl_coef` of \
TRL's former PPO trainer, take the KL off the reward, as here only `--algorithm ppo` does |
| no option, because D_KL is always k3 (grpo.kl_k3) |  | `actor.kl_loss_type` | verl's \
`low_var_kl`; TRL: k3 times the ratio, see above |
| `--clip_low` and `--clip_high` | `epsilon` | `actor.clip_ratio` | ε |
| `--clip_high` | `epsilon_high` | `actor.clip_ratio_high` | with TRL's `loss_type="cispo"` it is \
the largest ratio itself: 5, ours 4 |
| `--clip_low` |  | `actor.clip_ratio_low` |  |
| no option, but examples/my_loss.py bounds the ratio if A < 0 | `delta` | `actor.clip_ratio_c` | \
dual clip |
| no option, but examples/my_loss.py has a bonus for entropy | `entropy_coef`, \
`use_adaptive_entropy`, `entropy_coef_min`, `entropy_coef_max`, `entropy_coef_delta`, \
`entropy_target` | `actor.entropy_coeff` |  |
| no option, but a loss of your own may read the entropy, as examples/my_loss.py does | \
`top_entropy_quantile` |  | TRL trains on the tokens of highest entropy only |
| `--pruning_rate` and `--keep` |  |  | k = ⌊G(1−P)⌋. Neither has it: CPPOTrainer [for \
TRL](../examples/cppo_in_trl.py), [for verl](../examples/cppo_in_verl.py) |
| `--allocation` |  |  | neither has it: a larger `per_device_train_batch_size`, a larger \
`data.train_batch_size` |
| `--max_new_tokens` | `max_completion_length` | `data.max_response_length`, \
`rollout.response_length` |  |
| `--max_prompt_tokens` | `max_prompt_length` | `data.max_prompt_length`, `rollout.prompt_length` \
| TRL 1.16.0 has none: earlier versions had it |
| `--chat_template_kwargs` | `chat_template_kwargs` | `data.apply_chat_template_kwargs` |  |
| `--stop` | `generation_kwargs` |  | a list of texts |
| `--temperature` | `temperature` | `rollout.temperature` |  |
| no option, because train.py samples from the policy that it scores | `top_p`, `top_k`, `min_p`, \
`repetition_penalty` | `rollout.top_p`, `rollout.top_k` | eval.py has `--top_p` and `--top_k` |
| `--rewards NAME:WEIGHT` | `reward_funcs`, `reward_weights` | `custom_reward_function.path` |  |
| `--algorithm gdpo` | `multi_objective_aggregation` |  | TRL's `normalize_then_sum`. verl: \
`algorithm.adv_estimator=gdpo` |
| `--token_weights` and `--algorithm` | `loss_type` | `actor.loss_agg_mode` | `sequence_mean`, \
`token_mean`, `constant`: TRL's `grpo`, `dapo`, `dr_grpo`, verl's `seq-mean-token-mean`, \
`token-mean`, `seq-mean-token-sum-norm`. TRL's `cispo` and `sapo` are rows here. `bnpo`, `luspo` \
and `vespo` are not |
| `--scale_rewards` | `scale_rewards` | `algorithm.norm_adv_by_std_in_grpo` | `group`, `batch` or \
`none`, as in TRL; `batch` with `token_mean` is the row `lite_ppo`. verl: `True` or `False` |
| `--algorithm` | `importance_sampling_level` | `actor.policy_loss.loss_mode` | ratio of a token \
or a completion (GSPO). verl's `cispo` and `sapo` are rows here |
| `--algorithm` |  | `algorithm.adv_estimator`, `algorithm.filter_groups.enable` | `rloo` (TRL: \
RLOOTrainer, with one ratio for a completion and β in the reward); another std than `lite_ppo`: \
verl's `reinforce_plus_plus_baseline`. filter_groups is DAPO's dynamic sampling: `max_rollouts` of\
 the row; TRL has none |
| no option, but tau_positive and tau_negative in family/sapo.py | `sapo_temperature_pos`, \
`sapo_temperature_neg` | `actor.tau_pos`, `actor.tau_neg` |  |
| no option, because VESPO is not here | `vespo_k_pos`, `vespo_k_neg`, `vespo_lambda_pos`, \
`vespo_lambda_neg` |  | 2602.10693 |
| `--algorithm deepseek_v32` | `use_bias_correction_kl`, `off_policy_mask_threshold` |  | also \
`scale_rewards="none"`, `loss_type="grpo"` |
| `--mask_truncated` | `mask_truncated_completions` |  |  |
| `--sampler_correction` | `vllm_importance_sampling_correction`, `vllm_importance_sampling_mode`,\
 `vllm_importance_sampling_clip_max`, `vllm_importance_sampling_clip_min` | \
`algorithm.rollout_correction.rollout_is`, `algorithm.rollout_correction.rollout_is_threshold` | \
`token_truncate` (TIS, at most 2), `token_mask` (IcePop, 0 outside 0.5 … 5); `sequence_truncate`, \
`sequence_mask`: the product, at most 3, or 0 above 3. TRL has the same names, and `sequence_mask`\
 with 3 is its default. verl: `token` or `sequence`, with one number, or `"0.5_5.0"`; a masked \
sequence: `"a_3"`, a > 0 |
| `--lr` | `learning_rate` | `actor.optim.lr` |  |
| `--warmup` | `warmup_steps`, `warmup_ratio` | `actor.optim.lr_warmup_steps`, \
`actor.optim.lr_warmup_steps_ratio` | here a share of the run. TRL 1.16.0 has no `warmup_ratio`: \
earlier versions had it |
| no option, because the learning rate falls like a cosine | `lr_scheduler_type` | \
`actor.optim.lr_scheduler_type` |  |
| no option, but Limits in loop/update.py: 1.0 | `max_grad_norm` | `actor.grad_clip`, \
`actor.optim.clip_grad` |  |
| no option, because AdamW has no weight decay here | `weight_decay` | `actor.optim.weight_decay` \
|  |
| `--model` | `model_name_or_path` | `model.path` | in TRL an option of its scripts |
| `--dataset` | `dataset_name` | `data.train_files` | in TRL an option of its scripts |
| `--eval_dataset` |  | `data.val_files` |  |
| `--eval_every` | `eval_steps`, `eval_strategy` | `trainer.test_freq` |  |
| no option, because an evaluation takes one greedy and one sampled answer | \
`num_generations_eval` | `rollout.val_kwargs.n` | eval.py has `--samples` |
| `--epochs` | `num_train_epochs` | `trainer.total_epochs` |  |
| `--steps` | `max_steps` | `trainer.total_training_steps` |  |
| `--sampler examples/vllm_sampler.py:VLLM` | `use_vllm`, `vllm_mode` | `rollout.name` |  |
| no option, but share in examples/vllm_sampler.py | `vllm_gpu_memory_utilization` | \
`rollout.gpu_memory_utilization` |  |
| `--dtype bfloat16` | `bf16` | `actor.fsdp_config.dtype` |  |
| `--lora` | `use_peft`, `lora_r` | `model.lora_rank` | the rank |
| no option, because α is twice the rank | `lora_alpha` | `model.lora_alpha` |  |
| `--gradient_checkpointing` | `gradient_checkpointing`, `gradient_checkpointing_kwargs`, \
`activation_checkpointing` | `model.enable_gradient_checkpointing` |  |
| `--shard full` | `fsdp`, `deepspeed` | `actor.strategy` |  |
| no option, but torchrun --nproc-per-node N train.py |  | `trainer.n_gpus_per_node`, \
`trainer.nnodes` | TRL: `accelerate launch` |
| `--save_every` | `save_steps` | `trainer.save_freq` |  |
| no option, but KEPT in engine/run/checkpoint.py: the newest two | `save_total_limit` | \
`trainer.max_actor_ckpt_to_keep` |  |
| `--resume` | `resume_from_checkpoint` | `trainer.resume_mode`, `trainer.resume_from_path` | with\
 `--output_dir`; from the newest checkpoint |
| `--hooks examples/my_tracker.py` | `report_to` | `trainer.logger` |  |
| no option, because metrics.jsonl has a line for every step | `logging_steps`, `logging_strategy`\
 |  |  |
| `--output_dir` | `output_dir` | `trainer.default_local_dir` |  |
| `--sampler_correction` | here, earlier: `importance_weights` |  |  |
| `--min_prefix` | here, earlier: `shortest_prefix` |  |  |
| `--overlong_buffer` | here, earlier: `overlong_cache` |  |  |
"""


def bare(name):
    """A name as it is compared: without a first part that people leave out, with _ for -."""
    name = name.lstrip("-").replace("-", "_")
    return re.sub(r"^(actor_rollout_ref|algorithm|data|trainer)\.", "", name)


NAMES = {}  # {bare name: what to write here}
for line in TABLE.splitlines()[2:]:
    here, trl, verl = line.split(" | ")[:3]
    names = re.findall("`(.+?)`", f"{trl} {verl}")
    NAMES |= dict.fromkeys(map(bare, names), re.sub("^\\| |`", "", here))

if __name__ == "__main__":
    print(TABLE, end="")
