"""CPPO in TRL 1.16, for text models: GRPOTrainer, and after the rewards only k completions of each
question stay.

    from trl import GRPOConfig
    from examples.cppo_in_trl import CPPOTrainer
    options = GRPOConfig(loss_type="grpo", num_generations=16)
    trainer = CPPOTrainer(model, reward_funcs, options, train_dataset, pruning_rate=0.75)

Allocation: make per_device_train_batch_size G/k times as large. For example, with G = 16 and P =
0.75, put 64 in place of 16. Then a device samples 64 completions of 4 questions and trains on 16 of
them.
"""

if __name__ == "__main__":
    print(__doc__)  # it is no program
    raise SystemExit

import torch
from trl import GRPOTrainer

from cppo import batch_rows, keep_count, prune


class CPPOTrainer(GRPOTrainer):
    def __init__(self, *args, pruning_rate=0.75, **kwargs):
        self.scoring = False
        super().__init__(*args, **kwargs)
        # vLLM's correction compares sampler and policy on all completions
        self.corrected = self.use_vllm and self.vllm_importance_sampling_correction
        self.k = keep_count(self.num_generations, pruning_rate)
        G, parts = self.num_generations, self.args.steps_per_generation
        own = self.args.per_device_train_batch_size * parts  # completions of a device
        if self._is_vlm:
            raise ValueError(
                "CPPOTrainer prunes text only: take GRPOTrainer for a model of images."
            )
        if self.beta and self.ref_model is None:
            raise ValueError(
                "with adapters the policy is its own reference: CPPOTrainer needs beta=0."
            )
        if own % G:
            raise ValueError(
                f"{own} completions on a device split a group of {G}: make them a multiple of {G}."
            )
        if own // G * self.k % parts:
            raise ValueError(
                f"{own // G * self.k} kept completions do not fill {parts} equal batches, and TRL "
                "would drop the rest: change per_device_train_batch_size or steps_per_generation."
            )

    def _get_per_token_logps_and_entropies(
        self, model, tokens, seen, logits_to_keep, *args, **kwargs
    ):
        # before pruning there is no forward pass: these zeros are replaced below
        if self.scoring and not (self.corrected and model is self.model):
            return torch.zeros(len(tokens), logits_to_keep, device=tokens.device), None, None
        return super()._get_per_token_logps_and_entropies(
            model, tokens, seen, logits_to_keep, *args, **kwargs
        )

    def _generate_and_score_completions(self, inputs):
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self.scoring = True
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self.scoring = False
        # the k largest |A| of each question; the advantages are over all G
        rows = batch_rows(
            prune(batch["advantages"].view(-1, self.num_generations), self.k), self.num_generations
        )
        batch = {name: x[rows] if x.dim() else x for name, x in batch.items()}
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        batch["num_items_in_batch"] = self.accelerator.gather(mask.sum()).sum()
        tokens, seen = (
            torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask")
        )
        for name, model in (
            ("old_per_token_logps", self.model), ("ref_per_token_logps", self.ref_model),
        ):
            if name in batch and not (self.corrected and model is self.model):
                how = {
                    "logits_to_keep": mask.shape[1],
                    "batch_size": self.args.per_device_train_batch_size,
                }
                with torch.no_grad():
                    batch[name] = self._get_per_token_logps_and_entropies(
                        model, tokens, seen, **how
                    )[0]
        return batch
