"""CUDA graphs on a CPU: operations are noted while a step runs, and computed again in the same
tensors. So what the host decided while it noted them is decided for good, as on a GPU."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# the host waits for their result
WAITING = (
    "item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "multinomial", "_unique2")


class Answers(TorchDispatchMode):
    """Counts the operations for whose result the host would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation.overloadpacket.__name__ in WAITING
        return operation(*args, **(kwargs or {}))


class Graph(TorchDispatchMode):
    """Stands for torch.cuda.CUDAGraph. Other than on a GPU, the operations are computed while they
    are noted, so the first replay has nothing to do."""

    def __init__(self):
        super().__init__()
        self.calls, self.replays, self.before = [], 0, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in WAITING:
            raise RuntimeError("operation not permitted when stream is capturing")
        if operation._schema.is_mutable:
            self.before.append((args[0], args[0].clone()))
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        self.replays += 1
        for operation, args, kwargs, noted in self.calls if self.replays > 1 else ():
            result = operation(*args, **kwargs)
            for old, new in zip(tree_leaves(noted), tree_leaves(result)):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def graphs_on_a_cpu(monkeypatch):
    """Let torch.cuda record such graphs. Returns the list to which they are added."""
    graphs = []

    @contextmanager
    def record(graph):
        try:
            with graph:
                yield
            graphs.append(graph)
        except RuntimeError:  # on a GPU nothing would have been computed
            for tensor, before in reversed(graph.before):
                tensor.copy_(before)
            raise

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    return graphs
