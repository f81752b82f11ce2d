"""Open R1 (Hugging Face; Apache 2.0), commit 1416fa0 of 2 April 2026:
git clone https://github.com/huggingface/open-r1; then --path open-r1/src

overlong_penalty is get_soft_overlong_punishment of src/open_r1/rewards.py.
It only renames and reshapes: each length becomes a list of so many token ids.
Left out: everything else, because Open R1 trains with TRL's GRPOTrainer: see trl.py.
Packages that none of this uses get stand-ins.
"""

import sys
from unittest.mock import MagicMock, patch

import torch

UNUSED = ("latex2sympy2_extended", "math_verify", "open_r1.utils", "open_r1.utils.code_providers",
          "open_r1.utils.competitive_programming")
with patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}):
    from open_r1.rewards import get_soft_overlong_punishment


def overlong_penalty(lengths, *, max_length, cache):
    penalties = get_soft_overlong_punishment(max_length, cache)(
        [range(int(n)) for n in lengths.flatten()])
    return torch.tensor(penalties, dtype=torch.float32).view(lengths.shape)
