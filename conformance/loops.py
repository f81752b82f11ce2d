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
    reward      reward(prompt, completion) → a number from 0.0 to 1.0

After the step θ is compared with what it must be and, if it differs, with what known mistakes and
choices make of it: in two worlds with different rewards. What they say must be the same in both.
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
    SECOND: [[A, B, A, B, A, B], [B, END], [B, A, B, END], [A, A, END]],  # the first is cut off
    THIRD: [[B, A, END], [A, A, B, END], [A, END], [B, B, END]],
}
RIGHT = {FIRST: [1, 0, 0, 0], SECOND: [1, 1, 1, 0], THIRD: [0, 0, 1, 1]}
OTHER = {FIRST: [0, 0, 0, 0], SECOND: [1, 0.25, 0.5, 0], THIRD: [1, 0.5, 0, 1]}
G, LONGEST, TEMPERATURE = 4, 8, 0.8
# With this rate a second update sees ratios other than 1, but none that a clip range of 0.2
# reaches. No gradient has a norm above 1, so a limit of 1 changes nothing.
RATE = 0.5

# What a step may do otherwise. The numbers in brackets are those of docs/conformance.md.
ROWS = "rows of a group are not one question"
MISTAKES = {
    "scored": {"at 1": "sampled at one temperature, scored at 1 [5]"},
    "trained": {"without END": "the last token, the EOS, is not trained on [4]",
                "without last": "the last token, the EOS, is not trained on [4]",
                "END counted": "the last token, the EOS, is not trained on, but |o| counts it [4]",
                "last counted": "the last token, the EOS, is not trained on, but |o| counts it [4]",
                "first": "of a completion that is cut off only the first token is trained on: "
                         "argmax(tokens == END) is 0 if there is no END"},
    "cut": {"averaged": "a mean of means over micro-batches [3]",
            "added": "the means of micro-batches are added up [3]"},
    "group": {"rows": f"{ROWS}: G consecutive rows are compared, whatever they answer [17]",
              "batch": "mean and std of the whole batch, not of each question's group [8]"},
    "compared": {"kept": "the advantages are taken after pruning, over the kept completions only"},
    "old": {"updated": "the old log-probabilities are those of the updated policy: the ratio is "
                       "always 1, and no clip ever acts [6]"},
    "weights": {"padded": "divided by the padded length, not by |o| [3]"},
    "std": {"columns": "the std over the questions, std(0), not over each question's group [17]"},
    "mean": {"uncentred": "the mean of the group is not subtracted: a reward without a baseline"},
    "softmax": {"probabilities": "softmax twice: the log-softmax of probabilities, not of logits"},
    "gradients": {"repeated": "zero_grad is forgotten: an update repeats the gradients before it"},
}
CHOICES = {
    "std": {"population": "the population std", "none": "no division by the std, as in Dr. GRPO",
            "others": "each compared with the mean of the others (RLOO)",
            "all": "the std of the whole batch, as in Lite PPO",
            "mean": "divided by the mean of the group, as in MaxRL",
            "twice": "normalised in each group, and then over the batch, as in GDPO"},
    "trained": {"ended": "completions that are cut off are not trained on, as in DAPO"},
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
REPLACED = "completions are kept twice: drawn with replacement, one counts as two"
STILL = "the weights do not move"
TURNED = "the sign is turned round: the update is −1 times the right one"
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
    "gradients": "it makes one update",
    "padding": "it computes no padding",
}
SIGNS = {"mistake": "✗", "edge": "△", "broken": "–", "unknown": "–", "choice": "≈", True: "◐",
         False: "✓"}
# parts: micro-batches, lists of rows. before, after: θ
Update = namedtuple("Update", "parts before after")


def first_table():
    """θ before the first update: (8, 8) float64. Row: the token before. Column: the next token."""
    table = torch.full((8, 8), -30.0, dtype=torch.float64)
    table[:, [END, A, B]] = 0.3 * torch.arange(24.0, dtype=torch.float64).sin().view(8, 3)
    return table


