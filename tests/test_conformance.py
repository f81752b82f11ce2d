"""conformance/: other people's functions are checked, and what is wrong is said in one sentence."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from conformance import __main__ as kit
from conformance import check, compare
from conformance.compare import MODULES, OURS, diagnose
from conformance.mistakes import LOSSES, VERSIONS, version_of
from conformance.theirs import Theirs
from cppo import prune, prune_pooled
from tests.helpers.runs import ROOT, json_of, python

# Of the losses, two: the others are made of the same parts.
NAMED = [name for name in VERSIONS if not name.endswith("_loss")]
NAMED += ["grpo_loss", "cispo_loss", "sapo_loss", "value_loss",
          pytest.param("gspo_loss", marks=pytest.mark.slow)]


@pytest.fixture
def forked():
    """The kit may fork this process."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU, autograd has threads in this process")


@pytest.fixture
def here(tmp_path, capfd, forked):
    """(exit code, output, --json) of the kit for a file with this text: in this process, so that
    torch is imported once."""
    def run(text):
        mine, file = tmp_path / "mine.py", tmp_path / "verdicts.json"
        mine.write_text(text)
        code = kit.main([str(mine), "--json", str(file)])
        output = "".join(capfd.readouterr())
        assert "Traceback" not in output
        written = json_of(file)
        assert written["exit_code"] == code
        return code, output, written

    return run


def conform(path, *words, before="", **options):
    """(exit code, output) of `python -m conformance`. before: lines that run first."""
    program = f"{before}\nimport runpy\nrunpy.run_module('conformance', run_name='__main__')"
    return python("-W", "ignore", "-c", program, path, *words, **options)


def sentences(written):
    """{function: its sign and what is said of it}"""
    return {row["function"]: f"{row['sign']} {row['sentence']}" for row in written["functions"]}


@pytest.mark.parametrize("name", NAMED)
def test_each_known_version_is_named_as_what_it_is(name):
    for version in VERSIONS[name]:
        found = diagnose(name, version.function)
        assert found and (found.sentence, found.kind) == (version.sentence, version.kind)


def test_a_mistake_that_nobody_made_before_is_shown_with_its_input():
    found = diagnose("kl_k3", lambda p, q: 3 * (p - q))
    assert (found.kind, found.sentence) == ("unknown", compare.UNKNOWN)
    assert found.evidence == (
        "logp = [[-1.0]], ref_logp = [[-1.0]]: yours gradient [[3.0]], right [[-0.0]]")


# --- mistakes that people make, in a loss as many people write it ---


PLAIN = """
def grpo_loss(logp, old_logp, advantages, mask, ref_logp=None, beta=0.04, clip_low=0.2):
    mask = mask.float()
    old_logp = old_logp.detach()
    ratio = torch.exp((logp - old_logp).clamp(max=20))
    advantages = advantages.view(len(mask), -1)
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_low)
    loss = -torch.min(ratio * advantages, clipped * advantages)
    if ref_logp is not None:
        log_r = ref_logp.detach() - logp
        kl = torch.exp(log_r) - log_r - 1
        loss = loss + beta * kl
    per_completion = (loss * mask).sum(1) / mask.sum(1).clamp(min=1)
    return per_completion.mean()
"""
PAD = "torch.nn.functional.pad"
PLANTED = [  # (what is replaced, by what, what must be said)
    ("(logp - old_logp)", "(logp - old_logp).detach()", "✗ the ratio is detached"),
    (".clamp(max=20)", "", "△ at a log-ratio of 90 in float32 the loss or its gradient is NaN"),
    ("ref_logp.detach() - logp", "logp - ref_logp.detach()", "✗ KL upside down"),
    ("mask.float()", f"{PAD}(mask.float()[:, :-1], (1, 0))", "✗ the mask is shifted by one"),
    ("mask.float()", "mask.float().roll(1, 1)", "✗ the mask is rolled by 1"),
    ("mask.float()", f"mask * {PAD}(mask[:, 1:], (0, 1))", "✗ the last token, the EOS"),
    ("torch.min", "torch.max", "✗ max in place of min: the clip acts on the wrong side"),
    (".sum(1) / mask.sum(1).clamp(min=1)", ".mean(1)", "✗ the sum over a completion is divided by"),
    ("old_logp.detach()", "old_logp", "△ a gradient flows into `old_logp`"),
    (".clamp(min=1)", "", "△ an empty completion gives NaN"),
    ("per_completion.mean()", "per_completion.mean() / 8", "≈ the loss is 0.125 times as large"),
    ("per_completion.mean()", "(loss * mask).sum() / 1024", "≈ other weights: a sum over all"),
    ("log_r = ref_logp.detach() - logp\n        kl = torch.exp(log_r) - log_r - 1",
     "kl = (logp - ref_logp.detach()) ** 2", "✗ (log r)² without the ½ in place of k3"),
    ("torch.exp(log_r) - log_r - 1", "log_r.abs()", "✗ |k1| in place of k3: biased"),
    ("torch.exp(log_r) - log_r - 1", "(torch.exp(log_r) - log_r - 1).detach() * logp",
     "✗ k3, detached, times log π"),
    ("-torch.min(ratio * advantages, clipped * advantages)",
     "-torch.max(-10 * advantages.abs(), torch.min(ratio * advantages, clipped * advantages))",
     "≈ the loss at A < 0 is bounded a second time, at a ratio of 10"),
    # right, with another subgradient in A where A = 0
    ("ratio * advantages, clipped * advantages",
     "ratio * advantages, torch.where(advantages >= 0, 1 + clip_low, 1 - clip_low) * advantages",
     "✓"),
    ("torch.min(ratio * advantages, clipped * advantages)",
     "torch.where(advantages > 0, ratio.clamp(max=1 + clip_low), ratio.clamp(min=1 - clip_low))"
     " * advantages", "✓"),
]


