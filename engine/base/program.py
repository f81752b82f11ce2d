"""Exit codes: a user's mistake becomes one sentence and exit code 2."""

import json
import os
import sys
import time
from pathlib import Path

from engine.base import files
from engine.base.errors import UserError


def run_program(main):
    """Call main(argv). A user's mistake ends the program with one sentence and exit code 2."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(exit_with(f"error: {error}"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # python eval.py … | head -1
        sys.exit(exit_with("error: stopped, because the program that read the output has ended."))
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # Python, too, writes what is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def exit_with(sentence):
    """Print why the program ends. Returns its exit code, 2.

    Under torchrun every process of a machine may find the same mistake. The first one tells it,
    also to torchrun, which repeats it as the last line of its own report. The others end with code
    0, so that the report is short.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # …/attempt_0/RANK/error.json
    if file:
        try:
            Path(file).parents[1].joinpath("told").touch(exist_ok=False)
        except FileExistsError:
            return 0
        # as a whole: torchrun may end this process at any moment, and fails on a part of a report
        files.write(file, json.dumps({"message": sentence, "timestamp": int(time.time())}))
    if file and os.environ.get("WORLD_SIZE") == "1":
        sentence += f" (One process needs no torchrun: python {sys.argv[0]} says only this.)"
    print(sentence, file=sys.stderr, flush=True)
    time.sleep(1 if file else 0)  # the others end first: torchrun would report whom it has to kill
    return 2