class Policy(torch.nn.Module):
    """The table θ. seen: the tokens of each forward pass with a gradient. updates: what was
    computed for each update, and what it changed. tolerance: how far an update may be from the
    closed form, relative to its largest number.

    A step with an output head of its own computes `head` of `states` itself.
    """

    def __init__(self, momentum=0.0):
        super().__init__()
        self.head = torch.nn.Linear(8, 8, bias=False)  # its columns are the rows of θ
        self.head.weight.data = first_table().T.float()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=momentum)
        self.optimizer.register_step_post_hook(self.updated)
        self.seen, self.updates, self.passes, self.before = [], [], [], self.table()
        self.tolerance = 1e-3  # an eps beside the std makes an advantage smaller

    def forward(self, tokens):
        return self.head(self.states(tokens))

    def states(self, tokens):
        """The tokens as one-hot vectors: (N, L, 8)."""
        if torch.is_grad_enabled():
            if torch.is_autocast_enabled("cpu"):
                self.tolerance = 0.03
            # a step may call the policy for each token: of growing rows only the last count
            if self.passes and grown(self.passes[-1], tokens.tolist()):
                self.passes.pop()
            self.passes.append(tokens.tolist())
        return torch.nn.functional.one_hot(tokens, 8).to(self.head.weight.dtype)

    def updated(self, *_):
        after = self.table()
        self.seen += sum(self.passes, [])
        parts = [sum(map(rows_of, rows), []) for rows in self.passes]
        self.updates += [Update(parts, self.before, after)] * bool(parts)
        self.passes, self.before = [], after

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

    def extend(self, prompts, temperature):
        """For a step that calls `generate`: the prompts (N, L), which may be padded, with a
        completion behind each: (N, L + T)."""
        rows = prompts.tolist()
        drawn = self([[t for t in row if t != PADDING] for row in rows], temperature)
        longest = max(map(len, drawn))
        whole = [row + own + [PADDING] * (longest - len(own)) for row, own in zip(rows, drawn)]
        return torch.tensor(whole)

    def next(self, question):
        number = [q for q, _ in self.asked].count(question)
        self.asked.append((question, number))
        return [*COMPLETIONS[question][number % G]]


def question_of(tokens):
    return next(int(token) for token in tokens if int(token) in COMPLETIONS)


def grown(rows, longer):
    """Whether the rows are the beginnings of longer ones."""
    starts = [row[:len(rows[0])] for row in longer]
    return len(longer[0]) > len(rows[0]) and starts == rows


def number_of(question, tokens):
    """Which completion of the question this is, with or without its last token. None, if it is
    none."""
    words = [*itertools.takewhile(lambda token: token in (A, B), map(int, tokens))]
    texts = COMPLETIONS[question]
    return next((i for i, text in enumerate(texts) if words in (text, text[:-1])), None)


def rows_of(tokens):
    """[(question, number)] of a row of tokens: one, or more if rows are packed into one."""
    found = [(token, number_of(token, tokens[place + 1:]))
             for place, token in enumerate(tokens) if token in COMPLETIONS]
    if not found or None in (number for _, number in found):
        raise ValueError(f"the policy computed a row that nobody sampled: {tokens}")
    return found


class Reward:
    """A number of a table, and always 0.0 without signal. shift: by how many places the rewards of
    a question are turned. strange: whether it was asked about a completion with another question
    than the one that it answers."""

    def __init__(self, table=RIGHT, *, signal=True, shift=0):
        self.table, self.signal, self.shift, self.strange = table, signal, shift, False

    def __call__(self, prompt, completion):
        question = question_of(prompt)
        number = number_of(question, completion)
        if number is None:
            self.strange = True
            return 0.0
        return float(self.signal and self.table[question][number - self.shift])


# --- the closed form. reading: {what is done otherwise: how}; {} is the paper's step ---


