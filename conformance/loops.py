"""Runs a whole training step of somebody else, and reads from the weights what the step did.

    step(policy, questions, sampler, reward)            a function of MINE.py; it returns nothing

The world around the step is so small that each of its numbers has a closed form:

    policy      a table θ: π(o_t) = softmax(θ[o_{t−1}] / temperature)[o_t]. Only the token before
                counts. Two words and the END are likely, all other tokens are not.
                policy(tokens (N, L)) → logits (N, L, 8). The updates are made by
                policy.optimizer, which is plain SGD.
    questions   three prompts, lists of tokens
    sampler     sampler(prompts, temperature) → one completion for each prompt, lists of tokens. It
                draws nothing: it hands out COMPLETIONS. sampler.group_size is G, sampler.longest
                the limit of a completion. A step with a temperature takes sampler.temperature.
    reward      reward(prompt, completion) → 1.0 or 0.0

After the step θ is compared with what it must be and, if it differs, with what known mistakes and
choices make of it.
"""

import itertools
from collections import Counter, namedtuple

import torch

from conformance.compare import in_time

PADDING, END, A, B, ASK, FIRST, SECOND, THIRD = range(8)
WORDS = "padding", "END", "a", "b", "ask", "question 1", "question 2", "question 3"
PROMPTS = [[ASK, FIRST], [ASK, ASK, SECOND], [ASK, ASK, ASK, THIRD]]
COMPLETIONS = {
    FIRST: [[A, END], [B, A, END], [B, B, A, END], [A, B, A, END]],
    SECOND: [[A, A, END], [B, END], [B, A, B, END], [A, B, END]],
    THIRD: [[B, A, END], [A, A, B, END], [A, END], [B, B, END]],
}
RIGHT = {FIRST: [1, 0, 0, 0], SECOND: [1, 1, 1, 0], THIRD: [0, 0, 1, 1]}
G, LONGEST, TEMPERATURE = 4, 6, 0.8
# With this rate a second update sees ratios other than 1, but none that a clip range of 0.2
# reaches. No gradient has a norm above 1, so a limit of 1 changes nothing.
RATE = 0.5

# What a step may do otherwise. The numbers in brackets are those of docs/conformance.md.
ROWS = "rows of a group are not one question"
MISTAKES = {
    "scored": {"at 1": "sampled at one temperature, scored at 1 [5]"},
    "trained": {"without END": "the last token, the EOS, is not trained on [4]",
                "END counted": "the last token, the EOS, is not trained on, but |o| counts it [4]"},
    "cut": {"averaged": "a mean of means over micro-batches [3]",
            "added": "the means of micro-batches are added up [3]"},
    "group": {"rows": f"{ROWS}: G consecutive rows are compared, whatever they answer [17]",
              "batch": "mean and std of the whole batch, not of each question's group [8]"},
    "compared": {"kept": "the advantages are taken after pruning, over the kept completions only"},
    "old": {"updated": "the old log-probabilities are those of the updated policy: the ratio is "
                       "always 1, and no clip ever acts [6]"},
    "weights": {"padded": "divided by the padded length, not by |o| [3]"},
}
CHOICES = {
    "std": {"population": "the population std", "none": "no division by the std, as in Dr. GRPO",
            "others": "each compared with the mean of the others (RLOO)",
            "all": "the std of the whole batch, as in Lite PPO",
            "mean": "divided by the mean of the group, as in MaxRL"},
    "weights": {"constant": "a sum over tokens, divided by a constant, as in Dr. GRPO",
                "tokens": "a mean over all tokens, as in DAPO"},
    "kl": {"k2": "k2, or k3 × π/sg(π), in place of k3", "k3 × ratio": "k3 × ratio in place of k3"},
}
SAYS = {value: words for known in (MISTAKES, CHOICES) for row in known.values()
        for value, words in row.items()}
# Which completions are kept: those with the largest score of (A, r, number, |o|).
LARGEST = lambda a, r, i, n: abs(a)
KEPT = {
    "the shortest completions are kept, as in GFPO": lambda a, r, i, n: -n,
    "the completions with the most reward per token are kept, as in GFPO":
        lambda a, r, i, n: r / n,
}
KEPT_MISTAKES = {  # of each question, or of all together
    "the first completions are kept, whatever A is: are the last rows dropped?":
        lambda a, r, i, n: -i,
    "the smallest |A| are kept": lambda a, r, i, n: -abs(a),
    "the largest A are kept, not the largest |A|: wrong answers are never trained on":
        lambda a, r, i, n: a,
}
POOLED = ("the largest |A| of all questions together are kept, as in CPPO's first code, or those "
          "above a threshold")