def said(name, function):
    """The sign and the sentence about a function, by the probes alone."""
    found = diagnose(name, Theirs(function, OURS[name]))
    return f"{kit.SIGNS[found.kind]} {found.sentence}" if found else "✓"


def made(text, name="grpo_loss"):
    space = {"torch": torch}
    exec(text, space)
    return space[name]


@pytest.mark.parametrize("old, new, words", [("", "", "✓"), *PLANTED])
def test_a_mistake_in_a_plain_loss_is_named(old, new, words):
    assert old in PLAIN
    assert said("grpo_loss", made(PLAIN.replace(old, new))).startswith(words)


@pytest.mark.parametrize("formula, words", [
    ("(r - r.mean()) / (r.std(correction=0) + 1e-8)",
     "✗ mean and std of the whole batch, not of each question's group [8], the population std, "),
    ("(r - mean) / (mean + 1e-6)", "≈ divided by the mean of the group, as in MaxRL, plus 1e-06"),
    ("(r - mean) / (r.std() + 1e-6)",
     "≈ the std of the whole batch (REINFORCE++-baseline), plus 1e-06"),
    # one rule for every eps: ≈ names it, △ adds what equal rewards get, if it is above 0.01 or NaN
    ("(r - mean) / std", "△ the unbiased std without eps; equal rewards "),
    ("(r - mean) / (population + 1e-8)", "△ the population std plus 1e-08; equal rewards "),
    ("(r - mean) / (std + 1e-6)", "△ the unbiased std plus 1e-06; equal rewards "),
    ("(r - mean) / (std + 1e-4)", "✓."),
    ("(r - mean) / (population + 1e-4)", "≈ the population std plus 0.0001."),
    ("(r - mean) / (std + 2e-4)", "≈ the unbiased std plus 0.0002."),
    ("(r - mean) / (population + 1e-2)", "≈ the population std plus 0.01."),
])
def test_what_is_said_of_advantages(formula, words):
    """It ends with a full stop here if nothing follows."""
    def advantages(r):
        mean, std = r.mean(1, keepdim=True), r.std(1, keepdim=True)
        population = r.std(1, keepdim=True, correction=0)
        return eval(formula, {"r": r, "mean": mean, "std": std, "population": population})

    assert f"{said('group_advantages', advantages)}.".startswith(words)


