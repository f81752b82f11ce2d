"""Read what torch.distributed.checkpoint has saved without running code that a file names: the run
may be a stranger's.

torch itself reads `.metadata`, and single values such as a learning rate, by pickle. A pickle may
call any function of Python. So each pickle is read here first, where it may name only the few
things that a checkpoint needs. torch reads the same bytes after that.
"""

import pickle

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

from engine.base.errors import UserError

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
REFUSED = ("the checkpoint holds code in its folder networks, as no checkpoint of this project "
           "does: do not use this run.")


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if name not in ALLOWED.get(module, ()):
            raise UserError(REFUSED)
        return super().find_class(module, name)


class Reader(FileSystemReader):
    def read_metadata(self, *args, **options):
        with open(self.path / ".metadata", "rb") as file:
            Unpickler(file).load()
        return super().read_metadata(*args, **options)


class Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise UserError(REFUSED) from None
        value.seek(0)
        super().load_bytes(read_item, value)
