"""What makes the relatives of nano.py: pairs of a piece of nano.py and what takes its place.

    python family/diffs/build.py     writes the patches, and shows their lines in README.md
    patch nano.py family/diffs/dapo.patch && python nano.py     trains with DAPO

A relative of your own is one more entry of RELATIVES. Each piece stands in nano.py exactly once. At
most 12 lines change: those that begin with − or + in the patch. tests/test_diffs.py compares a step
of the patched file with a step of the row in algorithms.py.
"""

import difflib
import re
from pathlib import Path

HERE = Path(__file__).parent
NANO = (HERE.parents[1] / "nano.py").read_text(encoding="utf-8")
PAGE = HERE / "README.md"

# what several relatives share
KEEP_ALL = ("P = 0.875", "P = 0.0")
FOUR_QUESTIONS = (
    "Q = 16 // K  # questions of a step: it trains on 16 completions, as GRPO does with one",
    "Q = 4  # questions of a step")
ONE_UPDATE = ("MU = 2", "MU = 1")
NO_KL = ("BETA = 0.04", "BETA = 0.0")
CLIP = "EPS_LOW, EPS_HIGH = 0.2, 0.2"
CLIP_HIGHER = (CLIP, "EPS_LOW, EPS_HIGH = 0.2, 0.28")
WEIGHTS = "mask / (n * mask.sum(1, keepdim=True).clamp(min=1))  # 1 / (N |o_i|)"
TOKEN_MEAN = (WEIGHTS, "mask / n_tokens  # 1 / Σ |o_i|")
CONSTANT = (WEIGHTS, "mask / (n * longest)  # 1 / (N L)")
ADVANTAGE = """(r_i − mean(r)) / (std(r) + 1e-4)
    return centred / (shifted.std(1, keepdim=True) + 1e-4)"""
NO_STD = (ADVANTAGE, """r_i − mean(r)
    return centred""")
SURROGATE = """min(ρA, clip(ρ, 1−ε, 1+ε)A)
    surrogate = torch.minimum(ratio * A, ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * A)
"""
KEEP = "rows = prune(advantages.abs(), K)  # those with the largest |A|"
KEEP_AND_A = KEEP + """
    A = advantages.flatten()[rows, None]"""
A_OVER_KEPT = """
    A = group_advantages(scores.flatten()[rows].view(-1, K)).view(-1, 1)  # over the kept ones"""

