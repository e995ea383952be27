"""Files that are whole or not there, under the name by which training knows them: see :mod:`ramify.files`."""

from ramify.files import load_tensors, save_tensors, sync_folder, write_atomic, write_text

__all__ = ["load_tensors", "save_tensors", "sync_folder", "write_atomic", "write_text"]