@pytest.mark.parametrize("name, function, words", [
    ("token_entropies", lambda x: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1),
     "△ the entropy or its gradient is NaN if a word has −∞"),
    ("token_entropies", lambda x: torch.distributions.Categorical(logits=x).entropy(), "✓."),
    # kept completions may stand in any order
    ("prune", lambda a, k: prune(a, k).flip(1), "≈ another order."),
    ("prune", lambda a, k: 0 * prune(a, k), f"– {compare.UNKNOWN}."),
    # ours has no gradient either
    ("truncated_importance_weights", lambda p, s, m, *, cap: torch.full_like(p, 7.0),
     f"– {compare.UNKNOWN}."),
    ("retain", lambda m, k: m.topk(k, largest=False).indices, "≈ another order."),
    ("prune_pooled", lambda a, n, *, allowed=None: prune_pooled(a, n),
     "△ a completion that is not `allowed` is kept"),
    ("kl_k3", lambda p, q: (q - p).exp() - (q - p) - 1, "△ at a log-ratio of 1e-6 in float32"),
    ("kl_k3", lambda p, q: torch.expm1((q - p).double()) - (q - p), "✓."),
    ("token_logprobs", lambda x, o: x.float().softmax(-1).gather(-1, o[..., None])[..., 0].log(),
     "△ a token of the probability e^−200"),
])
def test_what_is_said_of_another_function(name, function, words):
    assert f"{said(name, function)}.".startswith(words)


TEXTBOOK = PLAIN.replace("clip_low=0.2)", "clip_low=0.2, clip_high=None, weights=None)").replace(
    "1 + clip_low)", "1 + (clip_low if clip_high is None else clip_high))")


def test_weights_are_0_on_padding():
    """`(loss · weights).sum()` is right without the mask, because the weights hold it."""
    loss = TEXTBOOK.replace("    per_completion", "    if weights is not None:\n"
                            "        return (loss * weights).sum()\n    per_completion")
    assert said("grpo_loss", made(loss)) == "✓"


# --- the program ---


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("transformers", "numpy", "datasets", "peft", "engine"):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_all_functions_of_ours_hold_with_torch_and_pytest_alone(tmp_path):
    modules = sorted(set(MODULES.values()))
    (tmp_path / "ours.py").write_text("".join(f"from {name} import *\n" for name in modules))
    code, output = conform(tmp_path / "ours.py", before=ALONE)
    assert code == 0, output
    assert output.count("✓") == len(MODULES) + 1 and " 0 of" not in output


RIGHT = """
import math
import torch
from grpo import kl_k2, kl_k3
def other(logp, old_logp, advantages, mask, ref_logp=None, b=0.04, e=0.2):
    return plain(logp, old_logp, advantages, mask, ref_logp, b, e)
def token_logprobs(logits, tokens):
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]
def clipped_surrogate(ratio, advantages, **options):
    return (ratio.T * advantages.T).T
def kl_k1(p, q):
    return (1 + (p.numel() > 8)) * (p - q)
"""
IN_LOG_SPACE = PLAIN.replace(
    "torch.clamp(ratio, 1 - clip_low, 1 + clip_low)",
    "(logp - old_logp).clamp(math.log(1 - clip_low), math.log(1 + clip_low)).exp()")


def test_what_was_left_out_is_counted_and_named_and_lists_are_shown_whole(here):
    assert IN_LOG_SPACE != PLAIN
    plain = PLAIN.replace("grpo_loss", "plain")
    code, output, written = here(RIGHT + IN_LOG_SPACE + "cppo_loss = other\n" + plain)
    lines = sentences(written)
    assert code == 1 and lines["kl_k3"] == "✓ "
    for name, arguments in {
        "grpo_loss": "clip_high, weights", "token_logprobs": "temperature",
        "cppo_loss": "beta, clip_low, clip_high, weights",
    }.items():
        assert re.fullmatch(rf"◐ [1-9]\d* not asked: no argument {arguments}", lines[name])
    assert "nobody sees whether your function uses what it takes as **kwargs: clip_low" in output
    evidence = output.split("kl_k1")[1].split("\n")[1]
    assert "…" not in evidence and "..." not in evidence and evidence.count(",") > 3 * 29