RANDOM = "the kept completions change from run to run: a random choice"
PROMPT = "the tokens of the prompt are trained on"
BEHIND = "padding is trained on: the logits behind the END or behind padding moved [3]"
MOMENTUM = ("an update with nothing to learn: if all rewards are equal, the optimizer's momentum, "
            "or the KL, moves the weights")
NOT_FINITE = "if all rewards are equal, the weights become NaN: 0/0 in the advantages"
UNKNOWN = "the kit finds no choice and no mistake that gives these weights"
RULE = "the kit does not know by which rule {}, {} and {} completions of the questions are kept"
# why a mistake cannot be seen
UNSEEN = {
    "scored": "it samples at temperature 1",
    "cut": "its micro-batches show no difference",
    "compared": "it prunes nothing",
    "old": "it makes one update",
    "padding": "it computes no padding",
}
SIGNS = {"mistake": "✗", "edge": "△", "unknown": "–", "choice": "≈", True: "◐", False: "✓"}
# parts: micro-batches, lists of rows. before, after: θ
Update = namedtuple("Update", "parts before after")


def first_table():
    """θ before the first update: (8, 8) float64. Row: the token before. Column: the next token."""
    table = torch.full((8, 8), -30.0, dtype=torch.float64)
    table[:, [END, A, B]] = 0.3 * torch.arange(24.0, dtype=torch.float64).sin().view(8, 3)
    return table


class Policy(torch.nn.Module):
    """The table θ. seen: the tokens of each forward pass with a gradient. updates: what was
    computed for each update, and what it changed.

    A step with an output head of its own computes `head` of `states` itself.
    """

    def __init__(self, momentum=0.0):
        super().__init__()
        self.head = torch.nn.Linear(8, 8, bias=False)  # its columns are the rows of θ
        self.head.weight.data = first_table().T.float()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=momentum)
        self.optimizer.register_step_post_hook(self.updated)
        self.seen, self.updates, self.parts, self.before = [], [], [], self.table()

    def forward(self, tokens):
        return self.head(self.states(tokens))

    def states(self, tokens):
        """The tokens as one-hot vectors: (N, L, 8)."""
        if torch.is_grad_enabled():
            self.seen += tokens.tolist()
            self.parts.append(sum(map(rows_of, tokens.tolist()), []))
        return torch.nn.functional.one_hot(tokens, 8).to(self.head.weight.dtype)

    def updated(self, *_):
        after = self.table()
        self.updates += [Update(self.parts, self.before, after)] * bool(self.parts)
        self.parts, self.before = [], after

    def table(self):
        return self.head.weight.detach().T.double()

    def kept(self):
        """The rows that were trained on: (question, number)."""
        return {row for update in self.updates for part in update.parts for row in part}


class Sampler:
    """Hands out the completions of a question one after the other.

    asked: (question, number of the completion) of each row. temperatures: what it was asked at.
    """

    group_size, longest, temperature = G, LONGEST, TEMPERATURE

    def __init__(self):
        self.asked, self.temperatures = [], set()

    def __call__(self, prompts, temperature):
        self.temperatures.add(float(temperature))
        return [self.next(question_of(prompt)) for prompt in prompts]

    def extend(self, prompts, temperature, pad=PADDING):
        """For a step that calls `generate`: the prompts (N, L), which are padded with `pad`, with a
        completion behind each: (N, L + T)."""
        rows = prompts.tolist()
        drawn = self([[t for t in row if t not in (PADDING, pad)] for row in rows], temperature)
        longest = max(map(len, drawn))
        whole = [row + own + [pad] * (longest - len(own)) for row, own in zip(rows, drawn)]
        return torch.tensor(whole)

    def next(self, question):
        number = [q for q, _ in self.asked].count(question)
        self.asked.append((question, number))
        return [*COMPLETIONS[question][number % G]]


def question_of(tokens):
    return next(int(token) for token in tokens if int(token) in COMPLETIONS)


def number_of(question, tokens):
    """Which completion of the question this is, with or without its END. None, if it is none."""
    words = [*itertools.takewhile(lambda token: token in (A, B), map(int, tokens)), END]
    return COMPLETIONS[question].index(words) if words in COMPLETIONS[question] else None


def rows_of(tokens):
    """[(question, number)] of a row of tokens: one, or more if rows are packed into one."""
    found = [(token, number_of(token, tokens[place + 1:]))
             for place, token in enumerate(tokens) if token in COMPLETIONS]
    if not found or None in (number for _, number in found):
        raise ValueError(f"the policy computed a row that nobody sampled: {tokens}")
    return found