# {name: (what the patch says in its first line, its pairs)}
RELATIVES = {
    "grpo": ("GRPO (2402.03300), as its row.", [KEEP_ALL]),
    "2grpo": ("2-GRPO (2510.00977), as its row.", [("G = 16", "G = 2"), KEEP_ALL]),
    "cppo_published": ("CPPO as in its authors' first code. P is 0.875; in the row it is 0.75.", [
        TOKEN_MEAN,
        (KEEP, "rows = prune(advantages.abs().view(1, -1), K * len(advantages))  # of all groups"),
    ]),
    "drgrpo": ("Dr. GRPO (2503.20783), as its row.", [KEEP_ALL, NO_KL, NO_STD, CONSTANT]),
    "dapo": ("DAPO (2503.14476). If all rewards of a question are equal, it does not sample again.",
             [KEEP_ALL, NO_KL, CLIP_HIGHER, TOKEN_MEAN]),
    "dapo_oversampled": (
        "DAPO (2503.14476). It does not sample again: it samples for four questions at once, and "
        "trains on the first one whose rewards differ.", [
            KEEP_ALL, FOUR_QUESTIONS, NO_KL, CLIP_HIGHER, TOKEN_MEAN,
            (KEEP, "rows = prune(advantages.abs(), K).view(-1, K)"
                   "[advantages.any(1).int().argmax()]")]),
    "cispo": ("CISPO (2506.13585), as its row.", [
        KEEP_ALL, NO_KL, (CLIP, "EPS_LOW, EPS_HIGH = 1.0, 4.0"), TOKEN_MEAN,
        (SURROGATE, """sg(clip(ρ, 1−ε, 1+ε)) A log π
    surrogate = ratio.detach().clamp(1 - EPS_LOW, 1 + EPS_HIGH) * A * logp.masked_fill(~mask, 0.0)
""")]),
    "sapo": ("SAPO (2511.20347), as its row.", [
        KEEP_ALL, NO_KL, (SURROGATE, """f(ρ)A = 4/τ · sigmoid(τ (ρ − 1)) A
    tau = torch.where(A > 0, 1.0, 1.05)
    surrogate = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * A
""")]),
    "rloo": ("RLOO (2402.14740), as its row.", [
        KEEP_ALL, ONE_UPDATE, NO_KL, CONSTANT, (ADVANTAGE, """G/(G−1) · (r_i − mean(r))
    return centred * G / (G - 1)""")]),
    "lite_ppo": (
        "Lite PPO (2508.08221). A step has four questions. If there are several processes, each "
        "takes the std of its own four.", [
            KEEP_ALL, FOUR_QUESTIONS, ONE_UPDATE, NO_KL, TOKEN_MEAN,
            ("(shifted.std(1, keepdim=True) + 1e-4)", "(r.std() + 1e-4)  # of all groups")]),
    "maxrl": ("MaxRL (2602.02710), as its row.", [
        KEEP_ALL, ONE_UPDATE, NO_KL, TOKEN_MEAN,
        (ADVANTAGE, """(r_i − mean(r)) / mean(r); if one is right, mean(r) is at least 1/G
    return centred / r.mean(1, keepdim=True).clamp(min=1 / G)""")]),
    "gspo": ("GSPO (2507.18071). Each update takes all completions; the row has 4 mini-batches.", [
        KEEP_ALL, NO_KL, (CLIP, "EPS_LOW, EPS_HIGH = 3e-4, 4e-4"), ("""\
    # ρ = π_θ / π_old; a log-ratio above 20 counts as 20, so nothing is ∞
    ratio = (logp - old_logp.detach()).masked_fill(~mask, 0.0).clamp(max=20.0).exp()
""", """\
    # s = (π_θ(o) / π_old(o))^(1/|o|); a log-ratio above 20 counts as 20, so nothing is ∞
    log_ratio = (logp - old_logp.detach()).masked_fill(~mask, 0.0).sum(1, keepdim=True)
    ratio = (log_ratio / mask.sum(1, keepdim=True).clamp(min=1)).clamp(max=20.0).exp()
""")]),
    "gfpo": ("GFPO (2508.09726). A step has two questions; in the row it has one.", [
        ("P = 0.875", "P = 0.5"), ("BETA = 0.04", "BETA = 0.001"), TOKEN_MEAN,
        ("shifted.std(1, keepdim=True)", "shifted.std(1, keepdim=True, correction=0)"),
        (KEEP_AND_A, "rows = prune(-mask.sum(1).view(-1, G), K)  # the shortest" + A_OVER_KEPT)]),
    "deepseek_v32": (
        "DeepSeek-V3.2 (2512.02556). Its mask takes log π_old as the trainer computes it, not as "
        "the sampler does.", [
            KEEP_ALL, NO_STD, ("    k3 = torch.expm1(log_r) - log_r\n", """\
    k3 = torch.expm1(log_r) - log_r
    k3 = k3 * ratio  # then its gradient is unbiased, too
    fall = (old_logp - logp.detach()).masked_fill(~mask, 0.0).sum(1, keepdim=True)
    A = A * ((A >= 0) | (fall <= 0.5 * mask.sum(1, keepdim=True)))  # M of eq. 9
""")]),
    "pods": ("PODS (2504.13818). P is 0.875 and a step has 8 questions; in the row 0.75 and 1.", [
        (KEEP_AND_A, """\
# those whose rewards vary the most: for some i, the i highest and the k − i lowest
    kept = torch.zeros_like(scores)
    for q, order in enumerate(scores.argsort(dim=1, stable=True)):
        ends = [order.roll(i)[:K] for i in range(K + 1)]
        kept[q, max(ends, key=lambda x: scores[q, x].var(correction=0))] = 1.0
    rows = prune(kept, K)""" + A_OVER_KEPT)]),
}
# rows of algorithms.py that are no patch
NO_DIFF = {
    "cppo": "nano.py is CPPO",
    "ppo": "PPO trains a second network, its critic",
    "gdpo": "GDPO needs several rewards, and nano.py has one",
    "gfpo_adaptive": "it remembers the rewards of earlier questions",
    "gspo_token": "if A is one number for each completion, it makes the step of GSPO",
}


def patched(name):
    """nano.py as text, changed into this relative."""
    text = NANO
    for piece, instead in RELATIVES[name][1]:
        assert text.count(piece) == 1, (
            f"{name}: a pair of family/diffs/build.py is stale. Exactly one place of nano.py must "
            f"read {piece!r}")
        text = text.replace(piece, instead)
    return text


def patch(name):
    """The patch of a relative. Its first line says what is not as in the row of algorithms.py."""
    said, pairs = RELATIVES[name]
    if NO_KL in pairs:
        said += " As β is 0, the reference is computed for nothing."
    old, new = NANO.splitlines(keepends=True), patched(name).splitlines(keepends=True)
    return said + "\n" + "".join(difflib.unified_diff(old, new, "nano.py", "nano.py", n=1))


def changed_lines(name):
    """The lines of a patch that begin with − or +."""
    return re.findall(r"^[-+](?![-+]{2} ).*\n", patch(name), re.MULTILINE)


def page(text):
    """README.md with the changed lines of each patch below the link to the patch."""
    for name in RELATIVES:
        found = re.search(rf"\({name}\.patch\).*?```diff\n(.*?)```", text, re.DOTALL)
        assert found, f"README.md needs a link to {name}.patch and a block ```diff below it"
        text = text[: found.start(1)] + "".join(changed_lines(name)) + text[found.end(1) :]
    return text


if __name__ == "__main__":
    for name in RELATIVES:
        (HERE / f"{name}.patch").write_text(patch(name), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"written: {len(RELATIVES)} patches, and their lines in README.md")