BAD = """
import sys
import numpy, torch
from family.gfpo import retain
torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)  # threads that a forked process does not have
def kl_k1(p, q):
    return (p - q).detach().numpy()
def kl_k3(p, q):
    sys.exit(0)
def grpo_loss(logp, old, adv, mask, *, ref):
    return 42
def cppo_loss(logp, old, adv, mask, **options):
    return None
def ppo_loss(logp, old, adv, mask):
    raise RuntimeError("not today")
def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    import os; os._exit(0)
def token_entropies(logits, *, temperature=1.0):
    return 0.5
def overlong_penalty(lengths, *, max_length, cache):
    lengths -= max_length
    return lengths
def whiten(x, mask):
    print("a line that would stand in the table")
    return x
def kl_k2(logp, ref_logp):
    import grpo  # the module in which this function stands in for ours
    return grpo.kl_k2(logp, ref_logp)
clipped_surrogate = torch.sub
def valueloss(values): pass
"""
SENTENCES = {
    "kl_k1": "– nothing could be checked: it returns the type ndarray; a torch.Tensor is needed",
    "kl_k3": "– nothing could be checked: it calls sys.exit",
    "grpo_loss": "an argument that ours does not have: ref",
    "cppo_loss": "– nothing could be checked: it returns None; a torch.Tensor is needed",
    "ppo_loss": "– nothing could be checked: it raises RuntimeError: not today",
    "gae": "– it ended its process with exit code 0",
    "token_entropies": "– nothing could be checked: it returns the type float",
    "overlong_penalty": "✗ it changes its argument `lengths` in place",
    "whiten": "✗ ",
    "clipped_surrogate": "– Python cannot tell which arguments this builtin takes",
    "valueloss": "– no function of ours has this name: do you mean `value_loss`?",
    "retain": "✓ ",
    "kl_k2": "it imports a module while it runs, and finds ours",
}
PLUGIN = "raise RuntimeError('a plugin of another package')"


def test_what_breaks_is_told_in_one_sentence_and_hides_no_other_function(tmp_path):
    mine, file = tmp_path / "mine.py", tmp_path / "verdicts.json"
    info = tmp_path / "foreign-1.0.dist-info"
    mine.write_text(BAD)
    (tmp_path / "foreign.py").write_text(PLUGIN)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nforeign = foreign\n")
    code, output = conform(
        mine, "--json", file, PYTHONPATH=str(tmp_path), PYTEST_ADDOPTS="--no-such-option")
    lines = sentences(json_of(file))
    assert lines.keys() == SENTENCES.keys()
    for name, words in SENTENCES.items():
        assert words in lines[name]
    assert code == 1 and "would stand" not in output and "Traceback" not in output


def test_a_function_that_hangs_is_stopped_and_the_next_one_is_checked(here, monkeypatch):
    monkeypatch.setattr(kit, "LIMIT", 8)
    hangs = "def kl_k1(p, q):\n    while True:\n        time.sleep(1)"
    code, output, written = here(f"import time\nfrom grpo import kl_k2\n{hangs}")
    lines, right = sentences(written), written["functions"][-1]
    assert code == 2 and lines == {"kl_k1": "– it did not end within 8 seconds", "kl_k2": "✓ "}
    assert lines["kl_k1"] in output and not written["error"]
    assert right["held"] == right["asked"] > 5 and right["left"] == ""


@pytest.mark.parametrize("lines, expected", [
    ("from grpo import kl_k2", 0),
    ("prune = lambda a, k: cppo.prune(a, k).flip(1)", 3),  # ≈, and `allowed` was not asked for
    ("keep_count = lambda G, P: G - int(G * P)", 4),  # △
    ("keep_count = lambda G, P: G - int(G * P); kl_k1 = torch.sub; kl_k2 = lambda p, q: q - p", 1),
    ("prune = lambda a, k: cppo.prune(a, k).flip(1); kl_k1 = torch.sub; kl_k2 = torch.add", 2),
])
def test_the_exit_code(lines, expected, here):
    code, output, _ = here("import torch, cppo\n" + lines)
    assert code == expected, output


FROM_THE_END = """
from family import ppo
def value_loss(values, old_values, returns, mask, *, clip=0.2):
    return ppo.value_loss(values, old_values, returns, mask) + values.mean()
def random_prefixes(mask, u, *, share=0.0):
    mask, n = mask.bool(), mask.sum(1, keepdim=True)
    shortest = (share * n).ceil().clamp(min=1)
    return mask & (mask.cumsum(1) <= n - (u * (n - shortest + 1)).floor())
def draw(p, u):
    ends = p.flip(1).cumsum(1)
    return ((ends - u).ceil() > (ends - p.flip(1) - u).ceil()).flip(1)
def kl_k3(p, q):
    return 3 * (p - q)
def kl_k2(p, q):
    return 0.5 * (p - q) ** 2 + (p.numel() == 30) * 1e-3 * p
"""