class Reward:
    """1.0 or 0.0, and always 0.0 without signal. shift: by how many places the rewards of a
    question are turned. strange: whether it was asked about a completion with another question than
    the one that it answers."""

    def __init__(self, signal=True, shift=0):
        self.signal, self.shift, self.strange = signal, shift, False

    def __call__(self, prompt, completion):
        question = question_of(prompt)
        number = number_of(question, completion)
        if number is None:
            self.strange = True
            return 0.0
        return float(self.signal and RIGHT[question][number - self.shift])


# --- the closed form. reading: {what is done otherwise: how}; {} is the paper's step ---


def advantages(reading, asked, kept):
    """{(question, number): A}. asked: the rows as they were sampled. kept: those trained on."""
    rows = [row for row in asked if row in kept] if "compared" in reading else asked
    rewards = lambda group: torch.tensor([RIGHT[q][i] for q, i in group], dtype=torch.float64)
    divisors = {
        "population": lambda r: r.std(correction=0),
        "none": lambda r: 1.0,
        "others": lambda r: 1 - 1 / len(r),
        "all": lambda r: rewards(rows).std(),
        "mean": lambda r: r.mean(),
    }
    groups = {}
    for place, row in enumerate(rows):
        key = {"rows": place // G, "batch": "all"}.get(reading.get("group"), row[0])
        groups.setdefault(key, []).append(row)
    found = {}
    for group in groups.values():
        r = rewards(group)
        # A_i = (r_i − mean(r)) / std(r), and 0 if all rewards are equal
        A = r - r.mean()
        if A.any():
            A = A / divisors.get(reading.get("std"), torch.std)(r)
        found |= dict(zip(group, A.tolist()))
    return found


def counts(reading, lengths):
    """How much each token of a completion counts: w_i of these completions."""
    N = len(lengths)
    divisors = {"tokens": sum(lengths), "constant": N * LONGEST, "padded": N * max(lengths)}
    of_all = divisors.get(reading.get("weights"))
    return [1 / (of_all or N * n) for n in lengths]  # w = 1/(N |o_i|)


def tokens_of(reading, parts):
    """[(the token before, the token, its row, w)] of an update with these micro-batches of rows."""
    found = []
    for rows in parts if "cut" in reading else [sum(parts, [])]:
        texts = [COMPLETIONS[question][number] for question, number in rows]
        end = -1 if "trained" in reading else None
        counted = None if reading.get("trained") == "END counted" else end
        share = counts(reading, [len(text[:counted]) for text in texts])
        for row, text, w in zip(rows, texts, share):
            w = w / len(parts) if reading.get("cut") == "averaged" else w
            pairs = zip([row[0], *text], text[:end])
            found += [(before, token, row, w) for before, token in pairs]
    return found


def expected(reading, update, of_row, temperature, beta):
    """How an update changes θ: (8, 8). of_row: the advantages."""
    T = 1.0 if "scored" in reading else temperature
    before, token, rows, w = zip(*tokens_of(reading, update.parts))
    at = torch.tensor(before), torch.tensor(token)
    A, w = torch.tensor([of_row[row] for row in rows]), torch.tensor(w)
    log_pi, log_ref = ((table / T).log_softmax(1) for table in (update.before, first_table()))
    log_old = log_pi if "old" in reading else log_ref  # π_ref is the first policy, too
    ratio, k1 = (log_pi - log_old)[at].exp(), (log_pi - log_ref)[at]
    # ∂k3/∂ log π(o_t) = 1 − π_ref/π,   ∂k2 = k1,   ∂(ρ k3) = ρ k1
    slope = {"k2": k1, "k3 × ratio": ratio * k1}.get(reading.get("kl"), 1 - (-k1).exp())
    # J = Σ w (ρ A − β k3),   ∂J/∂ log π(o_t) = w (ρ A − β ∂k3)
    upstream = w * (ratio * A - beta * slope)
    # ∂ log π(o_t) / ∂θ[s, v] = (1[v = o_t] − π(v)) / T,   s = o_{t−1}
    slopes = (torch.nn.functional.one_hot(at[1], 8) - log_pi.exp()[at[0]]) / T
    # θ ← θ + rate · ∂J/∂θ
    return torch.zeros_like(log_pi).index_add(0, at[0], RATE * upstream.unsqueeze(1) * slopes)


def readings():
    """Those with fewer mistakes first: none, one, two, and then with the wrong temperature as a
    third; then those with fewer choices."""
    def combinations(known, most):
        single = [{name: value} for name, row in known.items() for value in row]
        for n in range(most + 1):
            for some in itertools.combinations(single, n):
                if len({name for one in some for name in one}) == n:
                    yield {name: value for one in some for name, value in one.items()}

    three = [m for m in combinations(MISTAKES, 3) if len(m) < 3 or "scored" in m]
    for mistakes, choices in itertools.product(three, [*combinations(CHOICES, 2)]):
        both = mistakes | choices
        if len(both) == len(mistakes) + len(choices) <= 4:
            yield both


def same(moved, other):
    """An eps beside the std may make an advantage smaller by less than 1/1000."""
    return bool((moved - other).abs().max() <= 1e-3 * other.abs().max())


def factors(moved, by):
    """How many times `by` each update is, [] if it is none. moved, by: one (8, 8) for each."""
    found = []
    for theirs, ours in zip(moved, by):
        c = (theirs * ours).sum() / (ours * ours).sum() if ours.any() else torch.tensor(1.0)
        if not (c > 0 and same(theirs, c * ours)):
            return []
        found.append(float(c))
    return found


# --- which completions are kept ---


def kept_by(score, kept, shift, pooled):
    """Whether the kept completions are those with the largest scores, of each question or of all.
    """
    groups = {}  # (scores of the others, scores of the kept ones)
    for question, texts in COMPLETIONS.items():
        r = torch.tensor(RIGHT[question], dtype=torch.float64).roll(shift)
        A = ((r - r.mean()) / r.std()).tolist()
        group = groups.setdefault(0 if pooled else question, ([], []))
        for i, text in enumerate(texts):
            place = G * (question - FIRST) + i
            group[(question, i) in kept].append(score(A[i], float(r[i]), place, len(text)))
    return all(own and min(own) >= max(others, default=min(own)) for others, own in groups.values())


def rule_of(worlds, again):
    """By which rule completions are kept: ("right", ""), or "choice" or "mistake" and which, or ""
    and why there is none, or "unknown" and RULE.

    worlds: the kept rows with the rewards moved on by 0, 1, 2 and 3 completions.
    again: by 0 once more.
    """
    if len(worlds[0]) == G * len(COMPLETIONS):
        return "", UNSEEN["compared"]
    fits = lambda score, pooled=False: all(
        kept_by(score, kept, shift, pooled) for shift, kept in enumerate(worlds))
    counted = [Counter(question for question, _ in kept) for kept in worlds]
    if all(len({count[question] for question in COMPLETIONS}) == 1 for count in counted):
        if fits(LARGEST):
            return "right", ""
        for words, score in KEPT.items():
            if fits(score):
                return "choice", words
    if fits(LARGEST, pooled=True):
        return "choice", POOLED
    if again != worlds[0]:
        return "choice", RANDOM
    for words, score in KEPT_MISTAKES.items():
        if fits(score) or fits(score, pooled=True):
            return "mistake", words
    return "unknown", RULE.format(*(counted[0][question] for question in COMPLETIONS))


# --- the verdict ---


def call(step, policy, reward):
    """Call the step. Returns its sampler."""
    sampler = Sampler()
    step(policy, [[*prompt] for prompt in PROMPTS], sampler, reward)
    return sampler


def verdict(step, beta=0.0):
    """(sign, sentence, properties that hold, properties asked, why some were not, evidence)."""
    policy, later, reward = Policy(), Policy(momentum=0.9), Reward()
    worlds = [Policy(), Policy(), Policy()]
    try:
        sampler = call(step, policy, reward)
        call(step, later, Reward())
        for shift, world in enumerate(worlds, start=1):
            if policy.kept() != {*sampler.asked}:
                call(step, world, Reward(shift=shift))
    except BaseException as error:
        return nothing(f"it raises {type(error).__name__}: {error}".split("\n")[0])
    found = not_the_world(policy, sampler, reward)
    if found:
        return found
    rule = rule_of([world.kept() for world in (policy, *worlds)], later.kept())
    return judged(policy, sampler, beta, rule, without_signal(step, later))


def not_the_world(policy, sampler, reward):
    """A verdict, if the step does not do on this world what can be compared."""
    if not policy.updates:
        return nothing("it makes no update with `policy` and `policy.optimizer`")
    if not policy.table().isfinite().all():
        return nothing("its weights become infinite or NaN")
    if len(sampler.temperatures) > 1:
        return nothing(f"it samples at several temperatures: {sorted(sampler.temperatures)}")
    times = Counter(WORDS[question] for question, _ in sampler.asked)
    numbers = {times[WORDS[question]] for question in COMPLETIONS}
    if len(numbers) > 1:
        drawn = ", ".join(f"{number} of {question}" for question, number in sorted(times.items()))
        return "✗", f"{ROWS}: G = 4 completions of each are needed [17]", 0, 1, "", [
            f"sampled: {drawn}"]
    if numbers != {G}:
        return nothing(f"it samples {max(numbers)} of each question, not sampler.group_size = {G}")
    if reward.strange:
        return "✗", f"{ROWS}: a completion was scored with another question [17]", 0, 1, "", []


def without_signal(step, policy):
    """What the step does if all rewards are equal: ("right", ""), or "choice" or "edge" and what,
    or "" and why it cannot be asked."""
    before = policy.table()
    try:
        call(step, policy, Reward(signal=False))
    except BaseException as error:
        return "", f"it raises {type(error).__name__} if all rewards are equal"
    if not policy.table().isfinite().all():
        return "edge", NOT_FINITE
    return ("right", "") if torch.equal(policy.table(), before) else ("choice", MOMENTUM)


def explained(moved, by, beta):
    """(the reading that gives these updates, how many times as large they are): (None, []) if none
    does. by(reading, n): the first n updates of a reading."""
    scaled = None, []
    for reading in in_time(readings()):
        if not beta and "kl" in reading:
            continue
        # few of them fit the first updates: only these are compared with all
        if all(factors(moved[:n], by(reading, n)) for n in (1, 3)):
            other = by(reading)
            if all(map(same, moved, other)):
                return reading, []
            scale = factors(moved, other)
            if scale and not scaled[1]:
                scaled = reading, scale
    return scaled


def judged(policy, sampler, beta, rule, quiet):
    """The verdict. rule: of `rule_of`. quiet: of `without_signal`."""
    [temperature] = sampler.temperatures
    moved = [update.after - update.before for update in policy.updates]

    def by(reading, n=None):
        of_row = advantages(reading, sampler.asked, policy.kept())
        return [expected(reading, update, of_row, temperature, beta)
                for update in policy.updates[:n]]

    reading, scale = explained(moved, by, beta)
    known = reading or {}
    right = {name: value for name, value in known.items() if value in CHOICES.get(name, ())}
    wrong = [SAYS[value] for name, value in known.items() if name not in right]
    said = {  # the worst first
        "mistake": wrong + mistakes_outside(policy.table() - Policy().table()),
        "edge": [],
        "unknown": [UNKNOWN] * (reading is None),
        "choice": [SAYS[value] for value in right.values()] + scaled(scale),
    }
    for kind, words in (rule, quiet):
        said.get(kind, []).append(words)

    def alike(other):
        return factors(other, by(right)) if scale else all(map(same, other, by(right)))

    asked = {name: not all(alike(by(right | {name: value})) for value in row)
             for name, row in MISTAKES.items() if reading is not None}
    asked |= {
        "prompt": True,
        "padding": any(PADDING in row or END in row[:-1] for row in policy.seen),
        "kept": rule[0] not in ("", "unknown"),
        "signal": quiet[0],
    }
    whys = dict.fromkeys(asked, "nothing shows it") | UNSEEN
    whys |= {"kept": rule[1], "signal": quiet[1]}
    left = dict.fromkeys(MISTAKES, UNKNOWN) if reading is None else {}
    left |= {name: whys[name] for name, is_asked in asked.items() if not is_asked}
    asked = len(MISTAKES) + 4 - len(left)
    held = asked - len(said["mistake"]) - (quiet[0] in said)
    why = "; ".join(dict.fromkeys(left.values()))
    why = f"{len(left)} not asked: {why}" if left else ""
    kind = next((kind for kind, words in said.items() if words), bool(why))
    total, closest = sum(moved), sum(by(right))
    shows = kind in ("mistake", "unknown") and not same(total, closest)
    lines = [evidence(total, closest)] if shows else []
    return SIGNS[kind], "; ".join(sum(said.values(), [])) or why, held, asked, why, lines


def mistakes_outside(moved):
    """What is wrong in rows of θ that no completion reaches."""
    if moved[ASK].any():
        return [PROMPT]
    return [BEHIND] * bool(moved[[PADDING, END]].any())


def scaled(scale):
    times = ", ".join(f"{c:.3g}" for c in scale)
    return [f"the updates are {times} times as large as with the learning rate {RATE}: another "
            "constant in the loss, or a warm-up"] * bool(scale)


def nothing(why):
    return "–", f"nothing could be checked: {why}", 0, 0, "", []


def evidence(moved, right):
    """The token behind which the logits differ most."""
    before = int((moved - right).abs().amax(1).argmax())
    token = int((moved - right)[before].abs().argmax())
    return (f"the logit of `{WORDS[token]}` behind `{WORDS[before]}` moved by "
            f"{moved[before, token]:.4f}, right is {right[before, token]:.4f}")
