"""Somebody's function, called as ours is; and what was seen of it."""

import inspect

import torch

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (*POSITIONAL[1:], inspect.Parameter.KEYWORD_ONLY)
# why something was left out
NO_ARGUMENT = "no argument"
SWALLOWED = "nobody sees whether your function uses what it takes as **kwargs:"
UNKNOWN = "your function needs an argument that ours does not have:"
RAISED = "your function raises NotImplementedError"
INSIDE = ("it imports a module while it runs, and finds ours, which has the same name: import it "
          "at the top of the file")
IN_PLACE = "it changes its argument `{}` in place"


class LeftOut(Exception):
    """Their function cannot be asked this."""


class Broken(Exception):
    """Their function gives no answer. The sentence says why."""


class Theirs:
    """Their function. It takes our arguments and gives an answer in our form.

    left: {why: names of arguments}, what was left out. answered: how many calls had an answer.
    broken: the sentence of each call that had none.
    """

    def __init__(self, function, ours):
        self.function, self.ours, self.form = function, ours, inspect.signature(ours)
        try:
            self.takes = inspect.signature(function)
        except ValueError as error:
            raise Broken("Python cannot tell which arguments this builtin takes: call it in a "
                         "function of your own, def …") from error
        kinds = {name: p.kind for name, p in self.takes.parameters.items()}
        self.named = {name for name, kind in kinds.items() if kind in NAMED}
        self.any_name = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self.any_number = inspect.Parameter.VAR_POSITIONAL in kinds.values()
        self.places = sum(kind in POSITIONAL for kind in kinds.values())
        self.left, self.broken, self.answered, self.inside = {}, [], 0, False

    def __call__(self, *args, **options):
        first, rest = self.handed(args, options)
        given = dict(zip(self.form.parameters, first)) | rest
        before = {name: x.detach().clone() for name, x in given.items() if torch.is_tensor(x)}
        if self.inside:
            self.breaks(INSIDE)
        self.inside = True
        try:
            answer = self.function(*first, **rest)
        except Broken:
            raise
        except NotImplementedError:
            self.leave_out(RAISED)
        except SystemExit as error:
            self.breaks("it calls sys.exit", error)
        except BaseException as error:
            words = f"it raises {type(error).__name__}: {error}".split("\n")[0]
            self.breaks(words.removesuffix(": "), error)
        finally:
            self.inside = False
        answer = self.in_our_form(answer, self.ours(*args, **options))
        self.answered += 1
        for name, old in before.items():
            if not torch.equal(given[name].nan_to_num(), old.nan_to_num()):
                self.breaks(IN_PLACE.format(name))
        return answer

    def handed(self, args, options):
        """Our call as a call of theirs: what ours requires goes by position, the rest by name."""
        first, rest = [], {}
        for name, value in arguments(self.form, args, options).items():
            ours = self.form.parameters.get(name)
            required = ours and ours.default is ours.empty and ours.kind in POSITIONAL
            if required and (self.any_number or len(first) < self.places):
                first.append(value)
            elif name in self.named or not (ours and is_off(ours, value)):
                rest[name] = value
        unnamed = [name for name in rest if name not in self.named]
        if unnamed and not self.any_name:
            self.leave_out(NO_ARGUMENT, *unnamed)
        if unnamed and self.swallows(first, rest):
            self.leave_out(SWALLOWED, *unnamed)
        try:
            bound = self.takes.bind_partial(*first, **rest).arguments
        except TypeError as error:
            self.leave_out(str(error))
        lacking = [name for name, p in self.takes.parameters.items()
                   if p.default is p.empty and p.kind in (*NAMED, *POSITIONAL)
                   and name not in bound]
        if lacking:
            self.leave_out(UNKNOWN, *lacking)
        return first, rest

    def swallows(self, first, rest):
        """Whether **kwargs takes anything: it is not handed on to a function that would refuse."""
        try:
            self.function(*first, **rest, no_option_of_anybody=None)
        except BaseException as error:
            return "no_option_of_anybody" not in str(error)
        return True

    def leave_out(self, why, *names):
        known = self.left.setdefault(why, [])
        known += [name for name in names if name not in known]
        raise LeftOut(why)

    def breaks(self, sentence, error=None):
        self.broken.append(sentence)
        raise Broken(sentence) from error

    def why_left_out(self):
        """Clauses, one after the other; the arguments are in our function's order."""
        clauses = []
        for why, names in self.left.items():
            order = [*self.form.parameters, *names].index
            clauses.append(f"{why} {', '.join(sorted(names, key=order))}".strip())
        return "; ".join(clauses)

    def in_our_form(self, answer, right):
        """(loss, stats) for a loss alone, with our statistics; the dtype becomes ours."""
        if not isinstance(right, tuple):
            return self.tensor(answer, right)
        answer = answer if isinstance(answer, tuple) else (answer,)
        needed = sum(torch.is_tensor(x) for x in right)
        if len(answer) < needed:
            self.breaks(f"it returns {len(answer)} answer, {needed} are needed")
        return tuple(b if isinstance(b, dict) else self.tensor(a, b)
                     for a, b in zip((*answer, None), right))

    def tensor(self, answer, right):
        if not torch.is_tensor(right):
            return answer
        if not torch.is_tensor(answer):
            kind = "None" if answer is None else f"the type {type(answer).__name__}"
            self.breaks(f"it returns {kind}; a torch.Tensor is needed")
        return answer.to(right.dtype)


def arguments(form, args, options):
    """{name: value}, also of what a loss hands on as **options. form: a signature."""
    given = form.bind(*args, **options).arguments
    return given | given.pop("options", {})


def is_off(parameter, value):
    """Whether an option is off, and off by default: None or False."""
    off = value is None or value is False
    return off and (parameter.default is None or parameter.default is False)
