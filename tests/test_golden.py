"""conformance/golden.json and check.py: right inputs and answers for code in other languages. They
are those of the paper's files, and of a port: the JavaScript of docs/live."""

import json
import runpy
import shutil
import subprocess
from inspect import signature
from types import SimpleNamespace

import pytest

from conformance import compare, golden, probes
from conformance.mistakes import VERSIONS
from tests.helpers.live import NODE, needs_node, run_js
from tests.helpers.runs import json_of

# by its path: `conformance.check` is a function
check = SimpleNamespace(**runpy.run_path(str(probes.FILE.with_name("check.py"))))
GOLDEN = json_of(probes.FILE)
LEFT = ("token_level", "normalize_batch")  # no case asks for them


def checked(tmp_path, capsys, given, *names):
    """(exit code, output) of check.py for these answers."""
    file = tmp_path / "answers.json"
    file.write_text(given if isinstance(given, str) else json.dumps(given))
    code = check.main([str(file), *names])
    return code, capsys.readouterr().out


def right(case):
    return {part: case[part] for part in ("output", "gradient") if part in case}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_answers_are_those_of_the_papers_files(name):
    cases = GOLDEN[name]["cases"]
    assert len(cases) >= 12 and len({json.dumps(case) for case in cases}) == len(cases)
    for case in cases:
        learns = ["gradient"] * ("gradient" in case)
        assert check.judged(case, golden.answered(name, case), learns) == ("", "")


def test_the_defaults_are_those_of_the_papers_files():
    for name in compare.OURS.keys() & GOLDEN.keys():
        given = signature(compare.OURS[name]).parameters
        assert GOLDEN[name]["defaults"] == {
            key: p.default for key, p in given.items()
            if isinstance(p.default, (int, float)) and key not in LEFT}


@pytest.mark.parametrize("name", [name for name in VERSIONS if name in probes.CASES])
def test_each_known_mistake_changes_a_case(name):
    asked = [probes.probe(case) for case in probes.CASES[name]]
    learns = compare.learns(name)
    correct = [compare.answers(compare.OURS[name], probe, learns) for probe in asked]
    for version in VERSIONS[name]:
        found = [compare.answers(version.function, probe, learns) for probe in asked]
        assert not all(compare.same(a, b, probe.atol)
                       for a, b, probe in zip(found, correct, asked)), version.sentence


# --- a port ---

JS = """
const per_token = (rows, mask) => rows.flatMap((row, i) => row.filter((_, t) => mask[i][t]));
const padded = (flat, mask) => {
  let next = 0;
  return mask.map(row => row.map(real => real ? flat[next++] : 0));
};
const lengths_of = mask => mask.map(row => row.reduce((a, b) => a + b, 0));
const symmetric = ({ clip_low, clip_high }) => clip_high === undefined || clip_high === clip_low;
const port = {
  group_advantages: ({ rewards }, { ddof, ...options }) =>
    ddof === 0 ? null : group_advantages(rewards, options),
  kl_k3: ({ logp, ref_logp }) =>
    logp.map((row, i) => row.map((x, t) => kl_k3(x, ref_logp[i][t]))),
  clipped_surrogate: ({ ratio, advantages }, options) => symmetric(options)
    ? ratio.map((r, i) => clipped_surrogate(r, advantages[i], options.clip_low ?? 0.2)) : null,
  sequence_mean_weights: ({ mask }, { num_sequences }) =>
    padded(sequence_mean_weights(lengths_of(mask), num_sequences), mask),
  constant_weights: ({ mask }, { max_tokens, num_sequences }) =>
    padded(constant_weights(lengths_of(mask), max_tokens, num_sequences), mask),
  grpo_loss: ({ logp, old_logp, advantages, mask }, options) => {
    if (!symmetric(options)) return null;
    const weights = options.weights && per_token(options.weights, mask);
    const found = grpo_loss(per_token(logp, mask), {
      old_logp: per_token(old_logp, mask),
      ref_logp: options.ref_logp && per_token(options.ref_logp, mask),
      advantages: per_token(mask.map((row, i) => row.map(() => advantages[i])), mask),
      weights: weights ?? sequence_mean_weights(lengths_of(mask)),
    }, { beta: options.beta ?? 0.04, epsilon: options.clip_low ?? 0.2 });
    return { output: found.loss, gradient: padded([...found.gradient], mask) };
  },
  keep_count: ({ group_size, pruning_rate }) => keep_count(group_size, pruning_rate),
  questions_per_step: ({ questions, group_size, k }) =>
    questions_per_step(questions, group_size, k),
  prune: ({ advantages, k }) => prune(advantages, k),
  prune_pooled: ({ advantages, n_keep }) => prune_pooled(advantages, n_keep).flatMap(
    (kept, q) => kept.map(i => q * advantages[0].length + i)),
};
return Object.fromEntries(Object.entries(port).map(([name, answer]) => [name,
  given.golden[name].cases.map(({ inputs, options }) => answer(inputs, options))]));
"""


@needs_node
def test_the_pages_javascript(tmp_path, capsys):
    found = run_js(JS, golden=GOLDEN)
    code, output = checked(tmp_path, capsys, found, *found)
    assert code == 2 and "yours" not in output  # what it cannot be asked: a second clip, ddof
    assert output.count("no output") == 1 + 2 + 2
    assert output.count("cases agree") == len(found) == 10


@needs_node
def test_the_port_of_the_page_agrees(tmp_path, capsys):
    page = (probes.FILE.parents[1] / "docs" / "conformance.md").read_text()
    program = page.split("```js\n")[1].split("```")[0]
    shutil.copy(probes.FILE, tmp_path)
    subprocess.run([NODE, "-e", program], cwd=tmp_path, check=True)
    found = (tmp_path / "answers.json").read_text()
    assert checked(tmp_path, capsys, found, "kl_k3") == (0, "kl_k3: 13 of 13 cases agree\n")


# --- check.py ---


RIGHT = {name: [right(case) for case in known["cases"]] for name, known in GOLDEN.items()}
K3 = [case["output"] for case in GOLDEN["kl_k3"]["cases"]]


@pytest.mark.parametrize("given, names, code, words", [
    (RIGHT, [], 0, "kl_k3: 13 of 13 cases agree"),
    ({"kl_k3": K3}, [], 2, "grpo_loss: not answered"),
    ({"kl_k3": [[[5.0]], *K3[1:]]}, ["kl_k3"], 1, "case 0, log π − log π_ref = 0.0"),
    ({"kl_k3": [[["nan"]], *K3[1:]]}, ["kl_k3"], 1, "yours [['nan']], right [[0.0]]"),
    ({"kl_k3": [[0.0], *K3[1:]]}, ["kl_k3"], 2, "the output has another form: yours [0.0]"),
    ({"kl_k3": K3[1:]}, ["kl_k3"], 2, "kl_k3: 12 answers, 13 are needed"),
    ({"grpo_loss": [row["output"] for row in RIGHT["grpo_loss"]]}, ["grpo_loss"], 2, "no gradient"),
    ("{", [], 2, "cannot be read"),
])
def test_the_exit_code_and_the_sentences(given, names, code, words, tmp_path, capsys):
    found = checked(tmp_path, capsys, given, *names)
    assert found[0] == code and words in found[1]
