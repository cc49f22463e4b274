"""A process that ends with the one that started it."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def follow() -> None:
    """End this process once its parent has ended, which may be killed before it can end its children.

    Without a parent of Python's `multiprocessing` nothing is followed.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
