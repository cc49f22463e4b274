"""Shared memory without a name: nothing to clean up, however a process ends.

A segment is an unnamed file in /dev/shm (`O_TMPFILE`). Peers map it through the owner's `/proc/PID/fd`, and the kernel
frees it with its last mapping, so that a crash leaves nothing behind.
"""

import errno
import mmap
import os

from tide_triton.errors import SharedMemoryError

DIRECTORY = "/dev/shm"


def create(nbytes: int, what: str) -> int:
    """A file descriptor of a new segment of `nbytes` bytes, all of them reserved.

    Raises SharedMemoryError with the bytes wanted and free where they do not fit: without the reservation, a full
    /dev/shm would kill the process at its first access instead.
    """
    fd = os.open(DIRECTORY, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.ENOSPC:
            raise
        raise SharedMemoryError(shortage(nbytes, what)) from error
    return fd


def shortage(nbytes: int, what: str) -> str:
    """What to tell a user whose segment does not fit."""
    free = os.statvfs(DIRECTORY)
    return (
        f"{DIRECTORY} is too small for {what}: {nbytes} bytes wanted, {free.f_bavail * free.f_frsize} bytes free; "
        f"enlarge it (docker run --shm-size=..., mount -o remount,size=... {DIRECTORY}) or hold less at once (fewer "
        f"slots)"
    )


def map_own(fd: int, nbytes: int) -> mmap.mmap:
    """Map a segment of this process."""
    return mmap.mmap(fd, nbytes)


def map_of(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    """Map segment `fd` of process `pid`, which must be of this user and in this PID namespace."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return mmap.mmap(own, nbytes)
    finally:
        os.close(own)


def release(fd: int) -> None:
    """Give the descriptor back; mappings stay."""
    os.close(fd)