@pytest.mark.parametrize("name, parts", [
    # verl's loss: a mean over tokens, a dual clip, a clamped KL
    ("grpo_loss", ["a mean over all tokens", "at a ratio of 3", "the KL is clamped"]),
    # what a first loss may look like
    ("grpo_loss", ["the last token, the EOS", "max in place of min", "KL upside down"]),
    ("drgrpo_loss", ["the ratio is detached", "the mask is shifted by one", "the sign of the KL"]),
    ("cispo_loss", ["the weight is not detached", "the first token", "k1 as a loss", "J in place"]),
    ("sapo_loss", ["one τ for both", "the padded length", "|k1|", "`weights` is ignored"]),
])
def test_several_parts_at_once_are_named(name, parts):
    base, others = LOSSES[name]
    known = [version for row in others.values() for version in row]
    some = [next(one for one in known if part in one.sentence) for part in parts]
    version = version_of(base, some)
    found = diagnose(name, version.function)
    assert found.kind == version.kind
    assert sorted(found.sentence.split("; ")) == sorted(version.sentence.split("; "))


def test_nothing_learned_and_the_sign_are_certain():
    still = lambda p, q: (p - q).detach()
    assert said("kl_k1", still) == f"✗ {compare.STILL}"
    assert said("gae", lambda *args, **o: tuple(-x for x in OURS["gae"](*args, **o))) == (
        f"✗ {compare.TURNED}")


def test_another_draw_is_right_and_what_nobody_knows_is_wrong_only_if_a_test_says_so(here):
    code, output, written = here(FROM_THE_END)
    assert code == 1 and sentences(written) == {
        "random_prefixes": "✓ ", "draw": "✓ ",
        "kl_k3": f"✗ a test does not hold; {compare.UNKNOWN}", "kl_k2": f"– {compare.UNKNOWN}",
        "value_loss": f"– {compare.UNKNOWN}"}
    assert "does not hold" in output.split("value_loss")[1].split("\nkl_k")[0]


def test_check_raises_the_sentences_or_passes(tmp_path, monkeypatch, forked):
    """`check` in a test of somebody, whose grpo.py is not ours."""
    (tmp_path / "grpo.py").write_text("turned = lambda p, q: q - p\n")
    (tmp_path / "right.py").write_text("from grpo import kl_k2\n")
    (tmp_path / "wrong.py").write_text("from grpo import turned as kl_k1\n")
    with monkeypatch.context() as here:  # one process is enough
        here.setattr(subprocess, "run", lambda words, **options: kit.main([*map(str, words[4:])]))
        check(SimpleNamespace(__file__=str(tmp_path / "right.py")))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError) as error:
        check(SimpleNamespace(__file__=str(tmp_path / "wrong.py")))
    first, evidence, *_ = str(error.value).split("\n")
    assert first == "kl_k1: ✗ k1 upside down: log π_ref − log π, so its mean is −KL [2]"
    assert evidence.startswith("    logp = ")


PRUNE = """
def prune(a, k):
    return a.abs().argsort(dim=1, descending=True, stable=True)[:, :k].sort(dim=1).values
"""


@pytest.mark.slow
def test_it_runs_from_any_folder_once_it_is_installed(tmp_path):
    """In a folder that has a grpo.py and a tests of its own."""
    copy, site, mine = tmp_path / "copy", tmp_path / "site", tmp_path / "mine"
    # a copy, because the build leaves a folder where it runs
    left_out = shutil.ignore_patterns(".*", "docs", "results", "runs", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    install = "-m pip install -q --no-deps --no-build-isolation --target".split()
    code, output = python(*install, site, copy)
    assert code == 0, output
    (mine / "tests").mkdir(parents=True)
    (mine / "tests" / "__init__.py").write_text("raise ImportError('the tests of another project')")
    (mine / "grpo.py").write_text("theirs = lambda p, q: q - p\n")
    (mine / "mine.py").write_text("from grpo import theirs as kl_k1\n" + PRUNE)
    code, output = conform("mine.py", folder=mine, PYTHONPATH=str(site))
    assert code == 1 and "✗ k1 upside down" in output
    assert re.search(r"\nprune .*◐ [1-9]\d* not asked", output)
