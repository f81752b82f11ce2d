"""Read what torch.distributed.checkpoint has saved without running code that a file names: the run
may be a stranger's.

torch itself reads `.metadata`, and single values such as a learning rate, by pickle. A pickle may
call any function of Python. So each pickle is read here first, where it may name only the few
things that a checkpoint needs. torch reads the same bytes after that. """

import pickle

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # its name in Python 3.13
}


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class Reader(FileSystemReader):
    def read_metadata(self, *args, **options):
        with open(self.path / ".metadata", "rb") as file:
            Unpickler(file).load()
        return super().read_metadata(*args, **options)


class Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
