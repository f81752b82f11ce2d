"""Defaults for each kind of device: what is right for a CPU, and what for a GPU.

The host takes 5 to 90 µs to start a kernel on a GPU, however small the tensors are. Meanwhile the
GPU waits. So for a GPU few large steps are better than many small ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceDefaults:
    # --- sampling (decoding.py) ---
    # every so many tokens the host asks the device which completions have ended. While it waits for
    # the answer, a GPU gets nothing to do
    ask_every: int
    # the rows that have ended leave if at most this share of the rows goes on
    leave_at: float
    # a step sees a multiple of so many columns of the cache
    columns: int
    # whether steps are recorded as a CUDA graph. One is recorded again after rows have left, and
    # for more columns
    records: bool
    # --- scoring and updates ---
    # tokens of a micro-batch, if memory allows it
    micro_batch_tokens: int
    # a second forward pass takes about as long as computing so many more tokens (prefix_sharing.py)
    second_pass: int
    # tokens × vocabulary scored at a time; at most three float32 tensors of this size exist
    # together
    chunk_elements: int


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(
        ask_every=1, leave_at=1.0, columns=1, records=False,
        micro_batch_tokens=2048,
        # 160 with 0.1 million parameters, 90 with 0.4 million, 40 with 135 million
        second_pass=128,
        chunk_elements=2**24,
    ),
    "cuda": DeviceDefaults(
        ask_every=16, leave_at=0.5, columns=512, records=True,
        micro_batch_tokens=16384,
        second_pass=4096,
        chunk_elements=2**28,
    ),
}
