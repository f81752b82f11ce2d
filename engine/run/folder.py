"""The folder of a run: whose it is, and that one job alone writes it.

    run.json    the options of the run; a resume writes those with which it goes on, and only a
                resume imports the Python files that it names
    run.lock    is locked while a job writes the folder, and names the first process of the job
    answers.jsonl   the answers to the test questions after training, in the form of eval.py

A folder holds a run only if it holds run.json.
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

from engine.base import files, progress, ranks
from engine.base.errors import UserError
from engine.data.questions import hold_out, names_others
from engine.data.rows import read_rows, same_rows
from engine.model.folders import checkpoints, resolve_model
from engine.options.command_line import command, flat, words_from
from engine.scoring.score import judged_alike
from tasks.table import TASKS

try:
    import fcntl
except ImportError:
    raise SystemExit("this program needs Linux or macOS: on Windows use WSL.") from None

ANSWERS = "answers.jsonl"


def run_folder(config):
    """The folder of the run, the same on every rank: --output_dir, which is made if it does not
    exist; or runs/DATA-ALGORITHM-N with the first free N, so that every run gets its own."""
    folder = None
    if ranks.rank() == 0:
        stem = f"{Path(config.data.dataset).stem}-{config.row.algorithm}"
        try:
            folder = make_folder(config.run.output_dir, stem)
        except OSError as error:
            raise UserError(f"the folder {config.run.output_dir or 'runs'} of the run cannot be "
                            f"made ({error.strerror}): name another --output_dir.") from None
    return ranks.from_first(folder)


def make_folder(output_dir, stem):
    if output_dir:
        Path(output_dir).mkdir(parents=True, exist_ok=True)  # a file of this name: an OSError
        return output_dir
    for n in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            Path(f"runs/{stem}-{n}").mkdir(parents=True)
            return f"runs/{stem}-{n}"


def options_of(run_dir):
    """The options of the run, {name: value}."""
    return json.loads(Path(run_dir, "run.json").read_text(encoding="utf-8"))


def how_to_resume(run_dir):
    """The sentence that says how to resume a run that ended early."""
    found = checkpoints(run_dir)
    again = command({"output_dir": str(run_dir), "resume": True})
    return (f"To go on from {found[-1].name}: {again}" if found
            else "There was no checkpoint yet: only the steps so far are lost.")


def as_in_the_run(chosen):
    """{option of eval.py: value}: those that were given, and those of the run that `model` names,
    its folder or a checkpoint's. So its questions are judged as the run has judged them. For
    another benchmark only all options of the run are added, as "run". chosen: {option: value}.

    Raises UserError if the run's judge or sampler is a Python file, and no other one was given: the
    folder may be a stranger's.
    """
    model = Path(chosen.get("model", ""))
    found = [folder for folder in (model, model.parent) if (folder / "run.json").is_file()]
    if not found:
        return chosen
    run = options_of(found[0])
    benchmark = run["eval_dataset"] or run["dataset"]
    if chosen.get("benchmark") not in (None, [benchmark]):
        return {"run": run} | chosen
    same = ("max_new_tokens", "max_prompt_tokens", "system_prompt", "temperature", "stop",
            "chat_template_kwargs", "columns")
    options = {name: run.get(name) for name in same} | {"run": run, "benchmark": [benchmark]}
    if benchmark in TASKS:
        del options["columns"]  # those of the table are known
    missing = {name: word for name, word in custom_files(run).items() if name not in chosen}
    if missing:
        words = shlex.join(words_from(missing))
        raise UserError(f"{found[0]}/run.json names Python files, and eval.py imports only those "
                        f"that its command names: read them, then add {words}, or give other "
                        "values.")
    if judged_alike(run["dataset"], benchmark):
        options["judge"] = run["rewards"][0]
        options["measure"] = run.get("measure", "accuracy")
    return options | chosen


def custom_files(run):
    """{option of eval.py: FILE.py:NAME} of the Python files that judge and sample in an evaluation
    of a run. run: its options, {name: value}."""
    words = {"sampler": run["sampler"]}
    if judged_alike(run["dataset"], run["eval_dataset"] or run["dataset"]):
        words["judge"] = run["rewards"][0]
    return {name: word for name, word in words.items() if files.names_file(word)}


def rows_for_eval(name, config):
    """(the rows of a benchmark, what the run of the model did with them, in words). config: that of
    eval.py.

    If the run trains on the very same rows, they are those that --eval_every has held out; without
    it, the words say how many the run has asked.
    """
    run, most = config.run, config.questions or None
    if not run or not same_rows(run["dataset"], name):
        return read_rows(name, "test", most, config.model, config.columns), ""
    rows = read_rows(name, "test", None, config.model, config.columns)
    state = json.loads(Path(resolve_model(config.model), "state.json").read_text(encoding="utf-8"))
    asked = min(state["position"], len(rows))
    words = f" (the run was trained on {asked} of {len(rows)})"
    if run["eval_every"] and not names_others(SimpleNamespace(**run)):
        rows, words = hold_out(rows, run["seed"])[1], ", held out of the training"
    return rows.select(range(len(rows))[:most]), words


def refuse_used(output_dir):
    """Refuse the --output_dir of a new run if it holds a run, or anything else. A run that ended
    before its first checkpoint starts anew."""
    run_dir = Path(output_dir)
    # a job that begins, too, holds the lock
    found = sorted(path.name for path in run_dir.glob("*") if path.name != "run.lock")
    begun = checkpoints(run_dir) or "metrics.jsonl" in found
    if found and (begun or "run.json" not in found):
        raise UserError(f"{run_dir} holds {found[0]}: if it is a run, add --resume to go on with "
                        "it; else name another --output_dir, or an empty one.")


def keep_options(run_dir, config):
    """Write run.json, on the first rank. Whether the run was resumed is no option of the run."""
    if ranks.rank() == 0:
        options = flat(config) | {"resume": False}
        if config.data.measure != "accuracy":
            options["measure"] = config.data.measure
        files.write(Path(run_dir, "run.json"), files.as_json(options, indent=2))


def steps_in(run_dir):
    """How many steps the log of a run has."""
    return len(files.read_lines(Path(run_dir, "metrics.jsonl")))


@contextlib.contextmanager
def exclusive_run_folder(run_dir):
    """Refuse a folder that another job writes, and keep others out. Every rank calls this; the
    first holds the lock. Yields how many steps the folder has.

    The lock ends with the process, however that ends. A folder in which nothing was written is
    removed.
    """
    path, problem = Path(run_dir, "run.lock"), None
    with contextlib.ExitStack() as held:
        if ranks.rank() == 0:
            try:
                file = held.enter_context(open(path, "a+", encoding="utf-8"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.truncate(0)
                print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
            except BlockingIOError:
                problem = (f"{run_dir} is being written by {path.read_text().strip()}: wait for "
                           "its end, stop it, or name another --output_dir.")
            except OSError as error:  # a file system without locks is no reason to refuse a run
                progress.note(f"note: {path} cannot be locked ({error.strerror}): start no second "
                              "run in this folder.")
        problem = ranks.from_first(problem)
        if problem:
            raise UserError(problem)
        try:
            yield steps_in(run_dir)
        finally:
            if ranks.rank() == 0 and os.listdir(run_dir) == [path.name]:
                shutil.rmtree(run_dir)
