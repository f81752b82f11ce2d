"""The completion that comes nearest to a form, and what it has in another way."""

MARKS = {  # of each form, in order
    "format_reward": ("<think>", "</think>", "<answer>", "</answer>"),
    "code_format": ("<think>", "</think>", "```python\n", "\n```"),
}


def nearest_miss(name, texts):
    """([the completion that comes nearest to the form of the reward `name`], a sentence that says
    what differs). For a form that is not known here: (texts, "")."""
    marks = MARKS.get(name.removeprefix("soft_"))
    if not marks:
        return texts, ""
    distances = [miss(text, marks) for text in texts]
    nearest = distances.index(min(distances))
    return [texts[nearest]], f" The nearest completion {distances[nearest][2]}."


def miss(text, marks):
    """(how many marks are missing, how many characters are outside of them, what differs) of a
    completion and a form.

        >>> miss("<think>9 + 9</think> <answer>18", MARKS["format_reward"])
        (1, 0, "has no '</answer>' after '<answer>'")
    """
    gaps, rest = [], text
    for mark in marks:
        gap, found, rest = rest.partition(mark)
        if not found:
            after = f" after {marks[len(gaps) - 1]!r}" if gaps else ""
            return len(marks) - len(gaps), 0, f"has no {mark!r}{after}"
        gaps.append(gap)
    before, _, between, _ = gaps
    if before:
        what = f"has {before!r:.40} before {marks[0]!r}"
    elif rest:
        what = f"has {rest!r:.40} after {marks[3]!r}"
    elif between not in ("\n", "\n\n"):
        what = f"has {between!r:.40} in place of a newline between {marks[1]!r} and {marks[2]!r}"
    else:
        what = "has a mark twice"
    return 0, len(before + between + rest), what