def advantages(reading, asked, kept, table=RIGHT):
    """{(question, number): A}. asked: the rows as they were sampled. kept: those trained on."""
    rows = [row for row in asked if row in kept] if "compared" in reading else asked
    rewards = lambda group: torch.tensor([table[q][i] for q, i in group], dtype=torch.float64)
    columns = lambda r: rewards(asked).view(-1, G).std(0).repeat(3)[:len(r)]
    divisors = {
        "population": lambda r: r.std(correction=0),
        "none": lambda r: 1.0,
        "others": lambda r: 1 - 1 / len(r),
        "all": lambda r: rewards(rows).std(),
        "mean": lambda r: r.mean(),
        "columns": columns,
    }
    groups = {}
    for place, row in enumerate(rows):
        key = {"rows": place // G, "batch": "all"}.get(reading.get("group"), row[0])
        groups.setdefault(key, []).append(row)
    found = {}
    for group in groups.values():
        r = rewards(group)
        # A_i = (r_i − mean(r)) / std(r), and 0 if all rewards are equal
        A = r if "mean" in reading else r - r.mean()
        if A.any() and r.std() > 0:
            A = A / divisors.get(reading.get("std"), torch.std)(r)
        found |= dict(zip(group, A.tolist()))
    if reading.get("std") == "twice":
        std = torch.tensor([*found.values()]).std().item()
        found = {row: A / std for row, A in found.items()}
    return found


def counts(reading, lengths):
    """How much each token of a completion counts: w_i of these completions."""
    N = len(lengths)
    divisors = {"tokens": sum(lengths), "constant": N * LONGEST, "padded": N * max(lengths)}
    of_all = divisors.get(reading.get("weights"))
    return [1 / (of_all or N * max(n, 1)) for n in lengths]  # w = 1/(N |o_i|)


def length_of(reading, text):
    """How many tokens of a completion are trained on."""
    ended = text[-1] == END
    known = {"without last": len(text) - 1, "last counted": len(text) - 1, None: len(text),
             "first": len(text) if ended else 1, "ended": len(text) * ended}
    return known.get(reading.get("trained"), len(text) - ended)


def tokens_of(reading, parts):
    """[(the token before, the token, its row, w)] of an update with these micro-batches of rows."""
    found = []
    for rows in parts if "cut" in reading else [sum(parts, [])]:
        texts = [COMPLETIONS[question][number] for question, number in rows]
        counted = {} if "counted" in reading.get("trained", "") else reading
        share = counts(reading, [length_of(counted, text) for text in texts])
        for row, text, w in zip(rows, texts, share):
            w = w / len(parts) if reading.get("cut") == "averaged" else w
            pairs = zip([row[0], *text], text[:length_of(reading, text)])
            found += [(before, token, row, w) for before, token in pairs]
    return found


def expected(reading, update, of_row, temperature, beta):
    """How an update changes θ: (8, 8). of_row: the advantages."""
    T = 1.0 if "scored" in reading else temperature
    before, token, rows, w = zip(*tokens_of(reading, update.parts))
    at = torch.tensor(before), torch.tensor(token)
    A, w = torch.tensor([of_row[row] for row in rows]), torch.tensor(w)
    start = update.before.clone().requires_grad_()
    log_pi, log_ref = (of(reading, table / T)[at] for table in (start, first_table()))
    log_old = log_pi.detach() if "old" in reading else log_ref  # π_ref is the first policy, too
    ratio, k1 = (log_pi - log_old).exp(), log_pi - log_ref
    k3 = torch.expm1(-k1) + k1
    kl = {"k2": k1 ** 2 / 2, "k3 × ratio": ratio * k3}.get(reading.get("kl"), k3)
    # θ ← θ + rate · ∂J/∂θ,   J = Σ w (ρ A − β k3)
    return RATE * torch.autograd.grad((w * (ratio * A - beta * kl)).sum(), start)[0]


def of(reading, logits):
    return (logits.softmax(1) if "softmax" in reading else logits).log_softmax(1)


def readings(beta):
    """Those with fewer parts first, and then with fewer mistakes: at most two mistakes and two
    choices, or a wrong temperature as a third mistake. Without a KL it has no other form."""
    def combinations(known, most):
        single = [{name: value} for name, row in known.items() for value in row]
        for n in range(most + 1):
            for some in itertools.combinations(single, n):
                if len({name for one in some for name in one}) == n:
                    yield {name: value for one in some for name, value in one.items()}

    three = [m for m in combinations(MISTAKES, 3) if len(m) < 3 or "scored" in m]
    choices = [c for c in combinations(CHOICES, 2) if beta or "kl" not in c]
    both = [m | c for m, c in itertools.product(three, choices) if not m.keys() & c.keys()]
    return sorted((one for one in both if len(one) < 5), key=len)


def same(moved, other, tolerance=1e-3):
    return bool((moved - other).abs().max() <= tolerance * other.abs().max())


def all_same(moved, by, tolerance):
    return all(same(x, y, tolerance) for x, y in zip(moved, by))


def factors(moved, by, tolerance):
    """How many times `by` each update is, [] if it is none. moved, by: one (8, 8) for each."""
    found = []
    for theirs, ours in zip(moved, by):
        c = (theirs * ours).sum() / (ours * ours).sum() if ours.any() else torch.tensor(1.0)
        if not (c and same(theirs, c * ours, tolerance)):
            return []
        found.append(round(float(c)) if abs(c.abs() - 1) < 2 * tolerance else float(c))
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


def rule_of(worlds, again, parts):
    """By which rule completions are kept: ("right", ""), or "choice" or "mistake" and which, or ""
    and why there is none, or "unknown" and RULE.

    worlds: the kept rows with the rewards moved on by 0, 1, 2 and 3 completions.
    again: by 0 once more. parts: the micro-batches.
    """
    if any(len(part) > len({*part}) for part in parts):
        return "mistake", REPLACED
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
    policy, other, later = Policy(), Policy(), Policy(momentum=0.9)
    worlds, reward = [Policy(), Policy(), Policy()], Reward()
    try:
        sampler = call(step, policy, reward)
        asked = call(step, other, Reward(OTHER)).asked
        call(step, later, Reward())
        for shift, world in enumerate(worlds, start=1):
            if policy.kept() != {*sampler.asked}:
                call(step, world, Reward(shift=shift))
    except BaseException as error:
        return nothing(f"it raises {type(error).__name__}: {error}".split("\n")[0])
    found = not_the_world(policy, sampler, reward)
    if found:
        return found
    # not in `other`: there a question has equal rewards, and its best and worst may be one
    updates = sum((one.updates for one in (policy, later, *worlds)), [])
    parts = sum((update.parts for update in updates), [])
    rule = rule_of([world.kept() for world in (policy, *worlds)], later.kept(), parts)
    both = (policy, sampler.asked, RIGHT), (other, asked, OTHER)
    return judged(both, sampler, beta, rule, without_signal(step, later))


def not_the_world(policy, sampler, reward):
    """A verdict, if the step does not do on this world what can be compared."""
    if torch.equal(policy.table(), Policy().table()):
        return "✗", STILL, 0, 1, "", []
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


def changes(world, reading, temperature, beta, n=None):
    """How a reading changes θ in the first n updates of a world."""
    policy, asked, table = world
    of_row = advantages(reading, asked, policy.kept(), table)
    found = [expected(reading, update, of_row, temperature, beta) for update in policy.updates[:n]]
    if "gradients" in reading:
        found = [*itertools.accumulate(found)]
    return found


def times_of(worlds, by):
    """How many times `by` the updates are: the same in each world, else []."""
    found = []
    for world, ours in zip(worlds, by):
        policy, moved = world[0], [update.after - update.before for update in world[0].updates]
        found.append(factors(moved, ours, policy.tolerance))
        if len(found[0]) != len(moved[:len(ours)]):
            return []
    alike = all(abs(c - d) <= 4e-3 * abs(d) for row in found for c, d in zip(row, found[0]))
    return found[0] if alike and all(found) else []


def explained(worlds, of, beta):
    """(the reading that gives these updates, how many times as large they are): (None, []) if none
    does. of(reading, worlds, n): what it makes of the first n updates."""
    scaled, most = (None, []), 4
    for reading in in_time(readings(beta)):
        count = sum(value not in CHOICES.get(name, ()) for name, value in reading.items())
        if count > most:
            continue
        # few of them fit the first updates: only these are compared with all
        first = worlds[:1]
        if all(times_of(first, of(reading, first, n)) for n in (1, 3)):
            scale = times_of(worlds, of(reading, worlds, None))
            if scale and {*map(abs, scale)} == {1}:
                return reading, scale
            if scale and not scaled[1]:
                # one mistake more may be the reason: the means of 3 micro-batches added up
                scaled, most = (reading, scale), count + 1
    return scaled


def judged(worlds, sampler, beta, rule, quiet):
    """The verdict. rule: of `rule_of`. quiet: of `without_signal`."""
    [temperature] = sampler.temperatures
    policy = worlds[0][0]
    of = lambda reading, worlds=worlds, n=None: [
        changes(world, reading, temperature, beta, n) for world in worlds]
    reading, scale = explained(worlds, of, beta)
    known = reading or {}
    right = {name: value for name, value in known.items() if value in CHOICES.get(name, ())}
    wrong = [SAYS[value] for name, value in known.items() if name not in right]
    turned = bool(scale) and max(scale) < 0
    said = {  # the worst first
        "mistake": [TURNED] * turned + wrong + mistakes_outside(policy.table() - Policy().table()),
        "edge": [],
        "unknown": [UNKNOWN] * (reading is None),
        "choice": [SAYS[value] for value in right.values()] + scaled([abs(c) for c in scale]),
    }
    for kind, words in (rule, quiet):
        said.get(kind, []).append(words)

    by = of(right)
    # beside a constant in the loss another constant cannot be seen
    as_large = factors if {*scale} - {1, -1} else all_same
    alike = lambda other: all(as_large(x, y, policy.tolerance) for x, y in zip(other, by))
    asked = {name: not all(alike(of(right | {name: value})) for value in row)
             for name, row in MISTAKES.items() if reading is not None}
    asked |= {
        "prompt": True,
        "padding": any(PADDING in row or END in row[:-1] for row in policy.seen),
        "kept": rule[0] not in ("", "unknown"),
        "signal": quiet[0],
    }
    whys = dict.fromkeys(asked, "nothing shows it") | UNSEEN
    whys |= {"kept": rule[1], "signal": quiet[1]}
    if len(policy.updates) > 1:
        whys |= dict.fromkeys(("old", "gradients"), "its numbers are too coarse to show it")
    left = dict.fromkeys(MISTAKES, UNKNOWN) if reading is None else {}
    left |= {name: whys[name] for name, is_asked in asked.items() if not is_asked}
    asked = len(MISTAKES) + 4 - len(left)
    held = asked - len(said["mistake"]) - (quiet[0] in said)
    why = "; ".join(dict.fromkeys(left.values()))
    why = f"{len(left)} not asked: {why}" if left else ""
    kind = next((kind for kind, words in said.items() if words), bool(why))
    moved = [update.after - update.before for update in policy.updates]
    total, closest = sum(moved), sum(by[0])
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
            "constant in the loss, or a warm-up"] * bool({*scale} - {1})


def nothing(why):
    return "–", f"nothing could be checked: {why}", 0, 0, "", []


def evidence(moved, right):
    """The token behind which the logits differ most."""
    before = int((moved - right).abs().amax(1).argmax())
    token = int((moved - right)[before].abs().argmax())
    return (f"the logit of `{WORDS[token]}` behind `{WORDS[before]}` moved by "
            f"{moved[before, token]:.4f}, right is {right[before, token]:.4f}")
